//! What can go wrong with a request, in the words of a person that must mend it; and what an answer means. Pure.

use std::fmt;
use std::time::Duration;

use http::header::{CONTENT_TYPE, LOCATION, RETRY_AFTER};
use http::response::Parts;
use kube::core::Status;
use serde::de::DeserializeOwned;
use tessera_model::printable;

pub(crate) use hyper::body::Bytes;

/// What a request does, as RBAC names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verb {
    Get,
    /// Reads all objects of a selector.
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
}

impl Verb {
    /// As in a rule of RBAC.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Get => "get",
            Verb::List => "list",
            Verb::Watch => "watch",
            Verb::Create => "create",
            Verb::Update => "update",
            Verb::Patch => "patch",
            Verb::Delete => "delete",
        }
    }
}

/// The kinds of object that this crate asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Events,
    Nodes,
    Claims,
    ClaimStatus,
    Slices,
    TokenReviews,
    AccessReviews,
    Classes,
    Pods,
    /// `pods/proxy`: what a pod serves over HTTP, through the API server.
    PodProxy,
    /// `pods/exec`: a command in a pod's container.
    PodExec,
    /// `serviceaccounts/token`: a token in the name of a service account.
    ServiceAccountToken,
}

impl Kind {
    /// The API group, empty for the core group, and the resource, as in a rule of RBAC.
    fn named(self) -> (&'static str, &'static str) {
        match self {
            Kind::Events => ("", "events"),
            Kind::Nodes => ("", "nodes"),
            Kind::Claims => ("resource.k8s.io", "resourceclaims"),
            Kind::ClaimStatus => ("resource.k8s.io", "resourceclaims/status"),
            Kind::Slices => ("resource.k8s.io", "resourceslices"),
            Kind::TokenReviews => ("authentication.k8s.io", "tokenreviews"),
            Kind::AccessReviews => ("authorization.k8s.io", "subjectaccessreviews"),
            Kind::Classes => ("resource.k8s.io", "deviceclasses"),
            Kind::Pods => ("", "pods"),
            Kind::PodProxy => ("", "pods/proxy"),
            Kind::PodExec => ("", "pods/exec"),
            Kind::ServiceAccountToken => ("", "serviceaccounts/token"),
        }
    }

    pub fn group(self) -> &'static str {
        self.named().0
    }

    pub fn resource(self) -> &'static str {
        self.named().1
    }
}

/// One request: the verb, and on what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub verb: Verb,
    pub kind: Kind,
    /// The object, `namespace/name` or `name`; empty for all of a kind.
    pub object: String,
}

impl Call {
    /// On the object of that name that lies in no namespace; on all of the kind where `name` is empty.
    pub fn new(verb: Verb, kind: Kind, name: &str) -> Self {
        Call { verb, kind, object: name.to_owned() }
    }

    /// On an object in a namespace.
    pub fn of(verb: Verb, kind: Kind, namespace: &str, name: &str) -> Self {
        Call { verb, kind, object: format!("{namespace}/{name}") }
    }

    /// The rule of RBAC that allows it, as YAML on one line.
    pub fn rule(&self) -> String {
        let verbs = match self.kind {
            // Which of both is asked depends on the API server's version: the request is GET, and begins a command.
            Kind::PodExec => "\"get\", \"create\"".to_owned(),
            _ => format!("\"{}\"", self.verb.name()),
        };
        format!(
            "{{apiGroups: [\"{}\"], resources: [\"{}\"], verbs: [{verbs}]}}",
            self.kind.group(),
            self.kind.resource(),
        )
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb.name(), self.kind.resource())?;
        if !self.kind.group().is_empty() {
            write!(f, ".{}", self.kind.group())?;
        }
        if !self.object.is_empty() {
            write!(f, " {}", self.object)?;
        }
        Ok(())
    }
}

