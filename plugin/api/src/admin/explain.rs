//! Explain: what the plugin knows, put together for [`crate::explain`].

use std::path::Path;
use std::sync::Arc;

use tessera_kubelet_api::admin::{ExplainRequest, ExplainResponse};
use tonic::{Code, Status};

use super::client::{TIMEOUT, connect};
use super::status::StatusView;
use crate::explain;
use crate::explain::{Facts, Unknown};
use tessera_agent::Agent;
use tessera_model::printable;

/// Longest subject, bytes: a namespace, a pod and a container are no longer.
const LONGEST: usize = 512;

/// Answers. Blocking: it reads the pages and the ledger, and asks the driver.
pub(super) fn answer(
    view: &StatusView,
    request: &ExplainRequest,
) -> Result<ExplainResponse, Status> {
    let subject = request.subject.as_str();
    if subject.trim().is_empty() || subject.len() > LONGEST {
        return Err(Status::invalid_argument("name a pod, an allocation or a GPU"));
    }
    let facts = match view.agent() {
        Some(agent) => facts(view, agent),
        None => Facts {
            status: view.status(),
            records: Vec::new(),
            trail: Vec::new(),
            config: view.config(),
            gpus: Vec::new(),
            page_versions: Default::default(),
            remarks: vec!["the plugin is still starting".to_owned()],
            alone: false,
        },
    };
    explain::answer(&facts, subject).map_err(|unknown| match unknown {
        Unknown::Nothing { .. } => Status::not_found(printable::reason(&unknown)),
        Unknown::Several { .. } => Status::invalid_argument(printable::reason(&unknown)),
    })
}

fn facts(view: &StatusView, agent: &Arc<Agent>) -> Facts {
    let mut remarks = Vec::new();
    let mut trail = agent.journal().history(usize::MAX).unwrap_or_else(|error| {
        remarks.push(format!("the audit trail cannot be read: {error}"));
        Vec::new()
    });
    // Happened, and not written yet.
    trail.extend(agent.journal().waiting_events());
    // One look, so that what is said of limits and of their sums is of one moment.
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
    Facts {
        page_versions: page_versions.collect(),
        status: survey.status,
        records,
        trail,
        config: view.config(),
        gpus,
        remarks,
        alone: false,
    }
}

/// Why there is no explanation.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The plugin says why.
    Refused(String),
    /// The plugin does not answer.
    Silent(anyhow::Error),
}

/// The plugin's answer to Explain.
pub(crate) async fn explain(socket: &Path, subject: &str) -> Result<ExplainResponse, Failure> {
    let call = async {
        let mut client = connect(socket).await.map_err(Failure::Silent)?;
        let request = ExplainRequest { subject: subject.to_owned() };
        client.explain(request).await.map_err(|status| match status.code() {
            Code::NotFound | Code::InvalidArgument => Failure::Refused(status.message().to_owned()),
            Code::Unimplemented => Failure::Refused(
                "the plugin is of an earlier version, which explains nothing".into(),
            ),
            _ => Failure::Silent(anyhow::anyhow!("{}", status.message())),
        })
    };
    match tokio::time::timeout(TIMEOUT, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Failure::Silent(anyhow::anyhow!("it takes too long"))),
    }
}
