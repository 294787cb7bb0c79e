//! What goes on beside kubelet's calls: the thread that waits for GPU events; and recording the history, which never delays
//! kubelet, and on which nothing depends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_agent::Agent;
use tessera_agent::status_board::StatusBoard;
use tessera_api::history::Recorder;
use tessera_gpu::Discovery;
use tessera_gpu::health::Observation;
use tessera_history::{FlushError, Found};
use tessera_model::gpu::Gpu;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tracing::{debug, info, warn};

/// How often a node without GPUs is asked whether it has some by now.
const IDLE: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Watcher {
    stop: Arc<AtomicBool>,
}

fn settings(agent: &Agent) -> (Vec<Gpu>, Duration) {
    (agent.inventory.catalogue().devices(), agent.config().health.probe_interval)
}

impl Watcher {
    pub(super) fn start(discovery: Arc<dyn Discovery>, agent: Arc<Agent>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        // The disk may keep the history waiting; health must not wait with it.
        let (history, mut events) = mpsc::channel(64);
        let recorder = Arc::clone(&agent);
        tokio::spawn(async move {
            while let Some(events) = events.recv().await {
                let inventory = Arc::clone(&recorder.inventory);
                // One after the other, so that they are in order.
                let save = move || inventory.save_health(events, false);
                let _ = tokio::task::spawn_blocking(save).await;
            }
        });
        std::thread::Builder::new().name("health".into()).stack_size(512 << 10).spawn(
            move || {
                let sink = |observation| {
                    // A program can make as many of its own errors as it likes; none gets further.
                    if agent.inventory.ignores(&observation) {
                        return;
                    }
                    debug!(?observation, "health");
                    let events = agent.observe(&observation);
                    let is_line = !events.is_empty();
                    let is_news = is_line || agent.inventory.has_unsaved_health();
                    if is_news && history.try_send(events).is_err() && is_line {
                        warn!("the history of GPUs has a gap: the disk does not keep up");
                    }
                };
                // An end of the channel is the plugin's.
                let stopped = || stopping.load(Ordering::Relaxed) || history.is_closed();
                while !stopped() {
                    watch(&*discovery, &agent, &stopped, &sink);
                }
            },
        )?;
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
    let edition = agent.inventory.catalogue().edition;
    let (gpus, interval) = settings(agent);
    let changed = || {
        agent.inventory.catalogue().edition != edition
            && settings(agent) != (gpus.clone(), interval)
    };
    let over = || stopped() || changed();
    let watched = match gpus.as_slice() {
        [] => Ok(()),
        gpus => discovery.watch(gpus, interval, &over, sink),
    };
    if let Err(reason) = &watched {
        agent.board.set_condition("health", Some(format!("GPU health is not watched: {reason}")));
    } else if !gpus.is_empty() {
        agent.board.set_condition("health", None);
    }
    while !over() && (watched.is_err() || gpus.is_empty()) {
        std::thread::sleep(IDLE);
    }
}

/// How long the end of the plugin waits for the history's disk.
const LAST: Duration = Duration::from_secs(3);

/// Looks and stores until it is dropped. What is under way then goes on to its end.
pub(crate) async fn record(
    recorder: &Arc<Recorder>,
    board: &Arc<StatusBoard>,
    look: Duration,
    store: Duration,
) {
    let mut looks = tokio::time::interval(look);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut stores = tokio::time::interval(store);
    stores.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut looking, mut storing): (Option<JoinHandle<()>>, Option<JoinHandle<()>>) = (None, None);
    let is_over = |task: &Option<JoinHandle<()>>| task.as_ref().is_none_or(JoinHandle::is_finished);
    loop {
        // A disk that does not answer holds up one thread, and no look.
        tokio::select! {
            _ = looks.tick() => {
                if is_over(&looking) {
                    let recorder = Arc::clone(recorder);
                    looking = Some(tokio::task::spawn_blocking(move || recorder.look()));
                }
            }
            _ = stores.tick() => {
                if is_over(&storing) {
                    let (recorder, board) = (Arc::clone(recorder), Arc::clone(board));
                    storing = Some(tokio::task::spawn_blocking(move || {
                        let stored = recorder.flush();
                        let writing = recorder.is_on().then_some(stored.is_ok());
                        board.publish(|facts| facts.history_writing = writing);
                        say(&board, stored);
                    }));
                } else {
                    // The disk does not answer.
                    let writing = recorder.is_on().then_some(false);
                    board.publish(|facts| facts.history_writing = writing);
                }
            }
        }
    }
}

/// Stores what is there, and lets go of the file for the next plugin.
pub(crate) async fn finish(recorder: Arc<Recorder>) {
    let closing = tokio::task::spawn_blocking(move || recorder.close());
    match tokio::time::timeout(LAST, closing).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => warn!("{error}"),
        Ok(Err(error)) => warn!(%error, "closing the history"),
        Err(_) => warn!("the history's disk does not answer: its last minute is lost"),
    }
}

fn say(board: &StatusBoard, stored: Result<Option<Found>, FlushError>) {
    match &stored {
        Ok(Some(Found::Created)) => info!("a new history"),
        Ok(Some(Found::Aside { kept_as, reason })) => board.note(format!(
            "the history could not be used ({reason}); it is kept as {}, and another one goes on",
            kept_as.display()
        )),
        Ok(Some(Found::Existing) | None) | Err(_) => {}
    }
    board.set_condition("history", stored.err().map(|error| error.to_string()));
}
