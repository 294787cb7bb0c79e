//! The one place where hooks meet the account: reserve, release, refuse, insist, and what the
//! tenant is shown.

use crate::allocations::Allocation;
use crate::log::{Reason, Throttle, now_ns};
use crate::pages::Full;
use crate::place;
use crate::spin::sleep_us;
use crate::state::{NO_UUID, Observed, Process};
use crate::thread::{Answer, Call};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use tessera_cuda::types::{CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use tessera_region::Size;
use tessera_region::account::{self, Overrun, Refused, Reservation};
use tessera_region::layout::Kind;
use tessera_region::session::{Event, EventKind};

/// How long a request that fits the quota insists when the driver refuses it and no plugin says whether dead
/// processes' memory is with the driver still, which tears a killed process down later than the kernel ends it.
const INSIST_NS: u64 = 2_000_000_000;
/// The same where the plugin sees none: it may see one a moment later.
const GLANCE_NS: u64 = 500_000_000;
/// The same where it sees some. A driver takes seconds for what was large, and half a minute and more where host
/// memory was pinned (sgl-project/sglang#32829, #37485).
const DEPARTING_NS: u64 = 120_000_000_000;
/// How long after one has insisted in vain others do so only briefly: then it was no process's end, and
/// the GPU is full.
const FULL_NS: u64 = 3_000_000_000;
/// How long that is.
const BRIEFLY_NS: u64 = 50_000_000;
/// How long a request waits for what it has shared with a process that is dead.
const IMPORTER_NS: u64 = 10_000_000_000;
/// Least time between two events of a kind.
const EVENT_NS: u64 = 1_000_000_000;
/// The same for contexts: each is a reason to look, within what the plugin looks at anyway.
const CONTEXT_NS: u64 = 10_000_000;

static OVER_QUOTA: Reason = Reason::new();
static CONTENDED: Reason = Reason::new();
static DEPARTING: Reason = Reason::new();
static UNLISTED: Reason = Reason::new();
static UNNOTED: Reason = Reason::new();
static FULL: Reason = Reason::new();
/// What a container that has used up its quota can do.
const ADVICE: &str = "use less (a smaller batch, a shorter context), or ask for a larger share";
/// When a request last insisted in vain, 0 if none has since one succeeded.
static FULL_SINCE: AtomicU64 = AtomicU64::new(0);
static OVER_QUOTA_EVENTS: Throttle = Throttle::new();
static DRIVER_EVENTS: Throttle = Throttle::new();
static CONTEXT_EVENTS: Throttle = Throttle::new();

/// Sets `bytes` of the page's GPU `gpu` aside. Before it is refused, this process gives back what it
/// freed and nobody has imported any more, and its pools what they hold there and do not use.
#[inline]
pub(crate) fn reserve(
    process: &'static Process,
    gpu: u8,
    bytes: u64,
) -> Result<Reservation<'static>, Refused> {
    process
        .account
        .try_reserve(usize::from(gpu), bytes)
        .or_else(|reason| once_more(process, gpu, bytes, reason))
}

#[cold]
fn once_more(
    process: &'static Process,
    gpu: u8,
    bytes: u64,
    reason: account::Reason,
) -> Result<Reservation<'static>, Refused> {
    let (account, at) = (&process.account, usize::from(gpu));
    let reclaimed = process.shares.look_again(process) | process.pools.reclaim(process, gpu);
    let mut again = if reclaimed { account.try_reserve(at, bytes) } else { Err(reason) };
    // What a dead importer keeps alive is this process's, and comes back when the driver has it.
    let began = now_ns();
    while again.is_err()
        && process.shares.any_lingers()
        && account.any_importer_departing()
        && now_ns().saturating_sub(began) < IMPORTER_NS
    {
        sleep_us(1_000);
        account.recover_dead(at);
        if process.shares.look_again(process) {
            again = account.try_reserve(at, bytes);
        }
    }
    again.map_err(|reason| account.refuse(reason, at, bytes))
}

