//! Reading a page that a tenant wrote, believing nothing.

use core::fmt;
use core::mem::offset_of;
use core::ops::Range;

use crate::layout::{
    KINDS, Kind, LAUNCH_SHARDS, MAX_BYTES, MAX_GPUS, Past, SLOTS, Slot, USAGE_BYTES, USAGE_MAGIC,
    UsageHeader, is_departing,
};

/// What the processes of one allocation say they hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The quota page's generation when the usage page was made or renewed.
    pub generation: u64,
    /// The slots that hold anything, dead owners' included; see [`super::UsageFile::recover_dead`].
    pub slots: Vec<SlotView>,
    /// What those did whose slots other processes of the tenant took over.
    pub past: Tally,
}

impl Snapshot {
    /// Bytes charged on a GPU by all processes: granted and reserved. Saturates.
    pub fn charged(&self, gpu: usize) -> u64 {
        self.slots.iter().fold(0, |sum, slot| sum.saturating_add(slot.charged[gpu]))
    }

    /// Bytes granted on a GPU to all processes. Saturates.
    pub fn granted(&self, gpu: usize) -> u64 {
        self.slots.iter().fold(0, |sum, slot| sum.saturating_add(slot.granted[gpu]))
    }

    /// All that processes did, as far as the page says it still.
    pub fn tally(&self) -> Tally {
        let mut all = self.past.clone();
        self.slots.iter().for_each(|slot| all.merge(&slot.did));
        all
    }
}

/// One slot's words; see [`Slot`]. All of it is what the owner says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields of `Slot`, documented there")]
pub struct SlotView {
    /// The slot's index.
    pub index: usize,
    /// The owner's pid in its own pid namespace, a hint for people.
    pub pid_hint: u32,
    pub charged: [u64; MAX_GPUS],
    pub granted: [u64; MAX_GPUS],
    /// Granted bytes by [`crate::layout::Kind`].
    pub kinds: [u64; KINDS],
    pub allocations: u64,
    pub frees: u64,
    /// What else it counted.
    pub did: Tally,
    pub last_refused_bytes: u64,
    pub last_refused_ns: u64,
    pub claimed_ns: u64,
    /// When its dead owner's bytes were last known to be with the driver still, `CLOCK_MONOTONIC`
    /// nanoseconds; 0 where nobody has found the owner dead.
    pub departing_ns: u64,
}

impl SlotView {
    /// Whether its owner is dead, and the driver may have its memory still.
    pub fn is_departing(&self) -> bool {
        self.departing_ns != 0
    }

    /// How much of what is granted on a GPU the driver shows as the process's: managed memory is in no process's
    /// figure (NVML counts it for the device alone: gpuopenanalytics/pynvml#63). The page has its sum over all GPUs, so
    /// beside another GPU only as much of it is left out as cannot be there.
    pub fn shown(&self, gpu: usize) -> u64 {
        let others = self.granted.iter().enumerate().filter(|(other, _)| *other != gpu);
        let others = others.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        let managed = self.kinds[Kind::Managed as usize].saturating_sub(others);
        self.granted[gpu].saturating_sub(managed)
    }
}

/// Counters of any number of processes. All of it is what the tenant says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Requests refused because of the quota.
    pub refusals: u64,
    /// Requests within the quota that the driver refused.
    pub driver_refusals: u64,
    /// Kernel and graph launches.
    pub launches: u64,
    /// Nanoseconds of GPU time.
    pub gpu_time_ns: u64,
    /// Nanoseconds waited at the gate.
    pub gate_wait_ns: u64,
    /// Launches that waited there.
    pub gate_waits: u64,
    /// Times that a process rationed itself, because the arbiter was silent.
    pub gate_timeouts: u64,
    /// Times that the window was full while the gate was open.
    pub window_waits: u64,
    /// Highest granted bytes of any one process, per GPU.
    pub peak: [u64; MAX_GPUS],
}

impl Tally {
    /// Adds another's counters; sums saturate.
    pub fn merge(&mut self, other: &Tally) {
        for (sum, value) in [
            (&mut self.refusals, other.refusals),
            (&mut self.driver_refusals, other.driver_refusals),
            (&mut self.launches, other.launches),
            (&mut self.gpu_time_ns, other.gpu_time_ns),
            (&mut self.gate_wait_ns, other.gate_wait_ns),
            (&mut self.gate_waits, other.gate_waits),
            (&mut self.gate_timeouts, other.gate_timeouts),
            (&mut self.window_waits, other.window_waits),
        ] {
            *sum = sum.saturating_add(value);
        }
        for (peak, value) in self.peak.iter_mut().zip(other.peak) {
            *peak = (*peak).max(value);
        }
    }
}

