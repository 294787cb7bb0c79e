//! Lines of bars in characters, and buckets drawn together into their columns.

/// Characters before a line of bars: what it is of.
pub(super) const LABEL: usize = 9;
/// In a column of which nothing is known.
pub(super) const UNKNOWN: char = '·';
/// From nothing to all.
const STEPS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A line of bars for parts of one.
pub(super) fn spark(columns: &[Column], part: impl Fn(&Column) -> f64) -> String {
    let draw = |column: &Column| {
        if column.seconds <= 0.0 {
            return UNKNOWN;
        }
        let part = part(column).clamp(0.0, 1.0);
        // Of a few steps: neither negative nor large.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let step = (part * (STEPS.len() - 1) as f64).round() as usize;
        // What is little and not nothing is seen.
        STEPS[step.max(usize::from(part > 0.0))]
    };
    columns.iter().map(draw).collect()
}

/// What a column shows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Column {
    /// Seconds that were observed; 0: nothing is known.
    pub seconds: f64,
    /// Highest memory, bytes.
    pub peak: u64,
    /// Parts of the observed time: used, or of a GPU leased.
    pub got: f64,
    /// Parts of the observed time: waited.
    pub waited: f64,
    /// How often refused.
    pub refusals: u64,
    /// Some of the time unhealthy, cordoned.
    pub unhealthy: bool,
    pub cordoned: bool,
}

/// So many columns from one instant to another, of buckets by their beginnings. A bucket of `step` seconds is in each
/// column that it reaches; what is counted of it, in the first.
pub(super) fn columns(
    buckets: impl Iterator<Item = (i64, Column)>,
    (since, until): (i64, i64),
    step: u32,
    count: usize,
) -> Vec<Column> {
    let mut columns = vec![Column::default(); count];
    let length = i128::from(until.saturating_sub(since).max(1));
    // A bucket may begin a little before the window.
    let place = |at: i64| {
        let place = i128::from(at.saturating_sub(since)) * count as i128 / length;
        usize::try_from(place.max(0)).unwrap_or(usize::MAX)
    };
    for (at_unix_ms, mut column) in buckets {
        let first = place(at_unix_ms);
        let last = place(at_unix_ms.saturating_add(i64::from(step) * 1000 - 1));
        for to in columns.iter_mut().take(last.saturating_add(1)).skip(first) {
            to.add(&column);
            column.refusals = 0;
        }
    }
    columns
}

impl Column {
    fn add(&mut self, part: &Column) {
        let seconds = self.seconds + part.seconds;
        let mean = |before: f64, after: f64| match seconds > 0.0 {
            true => (before * self.seconds + after * part.seconds) / seconds,
            false => 0.0,
        };
        *self = Column {
            seconds,
            peak: self.peak.max(part.peak),
            got: mean(self.got, part.got),
            waited: mean(self.waited, part.waited),
            refusals: self.refusals.saturating_add(part.refusals),
            unhealthy: self.unhealthy || part.unhealthy,
            cordoned: self.cordoned || part.cordoned,
        };
    }
}
