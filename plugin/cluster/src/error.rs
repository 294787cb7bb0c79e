//! What can go wrong with a request, in the words of a person that must mend it; and what an answer means. Pure.

use std::fmt;
use std::time::Duration;

use kube::core::Status;
use serde::de::DeserializeOwned;
use strum::IntoStaticStr;
use tessera_model::printable;

pub(crate) use hyper::body::Bytes;

/// What a request does, as RBAC names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
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

/// A kind of object that this crate asks for, as a rule of RBAC names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The API group; empty for the core group.
    pub group: &'static str,
    pub resource: &'static str,
}

impl Kind {
    pub const EVENTS: Kind = Kind::of("", "events");
    pub const NODES: Kind = Kind::of("", "nodes");
    pub const CLAIMS: Kind = Kind::of("resource.k8s.io", "resourceclaims");
    pub const CLAIM_STATUS: Kind = Kind::of("resource.k8s.io", "resourceclaims/status");
    pub const SLICES: Kind = Kind::of("resource.k8s.io", "resourceslices");
    pub const CLASSES: Kind = Kind::of("resource.k8s.io", "deviceclasses");
    pub const TOKEN_REVIEWS: Kind = Kind::of("authentication.k8s.io", "tokenreviews");
    pub const ACCESS_REVIEWS: Kind = Kind::of("authorization.k8s.io", "subjectaccessreviews");
    pub const PODS: Kind = Kind::of("", "pods");
    /// What a pod serves over HTTP, through the API server.
    pub const POD_PROXY: Kind = Kind::of("", "pods/proxy");
    /// A command in a pod's container.
    pub const POD_EXEC: Kind = Kind::of("", "pods/exec");
    /// A token in the name of a service account.
    pub const SERVICE_ACCOUNT_TOKEN: Kind = Kind::of("", "serviceaccounts/token");

    const fn of(group: &'static str, resource: &'static str) -> Self {
        Kind { group, resource }
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
            Kind::POD_EXEC => "\"get\", \"create\"".to_owned(),
            _ => format!("\"{}\"", self.verb.into_str()),
        };
        format!(
            "{{apiGroups: [\"{}\"], resources: [\"{}\"], verbs: [{verbs}]}}",
            self.kind.group, self.kind.resource,
        )
    }

    /// It came to nothing.
    pub fn failed(&self, failure: Failure, message: impl Into<String>) -> ApiError {
        ApiError { call: self.clone(), failure, message: message.into() }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb.into_str(), self.kind.resource)?;
        if !self.kind.group.is_empty() {
            write!(f, ".{}", self.kind.group)?;
        }
        if !self.object.is_empty() {
            write!(f, " {}", self.object)?;
        }
        Ok(())
    }
}

/// Why a request came to nothing. The text says what to do where a person has to do something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub call: Call,
    pub failure: Failure,
    /// What happened, or what the server said.
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection, one that broke, or credentials that cannot be read.
    Unreachable,
    /// The kubeconfig is wrong, or its credential plugin came to nothing, and nothing was asked. The message names the file.
    Kubeconfig,
    /// No answer in this time. The request may have been served nevertheless.
    Slow(Duration),
    /// 408, 429, 5xx: the server can not now.
    Busy {
        status: u16,
        /// When to ask again, if the server says so.
        after: Option<Duration>,
    },
    /// 410: the server has forgotten the state from which the request goes on.
    Expired,
    /// 401: it does not know us.
    Unauthorized,
    /// 403: it knows us, and RBAC or an admission policy says no, which the server's words alone distinguish.
    Forbidden,
    /// There is no such object (any more).
    NotFound,
    /// The API server does not serve the group or any version of it that we know.
    NotServed,
    /// Somebody changed the object in between: read it and try again.
    Conflict,
    /// There is an object of this name already.
    Exists,
    /// The object is not valid to the server: the same object will never be accepted. The first field at fault, if it is
    /// named.
    Invalid(Option<String>),
    /// An answer that we cannot read.
    Unreadable,
    /// A command was not started, or the connection broke while it ran.
    Broken,
}

impl std::error::Error for ApiError {}

