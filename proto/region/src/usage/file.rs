//! The plugin's side of the usage page: publishing it, and one descriptor, `pread` and `pwrite`, no mapping.

use core::mem::offset_of;
use core::ops::Range;
use std::fs::{File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::snapshot::{
    DEPARTING, HEADER, SIZE, SlotView, Snapshot, Tally, Tampered, Words, check_slot, is_zero,
    parse_header, parse_slots, read_slot,
};
use crate::abi;
use crate::error::PageError;
use crate::files::{self, Spares};
use crate::layout::{
    DEPARTURE_NS, MAX_GPUS, Past, SLOTS, Slot, USAGE_BYTES, USAGE_FILE, USAGE_MAGIC, UsageHeader,
    is_departing, slot_lock_offset,
};
use crate::os::{self, Stat};
use crate::quota::QuotaWriter;

/// Any user of the container writes it.
const MODE: u32 = 0o666;

/// What [`create`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Created {
    /// There was no page; there is one now.
    pub fresh: bool,
    /// What was left of dead processes whose memory the driver has back.
    pub recovered: Recovered,
    /// The page was not as Tessera leaves it (size, mode, magic, version or counts), and is now.
    pub repaired: bool,
}

/// Publishes the usage page in `dir`, of full size with memory behind all of it, mode 0666.
///
/// Where one exists, containers may have it mounted and mapped, so the same file is put right:
/// slots of dead processes are zeroed, living ones are left alone, and whatever an earlier tenant
/// did to size, mode or header is repaired and reported. So nothing that one tenant leaves behind
/// can keep the next from starting.
pub fn create(dir: &Path, generation: u64) -> Result<Created, PageError> {
    create_from(dir, generation, abi::version(), None)
}

/// [`create`] of a version that [`abi::speaks`], with files to fall back on where the file system is full.
pub fn create_from(
    dir: &Path,
    generation: u64,
    abi: u32,
    spares: Option<&Spares>,
) -> Result<Created, PageError> {
    let path = dir.join(USAGE_FILE);
    // What exists needs no memory: on a full file system a tenant's restart must not fail.
    if !files::exists(&path)
        && files::publish(dir, USAGE_FILE, &encode(generation, abi), MODE, spares)?.is_some()
    {
        return Ok(Created { fresh: true, ..Created::default() });
    }
    let departure =
        QuotaWriter::open(dir).map_or(Duration::from_nanos(DEPARTURE_NS), |page| page.departure());
    UsageFile::open_as(dir, abi)?.renew(generation, departure)
}

/// The bytes of an unused page.
fn encode(generation: u64, abi: u32) -> Vec<u8> {
    let mut page = vec![0; USAGE_BYTES];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(offset_of!(UsageHeader, magic), &USAGE_MAGIC.to_le_bytes());
    put(offset_of!(UsageHeader, abi), &abi.to_le_bytes());
    put(
        offset_of!(UsageHeader, slot_count),
        &u32::try_from(SLOTS).unwrap_or(u32::MAX).to_le_bytes(),
    );
    put(offset_of!(UsageHeader, generation), &generation.to_le_bytes());
    page
}

/// Reads before an impossible value is called tampering: a read that straddles an owner's stores
/// happens now and then, but not that many times in a row.
const READS: usize = 8;

/// Readings of a page whose slots are being taken over, after the first.
const PASTS: usize = 3;

/// The plugin's handle on one usage page. Opened once and kept: whatever the tenant does to the
/// file later (lease, mode), this descriptor goes on working.
#[derive(Debug)]
pub struct UsageFile {
    path: PathBuf,
    file: File,
    abi: u32,
    /// Where a page without memory behind it is somebody's doing.
    tmpfs: bool,
    /// Locks of one open file description do not exclude each other.
    recovering: Mutex<()>,
}

/// What dead processes had left in their slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Slots that held anything.
    pub slots: usize,
    /// Bytes that were charged there, per GPU of the quota page.
    pub bytes: [u64; MAX_GPUS],
    /// What those processes did, as far as it can be true. It is in the page no more.
    pub tally: Tally,
}

impl UsageFile {
    /// Opens the page in `dir`, of this program's own version; see [`Self::open_as`].
    pub fn open(dir: &Path) -> Result<Self, PageError> {
        Self::open_as(dir, crate::abi::version())
    }

    /// Opens the page in `dir`, which is to be of version `abi`, without following a symlink and without waiting. Its contents are
    /// not looked at: they are the tenant's.
    pub fn open_as(dir: &Path, abi: u32) -> Result<Self, PageError> {
        let path = dir.join(USAGE_FILE);
        let (file, _) = files::open_page(&path)?;
        let tmpfs = os::is_tmpfs(file.as_raw_fd());
        Ok(Self { path, file, abi, tmpfs, recovering: Mutex::new(()) })
    }