/// Why a request came to nothing. The text says what to do where a person has to do something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiError {
    /// No connection, one that broke, or credentials that cannot be read.
    Unreachable { call: Call, reason: String },
    /// The kubeconfig is wrong, and nothing was asked.
    Kubeconfig {
        call: Call,
        /// The file, the field, and what to do.
        reason: String,
    },
    /// The credential plugin of the kubeconfig came to nothing, and nothing was asked.
    Login {
        call: Call,
        command: String,
        /// What it did, and what to do.
        reason: String,
    },
    /// No answer in time. The request may have been served nevertheless.
    Slow { call: Call, limit: Duration },
    /// 408, 429, 5xx: the server can not now.
    Busy {
        call: Call,
        status: u16,
        /// When to ask again, if the server says so.
        after: Option<Duration>,
        message: String,
    },
    /// 410: the server has forgotten the state from which the request goes on.
    Expired { call: Call, message: String },
    /// 401: it does not know us.
    Unauthorized { call: Call, message: String },
    /// 403: it knows us, and RBAC or an admission policy says no.
    Forbidden {
        call: Call,
        /// The server's words. They distinguish a missing RBAC rule from an admission policy.
        message: String,
    },
    /// There is no such object (any more).
    NotFound { call: Call, message: String },
    /// The API server does not serve the group or any version of it that we know.
    NotServed { call: Call, message: String },
    /// Somebody changed the object in between: read it and try again.
    Conflict { call: Call, message: String },
    /// There is an object of this name already.
    Exists { call: Call, message: String },
    /// The object is not valid to the server: the same object will never be accepted.
    Invalid {
        call: Call,
        /// The first field at fault, if it is named.
        field: Option<String>,
        message: String,
    },
    /// An answer that we cannot read.
    Unreadable { call: Call, reason: String },
}

impl std::error::Error for ApiError {}

/// In one line: credential plugins, servers and what answers in their place have words in it.
impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = match self {
            ApiError::Unreachable { call, reason } => {
                format!("{call}: the API server cannot be reached: {reason}")
            }
            ApiError::Kubeconfig { call, reason } => {
                format!("{call}: the kubeconfig is wrong: {reason}")
            }
            ApiError::Login { call, command, reason } => {
                format!("{call}: the credential plugin {command:?} gave no login: {reason}")
            }
            ApiError::Slow { call, limit } => {
                format!("{call}: the API server did not answer within {limit:?}")
            }
            ApiError::Busy { call, status, message, .. } => {
                format!("{call}: the API server is busy or failing (HTTP {status}): {message}")
            }
            ApiError::Expired { call, message } => format!(
                "{call}: the API server has forgotten the state from which the request goes on (HTTP 410): {message}; \
                 ask again"
            ),
            ApiError::Unauthorized { call, message } => format!(
                "{call}: the API server does not accept the credentials: {message}; see to the service account's token"
            ),
            ApiError::Forbidden { call, message } => {
                format!("{call}: the API server answered 403: {message}; grant it: {}", call.rule())
            }
            ApiError::NotFound { call, message } => {
                format!("{call}: there is no such object: {message}")
            }
            ApiError::NotServed { call, message } => format!(
                "{call}: the API server does not serve {}/v1: {message}; DRA needs Kubernetes 1.36",
                call.kind.group()
            ),
            ApiError::Conflict { call, message } => {
                format!("{call}: it was changed in between: {message}")
            }
            ApiError::Exists { call, message } => format!("{call}: it exists already: {message}"),
            ApiError::Invalid { call, field, message } => format!(
                "{call}: the API server refuses the object{}: {message}",
                field.as_deref().map(|field| format!(" because of {field}")).unwrap_or_default()
            ),
            ApiError::Unreadable { call, reason } => {
                format!("{call}: the API server's answer makes no sense: {reason}")
            }
        };
        f.write_str(&printable::line(&said))
    }
}

/// Whether the same request may succeed another time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// After a pause that doubles with each failure.
    Soon,
    /// After minutes: a person must do something first.
    Later,
    /// After the object was read again.
    Reread,
    /// Not without another object.
    Never,
}

