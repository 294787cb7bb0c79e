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

/// Least time between two messages.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Bytes that a message is cut to. Kubelet shows 1024; what is cut says so in some more bytes.
const LONGEST: usize = 960;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub pool: String,
    pub device: String,
    pub is_healthy: bool,
    /// Why not, or what else is to be known; empty if nothing is.
    pub message: String,
    /// When that was found out, Unix seconds.
    pub unix_seconds: i64,
}

/// The services of both versions.
#[derive(Clone, Debug)]
pub struct Health {
    agent: Arc<Agent>,
    pool: Arc<str>,
    /// Between two messages without a change.
    heartbeat: Duration,
    /// Becomes true when streams are to end.
    stop: watch::Receiver<bool>,
}

impl Health {
    /// Of the devices of `pool`, until `stop` is true.
    pub fn new(
        agent: Arc<Agent>,
        pool: &str,
        heartbeat: Duration,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Health { agent, pool: pool.into(), heartbeat, stop }
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
        let mut events = self.agent.advertised().events();
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

    fn list(&self) -> Vec<Report> {
        let inventory = self.agent.inventory();
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
) -> Vec<Report> {
    let held = claims.iter().filter_map(|record| record.origin.claim());
    let held = held.flat_map(|claim| &claim.results).map(|result| result.device.clone());
    let mut devices: BTreeSet<String> = held.collect();
    let sold = || catalogue.gpus.values().filter(|sold| sold.seller == FrontEnd::Dra);
    devices.extend(sold().map(|sold| names::device(&sold.gpu.uuid)));
    let report = |device: String| {
        let found = sold().find(|sold| names::device(&sold.gpu.uuid) == device);
        let (is_healthy, message) = match found.map(|sold| (&sold.sick, &sold.gpu.uuid)) {
            None => (false, "the GPU is not shared on this node any more".to_owned()),
            Some((Some(reason), _)) => (false, reason.clone()),
            // Pods' statuses are not only the operators': by whom and why it is cordoned is.
            Some((None, uuid)) if is_cordoned(uuid) => (true, "cordoned".to_owned()),
            Some(_) => (true, String::new()),
        };
        let message = printable::brief(&printable::line(&message), LONGEST).into_owned();
        Report { pool: pool.to_owned(), device, is_healthy, message, unix_seconds }
    };
    devices.into_iter().map(report).collect()
}

/// The service of one version; their messages are the same, and types of their own.
macro_rules! serve {
    ($version:ident) => {
        mod $version {
            use tessera_kubelet_api::dra_health::$version::dra_resource_health_server::DraResourceHealth;
            use tessera_kubelet_api::dra_health::$version::{
                DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest,
                NodeWatchResourcesResponse,
            };

            use super::*;

            #[tonic::async_trait]
            impl DraResourceHealth for Health {
                type NodeWatchResourcesStream = Pin<
                    Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send + 'static>,
                >;

                async fn node_watch_resources(
                    &self,
                    _: Request<NodeWatchResourcesRequest>,
                ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                    let answer = |reports: Vec<Report>| {
                        Ok(NodeWatchResourcesResponse {
                            devices: reports.into_iter().map(device).collect(),
                        })
                    };
                    Ok(Response::new(Box::pin(self.watch().map(answer))))
                }
            }

            fn device(report: Report) -> DeviceHealth {
                let Report { pool: pool_name, device: device_name, .. } = report;
                let health = match report.is_healthy {
                    true => HealthStatus::Healthy,
                    false => HealthStatus::Unhealthy,
                };
                DeviceHealth {
                    device: Some(DeviceIdentifier { pool_name, device_name }),
                    health: health.into(),
                    last_updated_time: report.unix_seconds,
                    health_check_timeout_seconds: 0,
                    message: report.message,
                }
            }
        }
    };
}

serve!(v1);
serve!(v1alpha1);

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
        let mut catalogue = catalogue(&["GPU-a"]);
        catalogue.gpus.get_mut("GPU-a").unwrap().sick = Some("ü".repeat(2000));
        let reports = reports((&catalogue, NONE), &[], "node", 0);
        assert!(reports[0].message.len() <= 1024, "{}", reports[0].message.len());
    }
}
