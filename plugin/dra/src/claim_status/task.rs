//! Writes the status of claims' devices after Prepare, and when limits or health change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_agent::Agent;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_cluster::resource::ResourceApi;
use tessera_model::clock::unix_ms;
use tracing::warn;

use super::reports::Reports;

/// How long changes are gathered: a claim's requests are prepared one after the other.
const GATHER: Duration = Duration::from_millis(100);

/// See the module's text.
#[derive(Debug)]
pub struct Reporter {
    api: Arc<dyn ResourceApi>,
    agent: Arc<Agent>,
}

impl Reporter {
    pub fn new(api: Arc<dyn ResourceApi>, agent: Arc<Agent>) -> Self {
        Reporter { api, agent }
    }

    /// Writes until it is dropped.
    pub async fn run(self) {
        let (mut reports, mut events) = (Reports::default(), self.agent.advertised().events());
        loop {
            events.mark_unchanged();
            let agent = Arc::clone(&self.agent);
            let ask = move || {
                let catalogue = agent.inventory().catalogue();
                let gpus = catalogue.gpus.iter();
                let sick = gpus.filter_map(|(uuid, sold)| Some((uuid.clone(), sold.sick.clone()?)));
                super::of(&agent.claims(), &sick.collect())
            };
            if let Ok(wanted) = tokio::task::spawn_blocking(ask).await {
                let now = Timestamp::from_millisecond(unix_ms()).unwrap_or(Timestamp::UNIX_EPOCH);
                reports.want(wanted, now);
            }
            let pause = self.write(&mut reports).await;
            tokio::select! {
                changed = events.changed() => match changed {
                    Ok(()) => tokio::time::sleep(GATHER).await,
                    Err(_) => return,
                },
                () = sleep(pause) => {}
            }
        }
    }

    /// Writes what is due; how long to wait for the rest.
    async fn write(&self, reports: &mut Reports) -> Option<Duration> {
        loop {
            let (claim, devices) = match reports.next(Instant::now()) {
                Ok(None) => return None,
                Ok(Some((claim, devices))) => (claim.clone(), devices.to_vec()),
                Err(pause) => return Some(pause),
            };
            let answer = self.api.set_device_status(&claim, &devices).await;
            if reports.done(&claim, devices, &answer, Instant::now())
                && let Err(error) = answer
            {
                let name = format!("{}/{}", claim.namespace, claim.name);
                warn!(claim = name, %error, "the claim's device status is not written; nothing depends on it");
            }
        }
    }
}

async fn sleep(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