impl ApiError {
    /// The request that failed.
    pub fn call(&self) -> &Call {
        match self {
            ApiError::Unreachable { call, .. }
            | ApiError::Kubeconfig { call, .. }
            | ApiError::Login { call, .. }
            | ApiError::Expired { call, .. }
            | ApiError::Slow { call, .. }
            | ApiError::Busy { call, .. }
            | ApiError::Unauthorized { call, .. }
            | ApiError::Forbidden { call, .. }
            | ApiError::NotFound { call, .. }
            | ApiError::NotServed { call, .. }
            | ApiError::Conflict { call, .. }
            | ApiError::Exists { call, .. }
            | ApiError::Invalid { call, .. }
            | ApiError::Unreadable { call, .. } => call,
        }
    }

    /// Whether and when to try again.
    pub fn retry(&self) -> Retry {
        match self {
            ApiError::Unreachable { .. }
            | ApiError::Slow { .. }
            | ApiError::Busy { .. }
            | ApiError::Expired { .. } => Retry::Soon,
            ApiError::Kubeconfig { .. }
            | ApiError::Login { .. }
            | ApiError::Unauthorized { .. }
            | ApiError::Forbidden { .. }
            | ApiError::NotServed { .. }
            | ApiError::Unreadable { .. } => Retry::Later,
            ApiError::Conflict { .. } | ApiError::NotFound { .. } => Retry::Reread,
            ApiError::Exists { .. } | ApiError::Invalid { .. } => Retry::Never,
        }
    }
}

/// Longest message of a server that is passed on, in characters.
const LONGEST: usize = 400;

/// What redirects, or answers with a page, is no API server.
const IN_ITS_PLACE: &str = "a proxy or a login page answers in the API server's place; log in there, or correct the \
                            address of the server";

/// What a successful answer says.
pub(crate) fn read<T: DeserializeOwned>(
    call: &Call,
    head: &Parts,
    body: &[u8],
) -> Result<T, ApiError> {
    let header = |name| head.headers.get(name).and_then(|value| value.to_str().ok());
    let unreadable = |reason: String| ApiError::Unreadable { call: call.clone(), reason };
    if head.status.is_success() {
        return serde_json::from_slice(body).map_err(|error| {
            let is_page = header(CONTENT_TYPE).is_some_and(|kind| kind.starts_with("text/html"));
            unreadable(match is_page {
                true => format!("it is a page in HTML: {IN_ITS_PLACE}"),
                // Without the value at fault, which may be a token.
                false => format!(
                    "{:?} error at line {} column {}",
                    error.classify(),
                    error.line(),
                    error.column()
                ),
            })
        });
    }
    if head.status.is_redirection() {
        let to = head.headers.get(LOCATION).map(|to| cut(&String::from_utf8_lossy(to.as_bytes())));
        let to = to.map(|to| format!(" to {to}")).unwrap_or_default();
        return Err(unreadable(format!("HTTP {}{to}: {IN_ITS_PLACE}", head.status.as_u16())));
    }
    // A proxy's answer may be no Status.
    let mut status: Status = serde_json::from_slice(body).unwrap_or_else(|_| Status {
        message: String::from_utf8_lossy(body).trim().to_owned(),
        ..Status::default()
    });
    status.code = head.status.as_u16();
    let after = header(RETRY_AFTER).and_then(|value| value.parse().ok());
    Err(refused(call, status, after))
}

/// What a stranger says: a line that is not too long, and moves no cursor in a log or at a terminal.
fn cut(text: &str) -> String {
    printable::line(text).chars().take(LONGEST).collect()
}

