//! One tenant of the arbiter: its page, its processes, its connections.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use tessera_region::layout::{
    GATE_CLOSED, GATE_OPEN, GATE_SOCKET, GATE_SOLO, GATE_YIELD, QUOTA_FILE, gate_state,
};
use tessera_region::quota::{Policy as PagePolicy, QuotaWriter};
use tessera_region::usage::{SlotView, Snapshot, UsageFile};

use super::ArbiterError;
use super::drain_tracker::DrainTracker;
use super::flights::Flights;
use super::gate_connections::GateConnections;
use super::policy::{GateState, GpuIndex, Pace, Share, ShareKind, TenantTotals};
use tessera_config::Leases;
use tessera_model::clock::monotonic_ns;

/// How long the arbiter waits for processes that an earlier arbiter served: they read the gate at least
/// every 100 ms.
const INHERITED_WAIT: Duration = Duration::from_millis(250);
/// How long those that came may take to drain.
const INHERITED_DRAIN: Duration = Duration::from_secs(1);
/// Predicted work in flight where another tenant may wake that must not wait for a whole window.
const NARROW: Duration = Duration::from_micros(250);
/// A sleep of the arbiter's may end so late, nanoseconds.
const WATCHED_NS: u64 = 60_000;
/// How far back GPU time is remembered, and how finely. Of a tenant that is alone it is measured every ten seconds or
/// so; two such times have one in any case.
const REMEMBERED_NS: u64 = 20_000_000_000;
const SAMPLE_NS: u64 = 100_000_000;
/// What is older than a second is remembered by the second.
const SPARSE_NS: u64 = 1_000_000_000;

/// Quota pages by allocation: device and inode.
pub(super) type Served = BTreeMap<String, (u64, u64)>;

/// A tenant's pages as the arbiter needs them. The caller opens them, because the arbiter's thread opens
/// nothing.
#[derive(Debug)]
pub(super) struct OpenedPages {
    pub id: String,
    pub uuids: Vec<String>,
    /// `None`: not to be arbitrated.
    pub share: Option<Share>,
    pub page: QuotaWriter,
    /// Device and inode of the quota page.
    pub file: (u64, u64),
    /// Processes that may have work in flight, as far as known.
    pub in_use: usize,
    /// `None` where the present socket is kept.
    pub listening: Option<OwnedFd>,
}

impl OpenedPages {
    /// Opens the pages in `dir`, which must exist. Makes the socket unless this page is served already and
    /// the socket is there.
    pub fn open(dir: &Path, served: &Served) -> Result<Self, ArbiterError> {
        let socket = |error| ArbiterError::Socket { path: dir.to_owned(), error };
        let page = QuotaWriter::open(dir)?;
        let meta = std::fs::metadata(dir.join(QUOTA_FILE));
        let meta = meta.map_err(socket)?;
        let spec = page.spec();
        let share = spec.gpus.first().and_then(|gpu| {
            let kind = match gpu.policy {
                PagePolicy::Burst => ShareKind::Burst,
                PagePolicy::Strict => ShareKind::Strict,
                PagePolicy::None => return None,
            };
            Some(Share { millis: gpu.cores_millis, kind })
        });
        let in_use = UsageFile::open_as(dir, page.abi()).map_or(usize::MAX, |usage| users(&usage));
        let file = (meta.dev(), meta.ino());
        let listens = served.get(&spec.allocation) == Some(&file) && is_socket(dir);
        let listening =
            (share.is_some() && !listens).then(|| GateConnections::listen(dir)).transpose();
        Ok(OpenedPages {
            id: spec.allocation,
            uuids: spec.gpus.into_iter().map(|gpu| gpu.uuid).collect(),
            share,
            page,
            file,
            in_use,
            listening: listening.map_err(socket)?,
        })
    }
}

fn is_socket(dir: &Path) -> bool {
    let meta = std::fs::symlink_metadata(dir.join(GATE_SOCKET));
    meta.is_ok_and(|meta| meta.file_type().is_socket())
}

/// Processes that hold a slot. A page that cannot be read counts as used by many.
fn users(usage: &UsageFile) -> usize {
    if !usage.any_slot_locked() {
        return 0;
    }
    let living = |slot: &&SlotView| usage.slot_locked(slot.index);
    let count = |found: Snapshot| found.slots.iter().filter(living).count().max(1);
    usage.snapshot().map_or(usize::MAX, count)
}

