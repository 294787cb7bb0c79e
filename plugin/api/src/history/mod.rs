//! What was: the recorder, which hands looks at everything to `tessera-history`, and answers from it.
//!
//! - [`advice`]: pure, what follows from figures
//! - [`events`]: pure, lines of the audit trail as events of an answer

mod advice;
mod events;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tessera_config::Config;
use tessera_history::{FlushError, Found, History, Options, QueryError};
use tessera_model::clock::monotonic_ns;
use tessera_store::Filter;
use tessera_tenant::regions::Region;
use tessera_view::advice::{Recommendations, Waste};
use tessera_view::history::{Answer, Query};
use tessera_view::node::Node;
use tessera_web::source::{Scope, SourceError};

use crate::admin::StatusView;

/// Looks in a row that are left to the next one where the arbiter does not answer.
const UNHEARD: u32 = 5;

/// Records what the node does. All of it is blocking.
pub struct Recorder {
    view: Arc<StatusView>,
    history: History,
    /// Looks in a row that the arbiter did not answer.
    unheard: AtomicU32,
}

/// Where and how the history of a node with this configuration is kept.
pub fn options(config: &Config) -> Options {
    Options {
        path: tessera_history::beside(&config.paths.ledger),
        bound: config.history.size_bytes,
        keep: config.history.keep_seconds(),
        sync: config.ledger.fsync,
    }
}

impl Recorder {
    /// Of a node. Nothing is opened yet.
    pub fn new(view: Arc<StatusView>) -> Self {
        let history = History::new(options(&view.config()));
        Recorder { view, history, unheard: AtomicU32::new(0) }
    }

    /// Whether the configuration in force has it.
    pub fn is_on(&self) -> bool {
        self.view.config().history.enabled
    }

    /// Looks at everything once, changes nothing and waits for no tenant. The driver is asked for each GPU's memory in
    /// use. Where the arbiter does not answer, the next look is of this one's time as well: GPU time is spread over the
    /// time that it is of. One that stays silent is not waited for: memory goes on without it.
    pub fn look(&self) {
        let Some(agent) = self.view.agent().filter(|_| self.is_on()) else { return };
        let survey = self.view.survey(&Region::try_snapshot);
        let is_silent = survey.arbiter.is_none() && agent.allocations().arbiter().is_some();
        let unheard = if is_silent { self.unheard.fetch_add(1, Ordering::Relaxed) + 1 } else { 0 };
        if (1..=UNHEARD).contains(&unheard) {
            return;
        }
        self.unheard.store(0, Ordering::Relaxed);
        self.history.look(&survey.status, &survey.unread, monotonic_ns() / 1_000_000);
    }

    /// Stores what was seen, by the configuration in force; where it is off now, lets go of the file.
    pub fn flush(&self) -> Result<Option<Found>, FlushError> {
        if !self.is_on() {
            self.history.stop();
            return Ok(None);
        }
        self.history.set_options(options(&self.view.config()));
        self.name_gone();
        self.history.flush(false)
    }

    /// Stores everything and lets go of the file.
    pub fn close(&self) -> Result<(), FlushError> {
        self.name_gone();
        self.history.close()
    }

    /// Names tenants that ended before a look could see their names, by the audit trail.
    fn name_gone(&self) {
        let nameless = self.history.nameless();
        let Some(agent) = self.view.agent().filter(|_| !nameless.is_empty()) else { return };
        let filter = Filter::mentioning(nameless.iter().map(|(id, _)| id.as_bytes()));
        match agent.journal().read_trail(|trail| trail.read(&filter)) {
            Ok(lines) => self.history.name(&events::names(&lines, &nameless)),
            // They stay without names.
            Err(error) => tracing::debug!(%error, "the audit trail names nobody"),
        }
    }

    /// What was, with what happened. `now` is the node at this moment.
    pub(crate) fn history(&self, now: &Node, query: &Query) -> Result<Answer, SourceError> {
        let mut answer = self.figures(now, query)?;
        self.add_events(&mut answer, query);
        Ok(answer)
    }

    /// What to ask for instead.
    pub(crate) fn recommend(
        &self,
        now: &Node,
        scope: &Scope,
    ) -> Result<Recommendations, SourceError> {
        let figures = |query: &Query| self.figures(now, query);
        advice::recommend(&figures, &self.view.config().advice, now, scope)
    }

    /// What is asked and not used.
    pub(crate) fn waste(&self, now: &Node, scope: &Scope) -> Result<Waste, SourceError> {
        let figures = |query: &Query| self.figures(now, query);
        advice::waste(&figures, &self.view.config().advice, now, scope)
    }

    /// What was, without what happened.
    fn figures(&self, now: &Node, query: &Query) -> Result<Answer, SourceError> {
        if !self.is_on() {
            return Err(SourceError::Unavailable(
                "nothing is recorded: history.enabled is false".to_owned(),
            ));
        }
        self.name_gone();
        self.history.answer(query, now).map_err(|error| match error {
            QueryError::NotFound(text) => SourceError::NotFound(text),
            QueryError::Invalid(text) => SourceError::Invalid(text),
            QueryError::Unavailable(text) => SourceError::Unavailable(text),
        })
    }

    /// Adds to an answer what happened meanwhile.
    fn add_events(&self, answer: &mut Answer, query: &Query) {
        let Some(agent) = self.view.agent() else { return };
        let filter = events::filter(answer, query);
        match agent.journal().read_trail(|trail| trail.read(&filter)) {
            Ok(mut lines) => {
                // Happened, and not written yet.
                lines.events.extend(agent.journal().waiting_events());
                events::add(answer, query, &lines);
            }
            Err(error) => {
                answer.remarks.push(format!("the audit trail cannot be read: {error}"));
            }
        }
    }
}