/// The error that an answer is; `after`: when to ask again, in seconds, where a header says so.
pub(crate) fn refused(call: &Call, said: Status, after: Option<u32>) -> ApiError {
    let (call, message, status) = (call.clone(), cut(&said.message), said.code);
    let details = said.details.as_ref();
    match status {
        401 => ApiError::Unauthorized { call, message },
        403 => ApiError::Forbidden { call, message },
        // An API server without the group or version knows no objects of it either.
        404 | 406
            if details.is_none_or(|details| details.kind.is_empty())
                && !call.kind.group().is_empty() =>
        {
            ApiError::NotServed { call, message }
        }
        404 => ApiError::NotFound { call, message },
        409 if said.reason == "AlreadyExists" => ApiError::Exists { call, message },
        409 => ApiError::Conflict { call, message },
        410 => ApiError::Expired { call, message },
        408 | 429 | 500.. => {
            let said = details.map(|details| details.retry_after_seconds).filter(|s| *s > 0);
            let after = after.or(said).map(|seconds| Duration::from_secs(seconds.into()));
            ApiError::Busy { call, status, after, message }
        }
        _ => {
            let fields = details.iter().flat_map(|details| &details.causes);
            let field = fields.map(|cause| cut(&cause.field)).find(|field| !field.is_empty());
            ApiError::Invalid { call, field, message }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::error::{Kind, Retry, Verb};

    #[test]
    fn no_error_moves_a_cursor_or_begins_a_line() {
        let odd = || "a\u{1b}[2J\r\nb\u{9b}\u{202e}".to_owned();
        let call = || Call::new(Verb::Get, Kind::Pods, &odd());
        let (limit, status, after) = (Duration::from_secs(1), 503, None);
        let all = [
            ApiError::Unreachable { call: call(), reason: odd() },
            ApiError::Kubeconfig { call: call(), reason: odd() },
            ApiError::Login { call: call(), command: odd(), reason: odd() },
            ApiError::Slow { call: call(), limit },
            ApiError::Busy { call: call(), status, after, message: odd() },
            ApiError::Expired { call: call(), message: odd() },
            ApiError::Unauthorized { call: call(), message: odd() },
            ApiError::Forbidden { call: call(), message: odd() },
            ApiError::NotFound { call: call(), message: odd() },
            ApiError::NotServed { call: call(), message: odd() },
            ApiError::Conflict { call: call(), message: odd() },
            ApiError::Exists { call: call(), message: odd() },
            ApiError::Invalid { call: call(), field: Some(odd()), message: odd() },
            ApiError::Unreadable { call: call(), reason: odd() },
        ];
        for error in all {
            let said = error.to_string();
            assert_eq!(printable::line(&said), said);
            assert!(said.contains("\\u001b[2J\\r\\nb\\u009b\\u202e"), "{said}");
        }
    }

    #[test]
    fn what_is_forbidden_names_verb_object_and_the_rule_that_is_missing() {
        let call = Call::of(Verb::Patch, Kind::ClaimStatus, "team", "chat");
        let error = ApiError::Forbidden { call, message: "no".into() };
        assert_eq!(
            error.to_string(),
            "patch resourceclaims/status.resource.k8s.io team/chat: the API server answered 403: no; grant it: \
             {apiGroups: [\"resource.k8s.io\"], resources: [\"resourceclaims/status\"], verbs: [\"patch\"]}"
        );
        assert_eq!(error.retry(), Retry::Later);
        let exec = Call::of(Verb::Create, Kind::PodExec, "tessera", "tessera-x").rule();
        assert!(
            exec.ends_with("resources: [\"pods/exec\"], verbs: [\"get\", \"create\"]}"),
            "{exec}"
        );
        let call = Call::new(Verb::Create, Kind::Slices, "");
        let field = Some("spec.devices[3].name".to_owned());
        let error = ApiError::Invalid { call, field, message: "bad".into() };
        assert_eq!(
            error.to_string(),
            "create resourceslices.resource.k8s.io: the API server refuses the object because of \
             spec.devices[3].name: bad"
        );
    }

    fn said(kind: Kind, status: u16, headers: &[(&str, &str)], body: &[u8]) -> ApiError {
        let mut response = http::Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, value.as_bytes());
        }
        let (head, ()) = response.body(()).unwrap().into_parts();
        read::<Vec<u8>>(&Call::new(Verb::Update, kind, "s"), &head, body).unwrap_err()
    }

    fn answer(status: u16, body: &Value) -> ApiError {
        said(Kind::Slices, status, &[], body.to_string().as_bytes())
    }

    #[test]
    fn answers_are_distinguished_by_status_and_reason() {
        let details = json!({ "name": "s", "kind": "resourceslices" });
        let gone =
            answer(404, &json!({ "reason": "NotFound", "message": "m", "details": details }));
        assert!(matches!(gone, ApiError::NotFound { .. }));
        assert!(matches!(answer(404, &json!("404 page not found")), ApiError::NotServed { .. }));
        let conflict = answer(409, &json!({ "reason": "Conflict", "message": "m" }));
        assert!(matches!(conflict, ApiError::Conflict { .. }));
        let exists = answer(409, &json!({ "reason": "AlreadyExists" }));
        assert!(matches!(exists, ApiError::Exists { .. }));
        assert!(matches!(answer(401, &json!({})), ApiError::Unauthorized { .. }));
        let busy = answer(429, &json!({ "details": { "retryAfterSeconds": 7 } }));
        assert!(matches!(busy, ApiError::Busy { after: Some(after), .. } if after.as_secs() == 7));
        assert_eq!(answer(503, &json!({})).retry(), Retry::Soon);
        let gone = answer(410, &json!({ "reason": "Expired", "message": "too old" }));
        assert!(matches!(gone, ApiError::Expired { .. }) && gone.retry() == Retry::Soon);
        // What is no status is passed on, and a header says when to ask again.
        let busy = said(Kind::Slices, 502, &[("retry-after", "3")], b"bad gateway\n");
        let ApiError::Busy { after, message, .. } = busy else { panic!("{busy}") };
        assert_eq!((after, message.as_str()), (Some(Duration::from_secs(3)), "bad gateway"));
    }

    #[test]
    fn an_invalid_object_names_its_first_field_and_long_words_are_cut() {
        let causes = json!([{ "field": "spec.devices[0].name" }, { "field": "spec.pool" }]);
        let text = "ä".repeat(2000);
        let invalid = answer(422, &json!({ "message": text, "details": { "causes": causes } }));
        let ApiError::Invalid { field, message, .. } = invalid else { panic!("{invalid}") };
        assert_eq!(field.as_deref(), Some("spec.devices[0].name"));
        assert_eq!(message.chars().count(), LONGEST);
    }

    #[test]
    fn no_answer_moves_a_cursor_or_begins_a_line() {
        let text = "a\u{1b}[2J\r\nb\u{9b}\u{202e}";
        let body = json!({ "message": text, "details": { "causes": [{ "field": text }] } });
        for status in [200, 302, 401, 403, 404, 409, 410, 422, 429, 503] {
            for body in [body.to_string().as_bytes(), text.as_bytes()] {
                let said = said(Kind::Pods, status, &[("location", "a\u{9b}b")], body).to_string();
                assert_eq!(printable::line(&said), said, "{status}");
            }
        }
    }

    #[test]
    fn a_redirection_or_a_page_is_no_api_servers_answer_and_says_where_it_leads() {
        for status in [301, 302, 303, 307, 308] {
            let text = said(Kind::Pods, status, &[], b"").to_string();
            assert!(text.contains(&format!("HTTP {status}: a proxy or a login page")), "{text}");
        }
        let to = [("location", "https://sso.example/login")];
        let error = said(Kind::Pods, 302, &to, b"<html>");
        let text = error.to_string();
        assert!(text.contains("HTTP 302 to https://sso.example/login: a proxy"), "{text}");
        assert_eq!(error.retry(), Retry::Later);
        let page = [("content-type", "text/html; charset=utf-8")];
        let text = said(Kind::Pods, 200, &page, b"<html>").to_string();
        assert!(text.contains("a page in HTML: a proxy or a login page"), "{text}");
    }
}
