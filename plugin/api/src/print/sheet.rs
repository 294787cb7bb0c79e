//! Tables whose columns are as wide as their widest cells, and shrink where the page is narrow.

use std::fmt::Write;

use super::page::{Page, Tone};
use super::width::{columns, shorten};
use tessera_model::printable;

/// Between columns.
const GAP: usize = 2;
/// What a column that may shrink keeps, as long as another can give.
const LEAST: usize = 12;

/// A column's head.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    right: bool,
    shrinks: bool,
}

impl Column {
    /// Of words.
    #[must_use]
    pub const fn text(title: &'static str) -> Self {
        Column { title, right: false, shrinks: false }
    }

    /// Of names, which may be of any length and are shortened first.
    #[must_use]
    pub const fn name(title: &'static str) -> Self {
        Column { title, right: false, shrinks: true }
    }

    /// Of numbers with their units.
    #[must_use]
    pub const fn number(title: &'static str) -> Self {
        Column { title, right: true, shrinks: false }
    }
}

/// What stands in a row and a column.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// With a tone.
    #[must_use]
    pub fn toned(text: impl Into<String>, tone: Tone) -> Self {
        Cell { text: text.into(), tone }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Cell::toned(text, Tone::Plain)
    }
}

/// A table in the making.
#[derive(Clone, Debug)]
pub struct Sheet {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

impl Sheet {
    /// Without rows.
    #[must_use]
    pub fn new(columns: &[Column]) -> Self {
        Sheet { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// One more row, with a cell for each column.
    pub fn row(&mut self, cells: Vec<Cell>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// Without the columns of this title.
    #[must_use]
    pub fn without(mut self, title: &str) -> Self {
        while let Some(at) = self.columns.iter().position(|column| column.title == title) {
            self.columns.remove(at);
            for row in &mut self.rows {
                row.remove(at);
            }
        }
        self
    }

    /// Writes it, two columns in.
    pub fn lay(mut self, page: &mut Page) {
        // As they are printed, so that columns are as wide as that.
        for cell in self.rows.iter_mut().flatten() {
            cell.text = printable::line(&cell.text).into_owned();
        }
        let widths = self.widths(page.paper.width);
        let head = self.columns.iter().map(|column| Cell::toned(column.title, Tone::Head));
        let head = head.collect::<Vec<_>>();
        for row in std::iter::once(&head).chain(&self.rows) {
            let mut line = String::new();
            for ((cell, column), width) in row.iter().zip(&self.columns).zip(&widths) {
                let text = shorten(&cell.text, *width);
                let fill = width.saturating_sub(columns(&text));
                let (before, after) = if column.right { (fill, 0) } else { (0, fill) };
                let text = cell.tone.paint(&text, page.paper);
                // Writing to a string does not fail.
                let _ = write!(line, "{:GAP$}{:before$}{text}{:after$}", "", "", "");
            }
            let _ = writeln!(page.out, "{}", line.trim_end());
        }
    }

    fn widths(&self, most: Option<usize>) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|c| columns(c.title)).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(columns(&cell.text));
            }
        }
        let Some(most) = most else { return widths };
        let all = |widths: &[usize]| widths.iter().map(|width| width + GAP).sum::<usize>();
        let mut excess = all(&widths).saturating_sub(most);
        // Names give first, the longest the most; then whatever is longest.
        for (least, any) in [(LEAST, false), (LEAST, true), (1, true)] {
            while excess > 0 {
                let gives = |(at, width): &(usize, &usize)| {
                    **width > least && (any || self.columns[*at].shrinks)
                };
                let widest =
                    widths.iter().enumerate().filter(gives).max_by_key(|(_, width)| **width);
                let Some((at, width)) = widest.map(|(at, width)| (at, *width)) else { break };
                // Down to the next, so that a name of megabytes takes one step.
                let others = widths.iter().enumerate().filter(|(other, _)| *other != at);
                let others = others.filter(|(other, _)| any || self.columns[*other].shrinks);
                let next = others.map(|(_, width)| *width).filter(|other| *other < width).max();
                let step = (width - next.unwrap_or(least).max(least)).clamp(1, excess);
                widths[at] -= step;
                excess -= step;
            }
        }
        widths
    }
}

#[cfg(test)]
mod tests {
    use super::super::Paper;
    use super::*;

    fn laid(width: Option<usize>, colour: bool, name: &str) -> String {
        let mut sheet =
            Sheet::new(&[Column::name("POD"), Column::number("USED"), Column::text("ID")]);
        sheet.row(vec![name.into(), Cell::toned("1 GiB", Tone::Bad), "abcd".into()]);
        sheet.row(vec!["b".into(), "12 GiB".into(), "ef".into()]);
        let mut page = Page::new(Paper { width, colour });
        sheet.lay(&mut page);
        page.finish()
    }

    #[test]
    fn columns_are_as_wide_as_they_must_be_and_numbers_stand_right() {
        assert_eq!(
            laid(None, false, "ns/llm-0"),
            "  POD         USED  ID\n  ns/llm-0   1 GiB  abcd\n  b         12 GiB  ef\n"
        );
    }

    #[test]
    fn a_long_name_gives_way_and_numbers_stay() {
        let text = laid(Some(40), false, &"x".repeat(1 << 20));
        assert!(text.lines().all(|line| columns(line) <= 40), "{text}");
        assert!(text.contains("…") && text.contains(" 1 GiB  abcd"), "{text}");
    }

    #[test]
    fn colour_changes_no_column() {
        let (plain, painted) = (laid(None, false, "模"), laid(None, true, "模"));
        let bare = painted.replace("\x1b[1;31m", "").replace("\x1b[1m", "").replace("\x1b[0m", "");
        assert_ne!(plain, painted);
        assert_eq!(plain, bare);
    }
}
