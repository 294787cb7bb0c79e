//! Text for people: paragraphs and tables that fit a width. Foreign text in them moves no cursor and begins
//! no line; a colour never says what words do not.

use std::fmt::Write;
use std::io::IsTerminal;

use tessera_model::printable;
use tessera_system::terminal;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Most columns of a view for people: it fits half a screen, a chat and a terminal over a bad line.
pub const WIDEST: usize = 120;
/// A terminal that is narrower gets lines of this width, which it wraps.
const NARROWEST: usize = 40;

/// What standard output takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paper {
    /// Columns; `None` for as many as there must be.
    pub width: Option<usize>,
    /// Escape sequences for colour.
    pub colour: bool,
}

impl Paper {
    /// Of this process; with `wide`, nothing is shortened.
    pub fn of_stdout(wide: bool) -> Self {
        let terminal = terminal::size().map(|(columns, _)| usize::from(columns));
        let width = terminal.unwrap_or(WIDEST).clamp(NARROWEST, WIDEST);
        Paper {
            width: (!wide).then_some(width),
            colour: std::io::stdout().is_terminal() && terminal::has_colour(),
        }
    }

    /// For a file or a test: no colour.
    pub fn plain() -> Self {
        Paper { width: Some(WIDEST), colour: false }
    }
}

/// How something looks where there is colour. The words say the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// As it is.
    #[default]
    Plain,
    Head,
    /// Somebody should look at it.
    Warn,
    /// It is broken.
    Bad,
}

