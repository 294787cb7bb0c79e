//! What an answer means. Pure.

use std::time::Duration;

use http::header::{CONTENT_TYPE, LOCATION, RETRY_AFTER};
use http::response::Parts;
use kube::core::Status;
use serde::de::DeserializeOwned;
use tessera_model::printable;

use crate::error::{ApiError, Call};

pub(crate) use hyper::body::Bytes;

/// Longest message of a server that is passed on, in characters.
const LONGEST: usize = 400;

/// What redirects, or answers with a page, is no API server.
const IN_ITS_PLACE: &str = "a proxy or a login page answers in the API server's place; log in there, or correct the \
                            address of the server";

/// What a successful answer says.
///
/// # Errors
/// It is none, or cannot be read.
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
    use super::*;
    use crate::error::{Kind, Retry, Verb};
    use serde_json::{Value, json};

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
