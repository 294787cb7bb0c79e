//! Kubernetes Events on pods, where the API server is reachable and lets us. Nothing depends on them: what
//! happens is in the audit trail, and every path here ends in a counter.
//!
//! Lines of the audit trail go into a bounded queue ([`report`]), without waiting. A task of its own makes
//! events of them ([`words`], pure), adds up what repeats ([`series`], pure), and sends them over one
//! connection that lives no longer than there is something to send ([`tessera_cluster::events`]). A server that
//! is away, slow or hanging costs a timeout and then a pause that doubles; one that forbids it, five minutes.

mod series;
mod task;
mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;

pub use task::{Timing, node_name};

use crate::Agent;
pub use tessera_cluster::Server;
use tessera_config::{Config, Events};
use tessera_model::audit::Event;

/// Lines that wait to be made events of.
const QUEUE: usize = 128;

#[derive(Debug, Default)]
pub struct Counts {
    pub sent: AtomicU64,
    pub failed: AtomicU64,
    pub dropped: AtomicU64,
}

impl Counts {
    pub fn all(&self) -> [(&'static str, u64); 3] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("sent", read(&self.sent)),
            ("failed", read(&self.failed)),
            ("dropped", read(&self.dropped)),
        ]
    }
}

fn are_wanted(config: &Config) -> bool {
    config.kubernetes.events != Events::Off
}

/// Keeps what happens from now on, and sends it for as long as it is polled, where there is an API server to send to. What
/// happens while the configuration in force wants no events is not sent.
pub fn report(agent: Arc<Agent>, timing: Timing) -> impl Future<Output = ()> + Send {
    let server = timing.server.clone().or_else(Server::of_pod);
    let (queue, lines) = mpsc::channel(QUEUE);
    if server.is_some() {
        let (current, counts) = (agent.config.clone(), Arc::clone(agent.trust().events()));
        agent.journal().set_listener(Box::new(move |line: &Event| {
            let is_wanted = are_wanted(&current.get()) && words::concerns_pods(&line.what);
            if is_wanted && queue.try_send(line.clone()).is_err() {
                counts.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    async move {
        match server {
            Some(server) => task::run(agent, server, lines, timing).await,
            None => std::future::pending().await,
        }
    }
}
