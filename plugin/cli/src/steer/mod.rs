//! `quota`, `cordon` and `uncordon`: asked of this node's plugin, or run as the plugin's own command in its pod on the
//! right node of a cluster.

mod cordon;
mod quota;

use std::io::Write;
use std::process::ExitCode;

pub(crate) use cordon::{CordonArgs, UncordonArgs, cordon, uncordon};
pub(crate) use quota::{QuotaCommand, quota};
use tessera_fleet::{AskError, Fleet, Place, places};
use tessera_model::printable;
use tessera_model::written_name::{BEGINNING, Several};
use tessera_system::terminal;

use crate::kubectl::Common;
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

/// The place of a pod, or of an allocation, and what its plugin is asked for.
async fn holder(fleet: &Fleet, common: &Common, written: &str) -> Result<(Place, String), Failure> {
    let allocations = match may_be_id(written) {
        true => fleet.allocations(written).await?,
        false => Vec::new(),
    };
    let pod = match common.pod(fleet, written) {
        Ok((namespace, name)) => {
            let found = fleet.user().pod(&namespace, &name).await.map_err(AskError::from)?;
            if found.is_none() && allocations.is_empty() {
                let or_id = match may_be_id(written) {
                    true => ", and no allocation's id begins so",
                    false => "",
                };
                let text = format!("there is no pod {name} in namespace {namespace}{or_id}");
                return Err(Failure::failed(text));
            }
            found.map(|found| (format!("{namespace}/{name}"), found.spec.node_name))
        }
        // An id needs no namespace.
        Err(_) if !allocations.is_empty() => None,
        Err(failure) => return Err(failure),
    };
    match chosen(written, pod, allocations)? {
        Chosen::Allocation(place, id) => Ok((place, id)),
        Chosen::Pod(pod, node) if node.is_empty() => {
            let name = pod.rsplit('/').next().unwrap_or_default();
            let hint = format!("see `kubectl tessera why-pending {name}`");
            Err(Failure::failed(format!("pod {pod} has no node yet: {hint}")))
        }
        Chosen::Pod(pod, node) => Ok((place(fleet, &node).await?, pod)),
    }
}

/// Where the plugin of a node is.
async fn place(fleet: &Fleet, node: &str) -> Result<Place, Failure> {
    let places = fleet.places().await?;
    let place = places::on(&places, node).map_err(|error| Failure::failed(error.text))?;
    Ok(place.clone())
}

/// Whether a name may be the beginning of an allocation's id.
fn may_be_id(written: &str) -> bool {
    written.len() >= BEGINNING
        && written.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// What a written name means.
#[derive(Debug, PartialEq, Eq)]
enum Chosen {
    /// A pod as `namespace/pod`, and its node; empty where it has none.
    Pod(String, String),
    /// An allocation by its id, where it is.
    Allocation(Place, String),
}

/// The one thing of these that is called so; there is at least one. A pod may be called as another's allocation begins:
/// then nothing is chosen.
fn chosen(
    written: &str,
    pod: Option<(String, String)>,
    mut allocations: Vec<(Place, String)>,
) -> Result<Chosen, Failure> {
    match (pod, allocations.len()) {
        (Some((pod, node)), 0) => Ok(Chosen::Pod(pod, node)),
        (Some((pod, _)), _) => Err(Failure::usage(format!(
            "{written} is a pod and begins the id of an allocation: write {pod} for the pod, or more of the id"
        ))),
        (None, 1) => {
            let (place, id) = allocations.remove(0);
            Ok(Chosen::Allocation(place, id))
        }
        (None, _) => {
            let ids = allocations.iter().map(|(place, id)| format!("{id} on {}", place.node));
            Err(Failure::usage(Several::new(written, ids).to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_one_thing_or_nothing() {
        let place = |node: &str| Place {
            node: node.into(),
            namespace: "tessera".into(),
            pod: "p".into(),
            port: 0,
            away: String::new(),
        };
        let held = |node: &str, id: &str| (place(node), id.to_owned());
        let pod = || Some(("team/cafe".to_owned(), "n1".to_owned()));
        let says = |pod, held| chosen("cafe", pod, held).unwrap_err().text;
        assert_eq!(
            chosen("cafe", pod(), Vec::new()),
            Ok(Chosen::Pod("team/cafe".into(), "n1".into()))
        );
        assert_eq!(
            chosen("cafe", None, vec![held("n2", "cafe01")]),
            Ok(Chosen::Allocation(place("n2"), "cafe01".into()))
        );
        let both = says(pod(), vec![held("n2", "cafe01")]);
        assert!(both.contains("write team/cafe for the pod"), "{both}");
        let several = says(None, vec![held("n1", "cafe01"), held("n2", "cafe02")]);
        assert!(several.contains("cafe01 on n1, cafe02 on n2"), "{several}");
        for (written, may) in
            [("cafe", true), ("0c1d2e3f", true), ("caf", false), ("chat", false), ("a/cafe", false)]
        {
            assert_eq!(may_be_id(written), may, "{written}");
        }
    }
}