/// What [`Slot`] or [`Past`] has counted, in words of the same names.
macro_rules! tally {
    ($of:ty, $words:expr, launches: $launches:expr) => {
        Tally {
            refusals: $words.count(offset_of!($of, refusals)),
            driver_refusals: $words.count(offset_of!($of, driver_refusals)),
            launches: $launches,
            gpu_time_ns: $words.nanoseconds(offset_of!($of, gpu_time_ns)),
            gate_wait_ns: $words.nanoseconds(offset_of!($of, gate_wait_ns)),
            gate_waits: $words.count(offset_of!($of, gate_waits)),
            gate_timeouts: $words.count(offset_of!($of, gate_timeouts)),
            window_waits: $words.count(offset_of!($of, window_waits)),
            peak: $words.u64s(offset_of!($of, peak)),
        }
    };
}

/// A page that no sound tenant writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tampered {
    /// What is impossible.
    pub what: &'static str,
    /// Whether it is about the page as a whole, which [`super::UsageFile::restore`] puts right: else it is the word of
    /// a slot's owner.
    pub of_page: bool,
    /// In which slot, where it is in one.
    pub slot: Option<usize>,
    /// For which GPU, where it is about one.
    pub gpu: Option<usize>,
    /// The value found.
    pub found: u64,
}

impl Tampered {
    pub(super) fn page(what: &'static str, found: u64) -> Self {
        Self { what, of_page: true, slot: None, gpu: None, found }
    }
}

pub(super) const SIZE: &str = "its size";
const HIGH_WATER: &str = "its high-water mark";

