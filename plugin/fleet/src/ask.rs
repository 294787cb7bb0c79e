//! A question to a node, and what an answer means that came through the proxy: bytes go in, a value or a sentence comes
//! out. Pure.

use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tessera_cluster::user::Passed;
use tessera_cluster::{ApiError, Failure, Kind};
use tessera_model::printable;
use tessera_view::advice::Scope;
use tessera_view::fleet::Fleet;
use tessera_view::node::Node;
use tessera_view::{API_VERSION, history};
use tessera_web::{SourceError, client};

use crate::places::Place;

/// Most of an answer that is read: a month of 64 tenants has some MiB.
const LARGEST: usize = 8 << 20;
/// Most of a node as it is now, which is kept: 16 GPUs with 64 tenants each have less than 1 MiB.
pub(crate) const LARGEST_VIEW: usize = 2 << 20;
/// The port of the plugin's JSON API where its pod names none.
pub(crate) const PORT: u16 = 9481;
/// The service account in the plugin's namespace whose token is used where the user has none.
pub(crate) const VIEWER: &str = "tessera-viewer";

/// A question of the JSON API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The path below `/api/v1/`.
    path: &'static str,
    /// Its parameters; those that are empty are left out.
    query: Vec<(&'static str, String)>,
    /// How long an answer takes beside what it costs.
    pub(crate) lasts: Duration,
}

impl Question {
    fn new(path: &'static str, query: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        let query = query.into_iter().filter(|(_, value)| !value.is_empty()).collect();
        Question { path, query, lasts: Duration::ZERO }
    }

    /// Everything at this moment.
    pub fn fleet() -> Self {
        Question::new("fleet", [])
    }

    /// What was.
    pub fn history(asked: &history::Query) -> Self {
        let query = [
            ("subject", asked.subject.clone()),
            ("namespace", asked.namespace.clone()),
            ("since_unix_ms", number(asked.since_unix_ms)),
            ("until_unix_ms", number(asked.until_unix_ms)),
            ("step_seconds", number(asked.step_seconds)),
        ];
        Question::new("history", query)
    }

    /// Why a subject is as it is, for a reader of this namespace, or of all where it is empty.
    pub fn explain(subject: &str, namespace: &str) -> Self {
        let query = [("subject", subject.to_owned()), ("namespace", namespace.to_owned())];
        Question::new("explain", query)
    }

    /// `recommend` or `waste`.
    pub fn of_scope(path: &'static str, scope: &Scope) -> Self {
        let query = [
            ("namespace", scope.namespace.clone()),
            ("pod", scope.pod.clone()),
            ("since_unix_ms", number(scope.since_unix_ms)),
        ];
        Question::new(path, query)
    }

    /// What the arbiter does for so many seconds, of tenants of this namespace, or of all where it is empty.
    pub fn trace(namespace: &str, seconds: u32) -> Self {
        let query = [("namespace", namespace.to_owned()), ("seconds", number(seconds))];
        Question { lasts: Duration::from_secs(seconds.into()), ..Question::new("trace", query) }
    }

    /// Whether it names the namespace whose reader asks.
    pub(crate) fn is_of_namespace(&self) -> bool {
        self.query.iter().any(|(name, _)| *name == "namespace")
    }

    /// The same of a reader of this namespace.
    pub(crate) fn of_namespace(&self, namespace: &str) -> Self {
        let mut question = self.clone();
        question.query.push(("namespace", namespace.to_owned()));
        question
    }

    pub(crate) fn largest(&self) -> usize {
        if self.path == "fleet" { LARGEST_VIEW } else { LARGEST }
    }

    /// What is asked for.
    pub fn target(&self) -> String {
        let query: Vec<(&str, &str)> =
            self.query.iter().map(|(name, value)| (*name, value.as_str())).collect();
        format!("/api/v1/{}{}", self.path, client::query(&query))
    }
}

/// 0 stands for none.
fn number(value: impl Into<i64>) -> String {
    match value.into() {
        0 => String::new(),
        value => value.to_string(),
    }
}

