//! The life of the shim in a process, and what a fork does to it.
//!
//! ```text
//!            first hook
//!   FRESH ───────────────► PASS     not a tenant: hooks cost next to nothing
//!     ▲ │                   ARMED    pages attached, slot held
//!     │ └─────────────────► CLOSED   pages broken: cuInit fails; tried again by the next cuInit
//!     └── fork (in the child, whatever the state was)
//! ```
//!
//! Where a process stands is a word in a page that the kernel wipes in forked children
//! (`MADV_WIPEONFORK`), together with the pointers and the lock that go with it. So a child finds
//! itself FRESH, takes a slot, a session and empty maps of its own, and never touches its parent's
//! lock, descriptor or slot, nor a lock that another thread of its parent held while it forked.

use crate::allocations::Allocations;
use crate::arrays;
use crate::attach::{self, Found, Pages, Sockets};
use crate::contexts::Contexts;
use crate::gate::{self, local::Local};
use crate::graphs::Graphs;
use crate::log::Reason;
use crate::pages;
use crate::place::Gpus;
use crate::pools::Pools;
use crate::records::{Owner, Records};
use crate::session::Session;
use crate::shares::Shares;
use crate::spin::Spin;
use crate::thread::Deferred;
use crate::vmm::Vmm;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use tessera_cuda::types::{CUDA_ERROR_SYSTEM_NOT_READY, CUdevice, CUresult};
use tessera_region::account::Account;
use tessera_region::layout::MAX_GPUS;
use tessera_region::quota::QuotaReader;
use tessera_region::session::{EVENT_UUID_LEN, Event, EventKind, Message};
use tessera_region::share::ShareSet;

#[derive(Clone, Copy, Debug)]
pub enum Standing {
    Pass,
    /// A tenant whose pages cannot be used.
    Closed,
    Armed(&'static Process),
}

impl Standing {
    /// The process of a tenant, if it is one.
    #[inline]
    pub(crate) fn tenant(self) -> Result<Option<&'static Process>, CUresult> {
        match self {
            Self::Pass => Ok(None),
            Self::Closed => Err(CUDA_ERROR_SYSTEM_NOT_READY),
            Self::Armed(process) => Ok(Some(process)),
        }
    }
}

/// A tenant process's state; made once, never freed.
#[derive(Debug)]
pub struct Process {
    /// The pages and this process's slots.
    pub account: Account,
    /// The plugin, for each share.
    sessions: Vec<Session>,
    /// Where plugin and arbiter listen, for each share.
    pub(crate) sockets: Vec<Sockets>,
    pub gpus: Gpus,
    pub contexts: Contexts,
    pub allocations: Allocations,
    pub pools: Pools,
    pub(crate) array_sizes: Spin<arrays::Sizes>,
    pub graphs: Graphs,
    pub vmm: Vmm,
    pub shares: Shares,
    pub records: Records,
    /// Serialises what creates and destroys a device's primary context.
    pub primaries: [Spin<()>; PRIMARIES],
    pub(crate) gate: Local,
    /// Whether who closes the gate can order other threads' accesses; see [`crate::gate`].
    pub(crate) has_membarrier: bool,
}

/// Devices with a lock of their own for their primary context; more share them.
pub const PRIMARIES: usize = 16;

/// An event's UUID where the GPU is in the page.
pub(crate) const NO_UUID: [u8; EVENT_UUID_LEN] = [0; EVENT_UUID_LEN];

const FRESH: u32 = 0;
const PASS: u32 = 1;
const CLOSED: u32 = 2;
const ARMED: u32 = 3;

/// The page that a fork wipes. All zero is FRESH.
#[repr(C, align(4096))]
struct Wiped {
    standing: AtomicU32,
    process: AtomicPtr<Process>,
    /// Attached for looking only, see [`observed`].
    pages: AtomicPtr<Pages>,
    /// Held while attaching.
    attaching: Spin<()>,
}

static WIPED: AtomicPtr<Wiped> = AtomicPtr::new(ptr::null_mut());
static NO_SLOT: Reason = Reason::new();
static OLD_KERNEL: Reason = Reason::new();

/// Where this process stands, attaching when nobody asked before.
#[inline]
pub fn standing() -> Standing {
    settled().unwrap_or_else(|| arm(false))
}

/// As [`standing`], for `cuInit`: broken pages get another chance.
pub fn standing_at_init() -> Standing {
    match settled() {
        Some(Standing::Closed) | None => arm(true),
        Some(standing) => standing,
    }
}

