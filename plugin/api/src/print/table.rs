//! Tables as wide as what stands in them: of values that must not be shortened.

use std::borrow::Cow;
use std::fmt::Write;

use super::width::columns;
use tessera_model::printable;

/// Writes `rows` below `header`, in columns as wide as their widest cell.
pub fn table(out: &mut String, header: &[&str], mut rows: Vec<Vec<String>>) {
    // As they are printed, so that columns are as wide as that.
    for cell in rows.iter_mut().flatten() {
        if let Cow::Owned(printed) = printable::line(cell) {
            *cell = printed;
        }
    }
    let mut widths: Vec<usize> = header.iter().map(|cell| columns(cell)).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(columns(cell));
        }
    }
    let header = header.iter().map(ToString::to_string).collect();
    for row in std::iter::once(header).chain(rows) {
        let mut text = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let fill = width.saturating_sub(columns(cell));
            let _ = write!(text, "{cell}{:fill$}  ", "");
        }
        // Writing to a string does not fail.
        let _ = writeln!(out, "{}", text.trim_end());
    }
}
