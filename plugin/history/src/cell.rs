//! The figures of one series in one bucket.

/// What is counted of a tenant; of a GPU see [`gpu`].
pub(crate) mod tenant {
    pub(crate) const GOT: usize = 0;
    pub(crate) const WAITED: usize = 1;
    pub(crate) const CAPPED: usize = 2;
    pub(crate) const RATIONED: usize = 3;
    pub(crate) const REFUSALS: usize = 4;
    pub(crate) const LAUNCHES: usize = 5;
}

/// What is counted of a GPU. The mean of the sum of limits is in [`super::Cell::overhead_kib`].
pub(crate) mod gpu {
    pub(crate) const LEASED: usize = 0;
    pub(crate) const UNHEALTHY: usize = 1;
    pub(crate) const CORDONED: usize = 2;
}

/// How many figures are counted.
pub(crate) const COUNTS: usize = 6;
/// The first of them are times.
pub(crate) const TIMES: usize = 4;
/// Times are stored in so many microseconds.
pub(crate) const TICK_US: u64 = 100;

/// One series in one bucket, as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cell {
    /// Milliseconds that were observed.
    pub ms: u64,
    /// Mean memory in use, KiB.
    pub mean_kib: u64,
    /// Highest memory in use, KiB; at least the mean.
    pub peak_kib: u64,
    /// The limit at the end, KiB.
    pub limit_kib: u64,
    /// Mean overhead, KiB.
    pub overhead_kib: u64,
    /// The share at the end, thousandths.
    pub cores_millis: u32,
    /// Times in ticks, then numbers.
    pub counts: [u64; COUNTS],
}

impl Cell {
    /// Adds what was seen later of the same bucket.
    pub(crate) fn add(&mut self, later: &Cell) {
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
            counts,
        };
    }
}

/// A cell that is being filled: exact sums.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Filling {
    pub ms: u64,
    /// KiB times milliseconds.
    pub used: u64,
    pub peak_kib: u64,
    pub limit_kib: u64,
    pub overhead: u64,
    pub cores_millis: u32,
    /// Times in microseconds, then numbers.
    pub counts: [u64; COUNTS],
}

impl Filling {
    /// As it is stored.
    pub(crate) fn cell(&self) -> Cell {
        let mean = |sum: u64| (sum + self.ms / 2).checked_div(self.ms).unwrap_or(0);
        let mut counts = self.counts;
        counts[..TIMES].iter_mut().for_each(|us| *us = (*us + TICK_US / 2) / TICK_US);
        let mean_kib = mean(self.used);
        Cell {
            ms: self.ms,
            mean_kib,
            peak_kib: self.peak_kib.max(mean_kib),
            limit_kib: self.limit_kib,
            overhead_kib: mean(self.overhead),
            cores_millis: self.cores_millis,
            counts,
        }
    }
}
