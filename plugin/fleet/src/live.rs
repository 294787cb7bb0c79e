//! A fleet that is asked again and again while somebody looks: what the console shows, as a source of the web server.

use std::time::{Duration, Instant};

use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::explain::Explanations;
use tessera_view::trace::Trace;
use tessera_view::{fleet, history};
use tessera_web::Source;
use tessera_web::source::Answer;
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
    fleet: Fleet,
    every: Duration,
    /// When somebody looked last.
    looks: watch::Sender<Option<Instant>>,
    /// Counts rounds; the last failure of all.
    rounds: watch::Receiver<(u64, Option<AskError>)>,
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
        let (round, rounds) = watch::channel((0, None));
        let (looks, looked) = watch::channel(None);
        let task = tokio::spawn(ask(fleet.clone(), every, looked, round));
        Live { fleet, every, looks, rounds, task }
    }

    /// What is known, not much older than `every`. The first look waits for the first answers.
    pub async fn look(&self) -> Result<fleet::Fleet, AskError> {
        let before = self.looks.send_replace(Some(Instant::now()));
        let mut rounds = self.rounds.clone();
        if !is_recent(before) {
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

/// Whether somebody looks.
fn is_recent(look: Option<Instant>) -> bool {
    look.is_some_and(|at| at.elapsed() <= ATTENTION)
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

/// Asks as long as somebody looks.
async fn ask(
    fleet: Fleet,
    every: Duration,
    mut looked: watch::Receiver<Option<Instant>>,
    round: watch::Sender<(u64, Option<AskError>)>,
) {
    let mut places: Vec<Place> = Vec::new();
    let mut read: Option<Instant> = None;
    // Nobody can look any more where it is an error.
    while looked.wait_for(|look| is_recent(*look)).await.is_ok() {
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
            let _ = tokio::time::timeout(every, all).await;
            // Those that have not answered go on; their nodes are not asked twice.
            tasks.detach_all();
        }
        round.send_modify(|(round, last)| {
            *round += 1;
            *last = failure;
        });
        tokio::time::sleep(every).await;
    }
}
