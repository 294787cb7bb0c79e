//! How long the JSON API takes to answer about 64 tenants: over TLS on loopback, and by root's socket.

use std::time::{Duration, Instant};

use anyhow::Context;
use tessera_web::Route;
use tessera_web::client::{Client, Endpoint, query};
use tokio::time::sleep;

use crate::node::{self, NAMESPACE, Node, POD, TENANTS};
use crate::report::Report;
use crate::stats::Sample;
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

pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let answers = node::runtime()?.block_on(asked(world))?;
    let worst = answers.iter().map(|(_, ms)| ms.quantile(0.99)).fold(0.0, f64::max);
    let what = "64 tenants: an answer of the JSON API, worst p99";
    report.figure("api_p99_ms", what, "ms", worst, 10.0);
    for (name, ms) in &answers {
        report.detail(&format!("api_ms {name}"), ms);
    }
    Ok(())
}

/// Answers by the last part of the route's path, and the listener.
async fn asked(world: &World) -> anyhow::Result<Vec<(String, Sample)>> {
    let mut asked = Vec::new();
    for number in 0..NODES {
        let node = node::with_tenants(world, &format!("api-{number}")).await?;
        let endpoints = node.api().await?;
        asked.push(Asked { node, endpoints, last: Instant::now() });
    }
    sleep(RECORDED).await;
    let mut answers = Vec::new();
    // Those that last do so as long as they are asked to; the schema needs no look at the node.
    let is_answer = |route: &Route| !route.lasts() && *route != Route::Schema;
    for route in Route::ALL.into_iter().filter(is_answer) {
        for (at, listener) in ["tls", "socket"].into_iter().enumerate() {
            let name = route.path().rsplit('/').next().unwrap_or_default();
            let answered = of_route(&mut asked, route, at).await?;
            answers.push((format!("{name} {listener}"), answered));
        }
    }
    for Asked { node, .. } in asked {
        node.end().await;
    }
    Ok(answers)
}

struct Asked {
    node: Node,
    endpoints: [Endpoint; 2],
    last: Instant,
}

/// From connecting to the last byte, a handshake included, milliseconds.
async fn of_route(asked: &mut [Asked], route: Route, at: usize) -> anyhow::Result<Sample> {
    let mut ms = Vec::new();
    for call in 0..WARM_UP + ANSWERS {
        let path = path(route, call);
        let Asked { endpoints, last, .. } = &mut asked[call % NODES];
        sleep(FORGOTTEN.saturating_sub(last.elapsed())).await;
        let client = Client::new(endpoints[at].clone());
        let began = Instant::now();
        let body = client.bytes(&path, "application/json").await;
        ms.push(began.elapsed().as_secs_f64() * 1e3);
        body.with_context(|| path.clone())?;
        *last = began;
    }
    Ok(Sample::new(ms.split_off(WARM_UP)))
}

/// Another pod each time, where a route is of one.
fn path(route: Route, call: usize) -> String {
    let subject = match route {
        Route::Explain => format!("{NAMESPACE}/{POD}{}", call % TENANTS),
        _ => String::new(),
    };
    format!("{}{}", route.path(), query(&[("subject", &subject)]))
}
