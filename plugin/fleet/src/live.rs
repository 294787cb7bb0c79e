//! A fleet that is asked again and again while somebody looks: what the console shows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::fleet::{Fleet, FleetError};
use crate::places::Place;

/// How long it is asked on after the last look.
const ATTENTION: Duration = Duration::from_secs(60);
/// How often the list of nodes is read.
const PLACES: Duration = Duration::from_secs(15);

/// See the module's text. Asking ends with its drop.
#[derive(Debug)]
pub struct Live {
    pub(crate) fleet: Fleet,
    every: Duration,
    began: Instant,
    /// The last look, in milliseconds since the beginning.
    looked_ms: Arc<AtomicU64>,
    /// Counts rounds; the last failure of all.
    rounds: watch::Receiver<(u64, Option<FleetError>)>,
    wake: Arc<tokio::sync::Notify>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Live {
    /// Asks each node `every` so often. To be called within a runtime.
    pub fn start(fleet: Fleet, every: Duration) -> Self {
        let looked_ms = Arc::new(AtomicU64::new(0));
        let (round, rounds) = watch::channel((0, None));
        let wake = Arc::new(tokio::sync::Notify::new());
        let began = Instant::now();
        let task = Task {
            fleet: fleet.clone(),
            every,
            began,
            looked_ms: Arc::clone(&looked_ms),
            round,
            wake: Arc::clone(&wake),
        };
        let task = tokio::spawn(task.run());
        Live { fleet, every, began, looked_ms, rounds, wake, task }
    }

    /// What is known, not much older than `every`. The first look waits for the first answers.
    ///
    /// # Errors
    /// Nothing is known, and nothing can be asked.
    pub async fn look(&self) -> Result<tessera_view::fleet::Fleet, FleetError> {
        let now = millis(self.began.elapsed());
        let before = self.looked_ms.swap(now.max(1), Ordering::SeqCst);
        self.wake.notify_one();
        let is_stale = before == 0 || Duration::from_millis(now.saturating_sub(before)) > ATTENTION;
        let mut rounds = self.rounds.clone();
        if is_stale {
            let at = rounds.borrow_and_update().0;
            let limit = self.fleet.options().limit + self.every;
            // A node that stalls is not waited for: it is shown as it is.
            let _ = tokio::time::timeout(limit, rounds.wait_for(|(round, _)| *round > at)).await;
        }
        let known = self.fleet.known();
        let failure = rounds.borrow().1.clone();
        match failure {
            Some(error) if known.nodes.is_empty() => Err(error),
            _ => Ok(known),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

struct Task {
    fleet: Fleet,
    every: Duration,
    began: Instant,
    looked_ms: Arc<AtomicU64>,
    round: watch::Sender<(u64, Option<FleetError>)>,
    wake: Arc<tokio::sync::Notify>,
}

impl Task {
    async fn run(self) {
        let mut places: Vec<Place> = Vec::new();
        let mut read: Option<Instant> = None;
        loop {
            let looked = self.looked_ms.load(Ordering::SeqCst);
            let idle = Duration::from_millis(millis(self.began.elapsed()).saturating_sub(looked));
            if looked == 0 || idle > ATTENTION {
                self.wake.notified().await;
                continue;
            }
            let mut failure = None;
            if read.is_none_or(|at| at.elapsed() >= PLACES) {
                match self.fleet.places().await {
                    Ok(now) => {
                        self.fleet.set_places(&now);
                        (places, read) = (now, Some(Instant::now()));
                    }
                    Err(error) => {
                        self.fleet.fail(&error);
                        (failure, read) = (Some(error), None);
                    }
                }
            }
            if failure.is_none() {
                let mut tasks = self.fleet.round(&places, true);
                let all = async { while tasks.join_next().await.is_some() {} };
                let _ = tokio::time::timeout(self.every, all).await;
                // Those that have not answered go on; their nodes are not asked twice.
                tasks.detach_all();
            }
            self.round.send_modify(|(round, last)| {
                *round += 1;
                *last = failure;
            });
            tokio::time::sleep(self.every).await;
        }
    }
}
