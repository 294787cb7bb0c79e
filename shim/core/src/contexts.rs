//! The contexts this process has, and on which GPU each is.
//!
//! A context costs device memory that no hook sees, so each live one is charged the quota page's
//! overhead. Allocations carry their context's *serial*, never its handle: the driver reuses handles
//! as soon as a context is destroyed.

use crate::limits::{Frames, Local};
use crate::pages::{Table, Zeroed};
use crate::spin::Spin;
use core::sync::atomic::{AtomicU64, Ordering};

/// Where an allocation goes: the context that will own it and its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The context's serial; 0 is no context.
    pub serial: u32,
    /// Index in the quota page; `None` where the page does not name the GPU.
    pub gpu: Option<u8>,
}

/// A live context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The driver's handle; 0 marks an unused entry.
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

// SAFETY: `Context` is plain data; all-zero bytes are an unused entry (`Option`s of integers carry a
// separate tag, for which zero is a valid value), asserted by a test.
unsafe impl Zeroed for Context {}

/// Entries of the first table.
const FIRST: usize = 32;

/// All contexts that hooks have seen.
#[derive(Debug)]
pub struct Contexts {
    list: Spin<List>,
    /// Moves on when a context goes or changes, so that threads' cached places become void.
    epoch: AtomicU64,
    /// Handles of kernels with large frames; written under `list`.
    pub(crate) frames: Frames,
}

#[derive(Debug)]
struct List {
    entries: Option<Table<Context>>,
    /// Entries not in use that are promised: to contexts about to be made, or about to be kept after
    /// all.
    promised: usize,
    last_serial: u32,
}

/// A place for a context that is about to be made. Without one it must not be: nobody could say
/// later whose its memory is.
#[derive(Debug)]
#[must_use = "it keeps a place"]
pub struct Promise<'a>(&'a Contexts);

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.0.list.lock().promised -= 1;
    }
}

impl Default for Contexts {
    fn default() -> Self {
        Self::new()
    }
}

impl Contexts {
    /// None yet.
    pub const fn new() -> Self {
        Self {
            list: Spin::new(List { entries: None, promised: 0, last_serial: 0 }),
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
        self.list.lock().position(|c| c.handle == handle).map(|(_, context)| context.place)
    }

    /// The live primary context of `device`.
    pub fn primary(&self, device: i32) -> Option<Context> {
        self.list.lock().position(|c| c.primary_of == Some(device)).map(|(_, context)| context)
    }

    /// A place for one more. `None` when the kernel has no memory for the table.
    pub fn promise(&self) -> Option<Promise<'_>> {
        let promised = self.list.lock().promise();
        promised.then(|| Promise(self))
    }

    /// Remembers, at the place that was promised, a context that the driver has just made, and gives
    /// it a serial, unless it is a view. `stale` gets what had its handle before: a context that ended without our seeing
    /// it.
    pub fn insert(
        &self,
        promise: Promise<'_>,
        mut context: Context,
        stale: impl FnOnce(Context),
    ) -> Context {
        if let Some(before) = self.take(context.handle) {
            stale(before);
        }
        let mut list = self.list.lock();
        if !context.is_view {
            list.last_serial = list.last_serial.wrapping_add(1).max(1);
            context.place.serial = list.last_serial;
        }
        list.put(context);
        drop(list);
        drop(promise);
        self.changed();
        context
    }

    /// Puts back what [`Contexts::leaving`] took: the driver refused to destroy it.
    pub fn restore(&self, leaving: Leaving<'_>) {
        self.list.lock().put(leaving.context);
        drop(leaving);
        self.changed();
    }

