//! The lengths of buckets, the figures of one series in one bucket, and some buckets of a series as bytes: of each, what
//! was counted, and what else differs from the one before.

use std::collections::BTreeMap;

/// A length of buckets; its number is in keys of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    Fine,
    Middle,
    Coarse,
}

impl Level {
    pub const ALL: [Level; 3] = [Level::Fine, Level::Middle, Level::Coarse];

    pub const fn step_seconds(self) -> u32 {
        match self {
            Level::Fine => 10,
            Level::Middle => 300,
            Level::Coarse => 3600,
        }
    }

    pub fn of_step(seconds: u32) -> Option<Level> {
        Level::ALL.into_iter().find(|level| level.step_seconds() == seconds)
    }

    /// Buckets that are stored together.
    pub(crate) const fn buckets(self) -> u32 {
        match self {
            Level::Fine => 30,
            Level::Middle | Level::Coarse => 12,
        }
    }

    /// Seconds that are stored together.
    pub(crate) const fn chunk_seconds(self) -> u32 {
        self.step_seconds() * self.buckets()
    }

    /// What is kept of it, seconds, while there is anything finer or coarser to drop instead.
    pub(crate) const fn floor_seconds(self) -> u32 {
        match self {
            Level::Fine => 3600,
            Level::Middle => 24 * 3600,
            Level::Coarse => 7 * 24 * 3600,
        }
    }

    /// Where the chunk with this second begins.
    pub(crate) const fn chunk(self, second: u32) -> u32 {
        second - second % self.chunk_seconds()
    }
}

/// What is counted of a tenant; of a GPU see [`gpu`].
pub(crate) mod tenant {
    /// Leased.
    pub(crate) const GOT: usize = 0;
    pub(crate) const WAITED: usize = 1;
    pub(crate) const CAPPED: usize = 2;
    pub(crate) const RATIONED: usize = 3;
    /// Of the leased time, what it used, as far as that is known; and the leased time of which it is.
    pub(crate) const USED: usize = 4;
    pub(crate) const MEASURED: usize = 5;
    pub(crate) const REFUSALS: usize = 6;
    pub(crate) const LAUNCHES: usize = 7;
}

/// What is counted of a GPU. The mean of the sum of limits is in [`super::Cell::overhead_kib`].
pub(crate) mod gpu {
    pub(crate) const LEASED: usize = 0;
    pub(crate) const UNHEALTHY: usize = 1;
    pub(crate) const CORDONED: usize = 2;
    /// Leased again, where a tenant has what its [`super::Cell::busiest_millis`] is of.
    pub(crate) const BUSY: [usize; 2] = [super::tenant::USED, super::tenant::MEASURED];
}

pub(crate) const COUNTS: usize = 8;
/// The first of them are times.
pub(crate) const TIMES: usize = 6;
/// Times are stored in so many microseconds.
pub(crate) const TICK_US: u64 = 100;
/// A share of less time than this says nothing, milliseconds: two clocks are read for it.
const LEAST_MS: u64 = 1000;

/// One series in one bucket, as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cell {
    pub ms: u64,
    pub mean_kib: u64,
    /// Highest memory in use, KiB; at least the mean.
    pub peak_kib: u64,
    /// The limit at the end, KiB.
    pub limit_kib: u64,
    /// Mean overhead, KiB.
    pub overhead_kib: u64,
    /// The share at the end, thousandths.
    pub cores_millis: u32,
    /// The highest share of GPU time that a tenant used, or that was leased of a GPU, in any ten seconds of the bucket,
    /// thousandths, rounded up.
    pub busiest_millis: u32,
    /// Times in ticks, then numbers.
    pub counts: [u64; COUNTS],
}

impl Cell {
    /// The share of GPU time over the whole of what was observed, thousandths, rounded up. Where half of the leased time
    /// or more was measured, the rest was like it.
    pub(crate) fn share_millis(&self) -> u32 {
        let [leased, used, measured] =
            [tenant::GOT, tenant::USED, tenant::MEASURED].map(|at| u128::from(self.counts[at]));
        let (by, of) = match measured < leased && measured * 2 >= leased {
            true => (leased, measured),
            false => (1, 1),
        };
        let ticks = used.saturating_mul(by).saturating_mul(TICK_US.into());
        let millis = ticks.div_ceil(of * u128::from(self.ms.max(LEAST_MS)));
        u32::try_from(millis).unwrap_or(u32::MAX).min(1000)
    }

