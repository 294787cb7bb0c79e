//! One pool of this process, and its settlement with the quota.
//!
//! The driver is asked about a pool under the lock of its books, which also its destruction takes: no
//! other thread ever asks about a handle that the application has destroyed.

use super::ask::{Source, Uncaptured};
use super::books::{self, Books, Settled};
use super::notice_frees;
use crate::log::now_ns;
use crate::pages::Zeroed;
use crate::quota;
use crate::spin::{Held, Spin, pause};
use crate::state::Process;
use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
use tessera_cuda::types::CUdevice;
use tessera_region::account::Reservation;
use tessera_region::layout::Kind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// On a GPU of the quota page.
    Gpu(u8),
    /// On a GPU that the page does not name.
    Unlisted,
    /// In host memory, or in another process's pool: not charged.
    Free,
}

impl Home {
    const UNLISTED: u8 = 254;
    const FREE: u8 = 255;

    /// That of memory on `device`.
    pub(crate) fn on(process: &'static Process, device: CUdevice) -> Self {
        process.listed(device).flatten().map_or(Self::Unlisted, Self::Gpu)
    }

    fn word(self) -> u8 {
        match self {
            Self::Gpu(gpu) => gpu,
            Self::Unlisted => Self::UNLISTED,
            Self::Free => Self::FREE,
        }
    }

    fn of(word: u8) -> Self {
        match word {
            Self::UNLISTED => Self::Unlisted,
            Self::FREE => Self::Free,
            gpu => Self::Gpu(gpu),
        }
    }
}

/// How long a call waits to be alone: longer than the driver is insisted on. A pool in which a call
/// takes longer is shared after all; what is lacking then may be laid to the wrong one of them.
const LONGEST_CALL_NS: u64 = 3_000_000_000;

/// The right to be the only call under way in a pool: what it finds lacking is its own doing.
#[derive(Debug)]
pub(crate) struct Alone<'a> {
    pool: &'a Pool,
    _one_at_a_time: Held<'a, ()>,
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.pool.books.lock().closed = false;
    }
}

/// A pool. All zero is one that is not in use.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// The driver's handle; 0 while unused, after its destruction, and of what has none.
    handle: AtomicUsize,
    /// Of graph memory: the device, plus one; else 0.
    graphs_of: AtomicI32,
    /// See [`Home`].
    home: AtomicU8,
    /// Its place in the table, plus one.
    pub(super) number: AtomicU32,
    /// Allocations that live in it, as far as hooks saw them being made.
    pub(super) live: AtomicU64,
    /// Bytes that the driver keeps over synchronisations.
    pub(super) threshold: AtomicU64,
    /// Something was freed, and the driver may give chunks back at any synchronisation.
    loose: AtomicBool,
    /// The driver took more than could be reserved, and it is not undone: some of the charge is owed
    /// ([`Books::owe`]), or somebody is about to answer for what is lacking.
    in_debt: AtomicBool,
    /// The application made it, and may destroy it.
    pub(super) own: AtomicBool,
    /// The application has destroyed it while allocations lived.
    orphaned: AtomicBool,
    books: Spin<Books>,
    /// The chunk, where it was seen to be larger than is assumed; else 0.
    learnt: AtomicU64,
    /// Held over the driver's call by those that could not reserve the worst. Graph memory is
    /// trimmed under it only.
    pub(crate) tight: Spin<()>,
}

// SAFETY: locks and atomic numbers, which begin as zeros.
unsafe impl Zeroed for Pool {}

