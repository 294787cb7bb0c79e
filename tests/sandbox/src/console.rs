//! One page over all nodes of a sandbox: `tessera console`, whose API server is one of the sandbox.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tessera_cluster::fixtures::{ApiServer, Behind};
use tessera_fleet::{Fleet, Live, Options as Cluster};
use tessera_web::server::{Options, Server};

use super::node::Node;

/// How often a page hears of changes, as of a console.
const INTERVAL: Duration = Duration::from_secs(2);
/// How long the server may take until it listens.
const BOUND: Duration = Duration::from_secs(5);

/// A page that is served.
#[derive(Debug)]
pub struct Console {
    pub address: SocketAddr,
    _server: Server,
    /// Passes the questions on to the nodes.
    _cluster: ApiServer,
}

impl Console {
    /// Over these nodes, on a port that is free; what the API server writes is below `dir`.
    pub async fn over(nodes: &[Node], dir: &Path) -> anyhow::Result<Self> {
        let cluster = ApiServer::start(dir);
        for node in nodes {
            let Some(api) = node.api else { continue };
            cluster.with(|store| store.put_plugin(&node.spec.name, Some(Behind::At(api))));
        }
        let kubeconfig = dir.join("kubeconfig");
        std::fs::write(&kubeconfig, cluster.kubeconfig())?;
        let fleet = Fleet::new(Cluster { kubeconfig: Some(kubeconfig), ..Cluster::default() })?;
        let source = Arc::new(Live::new(fleet, INTERVAL));
        let listen = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
        let options = Options { listen, interval: INTERVAL, ..Options::new(source) };
        let server = Server::start(options).context("the page cannot be served")?;
        let bound = tokio::time::timeout(BOUND, server.bound()).await.ok().flatten();
        let address = bound.context("the page has no port")?;
        Ok(Self { address, _server: server, _cluster: cluster })
    }
}
