//! What an answer that came through the proxy means. Pure: bytes go in, a value or a sentence comes out.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tessera_cluster::user::Passed;
use tessera_cluster::{ApiError, bounded};
use tessera_model::printable;
use tessera_view::API_VERSION;
use tessera_view::fleet::Fleet;
use tessera_view::node::Node;
use tessera_web::SourceError;

use crate::places::Place;

/// Bytes in memory for each byte of text: an answer of a plugin has names for all its figures, and takes one or two.
const TIMES: usize = 4;
/// Longest text of a node that is passed on, in characters.
const LONGEST: usize = 300;

/// Why a node gave no answer. The text says what to do where a person has to do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// Nothing is called so there.
    #[error("{0}")]
    Unknown(String),
    /// The question makes no sense to it.
    #[error("{0}")]
    Invalid(String),
    /// The reader may not read it.
    #[error("{0}")]
    Forbidden(String),
    /// By the node's own judgement, the reader may see nothing of what was asked.
    #[error("{0}")]
    NoRights(String),
    /// It knows no such reader, or not any more.
    #[error("{0}")]
    Unauthenticated(String),
    /// It does not answer, or with nonsense.
    #[error("{0}")]
    Silent(String),
}

impl From<AskError> for SourceError {
    fn from(error: AskError) -> Self {
        match error {
            AskError::Unknown(text) => SourceError::NotFound(text),
            AskError::Invalid(text) => SourceError::Invalid(text),
            AskError::Forbidden(text)
            | AskError::NoRights(text)
            | AskError::Unauthenticated(text)
            | AskError::Silent(text) => SourceError::Unavailable(text),
        }
    }
}

/// What both a node and the API server say when they refuse.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Refusal {
    /// The node's.
    api_version: String,
    error: String,
    /// The API server's.
    kind: String,
    message: String,
}

/// A stranger's words, in a line and not too many.
pub(crate) fn quoted(text: &str, most: usize) -> String {
    printable::line(&printable::brief(text, most)).into_owned()
}

/// The body of a success.
pub(crate) fn body(place: &Place, port: u16, passed: &Passed) -> Result<Vec<u8>, AskError> {
    if passed.status == 200 {
        return Ok(passed.body.to_vec());
    }
    let refusal: Refusal = serde_json::from_slice(&passed.body).unwrap_or_default();
    let short = |text: &str| quoted(text.trim(), LONGEST);
    if refusal.api_version.starts_with("tessera.dev/") {
        let said = short(&refusal.error);
        return Err(match passed.status {
            400 => AskError::Invalid(said),
            401 => AskError::Unauthenticated(format!("it does not know you: {said}; log in again")),
            403 => AskError::NoRights(said),
            404 => AskError::Unknown(said),
            status => AskError::Silent(format!("it failed (HTTP {status}): {said}")),
        });
    }
    let said = match refusal.kind.as_str() {
        "Status" => short(&refusal.message),
        _ => short(&String::from_utf8_lossy(&passed.body)),
    };
    let Place { namespace, pod, .. } = place;
    Err(match passed.status {
        401 => AskError::Unauthenticated(format!(
            "the API server does not accept your credentials: {said}; log in again"
        )),
        403 => AskError::Forbidden(format!(
            "the API server forbids its proxy: {said}; ask for `get` on pods/proxy in namespace {namespace} \
             (docs/views.md, \"Readers\")"
        )),
        404 => AskError::Silent(format!(
            "the pod {namespace}/{pod} is gone, or serves no JSON API: its plugin may be older than this program"
        )),
        502..=504 => AskError::Silent(format!(
            "the API server does not reach port {port} of pod {namespace}/{pod}: {said}; api.listen has to be an \
             address that other nodes reach with this port (else name it: --plugin-port), and no NetworkPolicy may be in the way"
        )),
        status => AskError::Silent(format!("HTTP {status}: {said}")),
    })
}