    /// What the page says now, after checking that it can be true: the slots below the high-water mark, usually a few
    /// KiB of 132. What lies above it is read only if a living process holds a slot there, which says that the mark is
    /// wrong. So all that sums reach and all that any process lives by is looked at, and not what a tenant may have
    /// written where nobody is.
    ///
    /// # Errors
    /// [`Tampered`] for the first thing that cannot be true, on every one of several reads.
    pub fn snapshot(&self) -> Result<Snapshot, Tampered> {
        again(|| {
            self.check_size()?;
            let (mut snapshot, mark) = self.read_header()?;
            let (above, end) = (slot_lock_offset(mark), slot_lock_offset(SLOTS));
            let is_hidden = above < end && self.locked(above, end - above);
            self.read_slots(&mut snapshot, mark, if is_hidden { SLOTS } else { mark })?;
            self.read_past(&mut snapshot)?;
            Ok(snapshot)
        })
    }

    fn check_size(&self) -> Result<(), Tampered> {
        let stat = self.stat().map_err(|_| Tampered::page(SIZE, 0))?;
        if stat.size != BYTES {
            return Err(Tampered::page(SIZE, stat.size));
        }
        if self.tmpfs && stat.held < BYTES {
            return Err(Tampered::page("the bytes it has memory for", stat.held));
        }
        Ok(())
    }

    fn read_header(&self) -> Result<(Snapshot, usize), Tampered> {
        let mut header = [0; HEADER];
        self.file.read_exact_at(&mut header, 0).map_err(|_| Tampered::page(SIZE, BYTES))?;
        parse_header(&header, self.abi)
    }

    /// The first `slots` slots, some at a time: a buffer for all of them would come from the kernel and
    /// go back to it at every look.
    fn read_slots(
        &self,
        snapshot: &mut Snapshot,
        mark: usize,
        slots: usize,
    ) -> Result<(), Tampered> {
        const AT_ONCE: usize = 16;
        let mut bytes = [0; AT_ONCE * SLOT];
        for first in (0..slots).step_by(AT_ONCE) {
            let bytes = &mut bytes[..AT_ONCE.min(slots - first) * SLOT];
            let unreadable = |_| Tampered::page(SIZE, BYTES);
            self.file.read_exact_at(bytes, slot_lock_offset(first)).map_err(unreadable)?;
            // Where nobody is, nobody departs.
            if is_zero(bytes) {
                continue;
            }
            let mut departing = [0; AT_ONCE * size_of::<u64>()];
            self.file.read_exact_at(&mut departing, departing_at(first)).map_err(unreadable)?;
            parse_slots(snapshot, mark, first, bytes, &departing)?;
        }
        Ok(())
    }

    /// Reads the slots again while their counters move from them to the header: neither twice nor not at
    /// all. One that moves all the time is its tenant's affair.
    fn read_past(&self, snapshot: &mut Snapshot) -> Result<(), Tampered> {
        for _ in 0..PASTS {
            let (header, mark) = self.read_header()?;
            if header.past == snapshot.past {
                break;
            }
            *snapshot = header;
            self.read_slots(snapshot, mark, mark)?;
        }
        Ok(())
    }

    /// Zeroes the slots whose owners are gone, and says what was in them. For who knows that the driver
    /// has back all that they held; else see [`Self::bury`].
    pub fn recover_dead(&self) -> Result<Recovered, PageError> {
        self.recover(|_| End::Departed)
    }

    /// Notices the slots whose owners are gone as departing, and zeroes those that have been so for
    /// `departure`, or held nothing. Says what was in those that it zeroed.
    pub fn bury(&self, departure: Duration) -> Result<Recovered, PageError> {
        self.bury_for(departure, false)
    }

    /// The same; with `forgets`, what departing slots have counted goes.
    fn bury_for(&self, departure: Duration, forgets: bool) -> Result<Recovered, PageError> {
        let now = os::monotonic_ns();
        let departure = u64::try_from(departure.as_nanos()).unwrap_or(u64::MAX);
        self.recover(|dead| {
            let since = dead.view.departing_ns;
            let seen = since == 0 || since > now;
            let departed = !seen && now.saturating_sub(since) >= departure;
            // What cannot be true is nobody's memory.
            match !dead.holds || dead.view.claimed_ns == 0 || !dead.is_possible || departed {
                true => End::Departed,
                false => End::Departing { seen, left: dead.view.charged, forgets },
            }
        })
    }

