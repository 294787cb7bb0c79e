//! What a person asks with a kubeconfig: pods, nodes, claims, what pods serve behind the API server's proxy, and
//! commands in them. Everything is done with the person's own rights.

pub mod objects;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderValue;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{Api, AttachParams, GetParams, ListParams, PostParams};
use kube::core::request::Error::BuildRequest;
use kube::core::{ObjectList, Request};
use objects::{Event, Pod};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tessera_model::printable::causes;
use tessera_system::files;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::Mutex;

use crate::access;
use crate::access::Access;
use crate::client::{Client, PASS_ON, PASSED_ON, body, in_time};
use crate::error::{ApiError, Bytes, Call, Failure, Kind, Verb, found, refused};

/// Most of a list that is asked for at once.
const PAGE: u32 = 500;
/// The limit for a whole list, in limits of one request.
const WHOLE: u32 = 6;

/// The API server, as a person uses it. A clone shares connections.
#[derive(Clone, Debug)]
pub struct UserClient {
    client: Client,
    limit: Duration,
    viewer: Arc<Mutex<Option<Viewer>>>,
}

/// What a kubeconfig says of its context.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The context's name, or `in-cluster`.
    pub name: String,
    /// The namespace for what names none.
    pub namespace: String,
}

impl UserClient {
    /// Each request may take `limit`.
    pub fn new(access: Access, limit: Duration) -> Self {
        UserClient { client: Client::new(access, limit), limit, viewer: Arc::default() }
    }

    /// What the kubeconfig says. Reads files.
    pub fn context(&self) -> Result<Context, String> {
        let (names, asked) = match self.client.access() {
            Access::Server(_) => {
                let file = Path::new(access::CREDENTIALS).join("namespace");
                let namespace = files::text(&file, files::SMALL).unwrap_or_default();
                let namespace = namespace.trim().to_owned();
                return Ok(Context { name: "in-cluster".to_owned(), namespace });
            }
            Access::Kubeconfig(names, context) => (names, context),
        };
        let whole = access::merged(names)?;
        let name = asked.clone().or(whole.current_context).unwrap_or_default();
        let there: Vec<&str> = whole.contexts.iter().map(|one| one.name.as_str()).collect();
        if !there.contains(&name.as_str()) {
            let (names, there) = (access::names(names), there.join(", "));
            return Err(format!("{names}: there is no context \"{name}\"; it has {there}"));
        }
        let used = whole.contexts.into_iter().find(|one| one.name == name);
        let namespace = used.and_then(|one| one.context?.namespace);
        Ok(Context { name, namespace: namespace.unwrap_or_else(|| "default".to_owned()) })
    }

    /// Names of the contexts, for completion. Reads files.
    pub fn contexts(&self) -> Result<Vec<String>, String> {
        match self.client.access() {
            Access::Server(_) => Ok(Vec::new()),
            Access::Kubeconfig(files, _) => {
                Ok(access::merged(files)?.contexts.into_iter().map(|one| one.name).collect())
            }
        }
    }

    /// Pods of a namespace (empty: all) with these labels (empty: any).
    pub async fn pods(&self, namespace: &str, labels: &str) -> Result<Vec<Pod>, ApiError> {
        let call = Call::new(Verb::List, Kind::PODS, namespace);
        let asked = ListParams::default();
        let asked = if labels.is_empty() { asked } else { asked.labels(labels) };
        self.list(&call, &core(namespace, "pods"), asked).await
    }

