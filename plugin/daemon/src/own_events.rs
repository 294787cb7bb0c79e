//! Events on the plugin's own pod: directories that were removed under it, which no owner of a pod can mend.

use std::sync::Arc;
use std::time::Duration;

use tessera_agent::status_board::StatusBoard;
use tessera_cluster::events::{EventClient, PodEvent};
use tessera_cluster::{Access, Client};
use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tracing::{debug, warn};

/// Longest wait for the API server.
const LIMIT: Duration = Duration::from_secs(10);
/// How long to wait after a failure.
const AGAIN: Duration = Duration::from_secs(60);
/// How often it is looked which directories were removed.
const LOOK: Duration = Duration::from_secs(10);
/// Longest message that an event may have, bytes (core/v1 Event, validation).
const LONGEST: usize = 1024;

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

    /// Makes an event of what there is to say, once for each state of it, for as long as
    /// it is polled.
    pub(super) async fn report(self, board: Arc<StatusBoard>) {
        let mut reported = Vec::new();
        loop {
            let found = board.removed();
            let is_said = found == reported || self.create("DirectoryRemoved", &found).await;
            if is_said {
                reported = found;
            }
            tokio::time::sleep(if is_said { LOOK } else { AGAIN }).await;
        }
    }

    /// False where it is to be tried again.
    async fn create(&self, reason: &str, lacks: &[String]) -> bool {
        if lacks.is_empty() {
            return true;
        }
        let mut message = lacks.join("; ");
        printable::cut(&mut message, LONGEST);
        let now = unix_ms();
        let event = PodEvent {
            namespace: &self.namespace,
            pod: &self.pod,
            uid: self.uid.as_deref(),
            container: "",
            reason,
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
                debug!(name, reason, "an event on the own pod");
                true
            }
            Err(error) => {
                warn!(%error, reason, "no event on the own pod");
                false
            }
        }
    }
}
