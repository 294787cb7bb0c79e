//! The flight page: how much work a process has handed to the GPU, and how much of it is complete, in
//! words that the GPU itself, the process and the arbiter share. Whoever wants to know whether a process
//! has something in flight reads memory: no driver call, no lock, no thread of that process.
//!
//! A memfd, sealed against shrinking, that the process sends to the arbiter with its hello. The arbiter
//! believes it as it believes the process's messages: it moves that tenant's own lease. All counts wrap.
//!
//! - A launch adds 1 to `admitted` *before* it looks at the gate the last time (a locked instruction, so a
//!   full barrier), and takes it back where the gate is closed by then. The arbiter closes the gate, passes
//!   a full barrier, and reads `admitted`. So one of the two sees the other, and no flag, no
//!   `membarrier(2)` and no thread of the process is needed to end a lease that was counted.
//! - A marker is a stream-ordered write (`cuStreamWriteValue64`, CUDA Driver API, "Stream Memory
//!   Operations") into a *lane*: one word for each stream, into which the GPU writes how many operations of
//!   the lane are complete with it. `marked` is the sum of what markers in flight and complete ones cover.
//! - Operations of whose end the process learns otherwise (an event, a call that synchronised, a context
//!   that went) are added to `settled`.
//!
//! - Work may be queued *ahead* of its turn: at a closed gate to which the arbiter has `invited` the process, because
//!   nothing of the tenant is in flight, a stream is made to wait (`cuStreamWaitValue64`) until the *turn* of its context
//!   is one more, and launches go behind that wait. They are admitted like others. The arbiter writes the gate, then the
//!   turns; a launching thread reads the turn, admits, and looks at the gate again. So a wait that is put while the gate
//!   says what it said ends with the gate's next word.
//!
//! Launches at a gate that says SOLO are not counted. The process's own closer ([`FlightPage::closed`])
//! admits and marks an operation for each stream that was launched into meanwhile.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use libc::c_int;

#[cfg(feature = "std")]
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::os::{self, Map};

/// `"TSFLIGHT"`, little-endian.
pub const FLIGHT_MAGIC: u64 = u64::from_le_bytes(*b"TSFLIGHT");
/// Contexts of a process with lanes of their own; streams of further ones are marked by events.
pub const CONTEXTS: usize = 15;
/// Lanes of a context: streams with markers that are words, and its turn.
pub const LANES: usize = 512;
/// Where a context has its turn.
pub const TURN: usize = LANES - 1;
/// Bytes of the memfd.
pub const FLIGHT_BYTES: usize = 4096 * (1 + CONTEXTS);

/// The page. The process writes the first 4096 bytes but for the arbiter's words, the GPU the lanes, and the arbiter the
/// turns; each context registers its own
/// 4096 bytes with the driver, and has them until it ends.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct FlightPage {
    /// [`FLIGHT_MAGIC`].
    pub magic: AtomicU64,
    /// Operations let into the driver at an open gate, and those that closers mark.
    pub admitted: AtomicU64,
    /// Operations that the process knows to be complete, or of which it will never know.
    pub settled: AtomicU64,
    /// Operations behind which a marker word was queued.
    pub marked: AtomicU64,
    /// The gate word (CLOSED) at which no thread is inside the driver with a launch, and all that was launched before,
    /// SOLO included, is marked or settled.
    pub closed: AtomicU32,
    /// The gate word at which a thread of the process polls now, ready to launch within a microsecond of its opening; 0:
    /// none polls.
    pub awake: AtomicU32,
    /// Launches that wait at the closed gate.
    pub waiting: AtomicU32,
    /// Launches that wait for room in the window of the open gate.
    pub roomless: AtomicU32,
    /// What an operation usually takes, microseconds; 0: not known yet.
    pub usual_us: AtomicU32,
    /// When the first operation was admitted since the gate opened, `CLOCK_MONOTONIC` microseconds, which wrap; 0: none
    /// was.
    pub begun_us: AtomicU32,
    /// Lanes in use, from the first on, of each context.
    pub used_lanes: [AtomicU32; CONTEXTS],
    /// When the thread that polls last looked at the gate, `CLOCK_MONOTONIC` microseconds, which wrap: one that has no
    /// processor any more is not awake.
    pub awake_us: AtomicU32,
    /// Contexts whose streams may wait for a turn: a bit for each.
    pub ahead: AtomicU32,
    /// The arbiter's: the closed gate word at which work may be queued ahead of the next turn.
    pub invited: AtomicU32,
    /// The arbiter's: when the gate opened last, `CLOCK_MONOTONIC` microseconds, which wrap: before that nothing that was
    /// queued ahead ran.
    pub opened_us: AtomicU32,
    /// The arbiter's: how many operations fewer than another process of the tenant this one had in flight when the closed
    /// gate was closed again.
    pub behind: AtomicU32,
    /// The arbiter's: processes of the tenant that had operations of the last lease complete.
    pub launching: AtomicU32,
    /// The arbiter's: when it last saw, at the closed gate, that operations of another process of the tenant had
    /// completed, `CLOCK_MONOTONIC` microseconds, which wrap.
    pub elsewhere_us: AtomicU32,
    tail: [AtomicU32; 988],
    /// How many operations of each lane are complete: written by the GPU.
    pub lanes: [[AtomicU64; LANES]; CONTEXTS],
}