    /// A pod; `None` where there is none of that name.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, ApiError> {
        let call = Call::of(Verb::Get, Kind::PODS, namespace, name);
        self.get(&call, &core(namespace, "pods"), name).await
    }

    /// The newest event that says why the scheduler found no node for a pod; `None` where Kubernetes has none, or none
    /// any more.
    pub async fn unscheduled(&self, namespace: &str, pod: &str) -> Result<Option<Event>, ApiError> {
        let fields =
            format!("involvedObject.kind=Pod,involvedObject.name={pod},reason=FailedScheduling");
        let call = Call::new(Verb::List, Kind::EVENTS, namespace);
        let asked = ListParams::default().fields(&fields);
        let events: Vec<Event> = self.list(&call, &core(namespace, "events"), asked).await?;
        Ok(events.into_iter().max_by(|a, b| a.last_at().cmp(b.last_at())))
    }

    /// A claim as the API server has it; `None` where there is none.
    pub async fn claim(&self, namespace: &str, name: &str) -> Result<Option<Value>, ApiError> {
        let call = Call::of(Verb::Get, Kind::CLAIMS, namespace, name);
        let path = format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims");
        self.get(&call, &Request::new(path), name).await
    }

    /// A device class; `None` where there is none.
    pub async fn device_class(&self, name: &str) -> Result<Option<Value>, ApiError> {
        let call = Call::new(Verb::Get, Kind::CLASSES, name);
        self.get(&call, &Request::new("/apis/resource.k8s.io/v1/deviceclasses"), name).await
    }

    async fn get<T: DeserializeOwned>(
        &self,
        call: &Call,
        of: &Request,
        name: &str,
    ) -> Result<Option<T>, ApiError> {
        found(self.client.ask(call, of.get(name, &GetParams::default())).await)
    }

    async fn list<T: Clone + DeserializeOwned>(
        &self,
        call: &Call,
        of: &Request,
        asked: ListParams,
    ) -> Result<Vec<T>, ApiError> {
        // A person may have to log in, which has a limit of its own.
        self.client.has_token(call).await?;
        let parts = async {
            let (mut all, mut asked) = (Vec::new(), asked.limit(PAGE));
            loop {
                let page: ObjectList<T> = self.client.ask(call, of.list(&asked)).await?;
                all.extend(page.items);
                match page.metadata.continue_.filter(|next| !next.is_empty()) {
                    Some(next) => asked.continue_token = Some(next),
                    None => return Ok(all),
                }
            }
        };
        in_time(call, self.limit * WHOLE, parts).await
    }
}

/// Objects of the core group in a namespace, or in all where it is empty.
fn core(namespace: &str, plural: &str) -> Request {
    Request::new(match namespace {
        "" => format!("/api/v1/{plural}"),
        namespace => format!("/api/v1/namespaces/{namespace}/{plural}"),
    })
}

/// Most that is read of what a command prints, of each stream.
const LARGEST: u64 = 4 << 20;

/// A command that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl UserClient {
    /// Runs a command and waits for its end. No limit of time holds but the connection's own.
    /// Errors: See [`ApiError`]. A command that fails is none.
    pub async fn exec(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
        command: &[String],
    ) -> Result<Finished, ApiError> {
        let call = Call::of(Verb::Create, Kind::POD_EXEC, namespace, pod);
        let client = self.client.kube(&call).await?;
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(client, namespace);
        let how = AttachParams::default().container(container).stdin(false);
        let broken = |reason: String| call.failed(Failure::Broken, reason);
        let begun = pods.exec(pod, command.iter().map(String::as_str), &how).await;
        let mut process = begun.map_err(|error| match error {
            kube::Error::Api(status) => refused(&call, &status),
            error => broken(causes(&error)),
        })?;
        let (out, err) = (process.stdout(), process.stderr());
        let status = process.take_status();
        let ended = async {
            match status {
                Some(status) => status.await,
                None => None,
            }
        };
        let (stdout, stderr, status) = tokio::join!(all(out), all(err), ended);
        let Some(status) = status else {
            let reason = process.join().await.err().map(|error| causes(&error));
            return Err(broken(reason.unwrap_or_else(|| "the connection ended".to_owned())));
        };
        let code =
            code(&status).ok_or_else(|| broken(status.message.clone().unwrap_or_default()))?;
        Ok(Finished { code, stdout, stderr })
    }
}

