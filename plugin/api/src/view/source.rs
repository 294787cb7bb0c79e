//! The node, to the JSON API.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tessera_arbiter::trace::Tracing;
use tessera_model::clock::unix_ms;
use tessera_tenant::regions::Region;
use tessera_view::advice::{Recommendations, Waste};
use tessera_view::explain::Explanations;
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::node::Node;
use tessera_view::trace::Trace;
use tessera_view::{API_VERSION, history};
use tessera_web::source::{Answer, Scope, Source, SourceError};

use crate::admin::{StatusView, Turns};
use crate::explain;
use crate::history::Recorder;

/// Questions that are worked on at a time, each on a thread that may block: the others are left to kubelet's calls
/// and to metrics.
const AT_WORK: usize = 2;

const STARTS: &str = "the plugin has not found its GPUs yet; try again";
const NO_ARBITER: &str =
    "nobody divides GPU time on this node: its arbiter could not start; `tessera status` says why";

/// See the module. A clone is the same source.
#[derive(Clone)]
pub struct NodeSource {
    shared: Arc<Shared>,
}

struct Shared {
    view: Arc<StatusView>,
    name: String,
    past: OnceLock<Arc<Recorder>>,
    turns: Turns,
}

impl fmt::Debug for NodeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeSource").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

impl NodeSource {
    /// Of a node of this name. Call it within the runtime whose threads may block.
    pub fn new(name: String, view: Arc<StatusView>) -> Self {
        let (past, turns) = (OnceLock::new(), Turns::new(AT_WORK));
        NodeSource { shared: Arc::new(Shared { view, name, past, turns }) }
    }

    /// From now on, this answers what was.
    pub fn set_past(&self, past: Arc<Recorder>) {
        // Set once by the start.
        let _ = self.shared.past.set(past);
    }

    /// Does it on a thread that may block.
    async fn at_work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Result<T, SourceError> + Send + 'static,
    ) -> Result<T, SourceError> {
        let shared = Arc::clone(&self.shared);
        self.shared.turns.block(move || work(&shared)).await
    }

    fn check(&self, node: &str) -> Result<(), SourceError> {
        let name = &self.shared.name;
        match node.is_empty() || node == name {
            true => Ok(()),
            false => Err(SourceError::NotFound(format!("this is node {name} and no other"))),
        }
    }
}

impl Shared {
    /// Changes nothing, and waits for no tenant.
    fn node(&self) -> Node {
        let status = self.view.survey(&Region::try_snapshot).status;
        super::node(&self.name, &status, self.view.amiss())
    }

    fn tracing(&self) -> Result<Tracing, SourceError> {
        let unavailable = |text: String| SourceError::Unavailable(text);
        let agent = self.view.agent().ok_or_else(|| unavailable(STARTS.to_owned()))?;
        let arbiter = agent.allocations().arbiter();
        let arbiter = arbiter.ok_or_else(|| unavailable(NO_ARBITER.to_owned()))?;
        arbiter.trace().map_err(|error| unavailable(error.to_string()))
    }

    fn asked<T>(
        &self,
        ask: impl FnOnce(&Recorder, &Node) -> Result<T, SourceError>,
    ) -> Result<T, SourceError> {
        let starts = || SourceError::Unavailable(STARTS.to_owned());
        ask(self.past.get().ok_or_else(starts)?, &self.node())
    }
}

impl Source for NodeSource {
    fn fleet(&self) -> Answer<'_, Fleet> {
        Box::pin(self.at_work(|shared| {
            let view = shared.node();
            let entry = Entry {
                node: shared.name.clone(),
                answers: true,
                answered_unix_ms: view.at_unix_ms,
                error: String::new(),
                view: Some(view),
            };
            Ok(Fleet {
                api_version: API_VERSION.to_owned(),
                name: String::new(),
                at_unix_ms: unix_ms(),
                nodes: vec![entry],
            })
        }))
    }

    fn history<'a>(&'a self, node: &'a str, query: history::Query) -> Answer<'a, history::Answer> {
        Box::pin(async move {
            self.check(node)?;
            self.at_work(move |shared| shared.asked(|past, now| past.history(now, &query))).await
        })
    }

    fn explain<'a>(&'a self, node: &'a str, subject: &'a str) -> Answer<'a, Explanations> {
        Box::pin(async move {
            self.check(node)?;
            let subject = subject.to_owned();
            self.at_work(move |shared| {
                let explanation = explain::explanation(&shared.view, &subject)?;
                Ok(Explanations::of(vec![(shared.name.clone(), explanation)]))
            })
            .await
        })
    }

    fn recommend(&self, scope: Scope) -> Answer<'_, Recommendations> {
        Box::pin(self.at_work(move |shared| shared.asked(|past, now| past.recommend(now, &scope))))
    }

    fn waste(&self, scope: Scope) -> Answer<'_, Waste> {
        Box::pin(self.at_work(move |shared| shared.asked(|past, now| past.waste(now, &scope))))
    }

    fn trace<'a>(&'a self, node: &'a str, seconds: u32) -> Answer<'a, Trace> {
        Box::pin(async move {
            self.check(node)?;
            let begun = self.at_work(|shared| Ok((shared.node(), shared.tracing()?, unix_ms())));
            let (before, tracing, begun_unix_ms) = begun.await?;
            // Whoever asked may be gone before: then `tracing` is dropped here, and no turn is taken.
            tokio::time::sleep(Duration::from_secs(seconds.into())).await;
            self.at_work(move |shared| {
                let recording = tracing.end();
                let recording = recording.map_err(|e| SourceError::Unavailable(e.to_string()))?;
                Ok(super::trace::trace(&recording, &before, &shared.node(), begun_unix_ms))
            })
            .await
        })
    }
}