/// Longest text of a node that is passed on, in characters.
const LONGEST: usize = 300;

/// Why there is no answer. The text says what to do where a person has to do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct AskError {
    pub why: Why,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Nothing is called so there.
    Unknown,
    /// The question makes no sense.
    Invalid,
    Kubeconfig,
    /// The API server forbids it to the reader.
    Forbidden,
    /// By the node's own judgement, the reader may see nothing of what was asked.
    NoRights,
    /// There is no such reader, or not any more.
    Unauthenticated,
    /// There is no plugin, or none on a node that was asked for.
    NoPlugin,
    /// The node or the API server does not answer, or with nonsense.
    Silent,
}

impl Why {
    /// In words.
    pub fn says(self, text: String) -> AskError {
        AskError { why: self, text }
    }
}

impl From<AskError> for SourceError {
    fn from(AskError { why, text }: AskError) -> Self {
        match why {
            Why::Unknown | Why::NoPlugin => SourceError::NotFound(text),
            Why::Invalid => SourceError::Invalid(text),
            _ => SourceError::Unavailable(text),
        }
    }
}

impl From<ApiError> for AskError {
    fn from(error: ApiError) -> Self {
        let ApiError { call, failure, message } = &error;
        match failure {
            Failure::Forbidden => Why::Forbidden
                .says(format!("you may not {call}: {message}; ask for {}", call.rule())),
            Failure::Kubeconfig => Why::Kubeconfig.says(error.message),
            Failure::Unauthorized => Why::Unauthenticated.says(format!(
                "the API server does not accept your credentials: {message}; log in again"
            )),
            _ => Why::Silent.says(error.to_string()),
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
pub(crate) fn body(place: &Place, passed: &Passed) -> Result<Vec<u8>, AskError> {
    if passed.status == 200 {
        return Ok(passed.body.to_vec());
    }
    let refusal: Refusal = serde_json::from_slice(&passed.body).unwrap_or_default();
    let short = |text: &str| quoted(text.trim(), LONGEST);
    if refusal.api_version.starts_with("tessera.dev/") {
        let said = short(&refusal.error);
        return Err(match passed.status {
            400 => Why::Invalid.says(said),
            401 => Why::Unauthenticated.says(format!("it does not know you: {said}; log in again")),
            403 => Why::NoRights.says(said),
            404 => Why::Unknown.says(said),
            status => Why::Silent.says(format!("it failed (HTTP {status}): {said}")),
        });
    }
    let said = match refusal.kind.as_str() {
        "Status" => short(&refusal.message),
        _ => short(&String::from_utf8_lossy(&passed.body)),
    };
    let Place { namespace, pod, port, .. } = place;
    Err(match passed.status {
        401 => Why::Unauthenticated.says(format!(
            "the API server does not accept your credentials: {said}; log in again"
        )),
        403 => Why::Forbidden.says(format!(
            "the API server forbids its proxy: {said}; ask for `get` on pods/proxy in namespace {namespace} \
             (docs/views.md, \"Readers\")"
        )),
        404 => Why::Silent.says(format!(
            "the pod {namespace}/{pod} is gone, or serves no JSON API: its plugin may be older than this program"
        )),
        502..=504 => Why::Silent.says(format!(
            "the API server does not reach port {port} of pod {namespace}/{pod}: {said}; api.listen has to be an \
             address that other nodes reach with this port, which its container names `api`, and no NetworkPolicy may be \
             in the way"
        )),
        status => Why::Silent.says(format!("HTTP {status}: {said}")),
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
        Why::Silent
            .says(format!("its answer makes no sense: {}", printable::line(&error.to_string())))
    };
    let version: Version = serde_json::from_slice(text).map_err(nonsense)?;
    if version.api_version.is_empty() {
        return Err(
            Why::Silent.says("its answer makes no sense: it is none of this API".to_owned())
        );
    }
    if version.api_version != API_VERSION {
        return Err(Why::Silent.says(format!(
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
        return Err(Why::Silent.says(format!("it answers for {count} nodes instead of one")));
    };
    let Some(mut view) = entry.view else {
        let why = quoted(&entry.error, LONGEST);
        return Err(Why::Silent.says(format!("it shows nothing of itself: {why}")));
    };
    for name in [&entry.node, &view.node] {
        if !name.is_empty() && *name != place.node {
            return Err(Why::Silent.says(format!(
                "it says that it is node \"{}\": its answer is left out",
                quoted(name, 80)
            )));
        }
    }
    view.node.clone_from(&place.node);
    Ok(view)
}

/// In the words of a reader: the request is one of many, and which node it was of is said beside it.
pub(crate) fn failed(error: ApiError, viewer: &str) -> AskError {
    const NO_TOKEN: &str = "your kubeconfig has no token of yours that a plugin could check (it has a client \
                            certificate, or impersonates a user), and";
    let ApiError { call, failure, message } = &error;
    let is_token = call.kind == Kind::SERVICE_ACCOUNT_TOKEN;
    match failure {
        Failure::Slow(limit) => {
            Why::Silent.says(format!("it did not answer within {} s", limit.as_secs()))
        }
        Failure::Unreadable => Why::Silent.says(format!("its answer is left out: {message}")),
        Failure::Unauthorized => error.into(),
        Failure::Forbidden if is_token => Why::Forbidden.says(format!(
            "{NO_TOKEN} you may make none for {viewer}: {message}; use a kubeconfig with a token, or ask for `create` on \
             serviceaccounts/token of {viewer}"
        )),
        Failure::NotFound if is_token => Why::Forbidden.says(format!(
            "{NO_TOKEN} there is no service account {viewer} to have one of: use a kubeconfig with a token, or install \
             the chart's"
        )),
        _ => Why::Silent.says(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_become_paths() {
        let scope = Scope { namespace: "a b".into(), pod: "team/chat-0".into(), since_unix_ms: 5 };
        let path = "/api/v1/recommend?namespace=a+b&pod=team%2Fchat-0&since_unix_ms=5";
        assert_eq!(Question::of_scope("recommend", &scope).target(), path);
        assert_eq!(Question::of_scope("waste", &Scope::default()).target(), "/api/v1/waste");
        let asked = history::Query {
            subject: "team/a b".into(),
            since_unix_ms: 5,
            step_seconds: 10,
            ..history::Query::default()
        };
        let path = "/api/v1/history?subject=team%2Fa+b&since_unix_ms=5&step_seconds=10";
        assert_eq!(Question::history(&asked).target(), path);
        assert_eq!(Question::explain("0", "").target(), "/api/v1/explain?subject=0", "a GPU");
    }

    fn place() -> Place {
        let (namespace, pod) = ("tessera".into(), "p".into());
        Place { node: "a".into(), namespace, pod, port: PORT, ..Place::default() }
    }

    fn passed(status: u16, body: &str) -> Passed {
        Passed { status, body: body.to_owned().into() }
    }

    #[test]
    fn refusals_of_the_node_and_of_the_api_server_are_distinguished() {
        let own = |status| {
            body(&place(), &passed(status, r#"{"api_version":"tessera.dev/v1","error":"no"}"#))
        };
        assert_eq!(own(404), Err(Why::Unknown.says("no".into())));
        assert_eq!(own(403), Err(Why::NoRights.says("no".into())));
        let status = r#"{"kind":"Status","message":"cannot get resource pods/proxy"}"#;
        let theirs = body(&place(), &passed(403, status)).unwrap_err().to_string();
        assert!(theirs.contains("pods/proxy in namespace tessera"), "{theirs}");
        let refused =
            r#"{"kind":"Status","message":"error trying to reach service: connection refused"}"#;
        let away = body(&place(), &passed(503, refused)).unwrap_err().to_string();
        assert!(away.contains("names `api`"), "{away}");
        assert!(away.contains("port 9481") && away.contains("connection refused"), "{away}");
        let long = body(&place(), &passed(500, &"x".repeat(5000))).unwrap_err().to_string();
        assert!(long.len() < 400, "{}", long.len());
    }
}