/// In one line: credential plugins, servers and what answers in their place have words in it.
impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ApiError { call, failure, message } = self;
        let said = match failure {
            Failure::Unreachable => format!("the API server cannot be reached: {message}"),
            Failure::Kubeconfig => format!("the kubeconfig is wrong: {message}"),
            Failure::Slow(limit) => format!("the API server did not answer within {limit:?}"),
            Failure::Busy { status, .. } => {
                format!("the API server is busy or failing (HTTP {status}): {message}")
            }
            Failure::Expired => format!(
                "the API server has forgotten the state from which the request goes on (HTTP 410): {message}; ask again"
            ),
            Failure::Unauthorized => format!(
                "the API server does not accept the credentials: {message}; see to the service account's token"
            ),
            Failure::Forbidden => {
                format!("the API server answered 403: {message}; grant it: {}", call.rule())
            }
            Failure::NotFound => format!("there is no such object: {message}"),
            Failure::NotServed => format!(
                "the API server does not serve {}/v1: {message}; DRA needs Kubernetes 1.36",
                call.kind.group
            ),
            Failure::Conflict => format!("it was changed in between: {message}"),
            Failure::Exists => format!("it exists already: {message}"),
            Failure::Invalid(None) => format!("the API server refuses the object: {message}"),
            Failure::Invalid(Some(field)) => {
                format!("the API server refuses the object because of {field}: {message}")
            }
            Failure::Unreadable => format!("the API server's answer makes no sense: {message}"),
            Failure::Broken => format!("the command did not run to its end: {message}"),
        };
        f.write_str(&printable::line(&format!("{call}: {said}")))
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
    /// Whether and when to try again.
    pub fn retry(&self) -> Retry {
        match self.failure {
            Failure::Unreachable
            | Failure::Slow(_)
            | Failure::Busy { .. }
            | Failure::Expired
            | Failure::Broken => Retry::Soon,
            Failure::Kubeconfig
            | Failure::Unauthorized
            | Failure::Forbidden
            | Failure::NotServed
            | Failure::Unreadable => Retry::Later,
            Failure::Conflict | Failure::NotFound => Retry::Reread,
            Failure::Exists | Failure::Invalid(_) => Retry::Never,
        }
    }
}

/// What was found; `None` where there is no such object.
pub(crate) fn found<T>(answer: Result<T, ApiError>) -> Result<Option<T>, ApiError> {
    match answer {
        Err(error) if error.failure == Failure::NotFound => Ok(None),
        answer => answer.map(Some),
    }
}

/// Longest message of a server that is passed on, in characters.
const LONGEST: usize = 400;

/// What a successful answer says.
pub(crate) fn read<T: DeserializeOwned>(call: &Call, text: &str) -> Result<T, ApiError> {
    serde_json::from_str(text).map_err(|error| {
        // Without the value at fault, which may be a token.
        let (kind, line, column) = (error.classify(), error.line(), error.column());
        let message = format!(
            "{kind:?} error at line {line} column {column}; if a proxy or a login page answers in the API server's \
             place, log in there, or correct the address of the server"
        );
        call.failed(Failure::Unreadable, message)
    })
}

/// What a stranger says: a line that is not too long, and moves no cursor in a log or at a terminal.
fn cut(text: &str) -> String {
    printable::line(text).chars().take(LONGEST).collect()
}

