//! Tables whose columns are as wide as their widest cells. Where the page is narrow, names shrink; where that does
//! not do, columns are left out. A title and a number are never cut.

use std::fmt::Write;

use super::Paper;
use super::page::{Page, Tone};
use super::width::{columns, shorten};
use tessera_model::printable;

/// Between columns.
const GAP: usize = 2;
/// What a column of names or words keeps.
const LEAST: usize = 12;

/// A column's head.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    kind: Kind,
    least: usize,
    rank: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Name,
    Number,
}

impl Column {
    /// Of words, which are shortened after names.
    pub const fn text(title: &'static str) -> Self {
        Column { title, kind: Kind::Text, least: LEAST, rank: 0 }
    }

    /// Of names, which may be of any length and are shortened first.
    pub const fn name(title: &'static str) -> Self {
        Column { kind: Kind::Name, ..Column::text(title) }
    }

    /// Of numbers with their units, which are never shortened.
    pub const fn number(title: &'static str) -> Self {
        Column { kind: Kind::Number, ..Column::text(title) }
    }

    /// So many columns of the page stay, where there is that much to show.
    pub const fn least(self, least: usize) -> Self {
        Column { least, ..self }
    }

    /// Where there is no room, columns of the highest rank are left out first; of one rank, the rightmost.
    pub const fn rank(self, rank: u8) -> Self {
        Column { rank, ..self }
    }
}

/// What stands in a row and a column.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
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
    pub fn new(columns: &[Column]) -> Self {
        Sheet { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// One more row, with a cell for each column.
    pub fn row(&mut self, cells: Vec<Cell>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// Without the columns of this title.
    pub fn without(mut self, title: &str) -> Self {
        while let Some(at) = self.columns.iter().position(|column| column.title == title) {
            self.leave_out(at);
        }
        self
    }

    fn leave_out(&mut self, at: usize) {
        self.columns.remove(at);
        for row in &mut self.rows {
            row.remove(at);
        }
    }

    /// Writes it, two columns in.
    pub fn lay(mut self, page: &mut Page) {
        // As they are printed, so that columns are as wide as that.
        for cell in self.rows.iter_mut().flatten() {
            cell.text = printable::line(&cell.text).into_owned();
        }
        if let Some(most) = page.paper.width {
            self.leave_out_what_has_no_room(most);
        }
        let widths = self.widths(page.paper.width);
        let head = self.columns.iter().map(|column| Cell::toned(column.title, Tone::Head));
        let head = head.collect::<Vec<_>>();
        for row in std::iter::once(&head).chain(&self.rows) {
            let mut line = String::new();
            for ((cell, column), width) in row.iter().zip(&self.columns).zip(&widths) {
                let text = shorten(&cell.text, *width);
                let fill = width.saturating_sub(columns(&text));
                let (before, after) =
                    if column.kind == Kind::Number { (fill, 0) } else { (0, fill) };
                let text = cell.tone.paint(&text, page.paper);
                // Writing to a string does not fail.
                let _ = write!(line, "{:GAP$}{:before$}{text}{:after$}", "", "", "");
            }
            let _ = writeln!(page.out, "{}", line.trim_end());
        }
    }

    /// As wide as the title and the widest cell.
    fn natural(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|c| columns(c.title)).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(columns(&cell.text));
            }
        }
        widths
    }

    /// The first column stays in any case.
    fn leave_out_what_has_no_room(&mut self, most: usize) {
        let mut least: Vec<usize> = (self.columns.iter().zip(self.natural()))
            .map(|(column, natural)| GAP + column.least_of(natural))
            .collect();
        while least.iter().sum::<usize>() > most {
            let others = self.columns.iter().enumerate().skip(1);
            let Some((at, _)) = others.max_by_key(|(at, column)| (column.rank, *at)) else { break };
            self.leave_out(at);
            least.remove(at);
        }
    }

    fn widths(&self, most: Option<usize>) -> Vec<usize> {
        let mut widths = self.natural();
        let Some(most) = most else { return widths };
        let least: Vec<usize> = (self.columns.iter().zip(&widths))
            .map(|(column, natural)| column.least_of(*natural))
            .collect();
        let mut excess = widths.iter().map(|width| width + GAP).sum::<usize>().saturating_sub(most);
        // The longest gives the most.
        for kind in [Kind::Name, Kind::Text] {
            let may_give = |at: usize| self.columns[at].kind == kind;
            while excess > 0 {
                let gives = |(at, width): &(usize, &usize)| may_give(*at) && **width > least[*at];
                let widest =
                    widths.iter().enumerate().filter(gives).max_by_key(|(_, width)| **width);
                let Some((at, width)) = widest.map(|(at, width)| (at, *width)) else { break };
                // Down to the next, so that a name of megabytes takes one step.
                let others = widths.iter().enumerate().filter(|(other, _)| may_give(*other));
                let next = others.map(|(_, width)| *width).filter(|other| *other < width).max();
                let step = (width - next.unwrap_or(0).max(least[at])).clamp(1, excess);
                widths[at] -= step;
                excess -= step;
            }
        }
        widths
    }
}

