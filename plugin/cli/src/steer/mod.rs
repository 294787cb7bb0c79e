//! `quota`, `cordon` and `uncordon`: asked of this node's plugin, or run as the plugin's own command in its pod on the
//! right node of a cluster.

mod cordon;
mod quota;
mod target;

use std::io::Write;
use std::process::ExitCode;

pub(crate) use cordon::{CordonArgs, UncordonArgs, cordon, uncordon};
pub(crate) use quota::{QuotaCommand, quota};
use tessera_fleet::{Fleet, Place};
use tessera_model::printable;
use tessera_system::terminal;

use crate::output::Format;
use crate::source::Failure;

/// Words of a command after the first, with options before what strangers may have named.
fn words(
    first: &[&str],
    options: &[(&str, Option<String>)],
    flags: &[(&str, bool)],
    output: Format,
    last: Option<&str>,
) -> Vec<String> {
    // Its default is left out: older plugins have no word for it.
    let format = match output {
        Format::Text => None,
        Format::Wide => Some("wide".to_owned()),
        Format::Json => Some("json".to_owned()),
    };
    let format = ("output", format);
    let options = options.iter().chain([&format]);
    let mut words: Vec<String> = first.iter().map(ToString::to_string).collect();
    words.extend(options.filter_map(|(name, value)| Some(format!("--{name}={}", value.as_ref()?))));
    words.extend(flags.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| format!("--{name}")));
    words.extend(last.into_iter().flat_map(|last| ["--".to_owned(), last.to_owned()]));
    words
}

/// An option's value, unless it is left out.
fn given(text: &str) -> Option<String> {
    Some(text.to_owned()).filter(|text| !text.is_empty())
}

/// Runs it in the plugin's pod, prints what it prints, and ends as it ends.
async fn run(fleet: &Fleet, place: &Place, words: &[String]) -> Result<ExitCode, Failure> {
    let done = fleet.run_on(place, words).await?;
    terminal::print(&printable::lines(&String::from_utf8_lossy(&done.stdout)))?;
    let text = String::from_utf8_lossy(&done.stderr);
    // Nothing can be done about a closed standard error.
    let _ = std::io::stderr().write_all(printable::lines(&text).as_bytes());
    Ok(ExitCode::from(u8::try_from(done.code).unwrap_or(1)))
}