/// This process's state if it is an armed tenant already; attaches nothing.
#[inline]
pub fn armed() -> Option<&'static Process> {
    match settled() {
        Some(Standing::Armed(process)) => Some(process),
        _ => None,
    }
}

/// What is charged and allowed on the tenant's GPUs, for views that hold nothing: takes no slot and
/// opens no session. `None` where this is no tenant, or its pages are broken.
pub fn observed() -> Option<Observed> {
    if let Some(process) = armed() {
        return Some(Observed::AsProcess(process));
    }
    let wiped = wiped()?;
    let _deferred = Deferred::new();
    let _attaching = wiped.attaching.lock();
    let mut pages = wiped.pages.load(Ordering::Relaxed);
    if pages.is_null() {
        match wiped.standing.load(Ordering::Relaxed) {
            FRESH => {}
            _ => return None,
        }
        match attach::find() {
            Found::Nothing => {
                wiped.standing.store(PASS, Ordering::Release);
                return None;
            }
            Found::Broken => return None,
            Found::Pages(found) => pages = Box::into_raw(found),
        }
        wiped.pages.store(pages, Ordering::Relaxed);
    }
    // SAFETY: made above, in this process, and never freed.
    Some(Observed::AsStranger(unsafe { &*pages }))
}

/// See [`observed`].
#[derive(Clone, Copy, Debug)]
pub enum Observed {
    /// Through this process's own account.
    AsProcess(&'static Process),
    /// Through pages attached for looking only.
    AsStranger(&'static Pages),
}

impl Observed {
    pub fn shares(self) -> &'static ShareSet {
        match self {
            Self::AsProcess(process) => process.account.shares(),
            Self::AsStranger(pages) => &pages.shares,
        }
    }
}

#[inline]
pub fn passes() -> bool {
    matches!(settled(), Some(Standing::Pass))
}

#[inline]
fn settled() -> Option<Standing> {
    let wiped = WIPED.load(Ordering::Acquire);
    if wiped.is_null() {
        return None;
    }
    // SAFETY: mapped by `wiped`, never unmapped; in a forked child it reads as zero.
    let wiped = unsafe { &*wiped };
    // Acquire: pairs with the Release in `arm`, so that the process is seen whole.
    match wiped.standing.load(Ordering::Acquire) {
        ARMED => {
            // SAFETY: stored before ARMED was, and never freed.
            Some(Standing::Armed(unsafe { &*wiped.process.load(Ordering::Relaxed) }))
        }
        PASS => Some(Standing::Pass),
        CLOSED => Some(Standing::Closed),
        _ => None,
    }
}

#[cold]
fn arm(again: bool) -> Standing {
    let Some(wiped) = wiped() else { return Standing::Closed };
    let _deferred = Deferred::new();
    let _attaching = wiped.attaching.lock();
    match settled() {
        Some(Standing::Closed) if again => {}
        Some(standing) => return standing,
        None => {}
    }
    let settle = |word, standing| {
        wiped.standing.store(word, Ordering::Release);
        standing
    };
    let pages = match attach::find() {
        Found::Nothing => return settle(PASS, Standing::Pass),
        Found::Broken => return settle(CLOSED, Standing::Closed),
        Found::Pages(pages) => *pages,
    };
    let account = match Account::claim(pages.shares) {
        Ok(account) => account,
        Err((shares, share, error)) => {
            NO_SLOT.say(format_args!(
                "no GPU for this process: {error}; end other GPU processes of this container, or \
                 raise the limit on open files"
            ));
            tell_no_slot(&shares.shares()[share].quota, &pages.sockets[share]);
            return settle(CLOSED, Standing::Closed);
        }
    };
    let gate = Local::new(account.shares().lead().quota.gate_word(0));
    let process: &'static Process = Box::leak(Box::new(Process {
        account,
        sessions: pages.sockets.iter().map(|_| Session::default()).collect(),
        sockets: pages.sockets,
        gpus: Gpus::new(),
        contexts: Contexts::default(),
        allocations: Allocations::default(),
        pools: Pools::new(),
        array_sizes: Spin::default(),
        graphs: Graphs::default(),
        vmm: Vmm::default(),
        shares: Shares::default(),
        records: Records::new(),
        primaries: [const { Spin::new(()) }; PRIMARIES],
        gate,
        has_membarrier: gate::has_membarrier(),
    }));
    wiped.process.store(ptr::from_ref(process).cast_mut(), Ordering::Relaxed);
    // Release: pairs with the Acquire in `settled`.
    wiped.standing.store(ARMED, Ordering::Release);
    process.tell(None);
    Standing::Armed(process)
}

