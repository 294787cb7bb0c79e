//! `tessera serve`: builds everything, runs it until a signal ends it, and drains.

// `terminal::print`: a reader that goes away, like `head`, must not end a process by a panic.
#![cfg_attr(not(test), deny(clippy::print_stdout))]
#![forbid(unsafe_code)]

mod api;
mod dra;
mod jobs;
pub mod node_config;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{debug, error, info, warn};

use jobs::Watcher;
use node_config::NodeConfig;
use tessera_agent::reload::{self, Reloader, SetFilter};
use tessera_agent::status_board::StatusBoard;
use tessera_agent::{Agent, ForeignWatch, Service, kubernetes, labels, mend, observe};
use tessera_api::admin::StatusView;
use tessera_api::history::Recorder;
use tessera_api::metrics;
use tessera_api::view::NodeSource;
use tessera_config::{Config, ConfigFile, Current, LoadedConfig};
use tessera_gpu::Discovery;
use tessera_kubelet as kubelet;
use tessera_kubelet::pod_resources::PodResources;
use tessera_model::clock::monotonic_ns;
use tessera_model::gpu::Gpu;
use tessera_rules::shares;
use tessera_store::OpenError;
use tessera_tenant::delivery::Delivery;
use tessera_tenant::regions::root::{self, DirectoryLock};
use tessera_tenant::shim_install;

/// How often it is looked whether the pages directory is still the one that is held.
const CHECK_LOCK: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct Timing {
    pub heartbeat: Duration,
    pub reconcile: Duration,
    /// How long kubelet must leave an allocation out before it is released; `None`: as the configuration
    /// says. Ledger and kubelet are compared no less often than that needs.
    pub release_grace: Option<Duration>,
    /// How long nobody must have needed an installed shim before it is removed.
    pub shim_grace: Duration,
    pub discovery: Duration,
    /// How long the configuration's file must rest before it is read again.
    pub config_debounce: Duration,
    pub foreign_plugins: Duration,
    /// How long a GPU counts as sold by others after it was last seen so.
    pub foreign_plugins_grace: Duration,
    pub kubelet: kubelet::Timing,
    pub events: kubernetes::Timing,
    pub history_look: Duration,
    /// How often what it saw is stored: what a kill may lose.
    pub history_store: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            heartbeat: Duration::from_secs(1),
            reconcile: Duration::from_secs(10),
            release_grace: None,
            shim_grace: Duration::from_secs(3600),
            discovery: Duration::from_secs(10),
            config_debounce: reload::DEBOUNCE,
            foreign_plugins: Duration::from_secs(10),
            foreign_plugins_grace: Duration::from_secs(60),
            kubelet: kubelet::Timing::default(),
            events: kubernetes::Timing::default(),
            history_look: Duration::from_secs(10),
            history_store: Duration::from_secs(60),
        }
    }
}

pub use dra::stand_by;

#[derive(Debug)]
pub struct App {
    pub view: Arc<StatusView>,
    main: JoinHandle<anyhow::Result<()>>,
    stop: watch::Sender<bool>,
    _metrics: Option<tessera_web::Server>,
    // Dropped late: `status` answers until the end.
    api: api::Api,
    _pages_lock: Arc<DirectoryLock>,
}

/// Starts the plugin: installs the shim, finds room for pages, serves `status`. The rest, from
/// discovering GPUs to serving kubelet, goes on in a task.
pub fn start(config: Config, discovery: Arc<dyn Discovery>, timing: Timing) -> anyhow::Result<App> {
    let file = config.source.file.clone().map(|file| ConfigFile { asked: Some(file) });
    let text = file.as_ref().map(|file| file.judge().text).unwrap_or_default();
    let given = LoadedConfig { config, text, refused: None };
    start_with(StartOptions { file, given, set_filter: None, node_config: None }, discovery, timing)
}

pub struct StartOptions {
    /// The file that is read again when it changes, where there is to be one.
    pub file: Option<ConfigFile>,
    pub given: LoadedConfig,
    pub set_filter: Option<SetFilter>,
    /// Follows the node's label that chooses `file`, where one does.
    pub node_config: Option<NodeConfig>,
}

