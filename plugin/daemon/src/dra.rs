//! Wires the DRA driver: kubelet's sockets, the slices, what claims show of their devices, and what views read.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tessera_agent::Agent;
use tessera_agent::kubernetes;
use tessera_agent::status_board::StatusBoard;
use tessera_cluster::Access;
use tessera_cluster::resource::{ResourceApi, ResourceClient, Timing};
use tessera_config::{Config, Current};
use tessera_dra::claim_status::Reporter;
use tessera_dra::door::Core;
use tessera_dra::publish::{Publisher, Status};
use tessera_dra::serve::{self, Registration, Serving, Settings};
use tessera_dra::{AgentGpus, names};
use tessera_gpu::Discovery;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::warn;

use crate::own_events::OwnEvents;

/// The condition's topic.
const TOPIC: &str = "dra";

/// A DRA driver that runs.
pub(super) struct Driver {
    serving: Serving,
    /// Publication, claim status and what views read; they end with it.
    tasks: JoinSet<()>,
}

/// Starts the driver, where the configuration has one. The agent is whole: CDI files and pages are there before
/// kubelet finds the sockets.
///
/// # Errors
/// The sockets cannot be had, or the node's name is not known.
pub(super) fn start(
    current: &Current,
    agent: &Arc<Agent>,
    discovery: &Arc<dyn Discovery>,
    stopped: watch::Receiver<bool>,
) -> anyhow::Result<Option<Driver>> {
    let config = current.get();
    if !config.dra.enabled {
        return Ok(None);
    }
    let board = agent.board();
    let Some(access) = Access::of_environment() else {
        let text = "no claim is served: dra.enabled needs the API server, and there is neither a service account's \
                    token nor KUBECONFIG; mount the token (automountServiceAccountToken), or set dra.enabled to false";
        warn!("{text}");
        board.set_condition(TOPIC, Some(text.to_owned()));
        return Ok(None);
    };
    let node =
        kubernetes::node_name().context("dra.enabled needs the node's name: set NODE_NAME")?;
    board.change_dra(|status| {
        names::DRIVER.clone_into(&mut status.driver);
        status.pool.clone_from(&node);
    });
    let events = OwnEvents::of_pod(&access, &node);
    let client = ResourceClient::new(access, names::DRIVER, &node, Timing::default());
    let api: Arc<dyn ResourceApi> = Arc::new(client);
    let serving = tessera_dra::serve(
        settings(&config, &node),
        Arc::clone(agent) as Arc<dyn Core>,
        Arc::clone(&api),
        async move {
            let mut stopped = stopped;
            // An error means that the application itself is gone.
            let _ = stopped.wait_for(|stop| *stop).await;
        },
    )?;
    let gpus = Arc::new(AgentGpus::new(Arc::clone(agent), Arc::clone(discovery)));
    let publisher = Publisher::new(Arc::clone(&api), Arc::clone(&gpus), current.clone(), &node);
    let mut tasks = JoinSet::new();
    tasks.spawn(show(Arc::clone(board), serving.registration(), publisher.status()));
    if let Some(events) = events {
        tasks.spawn(events.report(publisher.status()));
    }
    tasks.spawn(publisher.run());
    tasks.spawn(Reporter::new(api, gpus).run());
    Ok(Some(Driver { serving, tasks }))
}

impl Driver {
    /// Waits until kubelet's calls are answered and the sockets are gone.
    ///
    /// # Errors
    /// Kubelet does not take the driver.
    pub(super) async fn finished(self) -> anyhow::Result<()> {
        let Driver { serving, tasks } = self;
        serving.finished().await?;
        drop(tasks);
        Ok(())
    }

    /// Done when kubelet has refused the driver.
    pub(super) async fn rejected(&self) {
        let mut registration = self.serving.registration();
        let refused = registration.wait_for(|now| now.rejected.is_some()).await.is_ok();
        if !refused {
            std::future::pending::<()>().await;
        }
    }
}

fn settings(config: &Config, node: &str) -> Settings {
    Settings {
        node: node.to_owned(),
        registry: config.paths.plugins_registry.clone(),
        dir: config.paths.dra.clone(),
        pod_uid: std::env::var("POD_UID").ok().filter(|uid| !uid.is_empty()),
        sweeping: tessera_dra::prepare::Sweeping::default(),
        timing: serve::Timing::default(),
    }
}

/// Writes to the status board what changes, for as long as it is polled.
async fn show(
    board: Arc<StatusBoard>,
    mut registration: watch::Receiver<Registration>,
    mut published: watch::Receiver<Status>,
) {
    loop {
        let kubelet = registration.borrow_and_update().clone();
        let slices = published.borrow_and_update().clone();
        let error = kubelet.rejected.clone().or_else(|| kubelet.last_error.clone());
        board.change_dra(|status| {
            status.registered = kubelet.is_registered;
            status.registration_error = error.clone().unwrap_or_default();
            status.publication = slices.state.as_str();
            status.mode = slices.mode.as_str();
            status.devices = slices.devices;
            status.slices = slices.slices;
            status.generation = slices.generation;
            status.writes = slices.writes;
            status.wipes = slices.wipes;
        });
        let refused = error.map(|error| format!("the DRA driver is not registered: {error}"));
        let sentences: Vec<String> = refused.into_iter().chain(slices.sentences()).collect();
        let text = (!sentences.is_empty()).then(|| format!("DRA: {}", sentences.join("; ")));
        if board.set_condition(TOPIC, text.clone())
            && let Some(text) = text
        {
            warn!("{text}");
        }
        tokio::select! {
            changed = registration.changed() => if changed.is_err() { return },
            changed = published.changed() => if changed.is_err() { return },
        }
        // A burst is one look.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