    /// Takes from departing slots what the driver has back, and zeroes those that it has back whole. Says
    /// what it took.
    pub fn settle(&self, fates: &[Fate]) -> Result<Recovered, PageError> {
        self.recover(|Dead { view: dead, .. }| {
            let mut left = dead.charged;
            let mut seen = false;
            let its = |fate: &&Fate| {
                dead.departing_ns != 0
                    && (fate.slot, fate.claimed_ns) == (dead.index, dead.claimed_ns)
            };
            for fate in fates.iter().filter(its) {
                if let Some(left) = left.get_mut(fate.gpu) {
                    *left = fate.left.min(*left);
                }
                seen |= fate.seen;
            }
            let gone = left == [0; MAX_GPUS] && left != dead.charged;
            match gone && !seen {
                true => End::Departed,
                false => End::Departing { seen, left, forgets: false },
            }
        })
    }

    /// Does with each dead owner's slot what `end` says.
    fn recover(&self, end: impl Fn(&Dead) -> End) -> Result<Recovered, PageError> {
        let _alone = self.recovering.lock().unwrap_or_else(PoisonError::into_inner);
        let mut total = Recovered::default();
        for slot in 0..SLOTS {
            let slot_bytes = self.slot_bytes(slot)?;
            if is_zero(&slot_bytes) {
                continue;
            }
            let lock = os::try_lock(self.file.as_raw_fd(), slot_lock_offset(slot));
            if !lock.map_err(|errno| PageError::os(&self.path, "fcntl", errno))? {
                continue;
            }
            let done = self.recover_one(slot, &end);
            os::unlock(self.file.as_raw_fd(), slot_lock_offset(slot));
            total.add(&done?);
        }
        if total.bytes.iter().any(|&bytes| bytes != 0) {
            let at = offset_of!(UsageHeader, recovered_ns) as u64;
            self.write(&os::monotonic_ns().to_le_bytes(), at)?;
        }
        Ok(total)
    }

    /// The same for one slot, whose lock is held. What is read of it before the lock was may be another
    /// owner's.
    fn recover_one(
        &self,
        slot: usize,
        end: &impl Fn(&Dead) -> End,
    ) -> Result<Recovered, PageError> {
        let bytes = self.slot_bytes(slot)?;
        if is_zero(&bytes) {
            return Ok(Recovered::default());
        }
        let mut departing = [0; size_of::<u64>()];
        // A page that was cut has no header either, and nothing departs from it.
        let _ = self.file.read_exact_at(&mut departing, departing_at(slot));
        let dead = Dead::read(slot, &bytes, u64::from_le_bytes(departing));
        let zero = |part: Range<usize>| {
            self.write(&[0; SLOT][part.clone()], slot_lock_offset(slot) + part.start as u64)
        };
        let end = end(&dead);
        let Dead { view: dead, is_possible, .. } = dead;
        let End::Departing { seen, left, forgets } = end else {
            // In the order of [`Slot::zero`].
            [GRANTED, REST, CHARGED].into_iter().try_for_each(zero)?;
            let tally = if is_possible { dead.did } else { Tally::default() };
            return Ok(Recovered { slots: 1, bytes: dead.charged, tally });
        };
        let frees = Words(&bytes).u64(offset_of!(Slot, frees)).wrapping_add(1).to_le_bytes();
        if forgets {
            COUNTERS.into_iter().try_for_each(zero)?;
        }
        if seen {
            let now = os::monotonic_ns().max(dead.claimed_ns);
            self.write(&now.to_le_bytes(), departing_at(slot))?;
        }
        let mut recovered = Recovered::default();
        for (gpu, &left) in
            left.iter().enumerate().filter(|(gpu, left)| **left < dead.charged[*gpu])
        {
            // The order of a release; see `crate::ledger`.
            let at = |part: &Range<usize>| {
                let at = part.start + gpu * size_of::<u64>();
                slot_lock_offset(slot) + u64::try_from(at).unwrap_or(0)
            };
            self.write(&left.min(dead.granted[gpu]).to_le_bytes(), at(&GRANTED))?;
            self.write(&frees, slot_lock_offset(slot) + FREES)?;
            self.write(&left.to_le_bytes(), at(&CHARGED))?;
            recovered.bytes[gpu] = dead.charged[gpu] - left;
        }
        Ok(recovered)
    }