#[derive(Debug)]
pub(super) struct ArbitratedTenant {
    pub id: String,
    pub uuids: Vec<String>,
    /// With those of other shares that its processes have.
    pub gpus: Vec<GpuIndex>,
    /// The same.
    pub share: Share,
    /// As its own page has it.
    pub own_gpus: Vec<GpuIndex>,
    pub own_share: Share,
    pub file: (u64, u64),
    pub connections: GateConnections,
    /// When it is due next, as the thread has noted it.
    pub due: Option<Instant>,
    pub drains: DrainTracker,
    /// The flight pages of those processes that have sent one.
    pub flights: Flights,
    /// When its words may be read again.
    pub looks_ns: u64,
    /// Where its part of the cycle begins.
    pub phase: u32,
    pub state: GateState,
    /// Whether work of it was seen to wait for this closed gate to open: it does until then.
    pub is_ahead: bool,
    /// Messages of another epoch, repeated ones, and those of a process with too many shares.
    pub ignored: u64,
    page: QuotaWriter,
    /// Window, in operations and microseconds, and idle time, in microseconds, as written last.
    pace: Option<(u32, u32, u32)>,
    /// Whether the policy knows that this closing is drained.
    settled: bool,
    /// Until when the arbiter waits for processes that an earlier arbiter served, and how many there are.
    inherited: Option<(Instant, usize)>,
    /// Until when it waits for those that came to drain.
    inherited_drain: Option<Instant>,
    samples: Samples,
}

/// The newest last.
#[derive(Debug, Default)]
struct Samples(VecDeque<Sample>);

impl Samples {
    fn push(&mut self, sample: Sample) {
        let now_ns = sample.at_ns;
        self.0.push_back(sample);
        let begin = now_ns.saturating_sub(REMEMBERED_NS + SPARSE_NS);
        while self.0.front().is_some_and(|first| first.at_ns < begin) {
            self.0.pop_front();
        }
        // The newest of those that are a second old is what the last second is counted from.
        let old = now_ns.saturating_sub(SPARSE_NS);
        let newest = self.0.iter().rposition(|sample| sample.at_ns <= old);
        if let Some(at) = newest.filter(|at| *at >= 2)
            && self.0[at - 1].at_ns - self.0[at - 2].at_ns < SPARSE_NS
        {
            self.0.remove(at - 1);
        }
    }

    /// The last before the last `ns`, or the first.
    fn before(&self, now_ns: u64, ns: u64) -> Option<&Sample> {
        let begin = now_ns.saturating_sub(ns);
        self.0.iter().rev().find(|sample| sample.at_ns <= begin).or(self.0.front())
    }
}

/// GPU time of a tenant until a moment, nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at_ns: u64,
    leased_ns: u64,
    used_ns: u64,
    measured_ns: u64,
}

impl Sample {
    fn of(at_ns: u64, totals: &TenantTotals) -> Self {
        let &TenantTotals { leased_ns, used_ns, measured_ns, .. } = totals;
        Sample { at_ns, leased_ns, used_ns, measured_ns }
    }

    /// Thousandths of the GPU in which work ran since `before`; `None` where more than half of the leased time was not
    /// measured. The rest is taken to be like the measured half.
    fn used_millis(&self, before: &Sample) -> Option<u32> {
        let leased_ns = u128::from(self.leased_ns.saturating_sub(before.leased_ns));
        let measured_ns = u128::from(self.measured_ns.saturating_sub(before.measured_ns));
        let used_ns = u128::from(self.used_ns.saturating_sub(before.used_ns));
        if measured_ns * 2 < leased_ns {
            return None;
        }
        let time_ns = u128::from(self.at_ns.saturating_sub(before.at_ns).max(1));
        let millis = used_ns * leased_ns * 1000 / (measured_ns.max(1) * time_ns);
        u32::try_from(millis).ok()
    }
}

impl ArbitratedTenant {
    /// Takes a tenant on and closes its gate.
    pub fn new(
        opened: OpenedPages,
        gpus: Vec<GpuIndex>,
        share: Share,
        connections: GateConnections,
        now: Instant,
    ) -> Self {
        let OpenedPages { id, uuids, page, file, in_use, .. } = opened;
        let epoch = set(&page, GATE_CLOSED, &Flights::default());
        page.set_takes_flight(true);
        let mut drains = DrainTracker::new(epoch);
        if in_use > 0 {
            drains.expect_inherited();
        }
        ArbitratedTenant {
            id,
            uuids,
            own_gpus: gpus.clone(),
            gpus,
            share,
            own_share: share,
            file,
            connections,
            due: None,
            drains,
            flights: Flights::default(),
            looks_ns: 0,
            phase: page.phase(0),
            state: GateState::Closed,
            is_ahead: false,
            ignored: 0,
            page,
            pace: None,
            settled: in_use == 0,
            inherited: (in_use > 0).then_some((now + INHERITED_WAIT, in_use)),
            inherited_drain: (in_use > 0).then_some(now + INHERITED_DRAIN),
            samples: Samples::default(),
        }
    }

