//! How answers are printed.

use clap::ValueEnum;
use serde::Serialize;
use tessera_api::print::Paper;
use tessera_model::printable;
use tessera_system::terminal;

use crate::source::Failure;

/// How something is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people, in 120 columns and fewer
    Text,
    /// For people: whole ids and names, in lines as long as that takes
    Wide,
    /// For programs
    Json,
}

/// How something is printed that also is a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TableFormat {
    /// For people, in 120 columns and fewer
    Text,
    /// For people: whole ids and names, in lines as long as that takes
    Wide,
    /// For programs
    Json,
    /// For spreadsheets
    Csv,
}

/// An answer as it was asked for.
pub(crate) fn show(
    answer: &impl Serialize,
    format: Format,
    text: impl FnOnce(Paper) -> String,
) -> Result<(), Failure> {
    let text = match format {
        Format::Text | Format::Wide => text(Paper::of_stdout(format == Format::Wide)),
        Format::Json => json(answer)?,
    };
    Ok(terminal::print(&text)?)
}

/// As [`show`].
pub(crate) fn show_table(
    answer: &impl Serialize,
    format: TableFormat,
    text: impl FnOnce(Paper) -> String,
    csv: impl FnOnce() -> String,
) -> Result<(), Failure> {
    let format = match format {
        TableFormat::Text => Format::Text,
        TableFormat::Wide => Format::Wide,
        TableFormat::Json => Format::Json,
        TableFormat::Csv => return Ok(terminal::print(&csv())?),
    };
    show(answer, format, text)
}

/// For programs, its fields by name; also in a terminal, names in it do nothing.
pub(crate) fn json(answer: &impl Serialize) -> Result<String, Failure> {
    let text = format!("{:#}\n", serde_json::to_value(answer)?);
    Ok(printable::lines(&text).into_owned())
}

/// A field of CSV in one line, which no spreadsheet takes for a formula and in which no character acts.
pub(crate) fn quoted(text: &str) -> String {
    // A terminal may show it, too.
    let text = printable::line(text);
    let formula = text.starts_with(['=', '+', '-', '@']);
    let text = if formula { format!("'{text}") } else { text.into_owned() };
    match text.contains([',', '"']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}