impl fmt::Display for Tampered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, found, .. } = self;
        write!(f, "the tenant tampered with its usage page: {what} cannot be {found:#x}")?;
        if let Some(slot) = self.slot {
            write!(f, ", slot {slot}")?;
        }
        if let Some(gpu) = self.gpu {
            write!(f, ", GPU {gpu}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Tampered {}

/// What the bytes of a usage page of this program's own version say, if they can be true. Pure, and total on any
/// input.
///
/// # Errors
/// The first thing that cannot be true. Whatever a process leaves when it is stopped or killed
/// between two stores can; but a read is not one moment, so a caller reads again before it calls
/// this tampering; see [`super::UsageFile::snapshot`].
pub fn parse(page: &[u8]) -> Result<Snapshot, Tampered> {
    if page.len() != USAGE_BYTES {
        return Err(Tampered::page(SIZE, u64::try_from(page.len()).unwrap_or(u64::MAX)));
    }
    let (header, slots) = page.split_at(size_of::<UsageHeader>());
    let (mut snapshot, mark) = parse_header(header, crate::abi::version())?;
    parse_slots(&mut snapshot, mark, 0, slots, &header[DEPARTING])?;
    Ok(snapshot)
}

/// Bytes of the header that [`parse_header`] looks at.
pub(super) const HEADER: usize = PAST + size_of::<Past>();
const PAST: usize = offset_of!(UsageHeader, past);

/// The header's part of [`parse`], of at least [`HEADER`] bytes: no slots yet, and the high-water mark.
pub(super) fn parse_header(header: &[u8], version: u32) -> Result<(Snapshot, usize), Tampered> {
    let words = Words(header);
    let expect = |what, found: u64, good: bool| match good {
        true => Ok(()),
        false => Err(Tampered::page(what, found)),
    };
    let magic = words.u64(offset_of!(UsageHeader, magic));
    expect("its magic", magic, magic == USAGE_MAGIC)?;
    let abi = words.u32(offset_of!(UsageHeader, abi));
    expect("its ABI version", abi.into(), abi == version)?;
    let slots = words.u32(offset_of!(UsageHeader, slot_count));
    expect("its number of slots", slots.into(), index(slots) == SLOTS)?;
    let mark = words.u32(offset_of!(UsageHeader, high_water));
    expect(HIGH_WATER, mark.into(), index(mark) <= SLOTS)?;
    let generation = words.u64(offset_of!(UsageHeader, generation));
    let past = Words(&header[PAST..HEADER]);
    let mut past = tally!(Past, past, launches: past.count(offset_of!(Past, launches)));
    // Nobody ever held more than a GPU can have.
    past.peak = past.peak.map(|bytes| bytes.min(MAX_BYTES));
    Ok((Snapshot { generation, slots: Vec::new(), past }, index(mark)))
}

/// Where the header says of each slot whether it is departing.
pub(super) const DEPARTING: Range<usize> = {
    let at = offset_of!(UsageHeader, departing_ns);
    at..at + SLOTS * size_of::<u64>()
};

/// The part of [`parse`] for the slots from `first` on, of which `bytes` has some or all, and
/// `departing` what the header says of as many.
pub(super) fn parse_slots(
    snapshot: &mut Snapshot,
    mark: usize,
    first: usize,
    bytes: &[u8],
    departing: &[u8],
) -> Result<(), Tampered> {
    let departing = departing.chunks_exact(size_of::<u64>());
    let slots = bytes.chunks_exact(size_of::<Slot>()).zip(departing);
    for (slot, (bytes, departing)) in (first..).zip(slots) {
        if is_zero(bytes) {
            continue;
        }
        if slot >= mark {
            let found = u64::try_from(mark).unwrap_or(u64::MAX);
            return Err(Tampered { slot: Some(slot), ..Tampered::page(HIGH_WATER, found) });
        }
        let mut view = read_slot(slot, Words(bytes));
        check_slot(&view, Words(bytes))?;
        let since = u64::from_le_bytes(departing.try_into().unwrap_or_default());
        if is_departing(view.claimed_ns, since) {
            view.departing_ns = since;
        }
        snapshot.slots.push(view);
    }
    Ok(())
}

/// Without a way out in the middle, so that it is done with wide registers: a page has 128 KiB of zeros.
pub(super) fn is_zero(slots: &[u8]) -> bool {
    slots.iter().fold(0, |any, byte| any | byte) == 0
}

/// What one slot says, whether or not it can be true.
pub(super) fn read_slot(index: usize, words: Words<'_>) -> SlotView {
    let shards = (0..LAUNCH_SHARDS).map(|at| offset_of!(Slot, launches) + at * size_of::<u64>());
    SlotView {
        index,
        pid_hint: words.u32(offset_of!(Slot, pid)),
        charged: words.u64s(offset_of!(Slot, charged)),
        granted: words.u64s(offset_of!(Slot, granted)),
        kinds: words.u64s(offset_of!(Slot, kinds)),
        allocations: words.count(offset_of!(Slot, allocations)),
        frees: words.count(offset_of!(Slot, frees)),
        did: tally!(Slot, words, launches: shards.map(|at| words.count(at)).sum()),
        last_refused_bytes: words.u64(offset_of!(Slot, last_refused_bytes)),
        last_refused_ns: words.nanoseconds(offset_of!(Slot, last_refused_ns)),
        claimed_ns: words.u64(offset_of!(Slot, claimed_ns)),
        departing_ns: 0,
    }
}

/// Whether that can be true.
pub(super) fn check_slot(view: &SlotView, words: Words<'_>) -> Result<(), Tampered> {
    let tampered =
        |what, gpu, found| Tampered { what, of_page: false, slot: Some(view.index), gpu, found };
    for gpu in 0..MAX_GPUS {
        let (charged, granted, peak) = (view.charged[gpu], view.granted[gpu], view.did.peak[gpu]);
        if charged > MAX_BYTES {
            return Err(tampered("the bytes charged", Some(gpu), charged));
        }
        if granted > charged {
            return Err(tampered("the bytes granted", Some(gpu), granted));
        }
        // Not compared with `granted`, which is raised before it: an owner can be stopped in between.
        if peak > MAX_BYTES {
            return Err(tampered("the peak", Some(gpu), peak));
        }
    }
    // Over all GPUs, hence more than one GPU's worth.
    if let Some(kind) = view.kinds.iter().find(|&&bytes| bytes > MAX_BYTES << 4) {
        return Err(tampered("the bytes of a kind", None, *kind));
    }
    // A process that recovers a slot can be stopped before the last step, when only `charged` is left.
    if view.claimed_ns == 0 {
        let left = SlotView {
            index: view.index,
            charged: view.charged,
            pid_hint: view.pid_hint,
            ..SlotView::default()
        };
        if *view != left {
            let nobodys = tampered("words of a slot nobody claimed", None, 0);
            return Err(Tampered { of_page: true, ..nobodys });
        }
    }
    // Any value is legal in the marks of imports: they mean something to the tenant alone.
    let reserved = &words.0[offset_of!(Slot, reserved)..];
    if let Some(at) = reserved.iter().position(|&byte| byte != 0) {
        let at = words.0.len() - reserved.len() + at;
        return Err(tampered("reserved bytes", None, u64::try_from(at).unwrap_or(u64::MAX)));
    }
    Ok(())
}

/// No process does anything as often: at a million times a second that takes nine years.
const MAX_COUNT: u64 = 1 << 48;
/// No page is that old, all threads of its processes together.
const MAX_NS: u64 = 1 << 63;

/// What cannot have happened is read as nothing: nobody lives by these words, and who reads them is told no nonsense.
fn up_to(most: u64, found: u64) -> u64 {
    if found <= most { found } else { 0 }
}

fn index(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Little-endian integers at offsets that [`crate::layout`] asserts to lie inside.
#[derive(Clone, Copy)]
pub(super) struct Words<'a>(pub(super) &'a [u8]);

impl Words<'_> {
    fn bytes<const N: usize>(self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at..at + N]);
        bytes
    }

    fn u32(self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes(at))
    }

    pub(super) fn u64(self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    /// How often something was done.
    fn count(self, at: usize) -> u64 {
        up_to(MAX_COUNT, self.u64(at))
    }

    /// How long something took, or when it was.
    fn nanoseconds(self, at: usize) -> u64 {
        up_to(MAX_NS, self.u64(at))
    }

    fn u64s<const N: usize>(self, at: usize) -> [u64; N] {
        core::array::from_fn(|index| self.u64(at + index * size_of::<u64>()))
    }
}
