//! The contexts this process has, and on which GPU each is.
//!
//! A context costs device memory that no hook sees, so each live one is charged the quota page's
//! overhead. Allocations carry their context's *serial*, never its handle: the driver reuses handles
//! as soon as a context is destroyed.

use crate::limits::{Frames, Local};
use crate::list::List;
use crate::pages::Zeroed;
use crate::spin::Spin;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Where an allocation goes: the context that will own it and its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The context's serial; 0 is no context.
    pub serial: u32,
    /// Index in the quota page; `None` where the page does not name the GPU.
    pub gpu: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    pub handle: usize,
    /// Bytes charged for its existence.
    pub overhead_bytes: u64,
    /// Owner and GPU of what is allocated in it.
    pub place: Place,
    /// What its limits take.
    pub local: Local,
    /// `cuCtxCreate` and `cuCtxAttach` less `cuCtxDetach`.
    pub users: u32,
    /// The device whose primary context it is.
    pub primary_of: Option<i32>,
    /// It is a green context's: another handle of the primary context, at whose place it is.
    pub is_view: bool,
}

impl Context {
    /// One that is charged nothing.
    pub fn new(handle: usize, place: Place) -> Self {
        Self {
            handle,
            overhead_bytes: 0,
            place,
            local: Local::default(),
            users: 1,
            primary_of: None,
            is_view: false,
        }
    }
}

// SAFETY: plain data, for which all-zero bytes are a value (`Option`s of integers carry a tag of their own).
unsafe impl Zeroed for Context {}

/// All contexts that hooks have seen.
#[derive(Debug)]
pub struct Contexts {
    list: Spin<List<Context>>,
    last_serial: AtomicU32,
    /// Moves on when a context goes or changes, so that threads' cached places become void.
    epoch: AtomicU64,
    /// Handles of kernels with large frames; written under `list`.
    pub(crate) frames: Frames,
}

/// A place for a context that is about to be made, without which it must not be: nobody could say
/// later whose its memory is. Or for one that the driver is asked to destroy, and may refuse to.
#[derive(Debug)]
#[must_use = "it keeps a place"]
pub struct Promise<'a> {
    contexts: &'a Contexts,
    context: Option<Context>,
}

impl Promise<'_> {
    /// There it is.
    pub fn keep(mut self, context: Context) {
        self.context = Some(context);
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.contexts.list.lock().redeem(self.context);
        if self.context.is_some() {
            self.contexts.changed();
        }
    }
}

impl Contexts {
    pub fn new() -> Self {
        Self {
            list: Spin::default(),
            last_serial: AtomicU32::new(0),
            epoch: AtomicU64::new(1),
            frames: Frames::new(),
        }
    }

    /// The current epoch; see [`Contexts::find`].
    #[inline]
    pub fn epoch(&self) -> u64 {
        // Acquire: pairs with the Release in `changed`.
        self.epoch.load(Ordering::Acquire)
    }

    /// Where `handle` is. The answer may be kept while the epoch stays.
    pub fn find(&self, handle: usize) -> Option<Place> {
        let list = self.list.lock();
        list.iter().find(|context| context.handle == handle).map(|context| context.place)
    }

    /// The live primary context of `device`.
    pub fn primary(&self, device: i32) -> Option<Context> {
        self.list.lock().iter().copied().find(|context| context.primary_of == Some(device))
    }

