//! A fleet as what the web server shows.

use tessera_view::advice::{Recommendations, Waste};
use tessera_view::explain::Explanations;
use tessera_view::trace::Trace;
use tessera_view::{fleet, history};
use tessera_web::source::{Answer, Scope};
use tessera_web::{Source, SourceError};

use crate::fleet::{Fleet, FleetError};
use crate::live::Live;
use crate::merge::{self, answered};

fn unavailable(error: FleetError) -> SourceError {
    match error {
        FleetError::NoPlugin(text) => SourceError::NotFound(text),
        FleetError::Kubeconfig(text) | FleetError::Cluster(text) | FleetError::Forbidden(text) => {
            SourceError::Unavailable(text)
        }
    }
}

impl Source for Live {
    fn fleet(&self) -> Answer<'_, fleet::Fleet> {
        Box::pin(async { self.look().await.map_err(unavailable) })
    }

    fn history<'a>(&'a self, node: &'a str, query: history::Query) -> Answer<'a, history::Answer> {
        Box::pin(async move { one_history(&self.fleet, node, query).await })
    }

    fn explain<'a>(&'a self, node: &'a str, subject: &'a str) -> Answer<'a, Explanations> {
        Box::pin(async move { one_explanation(&self.fleet, node, subject).await })
    }

    fn recommend(&self, scope: Scope) -> Answer<'_, Recommendations> {
        Box::pin(async move { self.fleet.recommendations(&scope).await.map_err(unavailable) })
    }

    fn waste(&self, scope: Scope) -> Answer<'_, Waste> {
        Box::pin(async move { self.fleet.waste(&scope).await.map_err(unavailable) })
    }

    fn trace<'a>(&'a self, node: &'a str, seconds: u32) -> Answer<'a, Trace> {
        Box::pin(async move {
            let traces = self.fleet.traces(node, "", seconds).await.map_err(unavailable)?;
            let (traces, _) = answered(traces).map_err(SourceError::from)?;
            Ok(Trace::joined(traces))
        })
    }
}

async fn one_history(
    fleet: &Fleet,
    node: &str,
    query: history::Query,
) -> Result<history::Answer, SourceError> {
    let answers = fleet.histories(node, &query).await.map_err(unavailable)?;
    Ok(merge::history(answers)?)
}

async fn one_explanation(
    fleet: &Fleet,
    node: &str,
    subject: &str,
) -> Result<Explanations, SourceError> {
    let answers = fleet.explanations(node, subject).await.map_err(unavailable)?;
    Ok(merge::explanations(answers)?)
}