    fn stat(&self) -> Result<Stat, PageError> {
        let failed = |errno| PageError::os(&self.path, "fstat", errno);
        os::fstat(self.file.as_raw_fd()).map_err(failed)
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), PageError> {
        let io = |error: std::io::Error| PageError::io(&self.path, "pread", &error);
        self.file.read_exact_at(bytes, at).map_err(io)
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), PageError> {
        let io = |error: std::io::Error| PageError::io(&self.path, "pwrite", &error);
        self.file.write_all_at(bytes, at).map_err(io)
    }

    fn slot_bytes(&self, slot: usize) -> Result<[u8; SLOT], PageError> {
        let mut bytes = [0; SLOT];
        let at = slot_lock_offset(slot);
        match self.file.read_exact_at(&mut bytes, at) {
            Ok(()) => Ok(bytes),
            // Truncated by the tenant: nothing there to recover.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok([0; SLOT]),
            Err(error) => Err(PageError::io(&self.path, "pread", &error)),
        }
    }

    /// Puts right what a tenant did to the page as a whole: size, memory behind it (it can cut the file
    /// or punch holes), and header. Slots keep what is in them; a living process's slot that was cut
    /// off is marked as claimed again, with nothing in it. Whether there was anything to do.
    ///
    /// Writes, and so waits while the tenant itself is in the middle of a write to the file.
    pub fn restore(&self, generation: u64) -> Result<bool, PageError> {
        let _alone = self.recovering.lock().unwrap_or_else(PoisonError::into_inner);
        let stat = self.stat()?;
        // Always: a tenant can punch holes, which a full tmpfs would turn into SIGBUS.
        files::restore_size(&self.file, &self.path, USAGE_BYTES)?;
        let living: [bool; SLOTS] = core::array::from_fn(|slot| self.slot_locked(slot));
        let mut restored = stat.size != BYTES || self.tmpfs && stat.held < BYTES;
        restored |= self.restore_header(generation, &living)?;
        for slot in (0..SLOTS).filter(|&slot| living[slot]) {
            let at = slot_lock_offset(slot) + CLAIMED;
            let mut claimed = [0; size_of::<u64>()];
            self.read(&mut claimed, at)?;
            if claimed == [0; size_of::<u64>()] {
                self.write(&os::monotonic_ns().max(1).to_le_bytes(), at)?;
                restored = true;
            }
        }
        Ok(restored)
    }

    /// Writes the header again where it is not as Tessera leaves it, the magic last. `living` are the slots
    /// that sums must reach.
    fn restore_header(&self, generation: u64, living: &[bool; SLOTS]) -> Result<bool, PageError> {
        let mut found = [0; MARK_END];
        self.read(&mut found, 0)?;
        let fresh = encode(generation, self.abi);
        let mark = u32::from_le_bytes(found[MARK..].try_into().unwrap_or_default());
        let needed = living.iter().rposition(|living| *living).map_or(0, |last| last + 1);
        let right = usize::try_from(mark).is_ok_and(|mark| (needed..=SLOTS).contains(&mark));
        if right && found[..GENERATION] == fresh[..GENERATION] {
            return Ok(false);
        }
        if !right {
            // All of them: a process that claims meanwhile can't raise it further.
            let all = u32::try_from(SLOTS).unwrap_or(u32::MAX).to_le_bytes();
            self.write(&all, MARK as u64)?;
        }
        self.write(&fresh[MAGIC..MARK], MAGIC as u64)?;
        self.write(&fresh[..MAGIC], 0)?;
        Ok(true)
    }

    /// Puts the page right for the next start of a container, whatever was done to it, and begins `generation` where it
    /// is another.
    pub(super) fn renew(&self, generation: u64, departure: Duration) -> Result<Created, PageError> {
        let mut repaired = self.stat()?.mode != MODE;
        if repaired {
            let set = self.file.set_permissions(Permissions::from_mode(MODE));
            set.map_err(|error| PageError::io(&self.path, "chmod", &error))?;
        }
        let mut found = [0; size_of::<u64>()];
        // Of a page that was cut, nothing.
        let _ = self.file.read_exact_at(&mut found, GENERATION as u64);
        repaired |= self.restore(generation)?;
        // What the generation before did is not this one's.
        let forgets = found != generation.to_le_bytes() && !self.any_slot_locked();
        let recovered = self.bury_for(departure, forgets)?;
        if forgets {
            self.write(&[0; size_of::<Past>()], offset_of!(UsageHeader, past) as u64)?;
        }
        self.write(&generation.to_le_bytes(), GENERATION as u64)?;
        Ok(Created { fresh: false, recovered, repaired })
    }