/// An answer of this API's version.
pub(crate) fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T, AskError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Version {
        api_version: String,
    }
    let nonsense = |error: serde_json::Error| {
        AskError::Silent(format!(
            "its answer makes no sense: {}",
            printable::line(&error.to_string())
        ))
    };
    let version: Version = serde_json::from_slice(text).map_err(nonsense)?;
    if version.api_version.is_empty() {
        return Err(AskError::Silent(
            "its answer makes no sense: it is none of this API".to_owned(),
        ));
    }
    if version.api_version != API_VERSION {
        return Err(AskError::Silent(format!(
            "it speaks \"{}\" and this program {API_VERSION}: use the kubectl-tessera of its version",
            quoted(&version.api_version, 60)
        )));
    }
    bounded::read(text, TIMES).map_err(nonsense)
}

/// The view of the node of a place, and of no other.
pub(crate) fn node(place: &Place, text: &[u8]) -> Result<Node, AskError> {
    let fleet: Fleet = read(text)?;
    let count = fleet.nodes.len();
    let mut entries = fleet.nodes.into_iter();
    let (Some(entry), None) = (entries.next(), entries.next()) else {
        return Err(AskError::Silent(format!("it answers for {count} nodes instead of one")));
    };
    let Some(mut view) = entry.view else {
        let why = quoted(&entry.error, LONGEST);
        return Err(AskError::Silent(format!("it shows nothing of itself: {why}")));
    };
    for name in [&entry.node, &view.node] {
        if !name.is_empty() && *name != place.node {
            return Err(AskError::Silent(format!(
                "it says that it is node \"{}\": its answer is left out",
                quoted(name, 80)
            )));
        }
    }
    view.node.clone_from(&place.node);
    Ok(view)
}