/// The error that an answer is.
pub(crate) fn refused(call: &Call, said: &Status) -> ApiError {
    let details = said.details.as_ref();
    let failure = match said.code {
        // A proxy's own object.
        0 => Failure::Unreadable,
        401 => Failure::Unauthorized,
        403 => Failure::Forbidden,
        // An API server without the group or version knows no objects of it either.
        404 | 406
            if details.is_none_or(|details| details.kind.is_empty())
                && !call.kind.group.is_empty() =>
        {
            Failure::NotServed
        }
        404 => Failure::NotFound,
        409 if said.reason == "AlreadyExists" => Failure::Exists,
        409 => Failure::Conflict,
        410 => Failure::Expired,
        status @ (408 | 429 | 500..) => {
            let after = details.map(|details| details.retry_after_seconds).filter(|s| *s > 0);
            let after = after.map(|seconds| Duration::from_secs(seconds.into()));
            Failure::Busy { status, after }
        }
        _ => {
            let fields = details.iter().flat_map(|details| &details.causes);
            let mut fields = fields.map(|cause| cut(&cause.field));
            Failure::Invalid(fields.find(|field| !field.is_empty()))
        }
    };
    call.failed(failure, cut(&said.message))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn no_error_moves_a_cursor_or_begins_a_line() {
        let odd = || "a\u{1b}[2J\r\nb\u{9b}\u{202e}".to_owned();
        let call = Call::new(Verb::Get, Kind::PODS, &odd());
        let all = [
            Failure::Unreachable,
            Failure::Kubeconfig,
            Failure::Slow(Duration::from_secs(1)),
            Failure::Busy { status: 503, after: None },
            Failure::Expired,
            Failure::Unauthorized,
            Failure::Forbidden,
            Failure::NotFound,
            Failure::NotServed,
            Failure::Conflict,
            Failure::Exists,
            Failure::Invalid(Some(odd())),
            Failure::Unreadable,
            Failure::Broken,
        ];
        for failure in all {
            let said = call.failed(failure, odd()).to_string();
            assert_eq!(printable::line(&said), said);
            assert!(said.contains("\\u001b[2J\\r\\nb\\u009b\\u202e"), "{said}");
        }
    }

    #[test]
    fn what_is_forbidden_names_verb_object_and_the_rule_that_is_missing() {
        let call = Call::of(Verb::Patch, Kind::CLAIM_STATUS, "team", "chat");
        let error = call.failed(Failure::Forbidden, "no");
        assert_eq!(
            error.to_string(),
            "patch resourceclaims/status.resource.k8s.io team/chat: the API server answered 403: no; grant it: \
             {apiGroups: [\"resource.k8s.io\"], resources: [\"resourceclaims/status\"], verbs: [\"patch\"]}"
        );
        assert_eq!(error.retry(), Retry::Later);
        let exec = Call::of(Verb::Create, Kind::POD_EXEC, "tessera", "tessera-x").rule();
        assert!(
            exec.ends_with("resources: [\"pods/exec\"], verbs: [\"get\", \"create\"]}"),
            "{exec}"
        );
        let field = Some("spec.devices[3].name".to_owned());
        let error =
            Call::new(Verb::Create, Kind::SLICES, "").failed(Failure::Invalid(field), "bad");
        assert_eq!(
            error.to_string(),
            "create resourceslices.resource.k8s.io: the API server refuses the object because of \
             spec.devices[3].name: bad"
        );
    }

    fn answer(status: u16, body: &Value) -> ApiError {
        let said = serde_json::from_value(body.clone()).unwrap_or_default();
        let call = Call::new(Verb::Update, Kind::SLICES, "s");
        refused(&call, &Status { code: status, ..said })
    }

    #[test]
    fn answers_are_distinguished_by_status_and_reason() {
        let details = json!({ "name": "s", "kind": "resourceslices" });
        let after = |seconds| Some(Duration::from_secs(seconds));
        for (status, said, failure) in [
            (404, json!({ "reason": "NotFound", "details": details }), Failure::NotFound),
            (404, json!("404 page not found"), Failure::NotServed),
            (409, json!({ "reason": "Conflict", "message": "m" }), Failure::Conflict),
            (409, json!({ "reason": "AlreadyExists" }), Failure::Exists),
            (401, json!({}), Failure::Unauthorized),
            (410, json!({ "reason": "Expired", "message": "too old" }), Failure::Expired),
            (
                429,
                json!({ "details": { "retryAfterSeconds": 7 } }),
                Failure::Busy { status: 429, after: after(7) },
            ),
        ] {
            assert_eq!(answer(status, &said).failure, failure);
        }
        assert_eq!(answer(503, &json!({})).retry(), Retry::Soon);
        assert_eq!(answer(410, &json!({})).retry(), Retry::Soon);
    }

    #[test]
    fn an_invalid_object_names_its_first_field_and_long_words_are_cut() {
        let causes = json!([{ "field": "spec.devices[0].name" }, { "field": "spec.pool" }]);
        let text = "ä".repeat(2000);
        let invalid = answer(422, &json!({ "message": text, "details": { "causes": causes } }));
        assert_eq!(invalid.failure, Failure::Invalid(Some("spec.devices[0].name".to_owned())));
        assert_eq!(invalid.message.chars().count(), LONGEST);
    }
}
