//! The health of devices, as kubelet shows it in the status of pods: v1 and v1alpha1, one implementation behind
//! both.
//!
//! Kubelet holds a device for unknown 30 s after it last heard of it, and all of them when the stream ends. So the
//! full list goes out as a heartbeat, and at once after a change.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tessera_agent::Agent;
use tessera_kubelet_api::dra_health::v1::{DeviceHealth, DeviceIdentifier, HealthStatus};
use tessera_kubelet_api::dra_health::{v1, v1alpha1};
use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tessera_model::record::Record;
use tessera_rules::allocate::Catalogue;
use tessera_rules::shares::FrontEnd;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use crate::names;

const DEBOUNCE: Duration = Duration::from_millis(50);
/// Bytes that a message is cut to. Kubelet shows 1024; what is cut says so in some more bytes.
const LONGEST: usize = 960;

#[derive(Clone, Debug)]
pub struct Health {
    agent: Arc<Agent>,
    pool: Arc<str>,
    heartbeat: Duration,
    /// Becomes true when streams are to end.
    stop: watch::Receiver<bool>,
}

impl Health {
    pub fn new(
        agent: Arc<Agent>,
        pool: &str,
        heartbeat: Duration,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Health { agent, pool: pool.into(), heartbeat, stop }
    }

    /// The list now, after each change, and as a heartbeat.
    fn watch(&self) -> ReceiverStream<Vec<DeviceHealth>> {
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

    async fn send(&self, sender: &mpsc::Sender<Vec<DeviceHealth>>) {
        let mut events = self.agent.advertised.events();
        loop {
            events.borrow_and_update();
            if sender.send(self.list()).await.is_err() {
                return;
            }
            let changed = async {
                if events.changed().await.is_err() {
                    // The agent has ended; what was said last holds until the plugin has, too.
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(DEBOUNCE).await;
            };
            let _ = tokio::time::timeout(self.heartbeat, changed).await;
        }
    }

    fn list(&self) -> Vec<DeviceHealth> {
        let inventory = &self.agent.inventory;
        let is_cordoned = |uuid: &str| inventory.cordon_of(uuid).is_some();
        let node = (&*inventory.catalogue(), &is_cordoned as &dyn Fn(&str) -> bool);
        reports(node, &self.agent.claims(), &self.pool, unix_ms() / 1000)
    }
}

/// What is said of the devices of the GPUs that are sold by claims, and of those that claims hold.
fn reports(
    (catalogue, is_cordoned): (&Catalogue, &dyn Fn(&str) -> bool),
    claims: &[Arc<Record>],
    pool: &str,
    unix_seconds: i64,
) -> Vec<DeviceHealth> {
    let held = claims.iter().filter_map(|record| record.origin.claim());
    let held = held.flat_map(|claim| &claim.results).map(|result| result.device.clone());
    let mut devices: BTreeSet<String> = held.collect();
    let sold = || catalogue.gpus.values().filter(|sold| sold.seller == FrontEnd::Dra);
    devices.extend(sold().map(|sold| names::device(&sold.gpu.uuid)));
    let report = |device: String| {
        let found = sold().find(|sold| names::device(&sold.gpu.uuid) == device);
        // The message says why not, or what else is to be known.
        let (health, message) = match found.map(|sold| (sold.sick.as_deref(), &sold.gpu.uuid)) {
            None => (HealthStatus::Unhealthy, "the GPU is not shared on this node any more"),
            Some((Some(reason), _)) => (HealthStatus::Unhealthy, reason),
            // Pods' statuses are not only the operators': by whom and why it is cordoned is.
            Some((None, uuid)) if is_cordoned(uuid) => (HealthStatus::Healthy, "cordoned"),
            Some(_) => (HealthStatus::Healthy, ""),
        };
        DeviceHealth {
            device: Some(DeviceIdentifier { pool_name: pool.to_owned(), device_name: device }),
            health: health.into(),
            last_updated_time: unix_seconds,
            health_check_timeout_seconds: 0,
            message: printable::brief(&printable::line(message), LONGEST).into_owned(),
        }
    };
    devices.into_iter().map(report).collect()
}

/// Of versions whose messages are the same, and types of their own.
macro_rules! serve {
    ($version:ident, $device:expr) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for Health {
            type NodeWatchResourcesStream = Pin<
                Box<dyn Stream<Item = Result<$version::NodeWatchResourcesResponse, Status>> + Send>,
            >;

            async fn node_watch_resources(
                &self,
                _: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                let answer = |devices: Vec<DeviceHealth>| {
                    let devices = devices.into_iter().map($device).collect();
                    Ok($version::NodeWatchResourcesResponse { devices })
                };
                Ok(Response::new(Box::pin(self.watch().map(answer))))
            }
        }
    };
}

serve!(v1, |device| device);
serve!(v1alpha1, |device| {
    let DeviceIdentifier { pool_name, device_name } = device.device.unwrap_or_default();
    v1alpha1::DeviceHealth {
        device: Some(v1alpha1::DeviceIdentifier { pool_name, device_name }),
        health: device.health,
        last_updated_time: device.last_updated_time,
        health_check_timeout_seconds: device.health_check_timeout_seconds,
        message: device.message,
    }
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{catalogue, claim_record};

    const NONE: &dyn Fn(&str) -> bool = &|_| false;

    #[test]
    fn each_gpu_and_each_held_device_is_reported() {
        let mut catalogue = catalogue(&["GPU-a", "GPU-b", "GPU-c"]);
        catalogue.gpus.get_mut("GPU-b").unwrap().sick = Some("XID 79".into());
        let records = [
            claim_record("u", "gpu", &[("gpu-a", Some("r"))]),
            claim_record("v", "gpu", &[("gpu-gone", Some("s"))]),
            claim_record("w", "gpu", &[("gpu-b", Some("t"))]),
        ];
        let said: Vec<_> = reports((&catalogue, &|uuid| uuid == "GPU-c"), &records, "node", 7)
            .into_iter()
            .map(|report| {
                let device = report.device.clone().unwrap();
                assert_eq!((device.pool_name.as_str(), report.last_updated_time), ("node", 7));
                let is_healthy = report.health() == HealthStatus::Healthy;
                (device.device_name, is_healthy, report.message)
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
        let mut catalogue = catalogue(&["GPU-a"]);
        catalogue.gpus.get_mut("GPU-a").unwrap().sick = Some("ü".repeat(2000));
        let reports = reports((&catalogue, NONE), &[], "node", 0);
        assert!(reports[0].message.len() <= 1024, "{}", reports[0].message.len());
    }
}
