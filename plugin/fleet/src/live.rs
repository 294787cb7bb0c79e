//! A fleet that is asked again and again while somebody looks: what the console shows, as a source of the web server.

use std::time::{Duration, Instant};

use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::explain::Explanations;
use tessera_view::trace::Trace;
use tessera_view::{fleet, history};
use tessera_web::Source;
use tessera_web::source::Answer;
use tokio::sync::Mutex;

use crate::ask::AskError;
use crate::fleet::Fleet;
use crate::merge::{self, answered};
use crate::places::Place;

/// How often the list of nodes is read.
const PLACES: Duration = Duration::from_secs(15);
/// How long a look waits for answers.
const PATIENCE: Duration = Duration::from_millis(250);

/// See the module's text.
#[derive(Debug)]
pub struct Live {
    fleet: Fleet,
    every: Duration,
    asked: Mutex<Asked>,
}

#[derive(Debug, Default)]
struct Asked {
    places: Vec<Place>,
    /// When they were read.
    read: Option<Instant>,
    /// When the nodes were last asked.
    at: Option<Instant>,
}

impl Live {
    /// Asks each node at most `every` so often.
    pub fn new(fleet: Fleet, every: Duration) -> Self {
        Live { fleet, every, asked: Mutex::default() }
    }

    /// What is known, not much older than `every`. A node that takes long is shown as it was: its answer is for a later
    /// look. The first look waits for the first answers.
    pub async fn look(&self) -> Result<fleet::Fleet, AskError> {
        let mut asked = self.asked.lock().await;
        if asked.at.is_some_and(|at| at.elapsed() < self.every) {
            return Ok(self.fleet.known());
        }
        if asked.read.is_none_or(|at| at.elapsed() >= PLACES) {
            match self.fleet.places().await {
                Ok(places) => {
                    self.fleet.set_places(&places);
                    (asked.places, asked.read) = (places, Some(Instant::now()));
                }
                Err(error) => {
                    self.fleet.fail(&error);
                    let known = self.fleet.known();
                    return if known.nodes.is_empty() { Err(error) } else { Ok(known) };
                }
            }
        }
        let first = asked.at.replace(Instant::now()).is_none();
        let limit = if first { self.fleet.options().limit } else { PATIENCE };
        let _ = tokio::time::timeout(limit, self.fleet.round(&asked.places, true)).await;
        Ok(self.fleet.known())
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