const _: () = {
    assert!(size_of::<FlightPage>() == FLIGHT_BYTES);
    assert!(offset_of!(FlightPage, admitted) == 8);
    assert!(offset_of!(FlightPage, closed) == 32);
    assert!(offset_of!(FlightPage, used_lanes) == 56);
    assert!(offset_of!(FlightPage, awake_us) == 116);
    assert!(offset_of!(FlightPage, ahead) == 120);
    assert!(offset_of!(FlightPage, lanes) == 4096);
};

/// What a process has in flight. Both wrap; a process that lies can say anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// Operations admitted and not complete. 0 is a proof, for a process that does not lie: there was a moment
    /// during the call at which nothing was in flight.
    pub operations: u64,
    /// Those of them that no marker covers: only the process's own threads can mark them.
    pub unmarked: u64,
}

impl FlightPage {
    /// One that nobody else sees.
    pub const fn unseen() -> Self {
        // SAFETY: atomics, for which zero is a value.
        unsafe { core::mem::zeroed() }
    }

    /// Reads the words in the order in which 0 is a proof: what is complete first, then what was admitted.
    pub fn in_flight(&self) -> InFlight {
        let settled = self.settled.load(Ordering::Acquire);
        let complete = settled.wrapping_add(self.landed());
        let marked = self.marked.load(Ordering::Acquire);
        let admitted = self.admitted.load(Ordering::SeqCst);
        InFlight {
            operations: admitted.wrapping_sub(complete),
            unmarked: admitted.wrapping_sub(settled).wrapping_sub(marked),
        }
    }

    /// Operations that are complete, those whose end will never be known included.
    pub fn complete(&self) -> u64 {
        // First of all: see `leave_context`.
        let settled = self.settled.load(Ordering::Acquire);
        settled.wrapping_add(self.landed())
    }

    fn landed(&self) -> u64 {
        let mut landed = 0u64;
        for (lanes, used) in self.lanes.iter().zip(&self.used_lanes) {
            let used = used.load(Ordering::Acquire) as usize;
            for lane in lanes.iter().take(used) {
                landed = landed.wrapping_add(lane.load(Ordering::Acquire));
            }
        }
        landed
    }

    /// The gate has another word: what waits for a turn goes.
    pub fn release(&self) {
        let ahead = self.ahead.load(Ordering::Acquire);
        for (at, lanes) in self.lanes.iter().enumerate() {
            if ahead >> at & 1 == 1 {
                // Release: the gate's word is to be seen before.
                lanes[TURN].fetch_add(1, Ordering::Release);
            }
        }
    }

    /// A new page, mapped for as long as the process lives, and its memfd, which is the caller's to close.
    ///
    /// # Errors
    /// `errno`, where the kernel has no such files or no memory.
    pub fn create() -> Result<(c_int, &'static Self), i32> {
        let file = os::sealed(c"tessera-flight", FLIGHT_BYTES as u64)?;
        // SAFETY: as long as the page, for good by its seals; atomics only, for which all bits are valid, aligned to a
        // page.
        let page = unsafe { Map::<Self>::new(file.as_raw_fd(), true) }?.leak();
        page.magic.store(FLIGHT_MAGIC, Ordering::Release);
        Ok((file.into_raw_fd(), page))
    }

    /// The process's: context number `context` has ended, and the GPU writes into its lanes no more. So many
    /// operations, `queued`, were to be counted there. The lanes are for another one then.
    pub fn leave_context(&self, context: usize, queued: u64) {
        for lane in &self.lanes[context] {
            lane.store(0, Ordering::Relaxed);
        }
        self.marked.fetch_sub(queued, Ordering::Relaxed);
        // Release: who sees the sum sees no lane that is part of it. Who reads in between takes too much to be in flight.
        self.settled.fetch_add(queued, Ordering::Release);
        self.used_lanes[context].store(0, Ordering::Release);
        self.ahead.fetch_and(!(1 << context), Ordering::Relaxed);
    }
}

/// Another process's page, mapped by the arbiter. What stands in it is that process's word.
#[cfg(feature = "std")]
#[derive(Debug)]
pub struct FlightReader(Map<FlightPage>);

#[cfg(feature = "std")]
impl FlightReader {
    /// Maps the page behind a descriptor, which is needed no longer than that. Nobody can make it wait, and nobody can
    /// take the page away from it later: what is no memfd, sealed against shrinking and of the page's size, is refused.
    pub fn map(file: BorrowedFd<'_>) -> Option<Self> {
        let fd = file.as_raw_fd();
        // First: of other files than memory's even `fstat` may wait, for a server of the sender's choice.
        if os::seals(fd).is_none_or(|seals| seals & libc::F_SEAL_SHRINK == 0) {
            return None;
        }
        let stat = os::fstat(fd).ok()?;
        if stat.kind != os::FileKind::Regular || stat.size != FLIGHT_BYTES as u64 {
            return None;
        }
        // SAFETY: as long as the page, for good by its seal; atomics only, for which all bits are valid, aligned to a
        // page.
        let map = unsafe { Map::<FlightPage>::new(fd, true) }.ok()?;
        (map.magic.load(Ordering::Acquire) == FLIGHT_MAGIC).then_some(Self(map))
    }
}