/// Settles `reservation` to the `actual` bytes that the driver took. Before what exceeds the
/// reservation is refused, as in [`reserve`].
#[inline]
pub(crate) fn commit(
    process: &'static Process,
    gpu: u8,
    reservation: Reservation<'static>,
    actual: u64,
    kind: Kind,
) -> Result<(), Overrun<'static>> {
    reservation.commit(actual, kind).or_else(|overrun| {
        if process.shares.look_again(process) | process.pools.reclaim_at_once(process, gpu) {
            overrun.reservation.commit(actual, kind)
        } else {
            Err(overrun)
        }
    })
}

/// What the quota has left, or will have when the driver has back what dead processes held.
#[inline]
pub(crate) fn room(process: &'static Process, gpu: u8) -> u64 {
    process.account.shares().room(usize::from(gpu))
}

/// Sets `bytes` aside if there is room for them; refuses nobody.
#[inline]
pub(crate) fn reserve_if_room(
    process: &'static Process,
    gpu: u8,
    bytes: u64,
) -> Option<Reservation<'static>> {
    if bytes > room(process, gpu) {
        return None;
    }
    process.account.try_reserve(usize::from(gpu), bytes).ok()
}

/// As [`reserve`], for `name`, which is told what was `asked` for where that is refused.
#[inline]
pub(crate) fn reserve_for(
    process: &'static Process,
    gpu: u8,
    bytes: u64,
    name: &str,
    asked: Asked,
) -> Result<Reservation<'static>, CUresult> {
    reserve(process, gpu, bytes).map_err(|refused| refuse(process, name, asked, &refused))
}

/// Gives back bytes that the driver has released.
#[inline]
pub(crate) fn release(process: &'static Process, gpu: u8, bytes: u64, kind: Kind) {
    process.account.release(usize::from(gpu), bytes, kind);
}

/// Gives back an allocation that the driver has released.
#[inline]
pub(crate) fn give_back(process: &'static Process, allocation: Allocation) {
    if allocation.kind != Kind::Async {
        release(process, allocation.gpu, allocation.bytes, allocation.kind);
    } else if let Some(pool) = process.pools.numbered(allocation.context) {
        pool.lost(process, false);
    }
}

/// Remembers `allocation`. What was there is gone, though we saw no free: the driver gave the address
/// again.
#[inline]
pub(crate) fn remember(
    process: &'static Process,
    pointer: u64,
    allocation: Allocation,
) -> Result<(), Full> {
    if let Some(stale) = process.allocations.insert(pointer, allocation)? {
        give_back(process, stale);
    }
    Ok(())
}

/// Remembers `allocation` again, because the driver refused to free it.
#[cold]
pub(crate) fn keep(process: &'static Process, pointer: u64, allocation: Allocation) {
    // Without memory for the map it stays charged, which is the safe side.
    if let Ok(Some(newer)) = process.allocations.insert(pointer, allocation) {
        // Another thread got the address meanwhile, so the old allocation is gone after all.
        let _ = remember(process, pointer, newer);
    }
}

/// Runs the driver's call; again, with back-off, while it refuses what the quota grants and dead processes' memory
/// may be why.
#[inline]
pub(crate) fn insist(
    process: &'static Process,
    gpu: u8,
    bytes: u64,
    call: &(impl Fn() -> Answer + ?Sized),
) -> Answer {
    match call() {
        Err(CUDA_ERROR_OUT_OF_MEMORY) => refused_by_driver(process, gpu, bytes, &|| call()),
        answer => answer,
    }
}

