//! An answer other than success: a status, and a sentence that says what to do.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use tessera_view::{API_VERSION, Problem};

use crate::source::SourceError;

/// A problem on its way to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal(pub Problem);

impl Refusal {
    pub(crate) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        let api_version = API_VERSION.to_owned();
        Refusal(Problem { api_version, error: error.into(), code: status.as_u16() })
    }

    pub(crate) fn json(&self) -> String {
        serde_json::to_string(&self.0).unwrap_or_default()
    }

    pub(crate) fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.json()));
        let status = StatusCode::from_u16(self.0.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }
}

impl From<SourceError> for Refusal {
    fn from(error: SourceError) -> Self {
        let status = match &error {
            SourceError::NotFound(_) => StatusCode::NOT_FOUND,
            SourceError::Invalid(_) => StatusCode::BAD_REQUEST,
            SourceError::Conflict(_) => StatusCode::CONFLICT,
            SourceError::NoRoom(_) => StatusCode::UNPROCESSABLE_ENTITY,
            SourceError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        Refusal::new(status, error.to_string())
    }
}

impl IntoResponse for SourceError {
    fn into_response(self) -> Response<Body> {
        Refusal::from(self).response()
    }
}