/// As [`start`], for a plugin whose configuration may be the last good one, and may change.
pub fn start_with(
    beginning: StartOptions,
    discovery: Arc<dyn Discovery>,
    timing: Timing,
) -> anyhow::Result<App> {
    let StartOptions { file, given, set_filter, node_config } = beginning;
    let config = given.config.clone();
    let source = config.paths.shim_source.clone().unwrap_or_else(shim_install::default_source);
    let delivery = shim_install::install(&source, &config.paths.shim)?;
    let current = Current::from(config);
    let config = current.get();
    let board = Arc::new(StatusBoard::default());
    let view =
        Arc::new(StatusView::new(current.clone(), Arc::clone(&discovery), Arc::clone(&board)));
    let asked = Arc::clone(&discovery);
    let reloader = Arc::new(Reloader::new(file, &given, current, asked, set_filter, &board));
    // Each is set once.
    let _ = view.reloader.set(Arc::clone(&reloader));
    let socket = api::bind(&config.paths.admin)?;
    // Before anything in the directory, or of the file system there, is touched.
    let pages_lock = Arc::new(DirectoryLock::take(&config.paths.pages)?);
    let metrics = metrics::serve(config.metrics.listen.clone(), Arc::clone(&view));
    let cluster = timing.events.server.clone().or_else(tessera_cluster::Server::of_pod);
    let api = api::start(&config, socket, cluster, &view, &board);
    let pages = root::ensure(&config.paths.pages, config.pages.tmpfs, config.pages.size_bytes)?;
    pages_lock.renew()?;
    info!(shim = %delivery.shim.display(), pages = %config.paths.pages.display(), "{pages}");
    board.set_condition("pages", pages.warning().map(str::to_owned));
    let (stop, stopped) = watch::channel(false);
    let chosen = choose(node_config, Arc::clone(&board));
    let kept = keep(Arc::clone(&pages_lock), board);
    let source = api.source.clone();
    let main = run(reloader, discovery, timing, delivery, (Arc::clone(&view), source), stopped);
    let main = tokio::spawn(async move {
        tokio::select! {
            ended = main => ended,
            never = kept => match never {},
            () = chosen => Ok(()),
        }
    });
    Ok(App { view, main, stop, _metrics: metrics, api, _pages_lock: pages_lock })
}

/// Keeps the pages directory locked, also when it was removed and made again.
async fn keep(pages_lock: Arc<DirectoryLock>, board: Arc<StatusBoard>) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(CHECK_LOCK).await;
        let amiss = pages_lock.renew().err().map(|error| error.to_string());
        board.set_condition("pages lock", amiss);
    }
}

async fn choose(node_config: Option<NodeConfig>, board: Arc<StatusBoard>) {
    match node_config {
        Some(node_config) => node_config.follow(board).await,
        None => std::future::pending().await,
    }
}

impl App {
    /// What the JSON API shows: it has a history once kubelet is served.
    pub fn source(&self) -> &NodeSource {
        &self.api.source
    }

    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        tokio::select! {
            ended = &mut self.main => return ended?,
            () = shutdown => {}
        }
        info!("stopping");
        self.stop.send_replace(true);
        self.main.await?
    }
}