impl Pool {
    /// Takes an unused place; the caller holds the table's lock.
    pub(crate) fn begin_life(&self, source: Source, home: Home, number: u32) {
        self.home.store(home.word(), Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        self.own.store(false, Ordering::Relaxed);
        self.loose.store(false, Ordering::Relaxed);
        self.in_debt.store(false, Ordering::Relaxed);
        self.threshold.store(source.release_threshold().unwrap_or(0), Ordering::Relaxed);
        match source {
            Source::Graphs(device) => self.graphs_of.store(device + 1, Ordering::Relaxed),
            // Release: who finds the handle finds the rest.
            Source::Pool(handle) => self.handle.store(handle, Ordering::Release),
        }
    }

    pub(crate) fn is(&self, handle: usize) -> bool {
        // Acquire: pairs with the Release in `begin_life`.
        self.handle.load(Ordering::Acquire) == handle
    }

    /// Whether its place may be given to another pool.
    pub(crate) fn is_unused(&self) -> bool {
        self.source().is_none()
            && self.live.load(Ordering::Relaxed) == 0
            && !self.orphaned.load(Ordering::Relaxed)
            && !self.books.lock().is_busy()
    }

    pub(crate) fn home(&self) -> Home {
        Home::of(self.home.load(Ordering::Relaxed))
    }

    /// Whether it can be asked about: not once it is destroyed.
    pub(crate) fn is_known(&self) -> bool {
        self.source().is_some()
    }

    /// Whom to ask about it, while the books are locked.
    fn source(&self) -> Option<Source> {
        match (self.handle.load(Ordering::Relaxed), self.graphs_of.load(Ordering::Relaxed)) {
            (0, 0) => None,
            (0, device) => Some(Source::Graphs(device - 1)),
            (handle, _) => Some(Source::Pool(handle)),
        }
    }

    fn kind(&self) -> Kind {
        if self.is_of_graphs() { Kind::Graph } else { Kind::Async }
    }

    pub(crate) fn is_of_graphs(&self) -> bool {
        self.graphs_of.load(Ordering::Relaxed) != 0
    }

    #[inline]
    pub(crate) fn worst(&self, bytes: u64) -> u64 {
        books::worst(bytes, self.learnt.load(Ordering::Relaxed))
    }

    pub(crate) fn charged(&self) -> u64 {
        self.books.lock().charged
    }

    /// What an allocation of `bytes` adds at least: what does not fit into what is reserved anyway.
    pub(crate) fn least(&self, bytes: u64) -> u64 {
        let _books = self.books.lock();
        let unused = self.source().and_then(|source| {
            let (reserved, used) = (source.reserved()?, source.used()?);
            Some(reserved.saturating_sub(used))
        });
        bytes.saturating_sub(unused.unwrap_or(0))
    }

    pub(crate) fn in_debt(&self) -> bool {
        self.in_debt.load(Ordering::Relaxed)
    }

    /// Waits until no call is under way, and keeps others from beginning. The caller holds no
    /// reservation: those under way may wait for one.
    pub(crate) fn alone(&self) -> Alone<'_> {
        let alone = Alone { _one_at_a_time: self.tight.lock(), pool: self };
        self.books.lock().closed = true;
        let (mut turn, begun_ns) = (0, now_ns());
        while self.books.lock().is_busy() && now_ns().saturating_sub(begun_ns) <= LONGEST_CALL_NS {
            pause(turn);
            turn = turn.saturating_add(1);
        }
        alone
    }

    /// Announces a call that has reserved `bytes`.
    pub(crate) fn begin(&self, bytes: u64) {
        self.books.lock().begin(bytes);
    }

    /// Announces a call that grows the pool by at most the `bytes` that it has reserved; false while
    /// another call is [`Alone`], and in a pool that is in debt.
    #[inline]
    pub(crate) fn begin_beside_others(&self, bytes: u64) -> bool {
        let mut books = self.books.lock();
        !self.in_debt() && books.begin_beside_others(bytes)
    }

    /// Settles a call that was announced with `reservation`: asks the driver, charges what it
    /// reserves, gives the rest back. Returns the bytes that the pool holds and nobody has reserved.
    pub(crate) fn settle_call(
        &self,
        process: &'static Process,
        reservation: Reservation<'static>,
    ) -> u64 {
        let mine = reservation.bytes();
        let mut books = self.books.lock();
        // A driver that does not tell has taken the worst.
        let reserved = self
            .source()
            .and_then(Source::reserved)
            .unwrap_or_else(|| books.charged.saturating_add(mine));
        let settled = books.settle(mine, reserved);
        if settled.keep > 0 {
            // At most what was reserved, which never fails.
            let _fits = reservation.commit(settled.keep, self.kind());
        } else {
            drop(reservation);
        }
        self.book(process, &mut books, &settled);
        settled.lacking
    }

    /// Asks the driver to give back what is unused, and settles. Returns how much came.
    pub(crate) fn trim(&self, process: &'static Process) -> u64 {
        let books = self.books.lock();
        let Some(source) = self.source() else { return 0 };
        let _uncaptured = Uncaptured::enter();
        source.trim();
        if let Source::Graphs(_) = source {
            process.graphs.trimmed();
        }
        drop(books);
        self.settle(process).release
    }

    /// Whether the driver still knows it.
    pub(crate) fn lives(&self) -> bool {
        let _books = self.books.lock();
        self.source().and_then(Source::reserved).is_some()
    }

    /// Settles without a call: what the driver has given back is given back.
    pub(crate) fn settle(&self, process: &'static Process) -> Settled {
        self.settle_as(process, false)
    }

    /// Charges what the pool holds and nobody has reserved, whether or not the quota has room. What
    /// it has no room for is asked back at every synchronisation, and before anything is refused.
    #[cold]
    pub(crate) fn owe(&self, process: &'static Process) {
        self.settle_as(process, true);
    }

