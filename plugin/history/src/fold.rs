//! Looks become buckets of ten seconds. Pure: the clock comes with each look.
//!
//! What happened between two looks is spread evenly over the time between them, by the clock that is never set, and
//! that time ends where the wall clock of the later look says. So a clock that is set moves what comes, and neither
//! counts anything twice nor takes anything away. The first look is where counting begins.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use tessera_view::status::{Allocation, AllocationState, Gpu, Status};
use tessera_view::tenant::Use;

use super::query::{Key, Series};
use super::row::{COUNTS, Cell, Level, TICK_US, TIMES, gpu, tenant};

/// Longest time between looks that is spread, milliseconds.
const LONGEST_MS: u64 = 3_600_000;
/// Nanoseconds that a launch or a refusal takes at least: a tenant's word is believed no further.
const LEAST_NS: u64 = 10;
/// Use of more time before than this becomes known no more, microseconds.
const LAGGING_US: u64 = 60_000_000;
/// Of its share, thousandths that a tenant has had when it is its share that it waits for.
const SPENT: u64 = 950;
/// Most buckets that wait for being stored; the oldest go first.
const PENDING: usize = 180;

/// Buckets of ten seconds by their beginnings in Unix seconds.
pub(crate) type Pending = BTreeMap<u32, BTreeMap<Arc<Key>, Cell>>;

#[derive(Debug, Default)]
pub(crate) struct Folder {
    /// When was looked last, by the wall clock and by the one that is never set.
    looked_ms: Option<(u64, u64)>,
    accounts: HashMap<(String, u64), Account>,
    /// Of the last look and of what waits.
    series: BTreeMap<Arc<Key>, Series>,
    pending: Pending,
}

#[derive(Debug, Default)]
struct Account {
    /// Of what the plugin counts; `None` before the arbiter has said anything.
    leased_us: u64,
    waited_us: u64,
    /// Seen and not yet spread: the arbiter's clock is read a little before or after the look's.
    owed: [u64; 2],
    /// Of what its work used, and the time of which that is known; of a tenant that was alone, of up to the last ten
    /// seconds.
    uses: [u64; 2],
    owed_uses: [u64; 2],
    /// The arbiter's figures are a beginning to count from.
    based: bool,
    /// What its processes count; `None` before its page could be read.
    reported: Option<[u64; 3]>,
    peaks: Vec<u64>,
    /// Memory used and overhead on each GPU, KiB, when its page could last be read.
    memory: Vec<[u64; 2]>,
}

impl Folder {
    /// Adds what happened since the look before. The usage pages of `unread` could not be read: their memory and what
    /// their processes count are unknown. `monotonic_ms` is of the clock that is never set. Replicas that went to another
    /// allocation have what their last processes hold, and are recorded as long as there are such.
    pub(crate) fn look(&mut self, status: &Status, unread: &HashSet<String>, monotonic_ms: u64) {
        let Ok(end_ms) = u64::try_from(status.at_unix_ms) else { return };
        if end_ms / 1000 > u64::from(u32::MAX) {
            return;
        }
        let elapsed = self.looked_ms.map(|(_, before)| monotonic_ms.saturating_sub(before));
        if elapsed == Some(0) {
            return;
        }
        self.looked_ms = Some((end_ms, monotonic_ms));
        let span = elapsed.map(|ms| Span { end_ms, ms: ms.min(LONGEST_MS).min(end_ms) });
        // A page is its tenant's word: nobody holds more than there is.
        let totals = status.gpus.iter().map(|gpu| (gpu.uuid.as_str(), kib(gpu.memory_total_bytes)));
        let totals: HashMap<&str, u64> = totals.collect();
        let mut accounts = std::mem::take(&mut self.accounts);
        let mut leased: HashMap<&str, u64> = HashMap::new();
        for one in &status.allocations {
            let key = (one.id.clone(), one.generation);
            let known = accounts.remove(&key);
            // Of what is there at the first look, its beginning is not known.
            let mut account = known.unwrap_or_else(|| match span {
                Some(_) => Account {
                    based: true,
                    reported: Some([0; 3]),
                    peaks: vec![0; one.gpus.len()],
                    ..Account::default()
                },
                None => Account::default(),
            });
            let is_read = !unread.contains(&one.id);
            let grown = account.grow(one, is_read, &totals, span.map_or(0, |span| span.ms));
            if let Some(span) = span {
                let memory = account.memory.iter().zip(&grown.peaks);
                for (used, (memory, peak)) in one.gpus.iter().zip(memory) {
                    *leased.entry(&used.gpu_uuid).or_default() += grown.counts[tenant::GOT];
                    self.tenant(one, used, (*memory, *peak), grown.counts, span);
                }
            }
            self.accounts.insert(key, account);
        }
        if let Some(span) = span {
            // Of one that is left out because it does not answer nothing is known.
            for one in status.gpus.iter().filter(|gpu| gpu.memory_total_bytes > 0) {
                let got = leased.get(one.uuid.as_str()).copied().unwrap_or(0);
                self.gpu(one, got.min(span.ms * 1000), span);
            }
        }
        self.drop_oldest();
    }