    /// Writes a state to all gates, in a new epoch.
    pub fn set(&mut self, now_ns: u64, state: GateState) {
        let word = match state {
            GateState::Solo => GATE_SOLO,
            GateState::Open => GATE_OPEN,
            GateState::Yield => GATE_YIELD,
            GateState::Closed => GATE_CLOSED,
        };
        self.state = state;
        // A closed gate stays as it is: a new epoch would only ask for another drain.
        let is_closed = gate_state(self.page.gate(0)) == GATE_CLOSED;
        if state == GateState::Closed && is_closed {
            return;
        }
        if is_closed {
            self.flights.opens(now_ns);
        }
        if state == GateState::Solo {
            self.flights.solo();
        }
        let epoch = set(&self.page, word, &self.flights);
        self.is_ahead = false;
        match state {
            GateState::Closed => {
                self.drains.close(epoch);
                self.settled = false;
                self.look_at_flight(now_ns);
            }
            _ => self.drains.open(epoch),
        }
    }

    /// Takes those of its processes to have drained whose pages show it. Whether something is in flight.
    pub fn look_at_flight(&mut self, now_ns: u64) -> bool {
        if self.state != GateState::Closed {
            return self.flights.quiet_since(now_ns).is_none();
        }
        if self.drains.owing() > 0 {
            for (process, used_ns) in self.flights.landed(now_ns, self.page.gate(0)) {
                self.drains.landed(process, used_ns);
            }
        }
        self.drains.owing() > 0
    }

    /// Reads on without a sleep where what is in flight lands within one, or should have: the GPU is about to be idle.
    /// Returns when that ended.
    pub fn watch_landing(&mut self, now_ns: u64) -> u64 {
        let is_near = |at: u64| at.abs_diff(now_ns) <= WATCHED_NS;
        let mut at_ns = now_ns;
        while is_near(at_ns)
            && self.look_at_flight(at_ns)
            && self.flights.lands_ns().is_some_and(is_near)
        {
            std::hint::spin_loop();
            at_ns = monotonic_ns();
        }
        at_ns
    }

    /// Whether all its processes show in their pages what they do.
    pub fn is_seen(&self) -> bool {
        self.flights.len() > 0 && self.flights.len() == self.drains.len()
    }

    /// Whether it launches as soon as its closed gate opens, as its pages show: a thread polls there, or the launches are
    /// on the GPU.
    pub fn is_awake(&mut self, now_ns: u64) -> bool {
        let word = self.page.gate(0);
        let is_closed = self.state == GateState::Closed;
        self.is_ahead = is_closed && self.flights.is_ahead(word);
        self.is_ahead || is_closed && self.flights.is_awake(now_ns, word)
    }

    /// Lets its processes queue work ahead of its turn, if all have drained, and wakes one that waits to launch.
    pub fn invite(&self) {
        let has_drained = self.state == GateState::Closed && self.settled;
        if has_drained && self.flights.invite(self.page.gate(0)) && self.flights.waits() {
            self.rouse();
        }
    }

    /// Closes the closed gate in a new epoch: each process that has drained lets waiting launches pass, and all drain
    /// again.
    pub fn close_again(&mut self) {
        self.flights.show_behind();
        let epoch = set(&self.page, GATE_CLOSED, &self.flights);
        self.is_ahead = false;
        self.drains.close(epoch);
        self.settled = false;
    }

    /// True once for each closing: when the last process has drained.
    pub fn has_settled(&mut self) -> bool {
        let news = self.state == GateState::Closed && !self.settled && self.drains.owing() == 0;
        self.settled |= news;
        news
    }

    /// Wakes one thread that waits at the gate, because it is about to open.
    pub fn rouse(&self) {
        self.page.rouse(0);
    }

    pub fn beat(&self, now_ns: u64) {
        self.page.set_arbiter(now_ns);
    }

    pub fn set_phase(&mut self, millis: u32) {
        self.phase = millis;
        (0..self.uuids.len()).for_each(|gpu| self.page.set_phase(gpu, millis));
    }