#[cold]
fn refused_by_driver(process: &'static Process, gpu: u8, bytes: u64, call: Call<'_>) -> Answer {
    let account = &process.account;
    // Nobody has looked for the dead while the quota had room.
    account.recover_dead(usize::from(gpu));
    let began = now_ns();
    let full = FULL_SINCE.load(Ordering::Relaxed);
    let is_full = full != 0 && began.saturating_sub(full) < FULL_NS;
    let patience = || {
        // Of an own dead process the driver has memory for sure.
        let own = account.any_departing(usize::from(gpu));
        match account.shares().departing(usize::from(gpu), now_ns()) {
            Some(true) => DEPARTING_NS,
            _ if (is_full || limit_of_cgroup().is_some()) && !own => BRIEFLY_NS,
            Some(false) if !own => GLANCE_NS,
            _ => INSIST_NS,
        }
    };
    let mut wait_us = 500;
    loop {
        // Before the call: what was there no more by then is free for it.
        let patience = patience();
        sleep_us(wait_us);
        wait_us = (wait_us * 2).min(8_000);
        let answer = call();
        if answer != Err(CUDA_ERROR_OUT_OF_MEMORY) {
            FULL_SINCE.store(0, Ordering::Relaxed);
            return answer;
        }
        if now_ns().saturating_sub(began) >= patience {
            break;
        }
    }
    if !is_full {
        FULL_SINCE.store(now_ns().max(1), Ordering::Relaxed);
    }
    account.count_driver_refusal(usize::from(gpu));
    let uuid = account.shares().uuid(usize::from(gpu));
    match limit_of_cgroup() {
        Some(limit) => FULL.say(format_args!(
            "out of memory: the driver refuses {:.3} on {uuid}, which the quota of this container allows: its cgroup \
             allows {:.3} (dmem.max, set by nvidia-smi memory-limits); ask those who run the node",
            Size(bytes),
            Size(limit),
        )),
        None => FULL.say(format_args!(
            "out of memory: the driver refuses {:.3} on {uuid}, which the quota of this container allows: the GPU \
             itself is full, or its memory fragmented; ask those who run the node",
            Size(bytes),
        )),
    }
    if DRIVER_EVENTS.allows(now_ns(), EVENT_NS) {
        process.tell(Some(event(EventKind::DriverRefused, Some(gpu), bytes)));
    }
    Err(CUDA_ERROR_OUT_OF_MEMORY)
}

/// The least limit of GPU memory, bytes, that somebody else gave this container's cgroup, as it was when first asked: from
/// r615 on the driver keeps one in the kernel's `dmem` controller (NVIDIA MPS documentation, "Memory limits"), and beyond
/// it has no memory, however empty the GPU is.
#[cold]
fn limit_of_cgroup() -> Option<u64> {
    static LIMIT: AtomicU64 = AtomicU64::new(0);
    const NONE: u64 = u64::MAX;
    let mut limit = LIMIT.load(Ordering::Relaxed);
    if limit == 0 {
        let mut text = [0u8; 1024];
        // SAFETY: a path with its NUL; as many bytes as the buffer has; the descriptor is this function's own.
        let length = unsafe {
            let fd =
                libc::open(c"/sys/fs/cgroup/dmem.max".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            let length = libc::read(fd, text.as_mut_ptr().cast(), text.len());
            libc::close(fd);
            length
        };
        let text = text.get(..usize::try_from(length).unwrap_or(0)).unwrap_or_default();
        limit = least_limit(text).unwrap_or(NONE);
        LIMIT.store(limit, Ordering::Relaxed);
    }
    (limit != NONE).then_some(limit)
}

/// Of lines such as `nvidia/0000:65:00.0/vidmem 12884901888`, or `max` for none (Linux, cgroup-v2, "DMEM").
fn least_limit(text: &[u8]) -> Option<u64> {
    let text = core::str::from_utf8(text).ok()?;
    let of = |line: &str| {
        let (region, limit) = line.split_once(' ')?;
        region.starts_with("nvidia/").then(|| limit.trim().parse().ok()).flatten()
    };
    text.lines().filter_map(of).min().filter(|limit| *limit > 0)
}

/// What the application asked for, in its own words: what the driver would have taken for it is another
/// number, which pools, pages and alignment make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Bytes(u64),
    /// A context, by its own call or by one that needs one.
    Context,
}

/// The same, and the bytes of the quota that it would take.
struct Wanted(Asked, u64);

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let taken = Size(self.1);
        match self.0 {
            Asked::Context => write!(f, "a context, which takes {taken:.3}"),
            Asked::Bytes(bytes) => {
                write!(f, "{:.3}", Size(bytes))?;
                // Where the two read alike, the second is of no use.
                match self.1 > crate::memory::footprint(bytes) {
                    true => write!(f, ", for which the driver would take {taken:.3}"),
                    false => Ok(()),
                }
            }
        }
    }
}

