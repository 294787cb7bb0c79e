//! What a plugin serves, through the API server's proxy for pods, with the person's token.

use std::time::{Duration, Instant};

use http::{HeaderValue, Request};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use kube::core::request::Error::BuildRequest;

use super::{UserClient, escaped};
use crate::answer::Bytes;
use crate::client::{PASS_ON, PASSED_ON, body};
use crate::error::{ApiError, Call, Kind, Verb};

/// How long a token of the viewer is asked for; the API server gives none for less.
const LIFE: Duration = Duration::from_secs(600);
/// How long it is used.
const USE: Duration = Duration::from_secs(480);

/// For how long a refused or missing token is not asked for again: all nodes that are asked at a time need the same.
const REFUSED: Duration = Duration::from_secs(5);

/// A token of the viewer's service account, or why there is none.
#[derive(Clone)]
pub(super) struct Viewer {
    token: Result<HeaderValue, ApiError>,
    since: Instant,
}

impl Viewer {
    fn is_of_use(&self) -> bool {
        self.since.elapsed() < if self.token.is_ok() { USE } else { REFUSED }
    }
}

impl std::fmt::Debug for Viewer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Viewer").field("since", &self.since).finish_non_exhaustive()
    }
}

/// A place behind the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxied {
    pub namespace: String,
    pub pod: String,
    /// Its port, which speaks TLS.
    pub port: u16,
    /// Path and query, with a slash in front.
    pub target: String,
    /// The type that is wanted, such as `application/json`.
    pub accept: &'static str,
}

/// An answer that the proxy passed on, or that the API server gave itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// HTTP's status.
    pub status: u16,
    pub body: Bytes,
}

impl UserClient {
    /// What a pod answers. The person's bearer token goes with it in a header that the proxy passes on; where there
    /// is none (client certificates), or it is not of the user in use (impersonation), one for the service account
    /// `viewer` in the pod's namespace.
    ///
    /// # Errors
    /// See [`ApiError`]: without a way to the API server or a token, in time, or of a size to be read. An answer
    /// that is no success is no error here.
    pub async fn through_pod(
        &self,
        place: &Proxied,
        viewer: &str,
        limit: Duration,
        largest: usize,
    ) -> Result<Passed, ApiError> {
        let Proxied { namespace, pod, port, target, accept } = place;
        let call = Call::of(Verb::Get, Kind::PodProxy, namespace, pod);
        let token = match self.client.has_token(&call).await? {
            true => HeaderValue::from_static(PASS_ON),
            false => self.viewers_token(namespace, viewer).await?,
        };
        let path = format!(
            "/api/v1/namespaces/{}/pods/https:{}:{port}/proxy{target}",
            escaped(namespace),
            escaped(pod),
        );
        let request = Request::get(path).header(PASSED_ON, token).header("accept", *accept);
        let request = request.body(Vec::new()).map_err(BuildRequest);
        let (head, body) = self.client.exchange(&call, request, limit, largest).await?;
        Ok(Passed { status: head.status.as_u16(), body })
    }

    /// Forgets what was found out about credentials, so that the next request reads them again.
    pub async fn renew(&self) {
        *self.viewer.lock().await = None;
        self.client.rest().await;
    }

    async fn viewers_token(&self, namespace: &str, account: &str) -> Result<HeaderValue, ApiError> {
        let mut viewer = self.viewer.lock().await;
        if let Some(viewer) = viewer.as_ref().filter(|viewer| viewer.is_of_use()) {
            return viewer.token.clone();
        }
        let since = Instant::now();
        let token = self.new_viewers_token(namespace, account).await;
        // An answer that came late is no older for that.
        let since = if token.is_ok() { since } else { Instant::now() };
        *viewer = Some(Viewer { token: token.clone(), since });
        token
    }

    async fn new_viewers_token(
        &self,
        namespace: &str,
        account: &str,
    ) -> Result<HeaderValue, ApiError> {
        let call = Call::of(Verb::Create, Kind::ServiceAccountToken, namespace, account);
        let seconds = i64::try_from(LIFE.as_secs()).ok();
        let spec = TokenRequestSpec { expiration_seconds: seconds, ..Default::default() };
        let asked = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let path = format!(
            "/api/v1/namespaces/{}/serviceaccounts/{}/token",
            escaped(namespace),
            escaped(account)
        );
        let request = Request::post(path).header("content-type", "application/json");
        let request = request.body(body(&asked)).map_err(BuildRequest);
        let made: TokenRequest = self.client.ask(&call, request).await?;
        let token = made.status.and_then(|status| status.token).unwrap_or_default();
        let token = HeaderValue::try_from(format!("Bearer {token}"));
        let mut token = token.map_err(|_| ApiError::Unreadable {
            call: call.clone(),
            reason: "the token is no word".to_owned(),
        })?;
        token.set_sensitive(true);
        Ok(token)
    }
}
