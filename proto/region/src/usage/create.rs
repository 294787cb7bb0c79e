//! Publishing the usage page, and putting an existing one right.

use core::mem::offset_of;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use super::file::{Dead, Recovered, departing_at, zero_slots};
use super::snapshot::{Words, parse_slot};
use crate::abi;
use crate::error::PageError;
use crate::files;
use crate::layout::{
    Past, SLOTS, Slot, USAGE_BYTES, USAGE_FILE, USAGE_MAGIC, UsageHeader, slot_lock_offset,
};
use crate::os::{self, Stat, TryLock};
use crate::quota;
use crate::spares::Spares;

/// Any user of the container writes it.
pub(super) const MODE: u32 = 0o666;

/// What [`create`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Created {
    /// There was no page; there is one now.
    pub fresh: bool,
    /// Slots of living processes; their words were left alone.
    pub live_slots: usize,
    /// Slots of dead processes whose memory the driver may have still; they stay charged.
    pub departing_slots: usize,
    /// What was left of other dead processes.
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
///
/// # Errors
/// [`crate::PageFault::IsDirectory`] (see [`crate::prepare_dir`]), [`crate::PageFault::NotRegular`],
/// [`crate::PageFault::Busy`] while a process holds a lease on the file,
/// [`crate::PageFault::Denied`] where a tenant took it from us and we lack the rights to take it back,
/// [`crate::PageFault::NoSpace`], [`crate::PageFault::Io`].
pub fn create(dir: &Path, generation: u64) -> Result<Created, PageError> {
    create_from(dir, generation, abi::version(), None)
}

/// [`create`] of a version that [`abi::speaks`], with files to fall back on where the file system is full.
///
/// # Errors
/// As [`create`].
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
    let (file, stat) = files::open_page(&path)?;
    renew(&file, &path, stat, &encode(generation, abi), quota::departure_in(dir))
}

fn renew(
    file: &File,
    path: &Path,
    stat: Stat,
    fresh: &[u8],
    departure: Duration,
) -> Result<Created, PageError> {
    let io = |call| move |error: std::io::Error| PageError::io(path, call, &error);
    let mut created = Created::default();
    // Always: a tenant can punch holes, which a full tmpfs would turn into SIGBUS.
    files::restore_size(file, path, USAGE_BYTES)?;
    created.repaired |= stat.size != u64::try_from(USAGE_BYTES).unwrap_or(0);
    if stat.mode != MODE {
        file.set_permissions(fs::Permissions::from_mode(MODE)).map_err(io("chmod"))?;
        created.repaired = true;
    }

    let mut found = [0; HEADER];
    file.read_exact_at(&mut found, 0).map_err(io("pread"))?;
    created.repaired |= found[..GENERATION] != fresh[..GENERATION];

    let mut taken = [false; SLOTS];
    for (slot, taken) in taken.iter_mut().enumerate() {
        *taken = os::try_lock(file.as_raw_fd(), slot_lock_offset(slot))
            .map_err(|errno| PageError::os(path, "fcntl", errno))?
            == TryLock::Taken;
    }
    created.live_slots = taken.iter().filter(|taken| **taken).count();
    let departing = departing(file, path, &taken, departure)?;
    created.departing_slots = departing.iter().filter(|departing| **departing).count();
    // While all other locks are held nobody can claim, so the mark may go back too. With a living
    // process, or a departing one, it may not; and if it is impossible, every sum must look everywhere.
    let used = |slot: &usize| taken[*slot] || departing[*slot];
    let needed = (0..SLOTS).rev().find(used).map_or(0, |last| last + 1);
    let mark = u32::from_le_bytes(found[MARK..].try_into().unwrap_or_default());
    let header = if needed == 0 {
        &fresh[..HEADER]
    } else if usize::try_from(mark).is_ok_and(|mark| (needed..=SLOTS).contains(&mark)) {
        &fresh[..MARK]
    } else {
        created.repaired = true;
        found[MARK..].copy_from_slice(&u32::try_from(SLOTS).unwrap_or(u32::MAX).to_le_bytes());
        found[..MARK].copy_from_slice(&fresh[..MARK]);
        &found[..]
    };
    // What the generation before did is not this one's.
    if created.live_slots == 0
        && found[GENERATION..GENERATION_END] != fresh[GENERATION..GENERATION_END]
    {
        for slot in (0..SLOTS).filter(|&slot| departing[slot]) {
            forget_counters(file, slot).map_err(io("pwrite"))?;
        }
        let past = [0; size_of::<Past>()];
        file.write_all_at(&past, offset_of!(UsageHeader, past) as u64).map_err(io("pwrite"))?;
    }
    // Slots first: a snapshot meanwhile must not see them above a mark that went back.
    let empty = |slot: usize| !taken[slot] && !departing[slot];
    let written = zero_slots(file, path, empty).and_then(|recovered| {
        file.write_all_at(header, 0).map(|()| recovered).map_err(io("pwrite"))
    });
    for slot in (0..SLOTS).filter(|&slot| !taken[slot]) {
        os::unlock(file.as_raw_fd(), slot_lock_offset(slot));
    }
    created.recovered = written?;
    Ok(created)
}