    /// Forgets `handle`, before the driver destroys it, and keeps its place.
    pub fn leaving(&self, handle: usize) -> Option<Leaving<'_>> {
        let mut list = self.list.lock();
        let context = list.remove(|context| context.handle == handle)?;
        list.promised += 1;
        drop(list);
        self.changed();
        Some(Leaving { context, _place: Promise(self) })
    }

    /// Forgets `handle`.
    pub fn take(&self, handle: usize) -> Option<Context> {
        self.take_if(|context| context.handle == handle)
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
        let (at, _) = list.position(|c| c.handle == handle && c.primary_of.is_none())?;
        let context = &mut list.entries.as_mut()?.as_mut_slice()[at];
        context.users = context.users.saturating_add_signed(by);
        Some(context.users)
    }

    /// What the limits of `handle` take, to be changed.
    pub(crate) fn local(&self, handle: usize, change: impl FnOnce(&mut Local)) {
        let mut list = self.list.lock();
        let Some((mut at, found)) = list.position(|c| c.handle == handle) else { return };
        if found.is_view {
            let serial = found.place.serial;
            let base = list.position(|c| !c.is_view && c.place.serial == serial);
            at = base.map_or(at, |(base, _)| base);
        }
        if let Some(entries) = &mut list.entries {
            change(&mut entries.as_mut_slice()[at].local);
        }
        self.frames.recount(list.lowest_frame());
    }

    /// Remembers that a kernel's frame is to be charged at its launch, if it is not yet everywhere. False
    /// where there is no place for it.
    pub(crate) fn remember_frame(&self, handle: usize, frame: u32, is_of_every: bool) -> bool {
        let list = self.list.lock();
        self.frames.remember(handle, frame, is_of_every, list.lowest_frame())
    }

    /// The frame of `handle` is charged, or it is another function's now.
    pub(crate) fn forget_frame(&self, handle: usize, if_of_every: bool) {
        let list = self.list.lock();
        self.frames.forget(handle, if_of_every, list.lowest_frame());
    }

    /// Every live context's handle.
    pub(crate) fn each(&self, mut see: impl FnMut(usize)) {
        let list = self.list.lock();
        let entries = list.entries.as_ref().map_or(&[][..], Table::as_slice);
        entries.iter().filter(|c| c.handle != 0).for_each(|c| see(c.handle));
    }

    /// Whether any context is left on the page's GPU `gpu`.
    pub fn any_on(&self, gpu: u8) -> bool {
        self.list.lock().position(|c| !c.is_view && c.place.gpu == Some(gpu)).is_some()
    }

    fn take_if(&self, wanted: impl Fn(&Context) -> bool) -> Option<Context> {
        let context = self.list.lock().remove(wanted)?;
        self.changed();
        Some(context)
    }

    fn changed(&self) {
        self.frames.recount(self.list.lock().lowest_frame());
        // Release: pairs with the Acquire in `epoch`.
        self.epoch.fetch_add(1, Ordering::Release);
    }
}

impl List {
    fn position(&self, wanted: impl Fn(&Context) -> bool) -> Option<(usize, Context)> {
        let entries = self.entries.as_ref()?.as_slice();
        let at = entries.iter().position(|c| c.handle != 0 && wanted(c))?;
        Some((at, entries[at]))
    }

    /// The frame that every context is charged; 0 where there is none.
    fn lowest_frame(&self) -> u32 {
        let entries = self.entries.as_ref().map_or(&[][..], Table::as_slice);
        let bases = entries.iter().filter(|c| c.handle != 0 && !c.is_view && c.place.gpu.is_some());
        bases.map(|c| c.local.frame()).min().unwrap_or(0)
    }

    fn remove(&mut self, wanted: impl Fn(&Context) -> bool) -> Option<Context> {
        let (at, context) = self.position(wanted)?;
        self.entries.as_mut()?.as_mut_slice()[at].handle = 0;
        Some(context)
    }

    /// Keeps one more entry free; false when the kernel has no memory for it.
    fn promise(&mut self) -> bool {
        let old = self.entries.as_ref().map_or(&[][..], Table::as_slice);
        if old.iter().filter(|c| c.handle == 0).count() <= self.promised {
            let Some(mut grown) = Table::<Context>::new((old.len() * 2).max(FIRST)) else {
                return false;
            };
            grown.as_mut_slice()[..old.len()].copy_from_slice(old);
            self.entries = Some(grown);
        }
        self.promised += 1;
        true
    }