    /// As it is shown: a bucket that a clock which was set back filled twice has its length, and its shares.
    pub(crate) fn within(mut self, level: Level) -> Self {
        let whole = u64::from(level.step_seconds()) * 1000;
        if self.ms > whole {
            for ticks in &mut self.counts[..TIMES] {
                let part = u128::from(*ticks) * u128::from(whole) / u128::from(self.ms);
                *ticks = u64::try_from(part).unwrap_or(u64::MAX);
            }
            self.ms = whole;
        }
        self
    }

    /// Adds what was seen later of the same bucket of this level.
    pub(crate) fn add(&mut self, level: Level, later: &Cell) {
        let ms = self.ms + later.ms;
        let mean = |before: u64, after: u64| {
            let sum =
                u128::from(before) * u128::from(self.ms) + u128::from(after) * u128::from(later.ms);
            let mean = (sum + u128::from(ms) / 2).checked_div(u128::from(ms)).unwrap_or(0);
            u64::try_from(mean).unwrap_or(u64::MAX)
        };
        let mut counts = self.counts;
        counts.iter_mut().zip(later.counts).for_each(|(sum, more)| *sum = sum.saturating_add(more));
        *self = Cell {
            ms,
            mean_kib: mean(self.mean_kib, later.mean_kib),
            peak_kib: self.peak_kib.max(later.peak_kib),
            limit_kib: later.limit_kib,
            overhead_kib: mean(self.overhead_kib, later.overhead_kib),
            cores_millis: later.cores_millis,
            busiest_millis: self.busiest_millis.max(later.busiest_millis),
            counts,
        };
        if level == Level::Fine {
            self.busiest_millis = self.share_millis();
        }
    }
}

/// Buckets of one series, by their place in the chunk.
pub(crate) type Buckets = BTreeMap<u32, Cell>;

/// Figures of a cell: those that seldom differ last, so that a busy one's flags take two bytes.
const FIGURES: usize = COUNTS + 7;

/// By how much the mean of memory is below its peak, and the busiest ten seconds above the rest, is mostly nothing.
fn figures(cell: &Cell) -> [u64; FIGURES] {
    let [a, b, c, d, e, f, g, h] = cell.counts;
    let Cell { ms, peak_kib, limit_kib, overhead_kib, .. } = *cell;
    let below = peak_kib.wrapping_sub(cell.mean_kib);
    let above = cell.busiest_millis.wrapping_sub(cell.share_millis());
    let (above, cores) = (above.into(), cell.cores_millis.into());
    [a, b, c, d, e, f, g, h, peak_kib, below, above, limit_kib, overhead_kib, cores, ms]
}

fn cell(figures: [u64; FIGURES]) -> Option<Cell> {
    let [counts @ .., peak_kib, below, above, limit_kib, overhead_kib, cores, ms] = figures;
    let mut cell = Cell { ms, peak_kib, limit_kib, overhead_kib, counts, ..Cell::default() };
    cell.mean_kib = peak_kib.wrapping_sub(below);
    cell.cores_millis = u32::try_from(cores).ok()?;
    cell.busiest_millis = u32::try_from(above).ok()?.wrapping_add(cell.share_millis());
    Some(cell)
}

pub(crate) fn encode(buckets: &Buckets) -> Vec<u8> {
    let mut out = Vec::new();
    put(&mut out, buckets.keys().fold(0, |bits, at| bits | 1 << at));
    let mut before = [0; FIGURES];
    for cell in buckets.values() {
        let now = figures(cell);
        let differs = |at: &usize| now[*at] != before[*at];
        put(&mut out, (0..FIGURES).filter(differs).fold(0, |bits, at| bits | 1 << at));
        for at in (0..FIGURES).filter(differs) {
            // Up and down alike in few bytes.
            let step = now[at].wrapping_sub(before[at]).cast_signed();
            put(&mut out, ((step << 1) ^ (step >> 63)).cast_unsigned());
        }
        before = now;
        before[..COUNTS].fill(0);
    }
    out
}

/// `None`: the row is damaged.
pub(crate) fn decode(level: Level, mut row: &[u8]) -> Option<Buckets> {
    let present = take(&mut row)?;
    if present >> level.buckets() != 0 {
        return None;
    }
    let (mut buckets, mut now) = (Buckets::new(), [0u64; FIGURES]);
    for at in (0..level.buckets()).filter(|at| present >> at & 1 != 0) {
        let flags = take(&mut row)?;
        now[..COUNTS].fill(0);
        for (_, figure) in now.iter_mut().enumerate().filter(|(at, _)| flags >> at & 1 != 0) {
            let coded = take(&mut row)?;
            let step = (coded >> 1).cast_signed() ^ -(coded & 1).cast_signed();
            *figure = figure.wrapping_add(step.cast_unsigned());
        }
        buckets.insert(at, cell(now)?);
    }
    Some(buckets)
}