    fn settle_as(&self, process: &'static Process, owes: bool) -> Settled {
        let mut books = self.books.lock();
        // Lowered before the driver is asked: a free after that raises it again.
        let was_loose = self.loose.swap(false, Ordering::Relaxed);
        let Some(reserved) = self.source().and_then(Source::reserved) else {
            return Settled { keep: 0, release: 0, lacking: 0 };
        };
        // The threshold tells whether the next synchronisation may give more back.
        if was_loose && reserved > self.threshold.load(Ordering::Relaxed) {
            self.loose.store(true, Ordering::Relaxed);
        }
        let mut settled = books.settle(0, reserved);
        // Of calls under way each answers for what it took, and of graphs the launch.
        if settled.lacking > 0 && (owes || books.is_quiet() && !self.is_of_graphs()) {
            if let Home::Gpu(gpu) = self.home() {
                process.account.owe(usize::from(gpu), settled.lacking, self.kind());
                books.owe(settled.lacking);
            }
            settled.lacking = 0;
        }
        self.book(process, &mut books, &settled);
        settled
    }

    fn book(&self, process: &'static Process, books: &mut Books, settled: &Settled) {
        if let (Home::Gpu(gpu), 1..) = (self.home(), settled.release) {
            quota::release(process, gpu, settled.release, self.kind());
        }
        if let (Home::Gpu(gpu), 1..) = (self.home(), books.owed) {
            books.forgive(process.account.shares().excess(usize::from(gpu)));
        }
        let in_debt = settled.lacking > 0 || books.owed > 0;
        self.in_debt.store(in_debt, Ordering::Relaxed);
        if in_debt {
            // Whatever its threshold: the next synchronisation looks at it.
            self.loosen();
        }
    }

    /// The driver took `lacking` bytes more than the `worst` that a call alone had reserved.
    pub(crate) fn learn(&self, worst: u64, lacking: u64) {
        self.learnt.fetch_max(books::learnt(worst, lacking), Ordering::Relaxed);
    }

    /// An allocation of it was freed; `complete` where the free has been waited for.
    pub(crate) fn lost(&self, process: &'static Process, complete: bool) {
        let before = self.live.fetch_sub(1, Ordering::Relaxed);
        self.loosen();
        if complete {
            if self.is_known() {
                self.settle(process);
            } else if before == 1 {
                self.end_orphan(process);
            }
        }
    }

    /// The driver may give chunks back from now on.
    pub(crate) fn loosen(&self) {
        if !self.loose.load(Ordering::Relaxed) {
            self.loose.store(true, Ordering::Relaxed);
        }
        notice_frees();
    }

    pub(crate) fn is_loose(&self) -> bool {
        self.loose.load(Ordering::Relaxed)
    }

    /// Before the application destroys it, after which nobody can be asked: gives back what living
    /// allocations do not need.
    pub(crate) fn prepare_end(&self, process: &'static Process) {
        // A device's default pool cannot be destroyed, and keeps what it has.
        if self.own.load(Ordering::Relaxed) {
            self.trim(process);
        }
    }

    /// The application destroys it: no more questions. The handle goes before the driver's call,
    /// because it may be another pool's at once.
    pub(crate) fn hide(&self) {
        let _nobody_asks = self.books.lock();
        self.handle.store(0, Ordering::Relaxed);
    }

    /// The driver refused to destroy it.
    pub(crate) fn show(&self, handle: usize) {
        self.handle.store(handle, Ordering::Release);
    }

    /// It is destroyed. What backs living allocations stays until the last of them is freed; then,
    /// as nobody can be asked any more, until the next synchronisation.
    pub(crate) fn orphan(&self) {
        self.in_debt.store(false, Ordering::Relaxed);
        if self.live.load(Ordering::Relaxed) > 0 || self.charged() > 0 {
            self.orphaned.store(true, Ordering::Relaxed);
            self.loosen();
        }
    }

    /// A destroyed pool whose last allocation is freed for certain.
    pub(crate) fn end_orphan(&self, process: &'static Process) {
        if self.live.load(Ordering::Relaxed) == 0 && self.orphaned.swap(false, Ordering::Relaxed) {
            self.close(process);
        }
    }

    /// The driver has given all of it back.
    pub(crate) fn close(&self, process: &'static Process) {
        let charged = self.books.lock().end();
        self.loose.store(false, Ordering::Relaxed);
        if let (Home::Gpu(gpu), 1..) = (self.home(), charged) {
            quota::release(process, gpu, charged, self.kind());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_call_is_alone_only_when_those_under_way_have_ended() {
        let pool = Pool::default();
        pool.begin(1);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| drop(pool.alone()));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished());
            pool.books.lock().settle(1, 0);
            waits.join().unwrap();
        });
    }
}