/// Writes `rows` below `titles`, none of them shortened.
pub fn table(out: &mut String, titles: &[&'static str], rows: Vec<Vec<String>>) {
    let columns: Vec<Column> = titles.iter().map(|title| Column::text(title)).collect();
    let mut sheet = Sheet::new(&columns);
    rows.into_iter().for_each(|row| sheet.row(row.into_iter().map(Cell::from).collect()));
    let mut page = Page::new(Paper { width: None, colour: false });
    sheet.lay(&mut page);
    out.push_str(&page.finish());
}

impl Column {
    /// What it keeps of the width that it would like.
    fn least_of(&self, natural: usize) -> usize {
        match self.kind {
            Kind::Number => natural,
            Kind::Text | Kind::Name => natural.min(self.least.max(columns(self.title))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
    fn what_has_no_room_is_left_out_by_rank_and_then_from_the_right() {
        let row = |width| {
            let mut sheet = Sheet::new(&[
                Column::name("POD"),
                Column::number("USED").rank(1),
                Column::text("STATE").rank(2),
                Column::number("QUOTA"),
                Column::text("ID").rank(1),
            ]);
            sheet.row(
                ["a-long-name-of-a-pod", "1 GiB", "running", "12 GiB", "0123"]
                    .map(Cell::from)
                    .into(),
            );
            let mut page = Page::new(Paper { width: Some(width), colour: false });
            sheet.lay(&mut page);
            let text = page.finish();
            let head = text.lines().next().unwrap();
            head.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(row(60), "POD USED STATE QUOTA ID");
        assert_eq!(row(40), "POD USED QUOTA ID");
        assert_eq!(row(30), "POD USED QUOTA");
        assert_eq!(row(24), "POD QUOTA");
        assert_eq!(row(16), "POD");
    }

    proptest! {
        #[test]
        fn titles_and_numbers_are_whole_and_no_line_is_too_wide(
            names in prop::collection::vec("\\PC{0,60}", 4),
            numbers in prop::collection::vec(any::<u64>(), 3),
            width in 40usize..140,
        ) {
            let titles = ["POD/CONTAINER", "A", "TIME SHARE", "CONFIDENCE", "B", "NODE", "REFUSED"];
            let mut sheet = Sheet::new(&[
                Column::name(titles[0]).least(20),
                Column::number(titles[1]),
                Column::text(titles[2]),
                Column::number(titles[3]).rank(1),
                Column::number(titles[4]),
                Column::name(titles[5]).rank(3),
                Column::text(titles[6]),
            ]);
            let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
            let cells = [&names[0], &numbers[0], &names[1], &numbers[1], &numbers[2], &names[2], &names[3]];
            sheet.row(cells.map(|cell| Cell::from(cell.as_str())).into());
            let mut page = Page::new(Paper { width: Some(width), colour: false });
            sheet.lay(&mut page);
            let text = page.finish();
            for line in text.lines() {
                prop_assert!(columns(line) <= width, "{line:?}");
            }
            let head = text.lines().next().unwrap();
            for title in head.split("  ").map(str::trim).filter(|title| !title.is_empty()) {
                prop_assert!(titles.contains(&title), "{title:?} of {head:?}");
            }
            for (title, number) in [("A", 0), ("CONFIDENCE", 1), ("B", 2)] {
                let shown = head.split_whitespace().any(|word| word == title);
                prop_assert!(!shown || text.contains(&numbers[number]), "{text}");
            }
        }
    }

    #[test]
    fn colour_changes_no_column() {
        let (plain, painted) = (laid(None, false, "模"), laid(None, true, "模"));
        let bare = painted.replace("\x1b[1;31m", "").replace("\x1b[1m", "").replace("\x1b[0m", "");
        assert_ne!(plain, painted);
        assert_eq!(plain, bare);
    }
}
