//! Wires the DRA driver: kubelet's sockets, the slices, what claims show of their devices, and what views read.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tessera_agent::status_board::StatusBoard;
use tessera_agent::{Agent, kubernetes};
use tessera_api::admin::StatusView;
use tessera_api::metrics;
use tessera_cluster::resource::{ResourceClient, Timing};
use tessera_cluster::{Access, ApiError};
use tessera_config::{Config, Current};
use tessera_dra::claim_status::Reporter;
use tessera_dra::names;
use tessera_dra::prepare::Preparer;
use tessera_dra::publish::{Publisher, Status};
use tessera_dra::serve::{self, Registration, Settings};
use tessera_gpu::Discovery;
use tessera_model::counted::plural;
use tessera_tenant::regions::root::DirectoryLock;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tracing::{debug, info};

use crate::api;

const TOPIC: &str = "dra";

/// Longest wait for the API server at the driver's end; kubelet removes what is left.
const WITHDRAWAL: Duration = Duration::from_secs(10);

/// Starts the driver, where the configuration has one, or where claims of the time when it had one have not ended: only
/// the driver can end them. The agent is whole: CDI files and pages are there before kubelet finds the sockets.
/// Its end is when kubelet's calls are answered and the sockets are gone.
pub(super) fn start(
    current: &Current,
    agent: &Arc<Agent>,
    discovery: &Arc<dyn Discovery>,
    stopped: watch::Receiver<bool>,
) -> anyhow::Result<Option<JoinHandle<()>>> {
    let config = current.get();
    let is_ending = !config.dra.enabled;
    let left = tessera_dra::prepare::left(agent, &config.paths.dra);
    if is_ending && left.is_empty() {
        return Ok(None);
    }
    // What else the node sells is served all the same.
    let lacks = match Access::of_environment() {
        None => without_server(is_ending, &left),
        Some(access) => match serve_claims(access, (current, &config), agent, discovery, stopped) {
            Err(error) if is_ending => without_sockets(&left, &error),
            served => return served.map(Some),
        },
    };
    lack(&agent.board, &lacks);
    Ok(None)
}

/// Says that claims are not served, in `status` and to probes.
fn lack(board: &StatusBoard, text: &str) {
    board.set_condition(TOPIC, Some(text.to_owned()));
    board.publish(|facts| {
        let status = facts.dra.get_or_insert_default();
        names::DRIVER.clone_into(&mut status.driver);
        text.clone_into(&mut status.registration_error);
    });
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn without_server(is_ending: bool, left: &[String]) -> String {
    let lacks = "there is neither a service account's token nor KUBECONFIG; mount the token \
                 (automountServiceAccountToken)";
    match is_ending {
        false => format!(
            "no claim is served: dra.enabled needs the API server, and {lacks}, or set dra.enabled to false"
        ),
        true => format!(
            "{} cannot end, and their pods stay Terminating: the DRA driver, which ends them, needs the API server, \
             and {lacks}",
            claims(left)
        ),
    }
}

fn without_sockets(left: &[String], error: &anyhow::Error) -> String {
    format!(
        "{} cannot end, and their pods stay Terminating: the DRA driver, which ends them, cannot be served ({error:#}). \
         With the chart, turn DRA off in two steps: dra.enabled: true with config.dra.enabled: false gives the plugin \
         the sockets and rights that it needs until the last claim has ended",
        claims(left)
    )
}

/// So many claims, and of which the first ones are called how.
fn claims(left: &[String]) -> String {
    format!("{} ({})", plural(left.len(), "claim"), tessera_agent::list(left))
}

fn serve_claims(
    access: Access,
    (current, config): (&Current, &Config),
    agent: &Arc<Agent>,
    discovery: &Arc<dyn Discovery>,
    stopped: watch::Receiver<bool>,
) -> anyhow::Result<JoinHandle<()>> {
    let board = Arc::clone(&agent.board);
    let node =
        kubernetes::node_name().context("dra.enabled needs the node's name: set NODE_NAME")?;
    let api = ResourceClient::new(access, names::DRIVER, &node, Timing::default());
    let is_ending = !config.dra.enabled;
    let (end, ended) = watch::channel(false);
    let serving = {
        let (stopped, ended) = (stopped.clone(), ended.clone());
        tessera_dra::serve(settings(config, &node), Arc::clone(agent), api.clone(), async move {
            tokio::select! {
                () = is_set(stopped) => {}
                () = is_set(ended) => {}
            }
        })?
    };
    board.publish(|facts| {
        let status = facts.dra.get_or_insert_default();
        names::DRIVER.clone_into(&mut status.driver);
        status.pool.clone_from(&node);
    });
    let sources = (Arc::clone(agent), Arc::clone(discovery));
    let publisher = Publisher::new(api.clone(), sources, current.clone(), &node);
    let left = Left { preparer: serving.preparer.clone(), is_ending };
    let mut tasks = JoinSet::new();
    let (shown, published) = (serving.registration.clone(), publisher.status());
    let changes = agent.advertised.events();
    tasks.spawn(show(Arc::clone(&board), left, (shown, published, changes), end));
    tasks.spawn(publisher.run());
    tasks.spawn(Reporter::new(api.clone(), Arc::clone(agent)).run());
    let task = async move {
        serving.finished().await;
        // Nobody publishes any more.
        tasks.shutdown().await;
        if *ended.borrow() && !*stopped.borrow() {
            withdraw(&api).await;
            board.publish(|facts| facts.dra = None);
            board.set_condition(TOPIC, None);
            info!("the last claim has ended: the DRA driver is turned off");
        }
    };
    Ok(tokio::spawn(task))
}

async fn is_set(mut signal: watch::Receiver<bool>) {
    // An error means that the application itself is gone.
    let _ = signal.wait_for(|set| *set).await;
}

async fn withdraw(api: &ResourceClient) {
    let removing = async {
        for slice in api.own_slices().await?.0 {
            if let Some(name) = slice.metadata.name {
                api.delete_slice(&name).await?;
            }
        }
        Ok::<_, ApiError>(())
    };
    match tokio::time::timeout(WITHDRAWAL, removing).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            info!(%error, "kubelet removes the ResourceSlices, 30 s after the driver's end")
        }
        Err(_) => info!("kubelet removes the ResourceSlices, 30 s after the driver's end"),
    }
}

