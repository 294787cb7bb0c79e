//! Tells pods while the configuration in force wants it, and stops when it does not.

use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::{error, info};

use super::task::{TOPIC, Timing, run};
use super::{Server, Teller};
use crate::admin::Sources;
use crate::config::{Config, Current, Events};
use crate::ledger;
use crate::node::Node;

/// See the module's text.
#[derive(Debug)]
pub struct Keeper {
    node: Arc<Node>,
    sources: Arc<Sources>,
    /// None where there is no API server that we may tell.
    server: Option<Server>,
    timing: Timing,
    /// Of the teller that the ledger has.
    lines: Option<mpsc::Receiver<ledger::Event>>,
}

fn is_wanted(config: &Config) -> bool {
    config.kubernetes.events != Events::Off
}

impl Keeper {
    /// From now on, what happens is to be told if the configuration wants it: by [`Keeper::run`].
    #[must_use]
    pub fn new(node: Arc<Node>, sources: Arc<Sources>, timing: Timing) -> Self {
        let server = timing.server.clone().or_else(Server::of_pod);
        let mut keeper = Keeper { node, sources, server, timing, lines: None };
        if keeper.server.is_some() && is_wanted(&keeper.node.config()) {
            let (teller, lines) = keeper.teller();
            keeper.node.set_teller(Some(teller));
            keeper.lines = Some(lines);
        }
        keeper
    }

    fn teller(&self) -> (Teller, mpsc::Receiver<ledger::Event>) {
        Teller::new(Arc::clone(self.node.trust().events()))
    }

    /// Follows the configuration, for ever. What is not sent when events are switched off is not sent.
    pub async fn run(mut self, current: &Current) {
        let Some(server) = self.server.take() else { return std::future::pending().await };
        let mut changes = current.changes();
        loop {
            let lines = match self.lines.take() {
                Some(lines) => lines,
                None => {
                    // It never ends: `current` is there for as long as we are.
                    let _ = changes.wait_for(|config| is_wanted(config)).await;
                    info!("pods are told of what concerns them by Kubernetes events");
                    let (teller, lines) = self.teller();
                    self.set(Some(teller)).await;
                    lines
                }
            };
            let counts = Arc::clone(self.node.trust().events());
            let (node, sources) = (Arc::clone(&self.node), Arc::clone(&self.sources));
            tokio::select! {
                () = run(node, sources, server.clone(), lines, counts, self.timing.clone()) => {}
                _ = changes.wait_for(|config| !is_wanted(config)) => {}
            }
            self.set(None).await;
            self.sources.set_condition(TOPIC, None);
            info!("pods are told nothing by Kubernetes events");
        }
    }

    /// Not at once: somebody may be waiting for the disk.
    async fn set(&self, teller: Option<Teller>) {
        let node = Arc::clone(&self.node);
        if let Err(error) = tokio::task::spawn_blocking(move || node.set_teller(teller)).await {
            error!(%error, "Kubernetes events");
        }
    }
}