    /// The caller holds a promise, so there is a free entry.
    fn put(&mut self, context: Context) {
        let entries = self.entries.as_mut().map_or(&mut [][..], Table::as_mut_slice);
        if let Some(entry) = entries.iter_mut().find(|c| c.handle == 0) {
            *entry = context;
        }
    }
}

/// A context that the driver is asked to destroy.
#[derive(Debug)]
pub struct Leaving<'a> {
    /// What it was.
    pub context: Context,
    _place: Promise<'a>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages;

    fn context(handle: usize, gpu: u8, primary_of: Option<i32>) -> Context {
        let place = Place { serial: 0, gpu: Some(gpu) };
        Context {
            handle,
            overhead_bytes: 1,
            place,
            local: Local::default(),
            users: 1,
            primary_of,
            is_view: false,
        }
    }

    fn made(contexts: &Contexts, context: Context) -> Context {
        let promise = contexts.promise().expect("memory");
        contexts.insert(promise, context, |stale| panic!("{stale:?} was known"))
    }

    #[test]
    fn a_handle_made_again_without_a_destroy_hands_back_the_old_context() {
        let contexts = Contexts::new();
        let first = made(&contexts, context(0x10, 0, None));
        let mut stale = None;
        let second =
            contexts.insert(contexts.promise().expect("memory"), context(0x10, 0, None), |c| {
                stale = Some(c)
            });
        assert_eq!(stale, Some(first));
        assert_eq!(contexts.find(0x10), Some(second.place));
    }

    #[test]
    fn an_unused_entry_is_all_zero() {
        let table = Table::<Context>::new(1).expect("memory");
        assert_eq!(table.as_slice()[0].handle, 0);
    }

    #[test]
    fn a_reused_handle_gets_a_new_serial() {
        let contexts = Contexts::new();
        let first = made(&contexts, context(0x10, 0, None));
        assert_eq!(contexts.take(0x10), Some(first));
        assert_eq!(contexts.find(0x10), None);
        let second = made(&contexts, context(0x10, 0, None));
        assert_ne!(first.place.serial, second.place.serial);
    }

    #[test]
    fn the_epoch_moves_when_a_context_goes() {
        let contexts = Contexts::new();
        made(&contexts, context(0x10, 0, Some(0)));
        let before = contexts.epoch();
        assert!(contexts.take_primary(0).is_some());
        assert_ne!(contexts.epoch(), before);
        assert!(contexts.take_primary(0).is_none());
    }

    #[test]
    fn a_failed_destroy_keeps_the_context() {
        let contexts = Contexts::new();
        let made = made(&contexts, context(0x10, 2, None));
        let leaving = contexts.leaving(0x10).expect("known");
        assert!(!contexts.any_on(2));
        contexts.restore(leaving);
        assert_eq!(contexts.find(0x10), Some(made.place));
        assert!(contexts.any_on(2));
    }

    #[test]
    fn the_table_grows() {
        let contexts = Contexts::new();
        for handle in 1..=100 {
            made(&contexts, context(handle, 0, None));
        }
        assert!((1..=100).all(|handle| contexts.find(handle).is_some()));
    }

    #[test]
    fn a_context_that_stays_finds_its_place_whatever_came_meanwhile() {
        let contexts = Contexts::new();
        (1..=FIRST).for_each(|handle| _ = made(&contexts, context(handle, 0, None)));
        let leaving = contexts.leaving(1).expect("known");
        pages::failing_from_now_on(|| {
            assert!(contexts.promise().is_none(), "the only free entry is kept");
            contexts.restore(leaving);
        });
        assert!((1..=FIRST).all(|handle| contexts.find(handle).is_some()));
        assert!(contexts.promise().is_some());
    }

    #[test]
    fn users_are_counted() {
        let contexts = Contexts::new();
        made(&contexts, context(0x10, 0, None));
        assert_eq!(contexts.adjust_users(0x10, 1), Some(2));
        assert_eq!(contexts.adjust_users(0x10, -1), Some(1));
        assert_eq!(contexts.adjust_users(0x20, 1), None);
    }
}
