//! How long the JSON API takes to answer about 64 tenants: over TLS on loopback, and by root's socket.

use std::time::{Duration, Instant};

use anyhow::Context;
use tessera_web::Route;
use tessera_web::client::{Client, Endpoint, query};
use tokio::time::sleep;

use crate::node::{Api, Node};
use crate::stats::Sample;
use crate::tenants::{self, NAMESPACE, POD, TENANTS};
use crate::world::World;

/// Nodes that are asked in turns. A look at a node serves all that ask within [`FORGOTTEN`], so each rests for as long:
/// every answer that is measured has a look of its own.
const NODES: usize = 4;
const FORGOTTEN: Duration = Duration::from_millis(260);
/// Answers of each route over each of the two listeners, after some that warm up.
const ANSWERS: usize = 100;
const WARM_UP: usize = NODES;
/// How long a history has been recorded when the first question comes: two of its looks.
const RECORDED: Duration = Duration::from_secs(21);

/// What was measured of a route over one listener.
#[derive(Clone, Debug)]
pub struct Answers {
    /// The last part of its path, and the listener: `fleet tls`.
    pub name: String,
    /// The route.
    pub route: Route,
    /// From connecting to the last byte, a handshake included, milliseconds.
    pub ms: Sample,
    /// The plugin's CPU time for it, milliseconds.
    pub cpu_ms: Sample,
    /// Length of the last one, bytes.
    pub bytes: usize,
}

/// Measures each route; the schema's is among them, which needs no look at the node.
///
/// # Errors
/// A plugin that does not start, register or answer.
pub fn run(world: &World) -> anyhow::Result<Vec<Answers>> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut asked = Vec::new();
        for number in 0..NODES {
            let setup = tenants::setup(world, &format!("api-{number}"), Api::Tls, true)?;
            asked.push(Asked::new(tenants::start(&setup).await?).await?);
        }
        sleep(RECORDED).await;
        let mut answers = Vec::new();
        // Those two last as long as they are asked to.
        for route in Route::ALL.into_iter().filter(|route| !route.lasts()) {
            for (at, listener) in ["tls", "socket"].into_iter().enumerate() {
                answers.push(of_route(&mut asked, route, at, listener).await?);
            }
        }
        for Asked { node, .. } in asked {
            node.end().await;
        }
        Ok(answers)
    })
}

/// One of the nodes.
struct Asked {
    node: Node,
    endpoints: [Endpoint; 2],
    /// When it was asked last.
    last: Instant,
}

impl Asked {
    async fn new(node: Node) -> anyhow::Result<Self> {
        let endpoints = node.api(Api::Tls).await?;
        Ok(Asked { node, endpoints, last: Instant::now() })
    }
}

async fn of_route(
    asked: &mut [Asked],
    route: Route,
    at: usize,
    listener: &str,
) -> anyhow::Result<Answers> {
    let (mut ms, mut cpu_ms, mut bytes) = (Vec::new(), Vec::new(), 0);
    for call in 0..WARM_UP + ANSWERS {
        let path = path(route, call);
        let Asked { node, endpoints, last } = &mut asked[call % NODES];
        sleep(FORGOTTEN.saturating_sub(last.elapsed())).await;
        let client = Client::new(endpoints[at].clone());
        let (process, began) = (node.process()?, Instant::now());
        let before = process.cpu_ns()?;
        let begun = Instant::now();
        let body = client.bytes(&path, "application/json").await;
        ms.push(begun.elapsed().as_secs_f64() * 1e3);
        bytes = body.with_context(|| path.clone())?.len();
        #[allow(clippy::cast_precision_loss, reason = "nanoseconds of one answer")]
        cpu_ms.push((process.cpu_ns()? - before) as f64 / 1e6);
        *last = began;
    }
    let name = route.path().rsplit('/').next().unwrap_or_default();
    Ok(Answers {
        name: format!("{name} {listener}"),
        route,
        ms: Sample::new(ms.split_off(WARM_UP)),
        cpu_ms: Sample::new(cpu_ms.split_off(WARM_UP)),
        bytes,
    })
}

/// Another pod each time, where a route is of one.
fn path(route: Route, call: usize) -> String {
    let subject = match route {
        Route::Explain => format!("{NAMESPACE}/{POD}{}", call % TENANTS),
        _ => String::new(),
    };
    format!("{}{}", route.path(), query(&[("subject", &subject)]))
}