/// Refuses a request of `name`, and says so: a line, an event.
#[cold]
pub(crate) fn refuse(
    process: &'static Process,
    name: &str,
    asked: Asked,
    refused: &Refused,
) -> CUresult {
    let uuid = process.account.shares().uuid(refused.gpu);
    let [used, limit] = [refused.used(), refused.limit].map(Size);
    let wanted = Wanted(asked, refused.bytes);
    match refused.reason {
        account::Reason::OverQuota if refused.overhead > 0 => OVER_QUOTA.say(format_args!(
            "out of memory: {name} asks for {wanted}, and this container has {used:.3} of its \
             {limit:.3} on {uuid} in use, {:.3} of it for contexts, modules and what else the \
             driver takes by itself beyond what was set aside for it; {ADVICE}",
            Size(refused.overhead.min(refused.limit))
        )),
        account::Reason::OverQuota => OVER_QUOTA.say(format_args!(
            "out of memory: {name} asks for {wanted}, and this container has {used:.3} of its \
             {limit:.3} on {uuid} in use; {ADVICE}"
        )),
        account::Reason::Contended => CONTENDED.say(format_args!(
            "out of memory: {name} asks for {wanted} on {uuid}, and another process of this \
             container has held up a request for too long: continue it, or end it"
        )),
        account::Reason::Departing => DEPARTING.say(format_args!(
            "out of memory: {name} asks for {wanted} on {uuid}, which fits, and the driver has not \
             given back what processes of this container held that ended: try again, or see nvidia-smi on the node"
        )),
    }
    let bytes = match asked {
        Asked::Bytes(bytes) => bytes,
        Asked::Context => refused.bytes,
    };
    process.account.asked(refused.gpu, bytes);
    if OVER_QUOTA_EVENTS.allows(now_ns(), EVENT_NS) {
        let gpu = u8::try_from(refused.gpu).ok();
        process.tell(Some(event(EventKind::OverQuota, gpu, bytes)));
    }
    CUDA_ERROR_OUT_OF_MEMORY
}

/// Tells the plugin that a context was made, with memory that no call shows: it looks at once. Also
/// greets a plugin that was away when this process began.
pub(crate) fn report_context(process: &'static Process, gpu: u8) {
    let news = CONTEXT_EVENTS.allows(now_ns(), CONTEXT_NS);
    process.tell(news.then(|| event(EventKind::ContextMade, Some(gpu), 0)));
}

/// Refuses a request on a GPU that the quota page does not name. A context there is what CUDA refuses for a
/// device that is none (CUDA Driver API, `cuCtxCreate`, `cuDevicePrimaryCtxRetain`: "invalid device"); in a
/// context that is there all the same, nothing may be held.
#[cold]
pub(crate) fn refuse_unlisted(process: &'static Process, name: &str, asked: Asked) -> CUresult {
    let listed = process.account.shares().uuid(0);
    let others = if process.account.shares().gpu_count() > 1 { " and others" } else { "" };
    let say = |what: fmt::Arguments<'_>| {
        UNLISTED.say(format_args!(
            "{what} on a GPU that this container sees but was not given; it was given {listed}{others}: leave the \
             choice to CUDA_VISIBLE_DEVICES, or use only what was given"
        ));
    };
    let (result, bytes) = match asked {
        Asked::Context => {
            say(format_args!("invalid device: {name} asks for a context"));
            (CUDA_ERROR_INVALID_DEVICE, 0)
        }
        Asked::Bytes(bytes) => {
            say(format_args!("out of memory: {name} asks for {:.3}", Size(bytes)));
            (CUDA_ERROR_OUT_OF_MEMORY, bytes)
        }
    };
    if OVER_QUOTA_EVENTS.allows(now_ns(), EVENT_NS) {
        process.tell(Some(event(EventKind::OverQuota, None, bytes)));
    }
    result
}

