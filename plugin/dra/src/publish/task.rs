//! Publishes: asks the core what there is, takes the controller's steps, and listens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_cluster::error::ApiError;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_cluster::resource::{ResourceApi, SliceEvent};
use tessera_config::Current;
use tessera_model::clock::unix_ms;
use tokio::sync::{mpsc, watch};
use tracing::{debug, info, warn};

use super::controller::{Answer, Controller, Step};
use super::offer::{Offer, Published};
use super::status::Status;
use tessera_agent::front_end::dra::DraGpu;

/// Where Linux lists PCI devices.
pub const PCI_DEVICES: &str = "/sys/bus/pci/devices";
/// How long to wait before a watch is begun again that has ended.
const WATCH_AGAIN: Duration = Duration::from_secs(5);

/// What the publication needs of the core.
pub trait Gpus: Send + Sync + 'static {
    /// The GPUs that are sold by claims. May block.
    fn gpus(&self) -> Vec<DraGpu>;
    /// Another number after each change of them.
    fn events(&self) -> watch::Receiver<u64>;
}

/// Keeps the node's ResourceSlices as they should be. See the parent's text.
#[derive(Debug)]
pub struct Publisher<G> {
    api: Arc<dyn ResourceApi>,
    gpus: Arc<G>,
    config: Current,
    node: String,
    pci_devices: PathBuf,
    status: watch::Sender<Status>,
}

impl<G: Gpus> Publisher<G> {
    /// Of the node with this name.
    pub fn new(api: Arc<dyn ResourceApi>, gpus: Arc<G>, config: Current, node: &str) -> Self {
        Publisher {
            api,
            gpus,
            config,
            node: node.to_owned(),
            pci_devices: PCI_DEVICES.into(),
            status: watch::Sender::new(Status::default()),
        }
    }

    /// With another place where Linux lists PCI devices.
    pub fn with_pci_devices(mut self, directory: &Path) -> Self {
        directory.clone_into(&mut self.pci_devices);
        self
    }

    /// How it stands, at any time.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Publishes until it is dropped. The slices stay: another instance takes them over, or kubelet removes them.
    pub async fn run(self) {
        let mut controller = Controller::new(&self.node);
        let (mut events, mut changes) = (self.gpus.events(), self.config.changes());
        let mut heard = self.api.watch_own_slices();
        let mut roots = BTreeMap::new();
        let mut offered = None;
        loop {
            events.mark_unchanged();
            changes.mark_unchanged();
            if let Some(offer) = self.offer(&mut roots).await
                && offered.as_ref() != Some(&offer)
            {
                offered = Some(offer.clone());
                controller.want(offer, now());
            }
            while let Ok(event) = heard.try_recv() {
                controller.heard(&event, Instant::now());
            }
            let step = controller.next(Instant::now());
            self.tell(controller.status());
            let Step::Wait(pause) = step else {
                let answer = self.take(&step).await;
                if let Err(error) = &answer {
                    debug!(%error, "a step of the publication failed");
                }
                controller.done(&step, answer, Instant::now());
                continue;
            };
            tokio::select! {
                changed = events.changed() => if changed.is_err() { return },
                changed = changes.changed() => if changed.is_err() { return },
                event = hear(&mut heard) => match event {
                    Some(event) => controller.heard(&event, Instant::now()),
                    None => heard = self.api.watch_own_slices(),
                },
                () = sleep(pause) => {}
            }
        }
    }

    async fn offer(&self, roots: &mut BTreeMap<String, Option<String>>) -> Option<Offer> {
        let gpus = Arc::clone(&self.gpus);
        let ask = tokio::task::spawn_blocking(move || gpus.gpus());
        // Without an answer, all stays as it is.
        let gpus = ask.await.ok()?;
        let published = |gpu: DraGpu| {
            let address = &gpu.gpu.pci_bus_id;
            let root = || tessera_gpu::pcie_root(&self.pci_devices, address);
            let pcie_root = roots.entry(address.clone()).or_insert_with(root).clone();
            Published { pcie_root, gpu }
        };
        let published: Vec<Published> = gpus.into_iter().map(published).collect();
        Some(Offer::new(&published, &self.config.get()))
    }

    async fn take(&self, step: &Step) -> Result<Answer, ApiError> {
        match step {
            Step::NodeUid => self.api.node_uid().await.map(Answer::NodeUid),
            Step::List => self.api.own_slices().await.map(Answer::Listed),
            Step::Create(slice) => {
                self.api.create_slice(slice).await.map(|kept| Answer::Kept(Box::new(kept)))
            }
            Step::Update(slice) => {
                self.api.update_slice(slice).await.map(|kept| Answer::Kept(Box::new(kept)))
            }
            Step::Delete(name) => self.api.delete_slice(name).await.map(|()| Answer::Deleted),
            Step::Wait(_) => Ok(Answer::Deleted),
        }
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
                    state = status.state.as_str(),
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

/// The next event; `None` a while after the watch has ended.
async fn hear(heard: &mut mpsc::Receiver<SliceEvent>) -> Option<SliceEvent> {
    let event = heard.recv().await;
    if event.is_none() {
        tokio::time::sleep(WATCH_AGAIN).await;
    }
    event
}

async fn sleep(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