/// In the words of a reader: the request is one of many, and which node it was of is said beside it.
pub(crate) fn failed(error: &ApiError, viewer: &str) -> AskError {
    match error {
        ApiError::Slow { limit, .. } => {
            AskError::Silent(format!("it did not answer within {} s", limit.as_secs()))
        }
        ApiError::Unreadable { reason, .. } => {
            AskError::Silent(format!("its answer is left out: {reason}"))
        }
        ApiError::Unauthorized { message, .. } => AskError::Unauthenticated(format!(
            "the API server does not accept your credentials: {message}; log in again"
        )),
        ApiError::Forbidden { call, message }
            if call.kind == tessera_cluster::Kind::ServiceAccountToken =>
        {
            AskError::Forbidden(format!(
                "your kubeconfig has no token of yours that a plugin could check (it has a client certificate, or \
                 impersonates a user), and you may make none for {viewer}: {message}; use a kubeconfig with a token, or ask for `create` on \
                 serviceaccounts/token of {viewer}"
            ))
        }
        ApiError::NotFound { call, .. }
            if call.kind == tessera_cluster::Kind::ServiceAccountToken =>
        {
            AskError::Forbidden(format!(
                "your kubeconfig has no token of yours that a plugin could check (it has a client certificate, or \
                 impersonates a user), and there is no service account {viewer} to have one of: use a kubeconfig with a token, or install the chart's"
            ))
        }
        error => AskError::Silent(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn place() -> Place {
        Place {
            node: "a".into(),
            namespace: "tessera".into(),
            pod: "p".into(),
            port: 0,
            away: String::new(),
        }
    }

    fn passed(status: u16, body: &str) -> Passed {
        Passed { status, body: body.to_owned().into() }
    }

    fn fleet(entry: &str, view: &str) -> String {
        json!({
            "api_version": "tessera.dev/v1",
            "nodes": [{ "node": entry, "answers": true, "view": { "node": view, "gpus": [{ "uuid": "GPU-1" }] } }],
        })
        .to_string()
    }

    #[test]
    fn a_node_is_believed_on_itself_alone() {
        assert_eq!(node(&place(), fleet("", "").as_bytes()).unwrap().node, "a");
        assert_eq!(node(&place(), fleet("a", "a").as_bytes()).unwrap().gpus.len(), 1);
        for lie in [fleet("b", "b"), fleet("a", "b"), fleet("b", "a"), fleet("b\u{1b}[2J", "")] {
            let error = node(&place(), lie.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("left out") && !error.contains('\u{1b}'), "{error}");
        }
        let two = json!({ "api_version": "tessera.dev/v1", "nodes": [{}, {}] }).to_string();
        assert!(node(&place(), two.as_bytes()).unwrap_err().to_string().contains("2 nodes"));
        let none = json!({ "api_version": "tessera.dev/v1" }).to_string();
        assert!(node(&place(), none.as_bytes()).unwrap_err().to_string().contains("0 nodes"));
    }

    #[test]
    fn nonsense_and_other_versions_are_sentences() {
        for (text, says) in [
            ("<html>", "makes no sense"),
            ("[]", "makes no sense"),
            (r#"{"api_version":"tessera.dev/v2"}"#, "kubectl-tessera of its version"),
            (r#"{"nodes":7,"api_version":"tessera.dev/v1"}"#, "makes no sense"),
        ] {
            let error = node(&place(), text.as_bytes()).unwrap_err();
            assert!(
                matches!(&error, AskError::Silent(text) if text.contains(says)),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn refusals_of_the_node_and_of_the_api_server_are_distinguished() {
        let own = |status| {
            body(
                &place(),
                9481,
                &passed(status, r#"{"api_version":"tessera.dev/v1","error":"no"}"#),
            )
        };
        assert_eq!(own(404), Err(AskError::Unknown("no".into())));
        assert_eq!(own(403), Err(AskError::NoRights("no".into())));
        let status = r#"{"kind":"Status","message":"cannot get resource pods/proxy"}"#;
        let theirs = body(&place(), 9481, &passed(403, status)).unwrap_err().to_string();
        assert!(theirs.contains("pods/proxy in namespace tessera"), "{theirs}");
        let refused =
            r#"{"kind":"Status","message":"error trying to reach service: connection refused"}"#;
        let away = body(&place(), 9481, &passed(503, refused)).unwrap_err().to_string();
        assert!(away.contains("--plugin-port"), "{away}");
        assert!(away.contains("port 9481") && away.contains("connection refused"), "{away}");
        let long = body(&place(), 9481, &passed(500, &"x".repeat(5000))).unwrap_err().to_string();
        assert!(long.len() < 400, "{}", long.len());
    }
}

#[cfg(test)]
mod bounds {
    use super::{DeserializeOwned, TIMES, bounded};
    use proptest::prelude::*;
    use serde::Serialize;
    use serde_json::{Value, json};
    use tessera_view::advice::{Recommendations, Waste};
    use tessera_view::explain::Explanation;
    use tessera_view::{fleet, history};

    fn read<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
        bounded::read(text, TIMES)
    }

    /// Whether what is read is no larger than in proportion to its text. What it is as JSON again stands for memory:
    /// each value takes at least its name there.
    fn kept<T: DeserializeOwned + Serialize>(text: &str) -> Result<bool, String> {
        let value: T = read(text.as_bytes()).map_err(|error| error.to_string())?;
        let again = serde_json::to_vec(&value).unwrap().len();
        assert!(again < 8 * text.len() + (256 << 10), "{} became {again}", text.len());
        Ok(true)
    }

    /// Every list of every answer, by the way to it.
    const LISTS: [&str; 31] = [
        "nodes",
        "nodes.view.gpus",
        "nodes.view.tenants",
        "nodes.view.others",
        "nodes.view.warnings",
        "nodes.view.gpus.replicas",
        "nodes.view.gpus.fits",
        "nodes.view.tenants.gpus",
        "nodes.view.tenants.other_holders",
        "nodes.view.plugin.amiss",
        "gpus",
        "gpus.points",
        "tenants",
        "tenants.points",
        "events",
        "remarks",
        "workloads",
        "workloads.pods",
        "workloads.evidence",
        "workloads.changes",
        "namespaces",
        "namespaces.tenants",
        "allocations",
        "allocations.trail",
        "allocations.limits",
        "allocations.incidents",
        "allocations.now.gpus",
        "allocations.now.processes",
        "allocations.placement.stands",
        "gpus.trail",
        "gpus.gpu.replicas",
    ];

    /// An answer with so many of `element` in the list at `path`; the lists on the way have one element.
    fn flood(path: &str, element: &str, count: usize) -> String {
        let single = ["view", "plugin", "now", "placement", "gpu"];
        let mut text = format!("[{}]", vec![element; count].join(","));
        let mut names: Vec<&str> = path.split('.').collect();
        while let Some(name) = names.pop() {
            let parent = names.last().copied();
            text = format!("{{\"{name}\":{text}}}");
            if parent.is_some_and(|parent| !single.contains(&parent)) {
                text = format!("[{text}]");
            }
        }
        text
    }

    #[test]
    fn no_list_of_any_answer_grows_out_of_proportion() {
        let mut refused = 0;
        for path in LISTS {
            for element in ["{}", "\"\""] {
                let text = flood(path, element, 100_000);
                let all = [
                    kept::<fleet::Fleet>(&text),
                    kept::<history::Answer>(&text),
                    kept::<Explanation>(&text),
                    kept::<Recommendations>(&text),
                    kept::<Waste>(&text),
                ];
                let sentence = |one: &Result<bool, String>| matches!(one, Err(error) if error.contains("more entries than text"));
                refused += all.iter().filter(|one| sentence(one)).count();
            }
        }
        assert!(refused >= LISTS.len(), "{refused}");
    }

    #[test]
    fn a_full_node_is_read() {
        let used = json!({ "gpu_uuid": "GPU-0" });
        let tenant = json!({ "id": "3f2a", "namespace": "a", "pod": "b", "gpus": [used] });
        let gpu = json!({ "uuid": "GPU-0", "replicas": [{ "count": 64 }], "fits": [{}] });
        let view = json!({ "gpus": vec![gpu; 16], "tenants": vec![tenant; 16 * 64] });
        let short = json!({ "nodes": [{ "view": view }] }).to_string();
        let whole: fleet::Fleet = serde_json::from_str(&short).unwrap();
        // As a plugin writes it, with every field.
        let text = serde_json::to_string(&whole).unwrap();
        assert_eq!(read::<fleet::Fleet>(text.as_bytes()).unwrap(), whole);
        assert!(text.len() < crate::ask::LARGEST_VIEW / 2, "{}", text.len());
    }

    #[test]
    fn figures_that_nothing_measures_are_refused() {
        let waste = |figure: &str| {
            let text = format!(r#"{{"price_per_gpu_hour":{figure}}}"#);
            read::<Waste>(text.as_bytes()).map_err(|error| error.to_string())
        };
        for figure in ["1e308", "-1e308", "-1", "-0.5", "1e400", "99999999999999999999", "null"] {
            assert!(waste(figure).is_err(), "{figure}");
        }
        for figure in ["0", "0.0", "2.5", "7", "1e15", "1e-300"] {
            assert!(waste(figure).is_ok(), "{figure}: {:?}", waste(figure));
        }
        // What is optional is a figure too.
        let idle = r#"{"namespaces":[{"tenants":[{"idle_seconds":-1e9}]}]}"#;
        assert!(read::<Waste>(idle.as_bytes()).is_err());
    }

    /// Any JSON with the names of the views.
    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        let names = LISTS.iter().flat_map(|path| path.split('.')).collect::<Vec<_>>();
        leaf.prop_recursive(5, 64, 8, move |inner| {
            let name = proptest::sample::select(names.clone()).prop_map(str::to_owned);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
                prop::collection::vec((name, inner), 0..6)
                    .prop_map(|all| Value::Object(all.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Whatever is read is what it is without bounds.
        #[test]
        fn bounds_change_nothing_that_they_let_pass(value in anything()) {
            let text = value.to_string();
            if let Ok(bounded) = read::<history::Answer>(text.as_bytes()) {
                prop_assert_eq!(bounded, serde_json::from_str::<history::Answer>(&text).unwrap());
            }
            if let Ok(bounded) = read::<Explanation>(text.as_bytes()) {
                prop_assert_eq!(bounded, serde_json::from_str::<Explanation>(&text).unwrap());
            }
        }
    }
}
