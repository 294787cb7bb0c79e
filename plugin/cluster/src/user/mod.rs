//! What a person asks with a kubeconfig: pods, nodes, claims, what pods serve behind the API server's proxy, and
//! commands in them. Everything is done with the person's own rights.

mod exec;
pub mod objects;
mod proxy;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use kube::core::request::Error::BuildRequest;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Mutex;

use crate::access::{self, Access};
use crate::client::Client;
use crate::error::{ApiError, Call, Kind, Verb};

pub use exec::{ExecError, Finished};
use objects::{Event, List, Pod};
use proxy::Viewer;
pub use proxy::{Passed, Proxied};

/// Most of a list that is asked for at once.
const PAGE: usize = 500;
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
    /// Each request may take `limit`; up to `parallel` connections wait for the next one.
    pub fn new(access: Access, limit: Duration, parallel: usize) -> Self {
        let client = Client::new(access, limit).keeping(parallel);
        UserClient { client, limit, viewer: Arc::default() }
    }

    /// What the kubeconfig says. Reads files.
    ///
    /// # Errors
    /// The file that cannot be read, or a context that it does not have.
    pub fn context(&self) -> Result<Context, String> {
        let (files, asked) = match self.client.access() {
            Access::Server(_) => {
                let file = Path::new(access::CREDENTIALS).join("namespace");
                let namespace = access::read(&file).unwrap_or_default().trim().to_owned();
                return Ok(Context { name: "in-cluster".to_owned(), namespace });
            }
            Access::Kubeconfig(files, context) => (files, context),
        };
        let whole = access::merged(files)?;
        let (name, context) = access::in_use(&whole, asked.as_deref())
            .map_err(|error| format!("{}: {error}", access::names(files)))?;
        let namespace = context.namespace.clone();
        Ok(Context {
            name: name.to_owned(),
            namespace: namespace.unwrap_or_else(|| "default".to_owned()),
        })
    }

    /// Names of the contexts, for completion. Reads files.
    ///
    /// # Errors
    /// The file that cannot be read.
    pub fn contexts(&self) -> Result<Vec<String>, String> {
        match self.client.access() {
            Access::Server(_) => Ok(Vec::new()),
            Access::Kubeconfig(files, _) => {
                Ok(access::merged(files)?.contexts.into_iter().map(|one| one.name).collect())
            }
        }
    }

    /// Reads the kubeconfig and what it names, as the first request does, and may run its credential plugin. Sends
    /// nothing.
    pub async fn prepare(&self) -> Result<(), ApiError> {
        let call = Call::new(Verb::List, Kind::Pods, "");
        self.client.has_token(&call).await.map(|_| ())
    }

    /// Pods of a namespace (empty: all) with these labels (empty: any).
    pub async fn pods(&self, namespace: &str, labels: &str) -> Result<Vec<Pod>, ApiError> {
        let path = match namespace {
            "" => "/api/v1/pods".to_owned(),
            namespace => format!("/api/v1/namespaces/{}/pods", escaped(namespace)),
        };
        let call = Call::new(Verb::List, Kind::Pods, namespace);
        let selector = match labels {
            "" => String::new(),
            labels => format!("&labelSelector={}", escaped(labels)),
        };
        self.list(&call, &path, &selector).await
    }

    /// A pod; `None` where there is none of that name.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, ApiError> {
        let call = Call::of(Verb::Get, Kind::Pods, namespace, name);
        let path = format!("/api/v1/namespaces/{}/pods/{}", escaped(namespace), escaped(name));
        found(self.get(&call, &path).await)
    }

    /// The newest event that says why the scheduler found no node for a pod; `None` where Kubernetes has none, or none
    /// any more.
    pub async fn unscheduled(&self, namespace: &str, pod: &str) -> Result<Option<Event>, ApiError> {
        let path = format!("/api/v1/namespaces/{}/events", escaped(namespace));
        let fields =
            format!("involvedObject.kind=Pod,involvedObject.name={pod},reason=FailedScheduling");
        let selector = format!("&fieldSelector={}", escaped(&fields));
        let call = Call::new(Verb::List, Kind::Events, namespace);
        let events: Vec<Event> = self.list(&call, &path, &selector).await?;
        Ok(events.into_iter().max_by(|a, b| a.last_at().cmp(b.last_at())))
    }

    /// A claim as the API server has it; `None` where there is none.
    pub async fn claim(&self, namespace: &str, name: &str) -> Result<Option<Value>, ApiError> {
        let call = Call::of(Verb::Get, Kind::Claims, namespace, name);
        let rest = format!("namespaces/{}/resourceclaims/{}", escaped(namespace), escaped(name));
        self.resource(&call, &rest).await
    }

    /// A device class; `None` where there is none.
    pub async fn device_class(&self, name: &str) -> Result<Option<Value>, ApiError> {
        let call = Call::new(Verb::Get, Kind::Classes, name);
        self.resource(&call, &format!("deviceclasses/{}", escaped(name))).await
    }

    async fn resource(&self, call: &Call, rest: &str) -> Result<Option<Value>, ApiError> {
        found(self.get(call, &format!("/apis/resource.k8s.io/v1/{rest}")).await)
    }

    async fn get<T: DeserializeOwned>(&self, call: &Call, path: &str) -> Result<T, ApiError> {
        let request = Request::get(path).body(Vec::new());
        self.client.ask(call, request.map_err(BuildRequest)).await
    }

    async fn list<T: DeserializeOwned>(
        &self,
        call: &Call,
        path: &str,
        selector: &str,
    ) -> Result<Vec<T>, ApiError> {
        // A person may have to log in, which has a limit of its own.
        self.client.has_token(call).await?;
        let limit = self.limit * WHOLE;
        let parts = async {
            let (mut all, mut next) = (Vec::new(), String::new());
            loop {
                let target = format!("{path}?limit={PAGE}{selector}{next}");
                let page: List<T> = self.get(call, &target).await?;
                all.extend(page.items.into_iter().flatten());
                match page.metadata.next.filter(|next| !next.is_empty()) {
                    Some(more) => next = format!("&continue={}", escaped(&more)),
                    None => return Ok(all),
                }
            }
        };
        let slow = || ApiError::Slow { call: call.clone(), limit };
        tokio::time::timeout(limit, parts).await.unwrap_or_else(|_| Err(slow()))
    }
}

fn found<T>(answer: Result<T, ApiError>) -> Result<Option<T>, ApiError> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(ApiError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A part of a path or of a query: everything but letters, digits and `-._~` is encoded.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte.into())
            }
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}
