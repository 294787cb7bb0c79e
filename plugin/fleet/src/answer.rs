//! What an answer that came through the proxy means. Pure: bytes go in, a value or a sentence comes out.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tessera_cluster::ApiError;
use tessera_cluster::user::Passed;
use tessera_model::printable;
use tessera_view::API_VERSION;
use tessera_view::fleet::Fleet;
use tessera_view::node::Node;
use tessera_web::SourceError;

use crate::places::Place;

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
    serde_json::from_slice(text).map_err(nonsense)
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