async fn all(stream: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut text = Vec::new();
    if let Some(mut stream) = stream {
        // What has come is worth more than the reason why no more comes, which the status says.
        let _ = (&mut stream).take(LARGEST).read_to_end(&mut text).await;
        // The rest is read, or the command would wait for ever.
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    }
    text
}

/// The exit status; `None` where the command was not run.
fn code(status: &Status) -> Option<i32> {
    if status.status.as_deref() == Some("Success") {
        return Some(0);
    }
    let causes = status.details.as_ref()?.causes.as_ref()?;
    let cause = causes.iter().find(|cause| cause.reason.as_deref() == Some("ExitCode"))?;
    cause.message.as_ref()?.parse().ok()
}

/// How long a token of the viewer is asked for; the API server gives none for less.
const LIFE: Duration = Duration::from_secs(600);
/// How long it is used.
const USE: Duration = Duration::from_secs(480);

/// For how long a refused or missing token is not asked for again: all nodes that are asked at a time need the same.
const REFUSED: Duration = Duration::from_secs(5);

/// A token of the viewer's service account, or why there is none.
#[derive(Clone)]
struct Viewer {
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
}

/// An answer that the proxy passed on, or that the API server gave itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    pub status: u16,
    pub body: Bytes,
}

impl UserClient {
    /// What a pod answers. The person's bearer token goes with it in a header that the proxy passes on; where there
    /// is none (client certificates), or it is not of the user in use (impersonation), one for the service account
    /// `viewer` in the pod's namespace.
    /// Errors: See [`ApiError`]: without a way to the API server or a token, in time, or of a size to be read. An
    /// answer that is no success is no error here.
    pub async fn through_pod(
        &self,
        place: &Proxied,
        viewer: &str,
        limit: Duration,
        largest: usize,
    ) -> Result<Passed, ApiError> {
        let Proxied { namespace, pod, port, target } = place;
        let call = Call::of(Verb::Get, Kind::POD_PROXY, namespace, pod);
        let token = match self.client.has_token(&call).await? {
            true => HeaderValue::from_static(PASS_ON),
            false => self.viewers_token(namespace, viewer).await?,
        };
        let path = format!("/api/v1/namespaces/{namespace}/pods/https:{pod}:{port}/proxy{target}");
        let request = http::Request::get(path).header(PASSED_ON, token);
        let request = request.header("accept", "application/json").body(Vec::new());
        let request = request.map_err(BuildRequest);
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
        let call = Call::of(Verb::Create, Kind::SERVICE_ACCOUNT_TOKEN, namespace, account);
        let seconds = i64::try_from(LIFE.as_secs()).ok();
        let spec = TokenRequestSpec { expiration_seconds: seconds, ..Default::default() };
        let asked = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let accounts = core(namespace, "serviceaccounts");
        let request =
            accounts.create_subresource("token", account, &PostParams::default(), body(&asked));
        let made: TokenRequest = self.client.ask(&call, request).await?;
        let token = made.status.and_then(|status| status.token).unwrap_or_default();
        let token = HeaderValue::try_from(format!("Bearer {token}"));
        let no_word = |_| call.failed(Failure::Unreadable, "the token is not one word");
        let mut token = token.map_err(no_word)?;
        token.set_sensitive(true);
        Ok(token)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_commands_exit_status_is_in_the_causes() {
        let status = |value| serde_json::from_value::<Status>(value).unwrap();
        assert_eq!(code(&status(json!({ "status": "Success" }))), Some(0));
        let failed = json!({
            "status": "Failure", "reason": "NonZeroExitCode", "message": "command terminated",
            "details": { "causes": [{ "reason": "ExitCode", "message": "64" }] },
        });
        assert_eq!(code(&status(failed)), Some(64));
        assert_eq!(code(&status(json!({ "status": "Failure", "message": "no such file" }))), None);
    }
}