/// The page itself, mapped at the first hook.
fn wiped() -> Option<&'static Wiped> {
    let mut at = WIPED.load(Ordering::Acquire);
    if at.is_null() {
        let page = fresh()?;
        match WIPED.compare_exchange(
            ptr::null_mut(),
            page.as_ptr().cast(),
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => at = page.as_ptr().cast(),
            Err(others) => {
                pages::unmap(page, size_of::<Wiped>());
                at = others;
            }
        }
    }
    // SAFETY: mapped zeroed, which is a FRESH page, and never unmapped once in WIPED.
    Some(unsafe { &*at })
}

/// A page for `WIPED`. What a fork does to it is settled before anybody can see it: a thread that
/// forks while another one publishes the page has a child that finds it as it should be, or not at
/// all.
fn fresh() -> Option<ptr::NonNull<u8>> {
    let page = pages::map(size_of::<Wiped>())?;
    if pages::wipe_on_fork(page, size_of::<Wiped>()) {
        return Some(page);
    }
    OLD_KERNEL.say(format_args!("no GPU for this process: it needs Linux 4.14 or newer"));
    pages::unmap(page, size_of::<Wiped>());
    None
}

/// A process that could claim no slot still tells the plugin; nobody else would.
fn tell_no_slot(quota: &QuotaReader, sockets: &Sockets) {
    let session = Session::default();
    let hello =
        Message::Hello { slot: 0, pid: tessera_region::pid(), generation: quota.generation() };
    let event = Event { kind: EventKind::NoSlot, gpu: None, bytes: 0, uuid: NO_UUID };
    session.send(&sockets.session, hello, Some(Message::Event(event)));
}

impl Process {
    /// What this process's launching threads need to find.
    pub(crate) fn owner(&'static self) -> Owner {
        Owner {
            process: ptr::NonNull::from(self),
            gate: self.gate.current(),
            launches: self.account.launches(),
            has_membarrier: self.has_membarrier,
        }
    }

    /// What `device` is in the page; the first look at one that is not there is an event.
    pub(crate) fn listed(&'static self, device: CUdevice) -> Option<Option<u8>> {
        let shares = self.account.shares();
        let uuids = (0..shares.gpu_count()).map(|gpu| shares.uuid(gpu));
        self.gpus.listed(device, uuids, |uuid| {
            self.tell(Some(Event { kind: EventKind::UnknownGpu, gpu: None, bytes: 0, uuid }));
        })
    }

    /// Tells the plugin, if that is possible right now: of a GPU, in the first share that has it, as its
    /// pages number it. The other shares hear of the process.
    pub(crate) fn tell(&'static self, event: Option<Event>) {
        let shares = self.account.shares();
        let part = event.and_then(|event| usize::try_from(event.gpu?).ok());
        let part = part.and_then(|gpu| shares.parts(gpu).first());
        let teller = part.map_or(0, |part| usize::from(part.share));
        for (share, (session, sockets)) in self.sessions.iter().zip(&self.sockets).enumerate() {
            let event = event
                .filter(|_| share == teller)
                .map(|event| Event { gpu: part.map(|part| part.gpu.into()), ..event });
            session.send(&sockets.session, self.hello(share), event.map(Message::Event));
        }
    }

    pub(crate) fn hello(&self, share: usize) -> Message {
        Message::Hello {
            slot: u32::try_from(self.account.slot_index_in(share)).unwrap_or(0),
            pid: tessera_region::pid(),
            generation: self.account.shares().shares()[share].quota.generation(),
        }
    }

    /// The page of the gate that the process keeps to.
    pub(crate) fn gate_quota(&self) -> &QuotaReader {
        &self.account.shares().lead().quota
    }
}

const _: () = assert!(MAX_GPUS <= 255 - 2, "a GPU's index fits beside the marks in `gpus`");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_finds_zeroes_where_its_parent_would_have_published() {
        let page = fresh().expect("memory").cast::<u32>();
        // SAFETY: a page of this test's own.
        unsafe { page.write(ARMED) };
        // SAFETY: the child only reads its memory and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: mapped in the parent, and so here.
            unsafe { libc::_exit(i32::from(page.read_volatile() != FRESH)) };
        }
        let mut status = 0;
        // SAFETY: this test's own child, and a place for its status.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        pages::unmap(page.cast(), size_of::<Wiped>());
    }
}