async fn run(
    reloader: Arc<Reloader>,
    discovery: Arc<dyn Discovery>,
    timing: Timing,
    delivery: Delivery,
    (view, source): (Arc<StatusView>, NodeSource),
    mut stopped: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let watching = reload::watch(Arc::clone(&reloader), timing.config_debounce);
    let mut watching = std::pin::pin!(watching);
    let board = Arc::clone(&view.board);
    let gpus = tokio::select! {
        gpus = discover(&discovery, reloader.current(), &board, timing.discovery) => gpus,
        () = &mut watching => return Ok(()),
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
    };
    let config = reloader.begin(&gpus)?;
    for gpu in &gpus {
        for share in shares::cut(gpu, &config) {
            let shares::Share { resource, count, memory_bytes, .. } = share;
            info!(%gpu, resource, replicas = count, memory = memory_bytes, "sharing");
        }
    }
    reloader.remark(&gpus, &config);
    let kubelet_dir = config.paths.kubelet.clone();
    let pod_resources = Arc::new(PodResources::new(&config.paths.pod_resources));
    let pod_resources_socket = config.paths.pod_resources.clone();
    let (asked, attached) = (Arc::clone(&discovery), Arc::clone(&reloader));
    let published = Arc::clone(&board);
    let agent = tokio::task::spawn_blocking(move || {
        let agent = attached.attach(|current| Agent::open(current, &gpus, delivery, published))?;
        agent.inventory.set_topology(asked.topology(&gpus));
        Ok::<_, OpenError>(agent)
    })
    .await??;
    let labels = labels::Keeper::new(Arc::clone(&agent), Arc::clone(&discovery));
    let _ = view.agent.set(Arc::clone(&agent));
    reloader.say_unsold();

    let reporting = kubernetes::report(Arc::clone(&agent), timing.events.clone());
    let mut others = ForeignWatch::new(
        Arc::clone(&agent),
        Arc::clone(&pod_resources),
        timing.foreign_plugins,
        timing.foreign_plugins_grace,
    );
    others.first().await;

    let mut stop_serving = stopped.clone();
    let (served, asked) = (Arc::clone(&agent), Arc::clone(&pod_resources));
    let serving = kubelet::serve(
        agent.advertised.resources(),
        &kubelet_dir,
        move |resource| Arc::new(Service::new(Arc::clone(&served), resource, Arc::clone(&asked))),
        async move {
            // An error means that the application itself is gone.
            let _ = stop_serving.wait_for(|stop| *stop).await;
        },
        kubelet::Options {
            timing: timing.kubelet.clone(),
            pod_resources: Some(pod_resources_socket),
        },
    )?;
    let _ = view.registration.set(serving.reports());

    let driver = dra::start(reloader.current(), &agent, &discovery, stopped.clone())?;
    let observing = observe::Watch::start(Arc::clone(&agent), Arc::clone(&discovery))?;
    let health = Watcher::start(discovery, Arc::clone(&agent))?;
    let recorder = Arc::new(Recorder::new(Arc::clone(&view)));
    source.set_past(Arc::clone(&recorder));
    tokio::select! {
        () = jobs::record(&recorder, &board, timing.history_look, timing.history_store) => {}
        () = beat(&agent, timing.heartbeat) => {}
        () = housekeeping(&agent, &pod_resources, &timing) => {}
        () = mend::keep(Arc::clone(&agent)) => {}
        () = others.run() => {}
        () = ask_again(&reloader, &agent) => {}
        () = labels.run() => {}
        () = reporting => {}
        () = &mut watching => {}
        _ = stopped.wait_for(|stop| *stop) => {}
    }
    if let Some(driver) = driver {
        // A panic has been reported.
        let _ = driver.await;
    }
    serving.finished().await;
    drop(observing);
    health.stop();
    jobs::finish(recorder).await;
    tokio::task::spawn_blocking(move || {
        labels.remove();
        agent.close();
    })
    .await?;
    Ok(())
}

/// Looks for GPUs until there are some, and says meanwhile what is missing.
async fn discover(
    discovery: &Arc<dyn Discovery>,
    current: &Current,
    board: &StatusBoard,
    interval: Duration,
) -> Vec<Gpu> {
    loop {
        let (looking, config) = (Arc::clone(discovery), current.get());
        let found = tokio::task::spawn_blocking(move || looking.gpus(&config.gpus)).await;
        let missing = match found {
            Ok(Ok(gpus)) => {
                board.set_condition("gpus", None);
                return gpus;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        board.set_silent(discovery.silent());
        let text = format!("waiting for GPUs, nothing is registered: {missing}");
        board.set_condition("gpus", Some(text));
        tokio::time::sleep(interval).await;
    }
}

/// Asks GPUs that were left out because they did not answer, as often as those that are sold.
async fn ask_again(reloader: &Arc<Reloader>, agent: &Agent) {
    loop {
        tokio::time::sleep(agent.config().health.probe_interval).await;
        let asking = Arc::clone(reloader);
        if let Err(error) = tokio::task::spawn_blocking(move || asking.ask_again()).await {
            error!(%error, "asking GPUs again");
        }
    }
}

async fn beat(agent: &Agent, interval: Duration) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        agent.allocations.pages.heartbeat(monotonic_ns());
    }
}

