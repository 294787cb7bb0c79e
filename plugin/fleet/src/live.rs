//! A fleet that is asked again and again while somebody looks: what the console shows, as a source of the web server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tessera_view::advice::{Recommendations, Waste};
use tessera_view::explain::Explanations;
use tessera_view::trace::Trace;
use tessera_view::{fleet, history};
use tessera_web::Source;
use tessera_web::source::{Answer, Scope};
use tokio::sync::watch;

use crate::ask::AskError;
use crate::fleet::Fleet;
use crate::merge::{self, answered};
use crate::places::Place;

/// How long it is asked on after the last look.
const ATTENTION: Duration = Duration::from_secs(60);
/// How often the list of nodes is read.
const PLACES: Duration = Duration::from_secs(15);

/// See the module's text. Asking ends with its drop.
#[derive(Debug)]
pub struct Live {
    pub(crate) fleet: Fleet,
    attention: Arc<Attention>,
    /// Counts rounds; the last failure of all.
    rounds: watch::Receiver<(u64, Option<AskError>)>,
    task: tokio::task::JoinHandle<()>,
}

/// Whether somebody looks.
#[derive(Debug)]
struct Attention {
    every: Duration,
    began: Instant,
    /// The last look, in milliseconds since the beginning.
    looked_ms: AtomicU64,
    wake: tokio::sync::Notify,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Live {
    /// Asks each node `every` so often. To be called within a runtime.
    pub fn start(fleet: Fleet, every: Duration) -> Self {
        let (round, rounds) = watch::channel((0, None));
        let attention = Arc::new(Attention {
            every,
            began: Instant::now(),
            looked_ms: AtomicU64::new(0),
            wake: tokio::sync::Notify::new(),
        });
        let task = tokio::spawn(ask(fleet.clone(), Arc::clone(&attention), round));
        Live { fleet, attention, rounds, task }
    }

    /// What is known, not much older than `every`. The first look waits for the first answers.
    pub async fn look(&self) -> Result<fleet::Fleet, AskError> {
        let Attention { every, began, looked_ms, wake } = &*self.attention;
        let now = millis(began.elapsed());
        let before = looked_ms.swap(now.max(1), Ordering::SeqCst);
        wake.notify_one();
        let is_stale = before == 0 || Duration::from_millis(now.saturating_sub(before)) > ATTENTION;
        let mut rounds = self.rounds.clone();
        if is_stale {
            let at = rounds.borrow_and_update().0;
            let limit = self.fleet.options().limit + *every;
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

impl Source for Live {
    fn fleet(&self) -> Answer<'_, fleet::Fleet> {
        Box::pin(async { Ok(self.look().await?) })
    }

    fn history<'a>(&'a self, node: &'a str, query: history::Query) -> Answer<'a, history::Answer> {
        Box::pin(async move { Ok(merge::history(self.fleet.histories(node, &query).await?)?) })
    }

    fn explain<'a>(&'a self, node: &'a str, subject: &'a str) -> Answer<'a, Explanations> {
        Box::pin(
            async move { Ok(merge::explanations(self.fleet.explanations(node, subject).await?)?) },
        )
    }

    fn recommend(&self, scope: Scope) -> Answer<'_, Recommendations> {
        Box::pin(async move { Ok(self.fleet.recommendations(&scope).await?) })
    }

    fn waste(&self, scope: Scope) -> Answer<'_, Waste> {
        Box::pin(async move { Ok(self.fleet.waste(&scope).await?) })
    }

    fn trace<'a>(&'a self, node: &'a str, seconds: u32) -> Answer<'a, Trace> {
        Box::pin(async move {
            let (traces, _) = answered(self.fleet.traces(node, "", seconds).await?)?;
            Ok(Trace::joined(traces))
        })
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Asks as long as somebody looks.
async fn ask(
    fleet: Fleet,
    attention: Arc<Attention>,
    round: watch::Sender<(u64, Option<AskError>)>,
) {
    let Attention { every, began, looked_ms, wake } = &*attention;
    let mut places: Vec<Place> = Vec::new();
    let mut read: Option<Instant> = None;
    loop {
        let looked = looked_ms.load(Ordering::SeqCst);
        let idle = Duration::from_millis(millis(began.elapsed()).saturating_sub(looked));
        if looked == 0 || idle > ATTENTION {
            wake.notified().await;
            continue;
        }
        let mut failure = None;
        if read.is_none_or(|at| at.elapsed() >= PLACES) {
            match fleet.places().await {
                Ok(now) => {
                    fleet.set_places(&now);
                    (places, read) = (now, Some(Instant::now()));
                }
                Err(error) => {
                    fleet.fail(&error);
                    (failure, read) = (Some(error), None);
                }
            }
        }
        if failure.is_none() {
            let mut tasks = fleet.round(&places, true);
            let all = async { while tasks.join_next().await.is_some() {} };
            let _ = tokio::time::timeout(*every, all).await;
            // Those that have not answered go on; their nodes are not asked twice.
            tasks.detach_all();
        }
        round.send_modify(|(round, last)| {
            *round += 1;
            *last = failure;
        });
        tokio::time::sleep(*every).await;
    }
}