/// Zeroes what a departing slot's owner has counted, and leaves what it held.
fn forget_counters(file: &File, slot: usize) -> std::io::Result<()> {
    let parts = [
        offset_of!(Slot, peak)..offset_of!(Slot, kinds),
        offset_of!(Slot, refusals)..offset_of!(Slot, claimed_ns),
        offset_of!(Slot, gate_waits)..offset_of!(Slot, reserved),
    ];
    for part in parts {
        let at = slot_lock_offset(slot) + u64::try_from(part.start).unwrap_or(0);
        file.write_all_at(&[0; size_of::<Slot>()][part], at)?;
    }
    Ok(())
}

/// Which of the slots that nobody holds keep what their dead owners have left with the driver. All their
/// locks are held.
fn departing(
    file: &File,
    path: &Path,
    taken: &[bool; SLOTS],
    departure: Duration,
) -> Result<[bool; SLOTS], PageError> {
    let io = |call| move |error: std::io::Error| PageError::io(path, call, &error);
    let (now, mut departing) = (os::monotonic_ns(), [false; SLOTS]);
    let departure = u64::try_from(departure.as_nanos()).unwrap_or(u64::MAX);
    for (slot, departing) in departing.iter_mut().enumerate().filter(|(slot, _)| !taken[*slot]) {
        let (mut bytes, mut since) = ([0; size_of::<Slot>()], [0; size_of::<u64>()]);
        file.read_exact_at(&mut bytes, slot_lock_offset(slot)).map_err(io("pread"))?;
        file.read_exact_at(&mut since, departing_at(slot)).map_err(io("pread"))?;
        let dead = Dead::parse(slot, &bytes, u64::from_le_bytes(since));
        if !dead.holds || dead.claimed_ns == 0 || parse_slot(slot, Words(&bytes)).is_err() {
            continue;
        }
        if dead.departing_ns == 0 {
            let now = now.max(dead.claimed_ns).to_le_bytes();
            file.write_all_at(&now, departing_at(slot)).map_err(io("pwrite"))?;
        }
        *departing = dead.departing_ns == 0 || now.saturating_sub(dead.departing_ns) < departure;
    }
    Ok(departing)
}

/// Writes the header again where it is not as Tessera leaves it, the magic last. `living` are the slots
/// that sums must reach.
pub(super) fn restore_header(
    file: &File,
    generation: u64,
    abi: u32,
    living: &[bool; SLOTS],
) -> std::io::Result<bool> {
    let mut found = [0; HEADER];
    file.read_exact_at(&mut found, 0)?;
    let fresh = encode(generation, abi);
    let mark = u32::from_le_bytes(found[MARK..].try_into().unwrap_or_default());
    let needed = living.iter().rposition(|living| *living).map_or(0, |last| last + 1);
    let right = usize::try_from(mark).is_ok_and(|mark| (needed..=SLOTS).contains(&mark));
    if right && found[..GENERATION] == fresh[..GENERATION] {
        return Ok(false);
    }
    if !right {
        // All of them: a process that claims meanwhile can't raise it further.
        let all = u32::try_from(SLOTS).unwrap_or(u32::MAX).to_le_bytes();
        file.write_all_at(&all, MARK as u64)?;
    }
    file.write_all_at(&fresh[MAGIC..MARK], MAGIC as u64)?;
    file.write_all_at(&fresh[..MAGIC], 0)?;
    Ok(true)
}

const MAGIC: usize = size_of::<u64>();
const GENERATION: usize = offset_of!(UsageHeader, generation);
const GENERATION_END: usize = GENERATION + size_of::<u64>();
const MARK: usize = offset_of!(UsageHeader, high_water);
/// The header's bytes that mean something.
const HEADER: usize = MARK + size_of::<u32>();

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