/// Compares ledger and kubelet now and then, and soon after a container has started. Every page is looked
/// at now and then alone: a start has looked at its own.
async fn housekeeping(agent: &Arc<Agent>, pod_resources: &PodResources, timing: &Timing) {
    let grace = || timing.release_grace.unwrap_or_else(|| agent.config().ledger.release_after);
    let mut due = tokio::time::Instant::now() + timing.reconcile.min(grace());
    loop {
        // However many containers start, what is due comes first.
        let soon = tokio::select! {
            biased;
            () = tokio::time::sleep_until(due) => false,
            () = agent.allocations.container_started() => true,
        };
        let began = Instant::now();
        if !soon {
            due = tokio::time::Instant::now() + timing.reconcile.min(grace());
            let inspected = Arc::clone(agent);
            if let Err(error) = tokio::task::spawn_blocking(move || {
                inspected.note_incidents();
                inspected.allocations.pages.keep_spares();
                inspected.allocations.reopen();
                inspected.settle_owed();
                inspected.journal.flush_audit(false);
            })
            .await
            {
                error!(%error, "inspection");
            }
        }
        // A container that starts is listed already; its neighbours of the same pod follow at once.
        let max_age = if soon { Duration::ZERO } else { timing.reconcile / 2 };
        let inspected = began.elapsed();
        let began = Instant::now();
        match pod_resources.census(max_age).await {
            Ok(census) => {
                agent.board.set_condition("pod-resources", None);
                let asked = began.elapsed();
                let began = Instant::now();
                let (agent, grace) = (Arc::clone(agent), grace());
                let shim_grace = timing.shim_grace;
                let round = tokio::task::spawn_blocking(move || {
                    agent.reconcile(&census, grace);
                    agent.allocations.sweep_shims(shim_grace);
                });
                if let Err(error) = round.await {
                    error!(%error, "housekeeping");
                }
                let inspected = (!soon).then_some(inspected.as_micros());
                debug!(
                    inspect_us = inspected,
                    pod_resources_us = asked.as_micros(),
                    compare_us = began.elapsed().as_micros(),
                    "a housekeeping round"
                );
            }
            Err(error) => {
                let text = format!("pods' names are unknown and nothing is released: {error}");
                agent.board.set_condition("pod-resources", Some(text));
            }
        }
    }
}

/// Raises the soft limit of open files to the hard one: an allocation takes three, a session two.
pub fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        warn!(%error, "the limit of open files stays as it is");
    }
}

/// Directories and files get the modes that the plugin means, whatever umask a unit, a shell or an image hands down:
/// under 077 nobody but root could enter them, under 0 anybody could replace a shim.
pub fn set_umask() {
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
}

/// Prepares the host for a plugin with fewer rights: the pages' tmpfs, the shim.
pub fn prepare_host(config: &Config, shim: Option<&Path>) -> anyhow::Result<String> {
    let pages = root::ensure(
        &config.paths.pages,
        tessera_config::TmpfsPolicy::Require,
        config.pages.size_bytes,
    )?;
    let source = shim.map(Path::to_owned).or_else(|| config.paths.shim_source.clone());
    let source = source.unwrap_or_else(shim_install::default_source);
    let delivery = shim_install::install(&source, &config.paths.shim)?;
    Ok(format!("{}: {pages}\n{}: installed", config.paths.pages.display(), delivery.shim.display()))
}