    /// Whether the page is as [`super::create`] would leave it for this generation, so that nothing of
    /// it need be written; decided by reading, which waits for no tenant. Never on a file system other than
    /// a tmpfs, where a read does not show whether there is memory behind all of it.
    pub fn is_whole(&self, generation: u64) -> bool {
        let of_living = |snapshot: &Snapshot| {
            let stays = |slot: &SlotView| slot.is_departing() || self.slot_locked(slot.index);
            snapshot.slots.iter().all(stays)
        };
        self.tmpfs
            && self.stat().is_ok_and(|stat| stat.mode == MODE)
            && self
                .snapshot()
                .is_ok_and(|snapshot| snapshot.generation == generation && of_living(&snapshot))
    }

    /// Whether any process (or a forked child of one) still holds a slot; also where the kernel does not say.
    pub fn any_slot_locked(&self) -> bool {
        let (first, end) = (slot_lock_offset(0), slot_lock_offset(SLOTS));
        self.locked(first, end - first)
    }

    /// The same of one slot.
    pub fn slot_locked(&self, slot: usize) -> bool {
        self.locked(slot_lock_offset(slot), 1)
    }

    fn locked(&self, start: u64, len: u64) -> bool {
        os::is_locked(self.file.as_raw_fd(), start, len).unwrap_or(true)
    }
}

/// What the driver says of a departing slot on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fate {
    /// The slot.
    pub slot: usize,
    /// When its dead owner claimed it.
    pub claimed_ns: u64,
    /// The GPU, as the page counts.
    pub gpu: usize,
    /// The most that the driver may have of it still, bytes.
    pub left: u64,
    /// The driver has something of it for certain: it departs for as long as that is seen.
    pub seen: bool,
}

/// What is to become of a dead owner's slot.
enum End {
    /// The driver has back all that it held.
    Departed,
    /// It may have this many bytes of each GPU still.
    Departing {
        /// That is known now.
        seen: bool,
        left: [u64; MAX_GPUS],
        /// What its owner has counted goes.
        forgets: bool,
    },
}

/// A dead owner's slot.
struct Dead {
    view: SlotView,
    /// The driver may hold something for it.
    holds: bool,
    is_possible: bool,
}

impl Dead {
    fn read(index: usize, slot: &[u8], departing_ns: u64) -> Self {
        let mut view = read_slot(index, Words(slot));
        let is_possible = check_slot(&view, Words(slot)).is_ok();
        if is_departing(view.claimed_ns, departing_ns) {
            view.departing_ns = departing_ns;
        }
        let imports = offset_of!(Slot, more_imports)..offset_of!(Slot, gate_waits);
        Self { view, holds: !is_zero(&slot[CHARGED]) || !is_zero(&slot[imports]), is_possible }
    }
}

/// Where the header says whether a slot is departing.
fn departing_at(slot: usize) -> u64 {
    u64::try_from(DEPARTING.start + slot * size_of::<u64>()).unwrap_or(0)
}

/// Reads until what is read can be true, [`READS`] times at most.
fn again<T>(read: impl Fn() -> Result<T, Tampered>) -> Result<T, Tampered> {
    for _ in 1..READS {
        if let Ok(found) = read() {
            return Ok(found);
        }
        std::thread::yield_now();
    }
    read()
}

impl Recovered {
    fn add(&mut self, other: &Self) {
        self.slots += other.slots;
        for (total, bytes) in self.bytes.iter_mut().zip(other.bytes) {
            *total = total.saturating_add(bytes);
        }
        self.tally.merge(&other.tally);
    }
}

const BYTES: u64 = USAGE_BYTES as u64;
const SLOT: usize = size_of::<Slot>();
const CLAIMED: u64 = offset_of!(Slot, claimed_ns) as u64;
const FREES: u64 = offset_of!(Slot, frees) as u64;
const CHARGED: Range<usize> = offset_of!(Slot, charged)..offset_of!(Slot, granted);
const GRANTED: Range<usize> = offset_of!(Slot, granted)..offset_of!(Slot, peak);
const REST: Range<usize> = offset_of!(Slot, peak)..SLOT;
/// What a slot's owner has counted, beside what it holds.
const COUNTERS: [Range<usize>; 3] = [
    offset_of!(Slot, peak)..offset_of!(Slot, kinds),
    offset_of!(Slot, refusals)..offset_of!(Slot, claimed_ns),
    offset_of!(Slot, gate_waits)..offset_of!(Slot, reserved),
];
const MAGIC: usize = size_of::<u64>();
const GENERATION: usize = offset_of!(UsageHeader, generation);
const MARK: usize = offset_of!(UsageHeader, high_water);
const MARK_END: usize = MARK + size_of::<u32>();
