//! Tables and sentences of at most 120 columns. Pure.

use std::fmt::Write;

use tessera_api::print::wrap;
use tessera_model::printable;

/// Widest line.
pub(super) const WIDTH: usize = 120;

/// A column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub title: &'static str,
    /// Numbers stand at the right.
    pub right: bool,
    /// Narrower where the whole is too wide.
    pub gives: bool,
}

pub(super) const fn left(title: &'static str) -> Column {
    Column { title, right: false, gives: false }
}

pub(super) const fn right(title: &'static str) -> Column {
    Column { title, right: true, gives: false }
}

pub(super) const fn gives(title: &'static str) -> Column {
    Column { title, right: false, gives: true }
}

/// A sentence behind a title, the lines after the first below its end.
pub(super) fn put(out: &mut String, title: &str, text: &str) {
    let indent = title.chars().count();
    for (at, line) in wrap(&printable::line(text), WIDTH - indent).iter().enumerate() {
        let title = if at == 0 { title } else { "" };
        let _ = writeln!(out, "{title:indent$}{line}");
    }
}

/// Fewest characters of a column that gives.
const LEAST: usize = 8;

/// The rows under their titles, each line at most `width` wide where columns that give can be cut so far.
pub(super) fn table(columns: &[Column], rows: &[Vec<String>], width: usize) -> String {
    let cell = |text: &str| printable::line(text).into_owned();
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(|text| cell(text)).collect()).collect();
    let length = |text: &str| text.chars().count();
    let mut widths: Vec<usize> = columns.iter().map(|column| length(column.title)).collect();
    for row in &rows {
        for (width, text) in widths.iter_mut().zip(row) {
            *width = (*width).max(length(text));
        }
    }
    let gaps = 2 * columns.len().saturating_sub(1);
    // The widest gives first.
    while widths.iter().sum::<usize>() + gaps > width {
        let giving = columns.iter().zip(&widths).enumerate();
        let giving = giving.filter(|(_, (column, width))| column.gives && **width > LEAST);
        let Some((at, _)) = giving.max_by_key(|(_, (_, width))| **width) else { break };
        widths[at] -= 1;
    }
    let mut out = String::new();
    let titles: Vec<String> = columns.iter().map(|column| column.title.to_owned()).collect();
    for row in std::iter::once(&titles).chain(&rows) {
        let mut line = String::new();
        for (at, ((column, width), text)) in columns.iter().zip(&widths).zip(row).enumerate() {
            if at > 0 {
                line.push_str("  ");
            }
            let text = shortened(text, *width);
            let pad = " ".repeat(width - length(&text));
            if column.right {
                line.push_str(&pad);
            }
            line.push_str(&text);
            if !column.right {
                line.push_str(&pad);
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// The beginning and the end of a text that is too long: names differ at both.
fn shortened(text: &str, width: usize) -> String {
    let all: Vec<char> = text.chars().collect();
    if all.len() <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let tail = kept / 2;
    let head: String = all[..kept - tail].iter().collect();
    let end: String = all[all.len() - tail..].iter().collect();
    format!("{head}…{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_no_wider_than_they_may_be_and_words_of_others_move_nothing() {
        let columns = [gives("POD"), left("NODE"), right("USED")];
        let rows = [
            vec![
                "team/".to_owned() + &"chat-".repeat(60) + "end",
                "a".to_owned(),
                "1 GiB".to_owned(),
            ],
            vec!["evil\u{1b}[2J\nNODE".to_owned(), "b".to_owned(), "12 GiB".to_owned()],
        ];
        let text = table(&columns, &rows, WIDTH);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert_eq!(text.lines().count(), 3);
        assert!(
            text.contains("team/chat") && text.contains("…") && text.contains("-end  a"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
