//! The labels of one node: read, and followed by a watch of that node alone. Only its metadata is asked for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::GetParams;
use kube::core::params::WatchParams;
use kube::core::{ObjectMeta, PartialObjectMeta, Request};
use tokio::time::timeout;

use crate::client::Client;
use crate::error::{ApiError, Call, Failure, Kind, Verb};

/// A node's labels at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    pub labels: BTreeMap<String, String>,
    /// `metadata.resourceVersion`: where a watch goes on.
    version: String,
}

/// Reads and follows the labels of one node. A clone shares its connections.
#[derive(Clone, Debug)]
pub struct NodeLabels {
    client: Client,
    node: Arc<str>,
    limit: Duration,
    watch: Duration,
}

impl NodeLabels {
    /// For the node of that name. A request may take `limit`, connecting included; a watch is asked for again after
    /// `watch`. Nothing is asked yet.
    pub fn new(
        access: impl Into<crate::Access>,
        node: &str,
        limit: Duration,
        watch: Duration,
    ) -> Self {
        NodeLabels { client: Client::new(access, limit), node: node.into(), limit, watch }
    }

    /// The node's labels now.
    pub async fn get(&self) -> Result<Labels, ApiError> {
        let call = Call::new(Verb::Get, Kind::NODES, &self.node);
        let request = nodes().get_metadata(&self.node, &GetParams::default());
        let node: PartialObjectMeta<Node> = self.client.ask(&call, request).await?;
        let ObjectMeta { labels, resource_version, .. } = node.metadata;
        Ok(Labels {
            labels: labels.unwrap_or_default(),
            version: resource_version.unwrap_or_default(),
        })
    }

    /// Returns when the node may have changed since `seen`: something came, or the watch ended.
    pub async fn changed(&self, seen: &Labels) -> Result<(), ApiError> {
        let call = &Call::new(Verb::Watch, Kind::NODES, &self.node);
        let seconds = u32::try_from(self.watch.as_secs()).unwrap_or(u32::MAX).max(1);
        let fields = format!("metadata.name={}", self.node);
        let params = WatchParams::default().fields(&fields).timeout(seconds).disable_bookmarks();
        let request = nodes().watch_metadata(&params, &seen.version);
        let events = match self.client.watch::<PartialObjectMeta<Node>>(call, request).await {
            Ok(events) => events,
            // The server remembers no more as far back.
            Err(error) if error.failure == Failure::Expired => return Ok(()),
            Err(error) => return Err(error),
        };
        // What is said does not matter: the labels are read again. A server that is gone ends no watch.
        let _ = timeout(self.watch + self.limit, std::pin::pin!(events).try_next()).await;
        Ok(())
    }
}

fn nodes() -> Request {
    Request::new("/api/v1/nodes")
}
