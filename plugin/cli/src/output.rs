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

/// For programs, its fields by name; also in a terminal, names in it do nothing.
pub(crate) fn json(answer: &impl Serialize) -> Result<String, Failure> {
    let text = format!("{:#}\n", serde_json::to_value(answer)?);
    Ok(printable::lines(&text).into_owned())
}
