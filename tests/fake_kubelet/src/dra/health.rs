//! What drivers say of their devices' health.

use std::collections::BTreeMap;
use std::sync::Weak;
use std::time::Duration;

use tessera_kubelet_api::dra_health::{v1, v1alpha1};
use tokio_stream::StreamExt;
use tonic::transport::Channel;

use super::Inner;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// The stream ended, or never spoke of it.
    Unknown,
    Healthy,
    Unhealthy,
}

/// What was last said of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    pub state: DeviceState,
    pub message: String,
}

/// By pool and name.
#[derive(Debug, Default)]
pub(super) struct Cache {
    devices: BTreeMap<(String, String), Reported>,
    messages: u64,
}

impl Cache {
    pub(super) fn all(&self) -> BTreeMap<(String, String), Reported> {
        self.devices.clone()
    }

    pub(super) fn messages(&self) -> u64 {
        self.messages
    }

    pub(super) fn all_unknown(&mut self) {
        self.devices.values_mut().for_each(|reported| reported.state = DeviceState::Unknown);
    }

    /// A message is the whole list: the real one lets what is missing expire, this one at once.
    fn take(&mut self, devices: Vec<((String, String), Reported)>) {
        self.devices = devices.into_iter().collect();
        self.messages += 1;
    }
}

/// Follows one plugin's stream, and opens it again.
pub(super) async fn follow(kubelet: Weak<Inner>, service: &str, channel: Channel, retry: Duration) {
    loop {
        // How it ended makes no difference.
        let _ = match service {
            "v1.DRAResourceHealth" => follow_v1(&kubelet, channel.clone()).await,
            _ => follow_v1alpha1(&kubelet, channel.clone()).await,
        };
        let Some(inner) = kubelet.upgrade() else { return };
        inner.state().health.all_unknown();
        inner.tick();
        drop(inner);
        tokio::time::sleep(retry).await;
    }
}

fn take(kubelet: &Weak<Inner>, devices: Vec<((String, String), Reported)>) {
    if let Some(inner) = kubelet.upgrade() {
        inner.state().health.take(devices);
        inner.tick();
    }
}

fn state(number: i32) -> DeviceState {
    match number {
        1 => DeviceState::Healthy,
        2 => DeviceState::Unhealthy,
        _ => DeviceState::Unknown,
    }
}

async fn follow_v1(kubelet: &Weak<Inner>, channel: Channel) -> Result<(), tonic::Status> {
    let mut client = v1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let request = v1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await?.into_inner();
    while let Some(list) = stream.next().await {
        let device = |device: v1::DeviceHealth| {
            let id = device.device.unwrap_or_default();
            let reported = Reported { state: state(device.health), message: device.message };
            ((id.pool_name, id.device_name), reported)
        };
        take(kubelet, list?.devices.into_iter().map(device).collect());
    }
    Ok(())
}

async fn follow_v1alpha1(kubelet: &Weak<Inner>, channel: Channel) -> Result<(), tonic::Status> {
    let mut client = v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let request = v1alpha1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await?.into_inner();
    while let Some(list) = stream.next().await {
        let device = |device: v1alpha1::DeviceHealth| {
            let id = device.device.unwrap_or_default();
            let reported = Reported { state: state(device.health), message: device.message };
            ((id.pool_name, id.device_name), reported)
        };
        take(kubelet, list?.devices.into_iter().map(device).collect());
    }
    Ok(())
}