    fn tenant(
        &mut self,
        one: &Allocation,
        used: &Use,
        ([used_kib, overhead_kib], process_peak_kib): ([u64; 2], u64),
        mut counts: [u64; COUNTS],
        span: Span,
    ) {
        let (limit_kib, cores_millis) = match one.state {
            AllocationState::Parked => (0, 0),
            _ => (kib(used.memory_limit_bytes), used.cores_millis),
        };
        let share_us = span.ms * u64::from(cores_millis);
        if counts[tenant::GOT] * 1000 >= share_us * SPENT && share_us > 0 {
            counts[tenant::CAPPED] = counts[tenant::WAITED];
        }
        let holder = one.holder.clone().unwrap_or_default();
        // A claim is of a namespace, whether kubelet has named its pod or not.
        let namespace = match (holder.namespace.is_empty(), &one.claim) {
            (true, Some(claim)) => claim.namespace.clone(),
            _ => holder.namespace,
        };
        let key =
            Key { id: one.id.clone(), generation: one.generation, gpu_uuid: used.gpu_uuid.clone() };
        let (pod, container) = (holder.pod, holder.container);
        let key = self.named(Series { key, namespace, pod, container });
        let gauges = Cell {
            mean_kib: used_kib,
            peak_kib: used_kib,
            limit_kib,
            overhead_kib,
            cores_millis,
            ..Cell::default()
        };
        self.spread(&key, span, counts, gauges, process_peak_kib);
    }

    fn gpu(&mut self, one: &Gpu, leased_us: u64, span: Span) {
        let mut counts = [0; COUNTS];
        counts[gpu::LEASED] = leased_us;
        for at in gpu::BUSY {
            counts[at] = leased_us;
        }
        counts[gpu::UNHEALTHY] = if one.state.is_sold() { 0 } else { span.ms * 1000 };
        counts[gpu::CORDONED] = if one.cordon.is_empty() { 0 } else { span.ms * 1000 };
        let key = Key { gpu_uuid: one.uuid.clone(), ..Key::default() };
        let key = self.named(Series { key, ..Series::default() });
        let used_kib = kib(one.memory_used_bytes);
        let overhead_kib = kib(one.memory_limits_bytes);
        let gauges =
            Cell { mean_kib: used_kib, peak_kib: used_kib, overhead_kib, ..Cell::default() };
        self.spread(&key, span, counts, gauges, 0);
    }

    fn named(&mut self, series: Series) -> Arc<Key> {
        let known = self.series.get_key_value(&series.key);
        let key = known.map_or_else(|| Arc::new(series.key.clone()), |(key, _)| Arc::clone(key));
        // Kubelet names a container some time after its Allocate.
        if known.is_none_or(|(_, known)| *known != series && !series.pod.is_empty()) {
            self.series.insert(Arc::clone(&key), series);
        }
        key
    }

