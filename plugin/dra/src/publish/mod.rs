//! What the scheduler knows of this node's GPUs: the driver's ResourceSlices.
//!
//! ```text
//!  GPUs, health, configuration ──► [`offer`] devices ──► [`controller`] next write ──► API server
//!                                                             ▲                          │
//!                                                             └── what there is, what it kept ┘
//! ```
//!
//! - [`device`]: the parts of a device; [`offer`]: all devices, in their order
//! - [`slices`]: devices cut into slices, and the next write; [`controller`]: the next step, and how it stands; both pure
//!
//! **One device per GPU** that many claims share (consumable capacity, KEP 5075). What an API server without it does to
//! such a device: see [`controller`].
//!
//! **Order**: the scheduler takes the first device that fits, so the order of devices packs or spreads.

pub mod controller;
pub mod device;
pub mod offer;
pub mod slices;

pub use controller::{State, Status};
pub use offer::{Offer, Published};

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use controller::{Answer, Controller, Step};
use tessera_agent::Agent;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_cluster::resource::{ResourceClient, SliceEvent};
use tessera_config::Current;
use tessera_gpu::{Discovery, Facts};
use tessera_model::clock::unix_ms;
use tessera_model::gpu::Gpu;
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt};
use tracing::{debug, info, warn};

use crate::sleep;

const PCI_DEVICES: &str = "/sys/bus/pci/devices";
/// How long to wait before a watch is begun again that has ended: a server may end each at once.
const WATCH_AGAIN: Duration = Duration::from_secs(5);
/// The same where the server did not begin it: a list is made now and then.
const WITHOUT_WATCH: Duration = Duration::from_secs(60);

/// What happens to the slices from a list on; it ends a while after the watch has ended.
type Told = Pin<Box<dyn Stream<Item = SliceEvent> + Send>>;

/// Keeps the node's ResourceSlices as they should be. See the module's text.
pub struct Publisher {
    api: ResourceClient,
    agent: Arc<Agent>,
    discovery: Arc<dyn Discovery>,
    config: Current,
    node: String,
    pci_devices: PathBuf,
    status: watch::Sender<Status>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("node", &self.node).finish_non_exhaustive()
    }
}

/// What is asked once of each GPU.
#[derive(Default)]
struct Known {
    /// Of which the driver was asked: it is again when there are others.
    gpus: Vec<Gpu>,
    facts: Facts,
}

impl Publisher {
    pub fn new(
        api: ResourceClient,
        (agent, discovery): (Arc<Agent>, Arc<dyn Discovery>),
        config: Current,
        node: &str,
    ) -> Self {
        Publisher {
            api,
            agent,
            discovery,
            config,
            node: node.to_owned(),
            pci_devices: PCI_DEVICES.into(),
            status: watch::Sender::new(Status::default()),
        }
    }

    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Publishes until it is dropped. The slices stay: another instance takes them over, or kubelet removes them.
    pub async fn run(self) {
        let mut controller = Controller::new(&self.node);
        let (mut events, mut changes) = (self.agent.advertised.events(), self.config.changes());
        let mut told: Option<Told> = None;
        let mut known = Known::default();
        let mut offered = None;
        loop {
            events.mark_unchanged();
            changes.mark_unchanged();
            if let Some(offer) = self.offer(&mut known).await
                && offered.as_ref() != Some(&offer)
            {
                offered = Some(offer.clone());
                controller.want(offer, now());
            }
            let step = controller.next(Instant::now());
            self.tell(&controller.status);
            let Step::Wait(pause) = step else {
                let answer = step.take(&self.api).await;
                if let Err(error) = &answer {
                    debug!(%error, "a step of the publication failed");
                }
                if let Ok(Answer::Listed(_, version)) = &answer
                    && told.is_none()
                {
                    told = Some(self.follow(version).await);
                }
                controller.done(&step, answer, Instant::now());
                continue;
            };
            tokio::select! {
                changed = events.changed() => if changed.is_err() { return },
                changed = changes.changed() => if changed.is_err() { return },
                event = next(&mut told) => match event {
                    Some(event) => controller.heard(&event, Instant::now()),
                    // What happened since is listed.
                    None => (told, controller.stale) = (None, true),
                },
                () = sleep(pause) => {}
            }
        }
    }

    async fn follow(&self, version: &str) -> Told {
        let pause = |long: Duration| {
            let pause = tokio_stream::once(()).then(move |()| tokio::time::sleep(long));
            pause.filter_map(|()| None::<SliceEvent>)
        };
        match self.api.watch_own_slices(version).await {
            Ok(told) => Box::pin(told.map_while(Result::ok).chain(pause(WATCH_AGAIN))),
            Err(error) => {
                debug!(%error, "the slices are not watched");
                Box::pin(pause(WITHOUT_WATCH))
            }
        }
    }

    async fn offer(&self, known: &mut Known) -> Option<Offer> {
        let (agent, discovery) = (Arc::clone(&self.agent), Arc::clone(&self.discovery));
        let (pci_devices, mut asked) = (self.pci_devices.clone(), std::mem::take(known));
        let ask = move || {
            let devices = agent.inventory.catalogue().devices();
            // A driver that did not answer may by now.
            if asked.gpus != devices || asked.facts.driver_version.is_none() {
                (asked.facts, asked.gpus) = (discovery.facts(&devices), devices);
            }
            (Published::all(&agent, &asked.facts, &pci_devices), asked)
        };
        // Without an answer, all stays as it is.
        let (published, asked) = tokio::task::spawn_blocking(ask).await.ok()?;
        *known = asked;
        Some(Offer::new(&published, &self.config.get()))
    }

    /// Says how it stands to those who look, and in the log what a person should know.
    fn tell(&self, status: &Status) {
        self.status.send_if_modified(|shown| {
            if shown == status {
                return false;
            }
            let (before, after) = (shown.sentences(), status.sentences());
            for sentence in after.iter().filter(|sentence| !before.contains(sentence)) {
                warn!("{sentence}");
            }
            if shown.state != status.state {
                info!(
                    state = status.state.into_str(),
                    devices = status.devices,
                    slices = status.slices,
                    "ResourceSlices"
                );
            }
            shown.clone_from(status);
            true
        });
    }
}

fn now() -> Timestamp {
    Timestamp::from_millisecond(unix_ms()).unwrap_or(Timestamp::UNIX_EPOCH)
}

async fn next(told: &mut Option<Told>) -> Option<SliceEvent> {
    match told {
        Some(told) => told.next().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