#[cfg(feature = "std")]
impl core::ops::Deref for FlightReader {
    type Target = FlightPage;

    fn deref(&self) -> &FlightPage {
        &self.0
    }
}

/// [`FlightPage::create`], for processes that std knows.
#[cfg(feature = "std")]
pub fn create() -> std::io::Result<(OwnedFd, &'static FlightPage)> {
    let (fd, page) = FlightPage::create().map_err(std::io::Error::from_raw_os_error)?;
    // SAFETY: just made, and the caller's.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, page))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_context_that_ends_takes_what_was_in_flight_along_and_nothing_else() {
        let (fd, page) = FlightPage::create().unwrap();
        // SAFETY: the test's own.
        unsafe { libc::close(fd) };
        page.admitted.store(10, Ordering::Relaxed);
        page.marked.store(9, Ordering::Relaxed);
        for context in 0..2 {
            page.used_lanes[context].store(2, Ordering::Relaxed);
        }
        page.lanes[0][1].store(3, Ordering::Relaxed);
        page.lanes[1][0].store(2, Ordering::Relaxed);
        // Of the first context's five operations two are in flight, of the other's four as many.
        assert_eq!(page.in_flight(), InFlight { operations: 5, unmarked: 1 });
        page.leave_context(0, 5);
        assert_eq!(page.in_flight(), InFlight { operations: 3, unmarked: 1 });
    }

    #[test]
    fn the_turn_comes_in_contexts_that_wait_for_it_and_in_no_other() {
        let page = Box::new(FlightPage::unseen());
        let turns = || [0, 1, 2].map(|at: usize| page.lanes[at][TURN].load(Ordering::Relaxed));
        page.release();
        assert_eq!(turns(), [0; 3], "one that knows no turns has another word there");
        page.ahead.store(0b101, Ordering::Relaxed);
        page.release();
        page.release();
        assert_eq!(turns(), [2, 0, 2]);
        page.leave_context(2, 0);
        page.release();
        assert_eq!(turns(), [3, 0, 0]);
    }

    #[test]
    fn nobody_can_take_the_page_away_from_who_has_mapped_it() {
        let (fd, page) = FlightPage::create().unwrap();
        assert_eq!(page.magic.load(Ordering::Acquire), FLIGHT_MAGIC);
        // SAFETY: calls about the test's own descriptor.
        unsafe {
            assert_eq!(libc::ftruncate(fd, 0), -1);
            assert_eq!(libc::ftruncate(fd, 2 * FLIGHT_BYTES as i64), -1);
            assert_ne!(libc::fcntl(fd, libc::F_GETFD) & libc::FD_CLOEXEC, 0);
            libc::close(fd);
        }
    }

    /// A memfd of so many bytes with these seals.
    fn memfd(bytes: u64, seals: libc::c_int) -> OwnedFd {
        // SAFETY: a NUL-terminated name; the descriptor is nobody else's.
        let fd = unsafe {
            OwnedFd::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_ALLOW_SEALING))
        };
        File::from(fd.try_clone().unwrap()).set_len(bytes).unwrap();
        // SAFETY: our own descriptor; no pointers.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        fd
    }

    #[test]
    fn what_another_process_writes_is_read() {
        let (fd, page) = create().unwrap();
        let reader = FlightReader::map(fd.as_fd()).unwrap();
        drop(fd);
        page.admitted.store(7, Ordering::SeqCst);
        assert_eq!(reader.in_flight().operations, 7);
    }

    #[test]
    fn a_file_that_could_be_taken_away_or_make_us_wait_is_refused() {
        let bytes = FLIGHT_BYTES as u64;
        let is_refused = |fd: OwnedFd| FlightReader::map(fd.as_fd()).is_none();
        assert!(is_refused(memfd(bytes, 0)), "it can be shortened");
        assert!(is_refused(memfd(bytes, libc::F_SEAL_GROW)));
        for bytes in [0, 1, bytes - 1, bytes + 1, bytes * 2] {
            assert!(is_refused(memfd(bytes, libc::F_SEAL_SHRINK)), "{bytes} bytes");
        }
        assert!(is_refused(memfd(bytes, libc::F_SEAL_SHRINK)), "it has no magic");
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        assert!(is_refused(file.into()), "an ordinary file");
        assert!(is_refused(File::open("/proc/self").unwrap().into()), "a directory");
        let (fd, _) = create().unwrap();
        // SAFETY: a path of this process's own; the descriptor is nobody else's.
        let for_writing = unsafe {
            let path = format!("/proc/self/fd/{}\0", fd.as_raw_fd());
            OwnedFd::from_raw_fd(libc::open(path.as_ptr().cast(), libc::O_WRONLY))
        };
        assert!(is_refused(for_writing), "it cannot be read");
    }
}