struct Left {
    preparer: Preparer,
    is_ending: bool,
}

impl Left {
    /// By name; `None` where the driver is on.
    fn names(&self) -> Option<Vec<String>> {
        self.is_ending.then(|| self.preparer.left())
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

/// Writes to the status board what changes, for as long as it is polled, and ends the driver once nothing is left for
/// which it was kept.
async fn show(
    board: Arc<StatusBoard>,
    left: Left,
    (mut registration, mut published, mut changes): (
        watch::Receiver<Registration>,
        watch::Receiver<Status>,
        watch::Receiver<u64>,
    ),
    end: watch::Sender<bool>,
) {
    let mut asked = left.preparer.asked();
    loop {
        changes.mark_unchanged();
        asked.mark_unchanged();
        let kubelet = registration.borrow_and_update().clone();
        let slices = published.borrow_and_update().clone();
        let names = left.names();
        if names.as_ref().is_some_and(Vec::is_empty) {
            end.send_replace(true);
        }
        let error = kubelet.last_error;
        board.publish(|facts| {
            let status = facts.dra.get_or_insert_default();
            status.registered = kubelet.is_registered;
            status.registration_error = error.clone().unwrap_or_default();
            slices.state.into_str().clone_into(&mut status.publication);
            status.devices = count(slices.devices);
            status.slices = count(slices.slices);
            status.generation = slices.generation;
            status.writes = slices.writes;
            status.wipes = slices.wipes;
        });
        let refused = error.map(|error| format!("the DRA driver is not registered: {error}"));
        let ending = names.filter(|names| !names.is_empty()).map(|names| {
            format!(
                "dra.enabled is false, and the driver stays until {} have ended; it prepares no other",
                claims(&names)
            )
        });
        let sentences: Vec<String> =
            refused.into_iter().chain(ending).chain(slices.sentences()).collect();
        let text = (!sentences.is_empty()).then(|| format!("DRA: {}", sentences.join("; ")));
        board.set_condition(TOPIC, text);
        tokio::select! {
            changed = registration.changed() => if changed.is_err() { return },
            changed = published.changed() => if changed.is_err() { return },
            changed = changes.changed(), if left.is_ending => if changed.is_err() { return },
            changed = asked.changed(), if left.is_ending => if changed.is_err() { return },
        }
        // A burst is one look.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const TAKE_OVER: Duration = Duration::from_millis(50);

/// Stands by: with a DRA driver, a DaemonSet's rolling update starts the new pod beside the old one (`maxSurge`). Two
/// plugins cannot share a ledger, so the new one waits, and counts as ready, until the old one has ended.
///
/// Waits until no other plugin has the pages directory, where the configuration allows two side by side. Answers
/// probes meanwhile.
pub async fn stand_by(config: &Config, discovery: &Arc<dyn Discovery>) {
    let pages = &config.paths.pages;
    if !config.dra.enabled || is_free(pages) {
        return;
    }
    info!(pages = %pages.display(), "another plugin serves this node; standing by until it ends");
    let view = StatusView::new(
        Current::from(config.clone()),
        Arc::clone(discovery),
        Arc::new(StatusBoard::default()),
    );
    view.stand_by();
    let view = Arc::new(view);
    let _probes = metrics::serve(config.metrics.listen.clone(), Arc::clone(&view));
    // For the startup probe, without which no other probe counts. Where the other plugin has the same path, it
    // answers there.
    let socket = api::bind(&config.paths.admin).inspect_err(|error| debug!("{error}")).ok();
    let _api = socket.and_then(|socket| api::serve_root(socket, view));
    while !is_free(pages) {
        tokio::time::sleep(TAKE_OVER).await;
    }
    info!("the other plugin has ended; taking over");
}

fn is_free(pages: &Path) -> bool {
    // What is not there yet is nobody's; what cannot be looked at is judged when it is taken.
    !pages.exists() || !DirectoryLock::is_taken(pages)
}
