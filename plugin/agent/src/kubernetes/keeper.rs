//! Sends events on pods while the configuration in force enables them.

use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::{error, info};

use super::task::{TOPIC, Timing, run};
use super::{EventSender, Server};
use crate::Agent;
use crate::status_board::StatusBoard;
use tessera_config::{Config, Current, Events};
use tessera_model::audit::Event;
use tessera_store::Listener;

#[derive(Debug)]
pub struct Keeper {
    agent: Arc<Agent>,
    board: Arc<StatusBoard>,
    /// None where there is no API server to send to.
    server: Option<Server>,
    timing: Timing,
    /// Of the teller that the ledger has.
    lines: Option<mpsc::Receiver<Event>>,
}

fn listener(teller: EventSender) -> Listener {
    Box::new(move |line| teller.tell(line))
}

fn is_wanted(config: &Config) -> bool {
    config.kubernetes.events != Events::Off
}

impl Keeper {
    /// From now on, [`Keeper::run`] is to send what happens, if the configuration wants it.
    pub fn new(agent: Arc<Agent>, board: Arc<StatusBoard>, timing: Timing) -> Self {
        let server = timing.server.clone().or_else(Server::of_pod);
        let mut keeper = Keeper { agent, board, server, timing, lines: None };
        if keeper.server.is_some() && is_wanted(&keeper.agent.config()) {
            let (teller, lines) = keeper.teller();
            keeper.agent.journal().set_listener(Some(listener(teller)));
            keeper.lines = Some(lines);
        }
        keeper
    }

    fn teller(&self) -> (EventSender, mpsc::Receiver<Event>) {
        EventSender::new(Arc::clone(self.agent.trust().events()))
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
                    info!("pods get Kubernetes events");
                    let (teller, lines) = self.teller();
                    self.set(Some(teller)).await;
                    lines
                }
            };
            let counts = Arc::clone(self.agent.trust().events());
            let (agent, board) = (Arc::clone(&self.agent), Arc::clone(&self.board));
            tokio::select! {
                () = run(agent, board, server.clone(), lines, counts, self.timing.clone()) => {}
                _ = changes.wait_for(|config| !is_wanted(config)) => {}
            }
            self.set(None).await;
            self.board.set_condition(TOPIC, None);
            info!("pods get no Kubernetes events");
        }
    }

    /// Not at once: somebody may be waiting for the disk.
    async fn set(&self, teller: Option<EventSender>) {
        let agent = Arc::clone(&self.agent);
        let listener = teller.map(listener);
        if let Err(error) =
            tokio::task::spawn_blocking(move || agent.journal().set_listener(listener)).await
        {
            error!(%error, "Kubernetes events");
        }
    }
}