    /// A place for one more. `None` when the kernel has no memory for the table.
    pub fn promise(&self) -> Option<Promise<'_>> {
        let promised = self.list.lock().promise();
        promised.ok().map(|()| Promise { contexts: self, context: None })
    }

    /// Remembers, at the place that was promised, a context that the driver has just made, and gives
    /// it a serial, unless it is a view. `stale` gets what had its handle before: a context that ended
    /// without our seeing it.
    pub fn insert(
        &self,
        promise: Promise<'_>,
        mut context: Context,
        stale: impl FnOnce(Context),
    ) -> Context {
        if let Some(before) = self.take_if(|known| known.handle == context.handle) {
            stale(before);
        }
        if !context.is_view {
            let last = self.last_serial.fetch_add(1, Ordering::Relaxed);
            context.place.serial = last.wrapping_add(1).max(1);
        }
        promise.keep(context);
        context
    }

    /// Forgets `handle`, before the driver destroys it, and keeps its place.
    pub fn leaving(&self, handle: usize) -> Option<(Context, Promise<'_>)> {
        let context = self.list.lock().lend(|context| context.handle == handle)?;
        self.changed();
        Some((context, Promise { contexts: self, context: None }))
    }

    /// Forgets the primary context of `device`.
    pub fn take_primary(&self, device: i32) -> Option<Context> {
        self.take_if(|context| context.primary_of == Some(device))
    }

    /// Forgets a view of the context with this serial; whether there was one.
    pub fn take_view(&self, serial: u32) -> bool {
        self.take_if(|context| context.is_view && context.place.serial == serial).is_some()
    }

    /// Adds to a context's users; returns how many there are now. A primary context has none: the driver counts its retains, and
    /// no document says that detaching ends it.
    pub fn adjust_users(&self, handle: usize, by: i32) -> Option<u32> {
        let mut list = self.list.lock();
        let context = list.iter_mut().find(|c| c.handle == handle && c.primary_of.is_none())?;
        context.users = context.users.saturating_add_signed(by);
        Some(context.users)
    }

    /// What the limits of `handle` take, to be changed; nothing where it is gone.
    pub(crate) fn local<R: Default>(
        &self,
        handle: usize,
        change: impl FnOnce(&mut Local) -> R,
    ) -> R {
        let mut list = self.list.lock();
        let Some(&found) = list.iter().find(|c| c.handle == handle) else { return R::default() };
        // A view's are those of the context that it is a view of.
        let wanted = |c: &&mut Context| match found.is_view {
            true => !c.is_view && c.place.serial == found.place.serial,
            false => c.handle == handle,
        };
        let base = list.iter_mut().find(wanted);
        let answer = base.map_or_else(R::default, |context| change(&mut context.local));
        self.frames.recount(lowest_frame(&list));
        answer
    }

    /// Remembers that a kernel's frame is to be charged at its launch, if it is not yet everywhere. False
    /// where there is no place for it.
    pub(crate) fn remember_frame(&self, handle: usize, frame: u32, is_of_every: bool) -> bool {
        let list = self.list.lock();
        self.frames.remember(handle, frame, is_of_every, lowest_frame(&list))
    }

    /// The frame of `handle` is charged, or it is another function's now.
    pub(crate) fn forget_frame(&self, handle: usize, if_of_every: bool) {
        let list = self.list.lock();
        self.frames.forget(handle, if_of_every, lowest_frame(&list));
    }

    /// Every live context's handle.
    pub(crate) fn each(&self, mut see: impl FnMut(usize)) {
        self.list.lock().iter().for_each(|context| see(context.handle));
    }

    /// Whether any context is left on the page's GPU `gpu`.
    pub fn any_on(&self, gpu: u8) -> bool {
        self.list.lock().iter().any(|c| !c.is_view && c.place.gpu == Some(gpu))
    }

    fn take_if(&self, wanted: impl FnMut(&Context) -> bool) -> Option<Context> {
        let context = self.list.lock().take(wanted)?;
        self.changed();
        Some(context)
    }

    fn changed(&self) {
        self.frames.recount(lowest_frame(&self.list.lock()));
        // Release: pairs with the Acquire in `epoch`.
        self.epoch.fetch_add(1, Ordering::Release);
    }
}

/// The frame that every context is charged; 0 where there is none.
fn lowest_frame(contexts: &[Context]) -> u32 {
    let bases = contexts.iter().filter(|c| !c.is_view && c.place.gpu.is_some());
    bases.map(|c| c.local.frame).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(handle: usize, gpu: u8) -> Context {
        Context::new(handle, Place { serial: 0, gpu: Some(gpu) })
    }

    fn made(contexts: &Contexts, context: Context) -> Context {
        let promise = contexts.promise().expect("memory");
        contexts.insert(promise, context, |stale| panic!("{stale:?} was known"))
    }

    #[test]
    fn a_handle_made_again_gets_a_new_serial_and_hands_back_a_context_that_is_still_known() {
        let contexts = Contexts::new();
        let first = made(&contexts, context(0x10, 0));
        assert_eq!(contexts.leaving(0x10).map(|(context, _)| context), Some(first));
        assert_eq!(contexts.find(0x10), None);
        let second = made(&contexts, context(0x10, 0));
        assert_ne!(first.place.serial, second.place.serial);
        let (promise, mut stale) = (contexts.promise().expect("memory"), None);
        let third = contexts.insert(promise, context(0x10, 0), |context| stale = Some(context));
        assert_eq!((stale, contexts.find(0x10)), (Some(second), Some(third.place)));
    }

    #[test]
    fn the_epoch_moves_when_a_context_goes() {
        let contexts = Contexts::new();
        made(&contexts, Context { primary_of: Some(0), ..context(0x10, 0) });
        let before = contexts.epoch();
        assert!(contexts.take_primary(0).is_some());
        assert_ne!(contexts.epoch(), before);
        assert!(contexts.take_primary(0).is_none());
    }

    #[test]
    fn a_failed_destroy_keeps_the_context() {
        let contexts = Contexts::new();
        let made = made(&contexts, context(0x10, 2));
        let (context, place) = contexts.leaving(0x10).expect("known");
        assert!(!contexts.any_on(2));
        place.keep(context);
        assert_eq!(contexts.find(0x10), Some(made.place));
        assert!(contexts.any_on(2));
    }

    #[test]
    fn users_are_counted() {
        let contexts = Contexts::new();
        made(&contexts, context(0x10, 0));
        assert_eq!(contexts.adjust_users(0x10, 1), Some(2));
        assert_eq!(contexts.adjust_users(0x10, -1), Some(1));
        assert_eq!(contexts.adjust_users(0x20, 1), None);
    }
}
