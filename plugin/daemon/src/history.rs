//! When the history is recorded: it never delays kubelet, and nothing depends on it.

use std::sync::Arc;
use std::time::Duration;

use tessera_agent::status_board::StatusBoard;
use tessera_api::history::Recorder;
use tessera_history::{FlushError, Found};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

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
    if let Ok(Some(found)) = &stored {
        say_found(board, found);
    }
    board.set_condition("history", stored.err().map(|error| error.to_string()));
}

fn say_found(board: &StatusBoard, found: &Found) {
    let text = match found {
        Found::Existing => return,
        Found::Created => {
            info!("a new history");
            return;
        }
        Found::Aside { kept_as, reason } => format!(
            "the history could not be used ({reason}); it is kept as {}, and another one goes on",
            kept_as.display()
        ),
    };
    board.note(text);
}