    /// Gives each bucket its part: nothing is lost or doubled between them. The peak is of the last one.
    fn spread(
        &mut self,
        key: &Arc<Key>,
        span: Span,
        counts: [u64; COUNTS],
        gauges: Cell,
        peak_kib: u64,
    ) {
        let step = u64::from(Level::Fine.step_seconds()) * 1000;
        let begin = span.end_ms - span.ms;
        let mut at = begin;
        while at < span.end_ms {
            let bucket = at - at % step;
            let end = (bucket + step).min(span.end_ms);
            let start = u32::try_from(bucket / 1000).unwrap_or(u32::MAX);
            let mut part = Cell { ms: end - at, ..gauges };
            if end == span.end_ms {
                part.peak_kib = part.peak_kib.max(peak_kib);
            }
            for (i, (to, count)) in part.counts.iter_mut().zip(counts).enumerate() {
                let unit = u128::from(if i < TIMES { TICK_US } else { 1 });
                let whole = u128::from(span.ms) * unit;
                // Times to the nearest tick.
                let half = if i < TIMES { whole / 2 } else { 0 };
                let until = |ms: u64| (u128::from(count) * u128::from(ms) + half) / whole;
                *to = u64::try_from(until(end - begin) - until(at - begin)).unwrap_or(0);
            }
            let cells = self.pending.entry(start).or_default();
            cells.entry(Arc::clone(key)).or_default().add(Level::Fine, &part);
            at = end;
        }
    }

    /// When was looked last, by the wall clock, Unix seconds.
    pub(crate) fn looked(&self) -> u32 {
        let (wall_ms, _) = self.looked_ms.unwrap_or_default();
        u32::try_from(wall_ms / 1000).unwrap_or(u32::MAX)
    }

    pub(crate) fn pending(&self) -> &Pending {
        &self.pending
    }

    /// All series of the last look and of what waits.
    pub(crate) fn series(&self) -> &BTreeMap<Arc<Key>, Series> {
        &self.series
    }

    pub(crate) fn nameless(&self) -> BTreeSet<(String, u64)> {
        let nameless = self.series.values().filter(|series| {
            let key = &series.key;
            !series.is_gpu() && series.pod.is_empty() && !self.is_live(&key.id, key.generation)
        });
        nameless.map(|series| (series.key.id.clone(), series.key.generation)).collect()
    }

    pub(crate) fn name(&mut self, named: &Series) {
        let is_its = |series: &&mut Series| {
            series.pod.is_empty()
                && (&series.key.id, series.key.generation) == (&named.key.id, named.key.generation)
        };
        for series in self.series.values_mut().filter(is_its) {
            let key = std::mem::take(&mut series.key);
            *series = Series { key, ..named.clone() };
        }
    }

    pub(crate) fn is_live(&self, id: &str, generation: u64) -> bool {
        self.accounts.contains_key(&(id.to_owned(), generation))
    }

    /// Takes the buckets that are full, or all of them, to store them.
    pub(crate) fn take(&mut self, all: bool) -> Pending {
        let last = match all {
            true => None,
            false => self.pending.pop_last(),
        };
        let taken = std::mem::take(&mut self.pending);
        self.pending.extend(last);
        taken
    }

    /// They could not be stored: they wait again.
    pub(crate) fn give_back(&mut self, pending: Pending) {
        for (start, cells) in pending {
            let bucket = self.pending.entry(start).or_default();
            for (key, mut cell) in cells {
                if let Some(newer) = bucket.remove(&key) {
                    cell.add(Level::Fine, &newer);
                }
                bucket.insert(key, cell);
            }
        }
        self.drop_oldest();
    }

    /// Of too many buckets the oldest go, with the names that only they had.
    fn drop_oldest(&mut self) {
        let excess = self.pending.len().saturating_sub(PENDING);
        for _ in 0..excess {
            self.pending.pop_first();
        }
        if excess > 0 {
            self.forget();
        }
    }

