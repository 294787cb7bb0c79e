//! The health of devices, as kubelet shows it in the status of pods: v1 and v1alpha1, one implementation behind
//! both.
//!
//! Kubelet holds a device for unknown 30 s after it last heard of it, and all of them when the stream ends. So the
//! full list goes out as a heartbeat, and at once after a change.

mod v1;
mod v1alpha1;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tessera_model::record::Record;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use crate::door::{Core, DraGpu};
use crate::names;

/// Between two messages without a change. Kubelet's limit is 30 s.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Least time between two messages.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Bytes that a message is cut to. Kubelet shows 1024; what is cut says so in some more bytes.
const LONGEST: usize = 960;

/// What is said of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub pool: String,
    /// Its name.
    pub device: String,
    /// Whether it works.
    pub is_healthy: bool,
    /// Why not, or what else is to be known; empty if nothing is.
    pub message: String,
    /// When that was found out, Unix seconds.
    pub unix_seconds: i64,
}

/// The services of both versions.
#[derive(Clone)]
pub struct Health {
    core: Arc<dyn Core>,
    pool: Arc<str>,
    heartbeat: Duration,
    /// Becomes true when streams are to end.
    stop: watch::Receiver<bool>,
}

impl std::fmt::Debug for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Health").field("pool", &self.pool).finish_non_exhaustive()
    }
}

impl Health {
    /// Of the devices of `pool`, until `stop` is true.
    pub fn new(core: Arc<dyn Core>, pool: &str, stop: watch::Receiver<bool>) -> Self {
        Health { core, pool: pool.into(), heartbeat: HEARTBEAT, stop }
    }

    /// With another heartbeat, for tests.
    pub fn with_heartbeat(self, heartbeat: Duration) -> Self {
        Health { heartbeat, ..self }
    }

    /// The list now, after each change, and as a heartbeat.
    fn watch(&self) -> ReceiverStream<Vec<Report>> {
        let (sender, receiver) = mpsc::channel(1);
        let health = self.clone();
        tokio::spawn(async move {
            let mut stop = health.stop.clone();
            tokio::select! {
                () = health.send(&sender) => {}
                () = sender.closed() => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        });
        ReceiverStream::new(receiver)
    }

    async fn send(&self, sender: &mpsc::Sender<Vec<Report>>) {
        let mut events = self.core.events();
        loop {
            events.borrow_and_update();
            if sender.send(self.list()).await.is_err() {
                return;
            }
            let changed = async {
                if events.changed().await.is_err() {
                    // The core has ended; what was said last holds until the plugin has, too.
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(DEBOUNCE).await;
            };
            let _ = tokio::time::timeout(self.heartbeat, changed).await;
        }
    }

    fn list(&self) -> Vec<Report> {
        reports(&self.core.gpus(), &self.core.claims(), &self.pool, unix_ms() / 1000)
    }
}

/// What is said of the devices of these GPUs, and of those that claims hold.
fn reports(gpus: &[DraGpu], claims: &[Arc<Record>], pool: &str, unix_seconds: i64) -> Vec<Report> {
    let held = claims.iter().filter_map(|record| record.origin.claim());
    let held = held.flat_map(|claim| &claim.results).map(|result| result.device.clone());
    let mut devices: BTreeSet<String> = held.collect();
    devices.extend(gpus.iter().map(|gpu| names::device(&gpu.gpu.uuid)));
    let report = |device: String| {
        let gpu = gpus.iter().find(|gpu| names::device(&gpu.gpu.uuid) == device);
        let (is_healthy, message) = match gpu {
            None => (false, "the GPU is not shared on this node any more".to_owned()),
            Some(DraGpu { sick: Some(reason), .. }) => (false, reason.clone()),
            // Pods' statuses are not only the operators': by whom and why it is cordoned is.
            Some(DraGpu { cordon: Some(_), .. }) => (true, "cordoned".to_owned()),
            Some(_) => (true, String::new()),
        };
        let message = printable::brief(&printable::line(&message), LONGEST).into_owned();
        Report { pool: pool.to_owned(), device, is_healthy, message, unix_seconds }
    };
    devices.into_iter().map(report).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{claim_record, gpu};

    #[test]
    fn each_gpu_and_each_held_device_is_reported() {
        let mut gpus = vec![gpu("GPU-a", 16), gpu("GPU-b", 16), gpu("GPU-c", 16)];
        gpus[1].sick = Some("XID 79".into());
        gpus[2].cordon = Some("a new fan".into());
        let records = [
            claim_record("u", "gpu", &[("gpu-a", Some("r"))]),
            claim_record("v", "gpu", &[("gpu-gone", Some("s"))]),
            claim_record("w", "gpu", &[("gpu-b", Some("t"))]),
        ];
        let said: Vec<_> = reports(&gpus, &records, "node", 7)
            .into_iter()
            .map(|report| {
                assert_eq!((report.pool.as_str(), report.unix_seconds), ("node", 7));
                (report.device, report.is_healthy, report.message)
            })
            .collect();
        let all = [
            ("gpu-a", true, ""),
            ("gpu-b", false, "XID 79"),
            ("gpu-c", true, "cordoned"),
            ("gpu-gone", false, "the GPU is not shared on this node any more"),
        ];
        assert_eq!(said, all.map(|(name, healthy, why)| (name.into(), healthy, why.into())));
    }

    #[test]
    fn a_message_is_no_longer_than_kubelet_shows() {
        let mut gpus = [gpu("GPU-a", 16)];
        gpus[0].sick = Some("ü".repeat(2000));
        let reports = reports(&gpus, &[], "node", 0);
        assert!(reports[0].message.len() <= 1024, "{}", reports[0].message.len());
    }
}