    /// Writes how the coming lease is to be used, where that has changed.
    pub fn set_pace(&mut self, leases: &Leases, pace: Pace) {
        let narrow = if pace.is_narrow { NARROW } else { Duration::MAX };
        let us = |us: u128| u32::try_from(us).unwrap_or(u32::MAX);
        let window = us(leases.window_time.min(narrow).as_micros());
        let idle = us(Duration::from_nanos(pace.idle_ns).as_micros());
        let pace = (leases.window, window, idle);
        if self.pace.replace(pace) == Some(pace) {
            return;
        }
        for gpu in 0..self.uuids.len() {
            self.page.set_window(gpu, leases.window, window);
            self.page.set_idle(gpu, idle);
        }
    }

    /// Ends arbitration: the page is as at its beginning.
    pub fn set_free(&self) {
        Self::free(&self.page, &self.flights);
    }

    /// The same of a page.
    pub fn free(page: &QuotaWriter, flights: &Flights) {
        page.set_arbiter(0);
        page.set_takes_flight(false);
        if gate_state(page.gate(0)) != GATE_SOLO {
            set(page, GATE_SOLO, flights);
        }
    }

    /// When [`ArbitratedTenant::forget_inherited`] is due.
    pub fn inherited_until(&self) -> Option<Instant> {
        self.inherited.map(|(until, _)| until).or(self.inherited_drain)
    }

    /// Stops waiting for inherited processes that have come, or whose time is over.
    pub fn forget_inherited(&mut self, now: Instant) {
        let bound = self.drains.len();
        if self.inherited.take_if(|(until, users)| *until <= now || bound >= *users).is_some() {
            self.drains.forget_inherited();
        }
        if self.inherited.is_none() && self.drains.owing() == 0 {
            self.inherited_drain = None;
        }
        if self.inherited_drain.take_if(|until| *until <= now).is_some() {
            self.drains.waive_inherited();
        }
    }

    /// Whether [`ArbitratedTenant::sample`] is due.
    pub fn wants_sample(&self, now_ns: u64) -> bool {
        self.samples.0.back().is_none_or(|last| now_ns >= last.at_ns.saturating_add(SAMPLE_NS))
    }

    /// Records the GPU time until now.
    pub fn sample(&mut self, now_ns: u64, totals: &TenantTotals) {
        self.samples.push(Sample::of(now_ns, totals));
    }

    /// Thousandths of a GPU in which its work ran in the last ten seconds, or in the last twenty where nothing was
    /// measured in ten; `None`: unknown.
    pub fn used_millis(&self, now_ns: u64, totals: &TenantTotals) -> Option<u32> {
        let now = Sample::of(now_ns, totals);
        [REMEMBERED_NS / 2, REMEMBERED_NS].into_iter().find_map(|ns| {
            self.samples.before(now_ns, ns).map_or(Some(0), |before| now.used_millis(before))
        })
    }

    /// Thousandths of a GPU that it got in the last `ns`, or since the first sample.
    pub fn got_millis(&self, now_ns: u64, leased_ns: u64, ns: u64) -> u32 {
        let Some(before) = self.samples.before(now_ns, ns) else { return 0 };
        let time = now_ns.saturating_sub(before.at_ns);
        let got = leased_ns.saturating_sub(before.leased_ns);
        let millis = u128::from(got) * 1000 / u128::from(time.max(1));
        u32::try_from(millis).unwrap_or(u32::MAX)
    }
}

/// Sets all gates of a page, the first one, which the shim reads, last; returns its epoch.
fn set(page: &QuotaWriter, word: u32, flights: &Flights) -> u32 {
    for gpu in 1..page.gpus() {
        let _ = page.set_gate(gpu, word);
    }
    page.set_gate_and(0, word, || flights.release())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_samples_remember_twenty_seconds_and_the_last_by_the_tenth() {
        let mut samples = Samples::default();
        for at_ns in (0..600).map(|n| n * SAMPLE_NS) {
            samples.push(Sample { at_ns, leased_ns: at_ns, used_ns: 0, measured_ns: 0 });
            assert!(samples.0.len() <= 32, "{}", samples.0.len());
            for ns in [SPARSE_NS, REMEMBERED_NS / 2, REMEMBERED_NS] {
                let since = at_ns - samples.before(at_ns, ns).unwrap().at_ns;
                let spare = if ns == SPARSE_NS { SAMPLE_NS } else { SPARSE_NS };
                assert!(since >= ns.min(at_ns) && since < ns + spare, "{since} of {ns} at {at_ns}");
            }
        }
    }
}