impl Tone {
    /// The text with the escape sequences for it.
    fn paint(self, text: &str, paper: Paper) -> String {
        let code = match self {
            _ if !paper.colour || text.is_empty() => return text.to_owned(),
            Tone::Plain => return text.to_owned(),
            Tone::Head => "1",
            Tone::Warn => "33",
            Tone::Bad => "1;31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// A text in the making.
#[derive(Debug)]
pub struct Page {
    paper: Paper,
    out: String,
}

impl Page {
    /// An empty one.
    pub fn new(paper: Paper) -> Self {
        Page { paper, out: String::new() }
    }

    /// Whether nothing is to be shortened.
    pub fn is_wide(&self) -> bool {
        self.paper.width.is_none()
    }

    /// An empty line.
    pub fn gap(&mut self) {
        self.out.push('\n');
    }

    /// A paragraph: further lines stand two columns farther right.
    pub fn say(&mut self, indent: usize, tone: Tone, text: &str) {
        self.paragraph(&format!("{:indent$}", ""), indent + 2, tone, text);
    }

    /// A paragraph behind a label: further lines stand below its text.
    pub fn labelled(&mut self, label: &str, text: &str) {
        self.paragraph(label, columns(label), Tone::Plain, text);
    }

    fn paragraph(&mut self, first: &str, further: usize, tone: Tone, text: &str) {
        let text = printable::line(text);
        let lines = match self.paper.width {
            // The first line may be as long as the others, so that nothing depends on where it breaks.
            Some(width) => wrap(&text, width.saturating_sub(further)),
            None => vec![&*text],
        };
        for (at, line) in lines.iter().enumerate() {
            let begin = if at == 0 { first.to_owned() } else { " ".repeat(further) };
            // Writing to a string does not fail.
            let _ = writeln!(self.out, "{begin}{}", tone.paint(line, self.paper));
        }
    }

    /// What is missing, a sentence each.
    pub fn notes(&mut self, notes: &[String]) {
        notes.iter().for_each(|note| self.say(0, Tone::Plain, &format!("note: {note}")));
    }

    /// Text that is laid out already, and safe to print.
    pub fn push(&mut self, text: &str) {
        self.out.push_str(text);
    }

    /// Lines that have their indentation already: what is too long goes on two columns right of where the text
    /// of its line begins, or of `column` in a line that is indented less.
    pub fn lines(&mut self, column: usize, text: &str) {
        for line in text.lines() {
            let line = printable::line(line);
            let own = line.len() - line.trim_start_matches(' ').len();
            let further = if own == 0 { 2 } else { own.max(column) + 2 };
            let wrapped = match self.paper.width {
                Some(width) if columns(&line) > width => {
                    let (begin, rest) = broken(&line, width);
                    let mut lines = vec![begin.to_owned()];
                    let rest = wrap(rest, width.saturating_sub(further));
                    lines.extend(rest.iter().map(|line| format!("{:further$}{line}", "")));
                    lines
                }
                _ => vec![line.into_owned()],
            };
            for line in wrapped {
                self.out.push_str(line.trim_end_matches(' '));
                self.out.push('\n');
            }
        }
    }

    /// All of it.
    pub fn finish(self) -> String {
        self.out
    }
}

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

/// A table in the making. Its columns are as wide as their widest cells. Where the page is narrow, names shrink; where that
/// does not do, columns are left out. A title and a number are never cut.
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

/// Columns of a text on a terminal.
pub fn columns(text: &str) -> usize {
    text.width()
}

/// At least the columns that a character takes in any company: a mark that joins others counts as one.
fn most(c: char) -> usize {
    c.width().unwrap_or(1).max(1)
}

/// How many bytes the first of these characters have that fit into `width` columns together.
fn fitting(characters: impl Iterator<Item = char>, width: usize) -> usize {
    let mut left = width;
    let fits = characters.map_while(|c| {
        left = left.checked_sub(most(c))?;
        Some(c.len_utf8())
    });
    fits.sum()
}

/// The longest beginning of at most `width` columns.
pub fn head(text: &str, width: usize) -> &str {
    &text[..fitting(text.chars(), width)]
}

/// The longest end of at most `width` columns.
fn tail(text: &str, width: usize) -> &str {
    &text[text.len() - fitting(text.chars().rev(), width)..]
}

/// At most `width` columns: of a longer text the beginning and the end, because pods of one Deployment differ
/// at their ends.
pub fn shorten(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let Some(kept) = width.checked_sub(1) else { return String::new() };
    let end = kept / 2;
    format!("{}…{}", head(text, kept - end), tail(text, end))
}

/// The beginning of a longer text that fits into `width` columns, and the rest: broken between words, but not
/// within the indentation; where that does not do, within a word.
fn broken(text: &str, width: usize) -> (&str, &str) {
    let fits = head(text, width);
    let indent = text.len() - text.trim_start_matches(' ').len();
    let ends_there = text[fits.len()..].starts_with(' ');
    let at = if ends_there { Some(fits.len()) } else { fits.rfind(' ') };
    match at.filter(|at| *at > indent) {
        Some(at) => (&text[..at], text[at..].trim_start_matches(' ')),
        None => (fits, &text[fits.len()..]),
    }
}

/// Lines of at most `width` columns, broken between words, and within those that are too long.
pub fn wrap(text: &str, width: usize) -> Vec<&str> {
    let (mut lines, mut rest) = (Vec::new(), text);
    while head(rest, width.max(4)).len() < rest.len() {
        let (line, next) = broken(rest, width.max(4));
        lines.push(line);
        rest = next;
    }
    if !rest.is_empty() || lines.is_empty() {
        lines.push(rest);
    }
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines_of(width: usize, text: &str) -> String {
        let mut page = Page::new(Paper { width: Some(width), colour: false });
        page.lines(9, text);
        page.finish()
    }

    #[test]
    fn a_long_line_goes_on_below_its_text() {
        let text = "a heading of its own, long\n  title  one two three four\n           five six seven eight\n\n";
        assert_eq!(
            lines_of(22, text),
            "a heading of its own,\n  long\n  title  one two three\n           four\n           five six\n             seven\n             eight\n\n"
        );
        assert_eq!(lines_of(60, text), text);
    }

    proptest! {
        #[test]
        fn no_line_is_too_wide_and_no_word_is_lost(
            lines in prop::collection::vec("[ ]{0,14}(\\PC| ){0,200}", 0..6),
            width in 40usize..140,
        ) {
            let text = lines.join("\n");
            let laid = lines_of(width, &text);
            for line in laid.lines() {
                prop_assert!(columns(line) <= width, "{line:?}");
            }
            let mut page = Page::new(Paper { width: Some(width), colour: false });
            page.say(2, Tone::Plain, &text);
            for line in page.finish().lines() {
                prop_assert!(columns(line) <= width && !line.contains(char::is_control), "{line:?}");
            }
            let bare = |text: &str| text.split([' ', '\n']).collect::<String>();
            let printed: Vec<_> = text.lines().map(printable::line).collect();
            prop_assert_eq!(bare(&laid), bare(&printed.join("\n")));
        }
    }

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

    #[test]
    fn both_ends_of_a_name_stay() {
        assert_eq!(shorten("inference-7d9c5b6f4-x2x8p", 12), "infere…x2x8p");
        assert_eq!(shorten("llm-0", 12), "llm-0");
        assert_eq!(shorten("llm-0", 0), "");
        // Characters of two columns.
        assert_eq!(shorten("模型推理服务", 7), "模…务");
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("one two three", 8), ["one two", "three"]);
        assert_eq!(wrap("abcdefghij k", 4), ["abcd", "efgh", "ij k"]);
        assert_eq!(wrap("", 8), [""]);
    }

    proptest! {
        #[test]
        fn nothing_is_wider_than_it_may_be(text in "\\PC{0,80}", width in 0usize..50) {
            prop_assert!(columns(&shorten(&text, width)) <= width);
            for line in wrap(&text, width) {
                prop_assert!(columns(line) <= width.max(4), "{line:?}");
            }
            let words: Vec<&str> = text.split_whitespace().collect();
            if width > 400 {
                prop_assert_eq!(wrap(&text, width).concat(), words.concat());
            }
        }

        #[test]
        fn wrapping_loses_nothing_but_spaces(text in "[a-z ]{0,80}", width in 4usize..50) {
            let together = wrap(&text, width).concat().replace(' ', "");
            prop_assert_eq!(together, text.replace(' ', ""));
        }
    }
}
