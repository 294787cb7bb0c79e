//! A chart in characters: what is full, what is beyond, and a line where a limit is; and buckets drawn together into its
//! columns.

use tessera_model::printable;

/// What the terminal takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Style {
    /// Columns.
    pub width: usize,
    /// Block characters.
    pub unicode: bool,
    /// Escape sequences for colour. Nothing is said by colour alone.
    pub colour: bool,
}

/// Rows of a chart.
const ROWS: usize = 6;
/// The parts of a character.
pub(super) const WHOLE: Cell = Cell::Full(8);
/// Characters before a chart: the axis' figures.
pub(super) const AXIS: usize = 9;

/// A cell of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    Empty,
    Unknown,
    /// Full to so many eighths.
    Full(u8),
    Beyond,
    Limit,
}

/// What is drawn of a column, in parts of the chart's height.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bar {
    pub known: bool,
    pub full: f64,
    pub beyond: f64,
    pub limit: f64,
}

/// Bars with figures at their left: that of the top, and 0.
pub(super) fn chart(bars: &[Bar], top: &str, style: Style) -> String {
    let mut out = String::new();
    for row in (0..ROWS).rev() {
        let figure = match row {
            _ if row == ROWS - 1 => top,
            0 => "0",
            _ => "",
        };
        let axis = if style.unicode { '┤' } else { '|' };
        let mut line = format!("{figure:>width$} {axis}", width = AXIS - 2);
        let mut before = "";
        for bar in bars {
            let (text, colour) = style.draw(cell(bar, row));
            if style.colour && colour != before {
                line.push_str(if colour.is_empty() { "\u{1b}[0m" } else { colour });
                before = colour;
            }
            line.push(text);
        }
        if !before.is_empty() {
            line.push_str("\u{1b}[0m");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Of a few rows or steps: neither negative nor large.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn rounded(steps: f64) -> usize {
    steps.round().max(0.0) as usize
}

fn cell(bar: &Bar, row: usize) -> Cell {
    let height = |part: f64| rounded(part.clamp(0.0, 1.0) * ROWS as f64 * 8.0);
    let (from, to) = (row * 8, row * 8 + 8);
    if !bar.known {
        return if row == 0 { Cell::Unknown } else { Cell::Empty };
    }
    let (full, beyond, limit) = (height(bar.full), height(bar.beyond), height(bar.limit));
    // What is little and not nothing is seen.
    let full = if bar.full > 0.0 { full.max(1) } else { full };
    if full > from {
        let eighths = u8::try_from((full - from).min(8)).unwrap_or(8);
        return if eighths < 4 && limit > from && limit <= to {
            Cell::Limit
        } else {
            Cell::Full(eighths)
        };
    }
    if limit > from && limit <= to {
        return Cell::Limit;
    }
    if beyond > from { Cell::Beyond } else { Cell::Empty }
}

impl Style {
    fn draw(self, cell: Cell) -> (char, &'static str) {
        const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let pick = |unicode: char, ascii: char| if self.unicode { unicode } else { ascii };
        match cell {
            Cell::Empty => (' ', ""),
            Cell::Unknown => (pick('·', '?'), "\u{1b}[2m"),
            Cell::Full(eighths) => {
                let ascii = if eighths >= 4 { '#' } else { '_' };
                (pick(BARS[usize::from(eighths.min(8))], ascii), "\u{1b}[36m")
            }
            Cell::Beyond => (pick('░', ':'), "\u{1b}[33m"),
            Cell::Limit => (pick('─', '-'), "\u{1b}[35m"),
        }
    }

    /// A text of characters that the terminal takes.
    pub(super) fn characters(self, text: &str) -> String {
        let text = printable::line(text);
        let ascii = |c: char| if c.is_ascii() { c } else { '?' };
        if self.unicode { text.into_owned() } else { text.chars().map(ascii).collect() }
    }

    /// A legend's sample.
    pub(super) fn sample(self, of: Cell) -> char {
        self.draw(of).0
    }

    /// A line of bars for parts of one; what is not known is a dot.
    pub(super) fn spark(self, columns: &[Column], part: impl Fn(&Column) -> f64) -> String {
        let draw = |column: &Column| {
            if column.seconds <= 0.0 {
                return self.draw(Cell::Unknown).0;
            }
            let part = part(column).clamp(0.0, 1.0);
            match self.unicode {
                true => {
                    let eighths = rounded(part * 8.0).max(usize::from(part > 0.0));
                    [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][eighths]
                }
                false => {
                    let tenths = rounded(part * 9.0).max(usize::from(part > 0.0));
                    [' ', '1', '2', '3', '4', '5', '6', '7', '8', '9'][tenths]
                }
            }
        };
        columns.iter().map(draw).collect()
    }
}

/// What a column shows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Column {
    /// Seconds that were observed; 0: nothing is known.
    pub seconds: f64,
    /// Mean memory, bytes.
    pub used: f64,
    /// Highest memory, bytes.
    pub peak: u64,
    /// Limit, bytes.
    pub limit: u64,
    /// Share, thousandths.
    pub cores_millis: u32,
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

/// What one bucket adds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub at_unix_ms: i64,
    pub column: Column,
}

/// So many columns from one instant to another. A bucket of `step` seconds is in each column that it reaches; what is
/// counted of it, in the first.
pub(super) fn columns(
    parts: impl Iterator<Item = Part>,
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
    for Part { at_unix_ms, mut column } in parts {
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
            used: mean(self.used, part.used),
            peak: self.peak.max(part.peak),
            limit: part.limit,
            cores_millis: part.cores_millis,
            got: mean(self.got, part.got),
            waited: mean(self.waited, part.waited),
            refusals: self.refusals.saturating_add(part.refusals),
            unhealthy: self.unhealthy || part.unhealthy,
            cordoned: self.cordoned || part.cordoned,
        };
    }
}
