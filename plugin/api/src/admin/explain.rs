//! Explain: what the plugin knows, put together for [`crate::explain`].

use std::sync::Arc;

use super::status::StatusView;
use crate::explain;
use crate::explain::{Facts, Unknown};
use tessera_agent::Agent;
use tessera_model::printable;
use tessera_store::Lines;
use tessera_view::explain::Explanation;
use tessera_web::SourceError;

/// Longest subject, bytes: a namespace, a pod and a container are no longer.
const LONGEST: usize = 512;

/// Answers. Blocking: it reads the pages and the ledger, and asks the driver.
pub(crate) fn explanation(view: &StatusView, subject: &str) -> Result<Explanation, SourceError> {
    if subject.trim().is_empty() || subject.len() > LONGEST {
        return Err(SourceError::Invalid("name a pod, an allocation or a GPU".to_owned()));
    }
    let facts = match view.agent() {
        Some(agent) => facts(view, agent, subject),
        None => Facts {
            status: view.status(),
            records: Vec::new(),
            trail: Lines::default(),
            config: view.config(),
            gpus: Vec::new(),
            page_versions: Default::default(),
            remarks: vec!["the plugin is still starting".to_owned()],
        },
    };
    explain::answer(&facts, subject).map_err(|unknown| match unknown {
        Unknown::Nothing { .. } => SourceError::NotFound(printable::reason(&unknown)),
        Unknown::Several(_) => SourceError::Invalid(printable::reason(&unknown)),
    })
}

fn facts(view: &StatusView, agent: &Arc<Agent>, subject: &str) -> Facts {
    // Counters are read below: the trail must not be behind them.
    agent.note_incidents_for_view();
    // One look, so that what is said of limits and of their sums is of one moment.
    // Where nobody is in a page, nothing is that a story is of: that is most of it.
    let survey = view.survey(&|region| Some(region.recover_and_snapshot()));
    let books = survey.books.as_ref();
    let records: Vec<_> = books.map_or_else(Vec::new, |books| {
        books.allocations.iter().map(|(record, _)| Arc::clone(record)).collect()
    });
    let page_versions = records.iter().filter_map(|record| {
        let version = tessera_region::quota::abi_in(&agent.allocations().pages_of(&record.id))?;
        Some((record.id.to_string(), version))
    });
    let gpus = books.map_or_else(Vec::new, |books| {
        books.catalogue.gpus.values().map(|sold| sold.gpu.clone()).collect()
    });
    let mut facts = Facts {
        page_versions: page_versions.collect(),
        status: survey.status,
        records,
        trail: Lines::default(),
        config: view.config(),
        gpus,
        remarks: Vec::new(),
    };
    let journal = agent.journal();
    let read = journal.read_trail(|trail| {
        // Asked after the trail was begun: no line is in both.
        let waiting = journal.waiting_events();
        explain::trail::add(&mut facts, subject, &waiting, |filter| trail.read(filter))
    });
    if let Err(error) = read {
        facts.remarks.push(format!("the audit trail cannot be read: {error}"));
    }
    facts
}
