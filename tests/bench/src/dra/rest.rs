//! What a node with claims asks of the API server while nothing happens. It rests beside the other measurements: it
//! takes a while, and a thousandth of a core.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use tessera_cluster::fixtures::Asked;
use tessera_fake_kubelet::dra::ClaimName;
use tokio::time::sleep;

use super::node::{Node, Setup};
use super::{BATCH, GPUS, STATUS};
use crate::world::World;

/// How long, unless it is said: in each such stretch the driver looks once for each claim's object.
pub const REST: Duration = Duration::from_secs(600);

/// Requests by verb and path, without names of claims.
pub type Requests = BTreeMap<String, usize>;

/// A node at rest, on a thread of its own.
#[derive(Debug)]
pub struct Resting(JoinHandle<anyhow::Result<(Requests, f64)>>);

impl Resting {
    /// Starts a node with 16 claims, waits until it has nothing to do, and counts from then on for so long.
    ///
    /// # Errors
    /// It does not come to its rest.
    pub fn begin(world: &World, rest: Duration) -> anyhow::Result<Self> {
        let (begun, begins) = mpsc::channel();
        let world = world.clone();
        let counting = move || {
            // The stand-ins answer on a thread of their own.
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(1).enable_all().build()?;
            runtime.block_on(count(&world, rest, &begun))
        };
        let thread = std::thread::Builder::new().name("rest".into()).spawn(counting)?;
        match begins.recv() {
            Ok(()) => Ok(Resting(thread)),
            // It ended before.
            Err(_) => Resting(thread).end().and_then(|_| anyhow::bail!("no rest")),
        }
    }

    /// Waits for its end: what was asked, and in how many seconds.
    ///
    /// # Errors
    /// The plugin ended, or refused a claim.
    pub fn end(self) -> anyhow::Result<(Requests, f64)> {
        self.0.join().ok().context("the thread of the node at rest panicked")?
    }
}

async fn count(
    world: &World,
    rest: Duration,
    begun: &mpsc::Sender<()>,
) -> anyhow::Result<(Requests, f64)> {
    let gpus = "[[gpu]]\nmemory = \"80GiB\"\n".repeat(GPUS);
    let mut node = Node::start(&Setup::new(world, "dra-rest", &gpus, GPUS)?).await?;
    let claims = claims(&mut node).await?;
    sleep(STATUS).await;
    let (before, began) = (node.api.asked().len(), Instant::now());
    let _ = begun.send(());
    sleep(rest).await;
    let seconds = began.elapsed().as_secs_f64();
    let requests = counted(&node.api.asked()[before..]);
    node.unprepare(&claims).await?;
    node.end().await;
    Ok((requests, seconds))
}

/// Prepares 16 claims one by one.
pub(super) async fn claims(node: &mut Node) -> anyhow::Result<Vec<ClaimName>> {
    let claims = (0..BATCH).map(|at| node.claim(at % GPUS)).collect::<anyhow::Result<Vec<_>>>()?;
    for claim in &claims {
        node.prepare(std::slice::from_ref(claim)).await?;
    }
    Ok(claims)
}

/// Requests by verb and path. The verb of a watch is `WATCH`.
pub(super) fn counted(asked: &[Asked]) -> Requests {
    let mut requests = Requests::new();
    for asked in asked {
        let (path, query) = asked.target.split_once('?').unwrap_or((&asked.target, ""));
        // The object's own name makes each request another.
        let path = path.split('/').filter(|part| !part.starts_with("claim-")).collect::<Vec<_>>();
        let is_watch = query.split('&').any(|pair| pair == "watch=true");
        let verb = if is_watch { "WATCH" } else { &asked.method };
        *requests.entry(format!("{verb} {}", path.join("/"))).or_default() += 1;
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_no_list_and_claims_are_counted_together() {
        let asked = |method: &str, target: &str| Asked {
            method: method.to_owned(),
            target: target.to_owned(),
            headers: BTreeMap::new(),
            body: serde_json::Value::Null,
        };
        let claim = |n| asked("GET", &format!("/x/namespaces/bench/resourceclaims/claim-{n}"));
        let slices = |query: &str| asked("GET", &format!("/x/resourceslices{query}"));
        let all = [claim(1), claim(2), slices("?a=b"), slices("?a=b&watch=true"), slices("")];
        let counted = counted(&all);
        let of = |what: &str| counted.get(what).copied();
        assert_eq!(of("GET /x/namespaces/bench/resourceclaims"), Some(2));
        assert_eq!(
            (of("GET /x/resourceslices"), of("WATCH /x/resourceslices")),
            (Some(2), Some(1))
        );
    }
}
