//! What an answer that is no success means. Pure.

use std::time::Duration;

use http::HeaderMap;
use http::header::{CONTENT_TYPE, LOCATION, RETRY_AFTER};
use serde::Deserialize;
use tessera_model::printable;

use crate::error::{ApiError, Call};

pub(crate) use hyper::body::Bytes;
pub(crate) use serde_json::from_slice as read;

/// Longest message of a server that is passed on, in characters.
const LONGEST: usize = 400;

/// `metav1.Status`, as far as it is read. A proxy's answer may be none.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    message: String,
    reason: String,
    details: Details,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Details {
    kind: String,
    causes: Vec<Cause>,
    retry_after_seconds: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Cause {
    field: String,
}

/// What redirects, or answers with a page, is no API server.
const IN_ITS_PLACE: &str = "a proxy or a login page answers in the API server's place; log in there, or correct the \
                            address of the server";

/// A success that cannot be read.
pub(crate) fn unreadable(call: &Call, headers: &HeaderMap, error: &serde_json::Error) -> ApiError {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let reason = match kind.starts_with("text/html") {
        true => format!("it is a page in HTML: {IN_ITS_PLACE}"),
        false => cut(&error.to_string()),
    };
    ApiError::Unreadable { call: call.clone(), reason }
}

/// What a stranger says: a line that is not too long, and moves no cursor in a log or at a terminal.
fn cut(text: &str) -> String {
    printable::line(text).chars().take(LONGEST).collect()
}

/// The error that an answer is.
pub(crate) fn refused(call: &Call, status: u16, headers: &HeaderMap, body: &[u8]) -> ApiError {
    let said: Option<Status> = read(body).ok();
    let said = said.unwrap_or_else(|| {
        let message = String::from_utf8_lossy(body).trim().to_owned();
        Status { message, ..Status::default() }
    });
    let after = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    let after = after.or(said.details.retry_after_seconds).map(Duration::from_secs);
    let message = cut(&said.message);
    let call = call.clone();
    match status {
        300..=399 => {
            let to = headers.get(LOCATION).map(|to| String::from_utf8_lossy(to.as_bytes()));
            let to = cut(&to.unwrap_or_default());
            let to = if to.is_empty() { to } else { format!(" to {to}") };
            ApiError::Unreadable { call, reason: format!("HTTP {status}{to}: {IN_ITS_PLACE}") }
        }
        401 => ApiError::Unauthorized { call, message },
        403 => ApiError::Forbidden { call, message },
        // An API server without the group or version knows no objects of it either.
        404 | 406 if said.details.kind.is_empty() && !call.kind.group().is_empty() => {
            ApiError::NotServed { call, message }
        }
        404 => ApiError::NotFound { call, message },
        409 if said.reason == "AlreadyExists" => ApiError::Exists { call, message },
        409 => ApiError::Conflict { call, message },
        410 => ApiError::Expired { call, message },
        408 | 429 | 500.. => ApiError::Busy { call, status, after, message },
        _ => {
            let field = said.details.causes.into_iter().map(|cause| cause.field);
            let field = field.into_iter().find(|field| !field.is_empty());
            let field = field.map(|field| cut(&field));
            ApiError::Invalid { call, field, message }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Kind, Retry, Verb};
    use serde_json::{Value, json};

    fn answer(status: u16, body: &Value) -> ApiError {
        let call = Call::new(Verb::Update, Kind::Slices, "s");
        refused(&call, status, &HeaderMap::new(), body.to_string().as_bytes())
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
        assert!(matches!(
            answer(409, &json!({ "reason": "AlreadyExists" })),
            ApiError::Exists { .. }
        ));
        assert!(matches!(answer(401, &json!({})), ApiError::Unauthorized { .. }));
        let busy = answer(429, &json!({ "details": { "retryAfterSeconds": 7 } }));
        assert!(matches!(busy, ApiError::Busy { after: Some(after), .. } if after.as_secs() == 7));
        assert_eq!(answer(503, &json!({})).retry(), Retry::Soon);
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
        for status in [302, 401, 403, 404, 409, 410, 422, 429, 503] {
            for body in [body.to_string().as_bytes(), text.as_bytes()] {
                let call = Call::new(Verb::List, Kind::Pods, "");
                let mut headers = HeaderMap::new();
                headers.insert(LOCATION, http::HeaderValue::from_bytes(b"a\xc2\x9bb").unwrap());
                let said = refused(&call, status, &headers, body).to_string();
                assert_eq!(printable::line(&said), said, "{status}");
            }
        }
        let odd = r#"{"reason":{"\u001b[2J":1}}"#;
        let error = serde_json::from_str::<std::collections::BTreeMap<String, Verbatim>>(odd);
        let call = Call::new(Verb::List, Kind::Pods, "");
        let said = unreadable(&call, &HeaderMap::new(), &error.unwrap_err()).to_string();
        assert!(said.contains("\\u001b[2J"), "{said}");
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Verbatim {}

    #[test]
    fn a_redirection_or_a_page_is_no_api_servers_answer_and_says_where_it_leads() {
        let call = Call::new(Verb::List, Kind::Pods, "");
        let mut headers = HeaderMap::new();
        for status in [301, 302, 303, 307, 308] {
            let text = refused(&call, status, &headers, b"").to_string();
            assert!(text.contains(&format!("HTTP {status}: a proxy or a login page")), "{text}");
        }
        headers.insert(LOCATION, http::HeaderValue::from_static("https://sso.example/login"));
        let error = refused(&call, 302, &headers, b"<html>");
        let text = error.to_string();
        assert!(text.contains("HTTP 302 to https://sso.example/login: a proxy"), "{text}");
        assert_eq!(error.retry(), Retry::Later);
        headers.insert(CONTENT_TYPE, http::HeaderValue::from_static("text/html; charset=utf-8"));
        let broken = serde_json::from_str::<Value>("<html>").unwrap_err();
        let text = unreadable(&call, &headers, &broken).to_string();
        assert!(text.contains("a page in HTML: a proxy or a login page"), "{text}");
        let gone = answer(410, &json!({ "reason": "Expired", "message": "too old" }));
        assert!(matches!(gone, ApiError::Expired { .. }) && gone.retry() == Retry::Soon);
        assert!(gone.to_string().contains("ask again"), "{gone}");
    }

    #[test]
    fn what_is_no_status_is_passed_on_and_a_header_says_when_to_ask_again() {
        let call = Call::new(Verb::List, Kind::Slices, "");
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, http::HeaderValue::from_static("3"));
        let busy = refused(&call, 502, &headers, b"bad gateway\n");
        let ApiError::Busy { after, message, .. } = busy else { panic!("{busy}") };
        assert_eq!((after, message.as_str()), (Some(Duration::from_secs(3)), "bad gateway"));
    }
}
