//! Events on the plugin's own pod: what the API server lacks, which no owner of a pod can mend.

use std::time::Duration;

use tessera_cluster::events::{EventClient, PodEvent};
use tessera_cluster::{Access, Client};
use tessera_dra::publish::Status;
use tessera_model::clock::unix_ms;
use tokio::sync::watch;
use tracing::{debug, warn};

/// Longest wait for the API server.
const LIMIT: Duration = Duration::from_secs(10);
/// How long to wait after a failure.
const AGAIN: Duration = Duration::from_secs(60);
/// Longest message that an event may have, bytes (core/v1 Event, validation).
const LONGEST: usize = 1024;

/// Makes events on this pod.
pub(super) struct OwnEvents {
    client: EventClient,
    namespace: String,
    pod: String,
    uid: Option<String>,
}

impl OwnEvents {
    /// On the pod that the environment names (POD_NAME, POD_NAMESPACE, POD_UID); `None` outside of pods.
    pub(super) fn of_pod(access: &Access, node: &str) -> Option<Self> {
        let named = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Some(OwnEvents {
            client: EventClient::new(Client::new(access.clone(), LIMIT), node.to_owned()),
            namespace: named("POD_NAMESPACE")?,
            pod: named("POD_NAME")?,
            uid: named("POD_UID"),
        })
    }

    /// Makes an event when the API server turns out to lack something, once for each state of it, for as long as
    /// it is polled.
    pub(super) async fn report(self, mut published: watch::Receiver<Status>) {
        let mut reported: Vec<String> = Vec::new();
        loop {
            let lacks = published.borrow_and_update().lacks();
            if lacks == reported || self.create(&lacks).await {
                reported = lacks;
                if published.changed().await.is_err() {
                    return;
                }
            } else {
                tokio::time::sleep(AGAIN).await;
            }
        }
    }

    /// False where it is to be tried again.
    async fn create(&self, lacks: &[String]) -> bool {
        if lacks.is_empty() {
            return true;
        }
        let mut message = lacks.join("; ");
        let end = (0..=LONGEST.min(message.len())).rev().find(|at| message.is_char_boundary(*at));
        message.truncate(end.unwrap_or(0));
        let now = unix_ms();
        let event = PodEvent {
            namespace: &self.namespace,
            pod: &self.pod,
            uid: self.uid.as_deref(),
            container: "",
            reason: "DRALimited",
            message: &message,
            warning: true,
            count: 1,
            first_unix_ms: now,
            last_unix_ms: now,
        };
        let made = self.client.create(&event).await;
        self.client.rest().await;
        match made {
            Ok(name) => {
                debug!(name, "an event says what the API server lacks");
                true
            }
            Err(error) => {
                warn!(%error, "no event says what the API server lacks");
                false
            }
        }
    }
}
