//! What both commands print with: tables of at most [`WIDTH`] columns.

use tessera_model::printable;

/// Columns of a terminal that everything fits into.
pub(super) const WIDTH: usize = 120;

/// A cell of at most `most` characters: the beginning and the end of a longer text.
pub(super) fn cell(text: &str, most: usize) -> String {
    let text = printable::line(text);
    let length = text.chars().count();
    if length <= most {
        return text.into_owned();
    }
    let (front, back) = ((most - 1) / 2, most / 2);
    let begin: String = text.chars().take(front).collect();
    let end: String = text.chars().skip(length - back).collect();
    format!("{begin}…{end}")
}

/// A name; a dash for none.
pub(super) fn name(text: &str, most: usize) -> String {
    if text.is_empty() { "-".to_owned() } else { cell(text, most) }
}

/// Adds a table and its header.
pub(super) fn table(out: &mut String, header: &[&str], rows: Vec<Vec<String>>) {
    tessera_api::print::table(out, header, rows);
}

/// Adds a text below `label`, wrapped at words to [`WIDTH`]; a word that is longer stays whole.
pub(super) fn paragraph(out: &mut String, label: &str, text: &str) {
    let indent = " ".repeat(label.chars().count());
    let mut line = label.to_owned();
    let mut is_empty = true;
    for word in printable::line(text).split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(line.trim_end());
            out.push('\n');
            (line, is_empty) = (indent.clone(), true);
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
}

/// Remarks about what is missing.
pub(super) fn remarks(out: &mut String, remarks: &[String]) {
    for remark in remarks {
        paragraph(out, "note: ", remark);
    }
}