/// LEB128.
fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

fn take(row: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = row.split_first()?;
        *row = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn used(seconds: u64, ticks: u64, busiest_millis: u32) -> Cell {
        let mut cell = Cell { ms: seconds * 1000, busiest_millis, ..Cell::default() };
        for at in [tenant::GOT, tenant::USED, tenant::MEASURED] {
            cell.counts[at] = ticks;
        }
        cell
    }

    fn sum(level: Level, a: Cell, b: Cell) -> u32 {
        let mut sum = a;
        sum.add(level, &b);
        sum.busiest_millis
    }

    #[test]
    fn the_busiest_ten_seconds_of_an_hour_are_kept() {
        let (busy, calm) = (used(10, 90_000, 900), used(10, 1000, 10));
        assert_eq!((busy.share_millis(), calm.share_millis()), (900, 10));
        assert_eq!(sum(Level::Coarse, busy, calm), 900);
        assert_eq!(sum(Level::Coarse, calm, busy), 900);
        assert_eq!(sum(Level::Coarse, busy, used(10, 0, 0)), 900);
        // Two parts of the same ten seconds, as a restart leaves them.
        assert_eq!(sum(Level::Fine, used(5, 50_000, 1000), used(5, 0, 0)), 500);
    }

    #[test]
    fn leased_time_is_not_used_and_what_was_not_measured_is_like_the_rest() {
        let mut alone = used(10, 1000, 0);
        alone.counts[tenant::GOT] = 100_000;
        assert_eq!(alone.share_millis(), 10, "too little was measured to tell more");
        alone.counts[tenant::MEASURED] = 50_000;
        assert_eq!(alone.share_millis(), 20);
        alone.counts[tenant::MEASURED] = 100_000;
        assert_eq!(alone.share_millis(), 10);
    }

    #[test]
    fn a_bucket_that_was_filled_twice_is_shown_with_its_length_and_shares() {
        let twice = used(20, 50_000, 250);
        let shown = twice.within(Level::Fine);
        assert_eq!((shown.ms, shown.counts[tenant::USED]), (10_000, 25_000));
        assert_eq!(shown.share_millis(), twice.share_millis());
        assert_eq!(twice.within(Level::Middle), twice);
    }

    #[test]
    fn a_moment_says_nothing_of_a_share() {
        // A tenth of a second, all of it: of a second it is a tenth.
        let mut moment = used(0, 1000, 0);
        moment.ms = 100;
        assert_eq!(moment.share_millis(), 100);
    }

    fn cell() -> impl Strategy<Value = Cell> {
        let parts =
            (prop::array::uniform6(any::<u64>()), any::<[u64; COUNTS]>(), 0..3u32, 0..1001u32);
        parts.prop_map(
            |([ms, a, b, limit_kib, overhead_kib, cores], mut counts, quiet, busiest_millis)| {
                if quiet > 0 {
                    counts = [0; COUNTS];
                }
                Cell {
                    ms: if quiet == 2 { 10_000 } else { ms },
                    mean_kib: a.min(b),
                    peak_kib: a.max(b),
                    limit_kib,
                    overhead_kib,
                    cores_millis: u32::try_from(cores >> 32).unwrap_or(0),
                    busiest_millis,
                    counts,
                }
            },
        )
    }

    fn level() -> impl Strategy<Value = Level> {
        prop::sample::select(Level::ALL.to_vec())
    }

    proptest! {
        #[test]
        fn what_is_stored_is_what_is_read(
            level in level(),
            buckets in prop::collection::btree_map(0..12u32, cell(), 1..12),
        ) {
            prop_assert_eq!(decode(level, &encode(&buckets)), Some(buckets));
        }

        #[test]
        fn garbage_is_never_a_panic(level in level(), row in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(level, &row);
        }
    }

    #[test]
    fn a_quiet_tenant_takes_a_byte_a_bucket() {
        let quiet = Cell { ms: 10_000, mean_kib: 1 << 22, peak_kib: 1 << 22, ..Cell::default() };
        let row = encode(&(0..30).map(|at| (at, quiet)).collect());
        assert!(row.len() < 45, "{}", row.len());
    }
}