    /// Forgets the names of what is gone and stored.
    pub(crate) fn forget(&mut self) {
        let Folder { accounts, pending, series, .. } = self;
        series.retain(|key, series| {
            series.is_gpu()
                || accounts.contains_key(&(key.id.clone(), key.generation))
                || pending.values().any(|cells| cells.contains_key(key))
        });
    }
}

/// The time between two looks, by the wall clock of the later one.
#[derive(Clone, Copy, Debug)]
struct Span {
    end_ms: u64,
    ms: u64,
}

struct Grown {
    counts: [u64; COUNTS],
    /// What its processes have reached meanwhile, on each GPU; 0 where that is not more than before.
    peaks: Vec<u64>,
}

impl Account {
    /// `totals`: KiB that each GPU has.
    fn grow(
        &mut self,
        one: &Allocation,
        is_read: bool,
        totals: &HashMap<&str, u64>,
        ms: u64,
    ) -> Grown {
        let us = ms * 1000;
        let mut counts = [0; COUNTS];
        let compute = one.compute.clone().unwrap_or_default();
        let before = [self.leased_us, self.waited_us];
        let now = [compute.leased_us, compute.waited_us];
        let uses = [compute.used_us, compute.measured_us];
        if self.based && one.compute.is_some() {
            for (i, at) in [tenant::GOT, tenant::WAITED].into_iter().enumerate() {
                // The arbiter's count restarts with the allocation's page.
                let added = now[i].checked_sub(before[i]).unwrap_or(now[i]);
                let owed = self.owed[i].saturating_add(added);
                counts[at] = owed.min(us);
                // More than a second beyond the clock is nobody's.
                self.owed[i] = (owed - counts[at]).min(1_000_000);
            }
            let added = |i: usize| uses[i].checked_sub(self.uses[i]).unwrap_or(uses[i]);
            let [used, measured] = [0, 1].map(|i| self.owed_uses[i].saturating_add(added(i)));
            // It becomes known all at once, and belongs to all the time of which it is known.
            let part = measured.min(us);
            let its =
                u128::from(used.min(measured)) * u128::from(part) / u128::from(measured.max(1));
            counts[tenant::USED] = u64::try_from(its).unwrap_or(0);
            counts[tenant::MEASURED] = part;
            self.owed_uses = match measured - part {
                ..=LAGGING_US => [used.min(measured) - counts[tenant::USED], measured - part],
                _ => [0; 2],
            };
        }
        // What the arbiter did not say is no restart.
        if one.compute.is_some() {
            self.based = true;
            [self.leased_us, self.waited_us] = now;
            self.uses = uses;
        }
        self.memory.resize(one.gpus.len(), [0; 2]);
        self.peaks.resize(one.gpus.len(), u64::MAX);
        let mut peaks = vec![0; one.gpus.len()];
        if is_read {
            let reported = [one.gate_timeouts, one.refusals, one.launches];
            if let Some(before) = self.reported {
                let most = ms * 1_000_000 / LEAST_NS + 1;
                let added = |i: usize| reported[i].saturating_sub(before[i]).min(most);
                counts[tenant::RATIONED] = if added(0) > 0 { us } else { 0 };
                counts[tenant::REFUSALS] = added(1);
                counts[tenant::LAUNCHES] = added(2);
            }
            self.reported = Some(reported);
            for (i, used) in one.gpus.iter().enumerate() {
                let most = totals.get(used.gpu_uuid.as_str()).copied().unwrap_or(u64::MAX);
                let held = |bytes: u64| kib(bytes).min(most);
                let peak_kib = held(used.memory_peak_bytes);
                // Of a process that was there before, its peak may be, too.
                peaks[i] = if peak_kib > self.peaks[i] { peak_kib } else { 0 };
                self.peaks[i] = peak_kib;
                self.memory[i] = [held(used.memory_used_bytes), held(used.memory_overhead_bytes)];
            }
        }
        Grown { counts, peaks }
    }
}

/// A tenant's word: nobody has more than 16 TiB.
fn kib(bytes: u64) -> u64 {
    (bytes >> 10).min(1 << 34)
}

#[cfg(test)]
#[path = "fold_tests.rs"]
mod tests;