/// Refuses a request that could not be noted: a quota holds for what is noted only.
#[cold]
pub(crate) fn refuse_unnoted(name: &str) -> CUresult {
    UNNOTED.say(format_args!(
        "out of memory: {name} is refused, because the kernel gives this process no more host memory, \
         which is needed to note what it holds on the GPU; raise the container's memory limit, or \
         `ulimit -v`"
    ));
    CUDA_ERROR_OUT_OF_MEMORY
}

fn event(kind: EventKind, gpu: Option<u8>, bytes: u64) -> Event {
    Event { kind, gpu: gpu.map(u32::from), bytes, uuid: NO_UUID }
}

/// A GPU's memory as the tenant sees it: the one formula behind `cuMemGetInfo`, `cuDeviceTotalMem`
/// and NVML. `used + free = total` always, and the total moves with the quota alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// The quota, at most what the GPU has; 0 where the page does not name it.
    pub(crate) total: u64,
    /// What is charged to the living, and what is seen beyond that. What dead processes have left with
    /// the driver is free: it is granted, to who waits until the driver has it back.
    taken: u64,
}

impl View {
    /// The page's GPU `gpu`, which has `real_total` bytes.
    #[inline]
    pub(crate) fn of(observed: Observed, gpu: Option<u8>, real_total: u64) -> Self {
        if let Observed::AsProcess(process) = observed {
            process.shares.look_again(process);
            process.pools.settle_freed(process, false);
        }
        match gpu.map(usize::from) {
            None => Self { total: 0, taken: 0 },
            Some(gpu) => Self {
                total: observed.shares().memory_limit(gpu).min(real_total),
                taken: observed.shares().used(gpu),
            },
        }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        // Free memory of one does not count for the other.
        let taken = self.used().saturating_add(other.used());
        Self { total: self.total.saturating_add(other.total), taken }
    }

    /// What may still be allocated.
    #[inline]
    pub(crate) fn free(self) -> u64 {
        self.total.saturating_sub(self.taken)
    }

    /// What is in use; never more than the total, even after the limit was lowered.
    pub(crate) fn used(self) -> u64 {
        self.taken.min(self.total)
    }
}

/// The UUID's text is what events and pages carry.
const _: () = assert!(place::TEXT_LEN == tessera_region::session::EVENT_UUID_LEN);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_named_as_the_application_asked_it() {
        let text = |asked, taken| Wanted(asked, taken).to_string();
        assert_eq!(text(Asked::Bytes(200 << 20), 200 << 20), "200 MiB");
        assert_eq!(
            text(Asked::Bytes(3_000_000), 4 << 20),
            "2.861 MiB",
            "whole pages go without saying"
        );
        let pool = "1 MiB, for which the driver would take 32 MiB";
        assert_eq!(text(Asked::Bytes(1 << 20), 32 << 20), pool);
        // A pool has part of it.
        assert_eq!(text(Asked::Bytes(40 << 20), 8 << 20), "40 MiB");
        assert_eq!(text(Asked::Context, 512 << 20), "a context, which takes 512 MiB");
    }

    #[test]
    fn the_least_limit_of_a_cgroup_is_that_of_nvidias_memory() {
        let text = b"drm/0000:03:00.0/vram0 4096\nnvidia/0000:65:00.0/vidmem 12884901888\n\
            nvidia/0000:66:00.0/vidmem max\nnvidia/0000:67:00.0/vidmem 17179869184\n";
        assert_eq!(least_limit(text), Some(12 << 30));
        for none in
            [&b""[..], b"nvidia/0000:65:00.0/vidmem max", b"\xff\xfe", b"nvidia/x y", b"max"]
        {
            assert_eq!(least_limit(none), None);
        }
    }

    #[test]
    fn what_one_lacks_is_not_taken_from_the_other() {
        let both = View { total: 100, taken: 140 }.plus(View { total: 50, taken: 10 });
        assert_eq!((both.total, both.used(), both.free()), (150, 110, 40));
    }
}
