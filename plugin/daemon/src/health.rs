//! The thread that waits for GPU events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tracing::{debug, warn};

use tessera_agent::Agent;
use tessera_gpu::Discovery;
use tessera_gpu::health::Observation;
use tessera_model::gpu::Gpu;

/// How often a node without GPUs is asked whether it has some by now.
const IDLE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Watcher {
    stop: Arc<AtomicBool>,
}

/// What it watches, and how.
fn settings(agent: &Agent) -> (Vec<Gpu>, Duration) {
    (agent.inventory().catalogue().devices(), agent.config().health.probe_interval)
}

impl Watcher {
    pub(super) fn start(discovery: Arc<dyn Discovery>, agent: Arc<Agent>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let (sender, mut receiver) = mpsc::channel::<Observation>(64);
        let watched = Arc::clone(&agent);
        std::thread::Builder::new().name("health".into()).stack_size(256 << 10).spawn(
            move || {
                let sink = |observation| {
                    // A program can make as many of its own errors as it likes; none gets further. Of
                    // the others none is lost: this thread may wait. An error is the plugin's end.
                    if !watched.inventory().ignores(&observation) {
                        let _ = sender.blocking_send(observation);
                    }
                };
                let stopped = || stopping.load(Ordering::Relaxed) || sender.is_closed();
                while !stopped() {
                    watch(&*discovery, &watched, &stopped, &sink);
                }
            },
        )?;
        // The disk may keep the history waiting; health must not wait with it.
        let (history, mut events) = mpsc::channel(64);
        let recorder = Arc::clone(&agent);
        tokio::spawn(async move {
            while let Some(events) = events.recv().await {
                let agent = Arc::clone(&recorder);
                // One after the other, so that they are in order.
                let _ = tokio::task::spawn_blocking(move || agent.record_health(events)).await;
            }
        });
        tokio::spawn(async move {
            while let Some(observation) = receiver.recv().await {
                debug!(?observation, "health");
                let events = agent.observe(&observation);
                if events.is_empty() && !agent.inventory().has_unsaved_health() {
                    continue;
                }
                let is_line = !events.is_empty();
                if history.try_send(events).is_err() && is_line {
                    warn!("the history of GPUs has a gap: the disk does not keep up");
                }
            }
        });
        Ok(Watcher { stop })
    }

    /// The thread ends within a second; nobody waits for it.
    pub(super) fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Watches the GPUs that are sold until there are others, or others settings.
fn watch(
    discovery: &dyn Discovery,
    agent: &Agent,
    stopped: &(dyn Fn() -> bool + Sync),
    sink: &(dyn Fn(Observation) + Sync),
) {
    let edition = agent.inventory().catalogue().edition;
    let (gpus, interval) = settings(agent);
    let changed = || {
        agent.inventory().catalogue().edition != edition
            && settings(agent) != (gpus.clone(), interval)
    };
    let over = || stopped() || changed();
    let watched = match gpus.as_slice() {
        [] => Ok(()),
        gpus => discovery.watch(gpus, interval, &over, sink),
    };
    if let Err(reason) = &watched {
        agent.board().set_condition("health", Some(format!("GPU health is not watched: {reason}")));
    } else if !gpus.is_empty() {
        agent.board().set_condition("health", None);
    }
    while !over() && (watched.is_err() || gpus.is_empty()) {
        std::thread::sleep(IDLE);
    }
}
