//! One page over all nodes of a sandbox: `tessera console`, whose API server is one of the sandbox.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tessera_cluster::fixtures::{ApiServer, Behind};
use tessera_fleet::{Fleet, Live, Options as Cluster};
use tessera_model::clock::unix_ms;
use tessera_system::terminal;
use tessera_view::fixtures::{Layout as Size, MadeUp};
use tessera_web::Source;
use tessera_web::fixtures::Fixture;
use tessera_web::server::{Options, Server};

use super::control::Ends;
use super::node::Node;
use super::start::Layout;

/// How often a page hears of changes, as of a console.
const INTERVAL: Duration = Duration::from_secs(2);
/// How long the server may take until it listens.
const BOUND: Duration = Duration::from_secs(5);

/// A page that is served.
#[derive(Debug)]
pub struct Console {
    pub address: SocketAddr,
    _server: Server,
    /// Passes the questions on to the nodes; none for nodes that are made up.
    _cluster: Option<ApiServer>,
}

impl Console {
    /// Over these nodes, on a port that is free; what the API server writes is below `dir`.
    pub async fn over(nodes: &[Node], dir: &Path) -> anyhow::Result<Self> {
        let cluster = ApiServer::start(dir);
        for node in nodes {
            let Some(api) = node.api else { continue };
            let (pod, namespace) = (format!("tessera-{}", node.spec.name), "tessera");
            let object = json!({
                "metadata": { "name": pod, "namespace": namespace, "ownerReferences": [{ "kind": "DaemonSet" }] },
                "spec": { "nodeName": node.spec.name },
                "status": { "phase": "Running" },
            });
            cluster.with(|store| {
                store.pods.insert((namespace.to_owned(), pod.clone()), object);
                store.behind.insert(pod, Behind::At(api));
            });
        }
        let kubeconfig = dir.join("kubeconfig");
        std::fs::write(&kubeconfig, cluster.kubeconfig())?;
        let fleet = Fleet::new(Cluster { kubeconfig: Some(kubeconfig), ..Cluster::default() })?;
        let console = Self::of(Arc::new(Live::new(fleet, INTERVAL))).await?;
        Ok(Self { _cluster: Some(cluster), ..console })
    }

    async fn of(source: Arc<dyn Source>) -> anyhow::Result<Self> {
        let listen = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
        let options = Options { listen, interval: INTERVAL, ..Options::new(source) };
        let server = Server::start(options).context("the page cannot be served")?;
        let bound = tokio::time::timeout(BOUND, server.bound()).await.ok().flatten();
        let address = bound.context("the page has no port")?;
        Ok(Self { address, _server: server, _cluster: None })
    }
}

/// As `docs/benchmarks.md` measures it: most nodes, and GPUs of each.
const MOST: (u32, u32) = (1000, 16);
/// Tenants of a GPU.
const TENANTS: usize = 10;
/// Time that histories go back, milliseconds.
const PAST_MS: i64 = 7 * 24 * 3_600_000;

/// Serves the page of a fleet that is made up, any number of nodes without a plugin, until it is asked to end.
pub async fn made_up(layout: Layout, ends: &Ends) -> anyhow::Result<ExitCode> {
    let (nodes, gpus) = MOST;
    anyhow::ensure!(
        layout.nodes <= nodes && layout.gpus <= gpus,
        "a made-up fleet has at most {nodes} nodes of {gpus} GPUs, not {layout}"
    );
    let now = unix_ms();
    let size = Size {
        nodes: usize::try_from(layout.nodes)?,
        gpus: usize::try_from(layout.gpus)?,
        tenants: TENANTS,
        since_unix_ms: now - PAST_MS,
        ..Size::default()
    };
    let source = Fixture::new(MadeUp::new(size, now));
    source.run();
    let console = Console::of(Arc::new(source)).await?;
    terminal::print(&format!(
        "a made-up fleet of {layout}: nothing of it exists\n\npage  http://{}/\nAPI   curl -s http://{}/api/v1/fleet\n\n\
         Ctrl-C ends it.\n",
        console.address, console.address
    ))?;
    ends.wait().await;
    Ok(ExitCode::SUCCESS)
}
