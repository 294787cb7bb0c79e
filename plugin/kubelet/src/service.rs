//! The five RPCs, over the [`DevicePlugin`] seam.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tessera_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin as Rpcs;
use tessera_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, Device as WireDevice,
    DevicePluginOptions, Empty, HEALTHY, ListAndWatchResponse, NumaNode, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
    TopologyInfo, UNHEALTHY,
};
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::registration::Event;
use super::{Device, DevicePlugin, driver};

/// Events with the generation of the socket they are about.
pub(super) type Events = mpsc::UnboundedSender<(u64, Event)>;

pub(super) struct Service<P> {
    pub(super) plugin: Arc<P>,
    pub(super) debounce: Duration,
    pub(super) generation: u64,
    pub(super) events: Events,
    /// Becomes true when the streams are to end.
    pub(super) stop: watch::Receiver<bool>,
    /// Calls that wait for their answer.
    pub(super) calls: watch::Sender<usize>,
}

/// Counts as one of [`Service::calls`] until it is dropped.
struct Call<'a>(&'a watch::Sender<usize>);

impl<'a> Call<'a> {
    fn new(calls: &'a watch::Sender<usize>) -> Self {
        calls.send_modify(|open| *open += 1);
        Self(calls)
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

#[tonic::async_trait]
impl<P: DevicePlugin> Rpcs for Service<P> {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(driver::OPTIONS))
    }

    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send + 'static>>;

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (sender, receiver) = mpsc::channel(1);
        let opened = Opened::new(self.generation, self.events.clone());
        let devices = self.plugin.devices();
        let end = ended(self.stop.clone(), self.calls.subscribe());
        tokio::spawn(send_devices(devices, sender, end, self.debounce, opened));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let container_responses = request
            .into_inner()
            .container_requests
            .into_iter()
            .map(|container| {
                let size = usize::try_from(container.allocation_size).map_err(|_| {
                    Status::invalid_argument("the number of devices to allocate is negative")
                })?;
                let device_ids = self.plugin.preferred(
                    &container.available_device_ids,
                    &container.must_include_device_ids,
                    size,
                )?;
                Ok(ContainerPreferredAllocationResponse { device_ids })
            })
            .collect::<Result<_, Status>>()?;
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let _call = Call::new(&self.calls);
        let containers: Vec<_> = request
            .into_inner()
            .container_requests
            .into_iter()
            .map(|container| container.device_ids)
            .collect();
        let asked = containers.len();
        let container_responses = self.plugin.allocate(containers).await?;
        if container_responses.len() != asked {
            return Err(Status::internal("the plugin answered for another number of containers"));
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let _call = Call::new(&self.calls);
        self.plugin.pre_start(request.into_inner().device_ids).await?;
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// Says that a stream is open, and when it is dropped, that it has ended.
struct Opened {
    generation: u64,
    events: Events,
}

impl Opened {
    fn new(generation: u64, events: Events) -> Self {
        // Nobody listens only at the very end.
        let _ = events.send((generation, Event::Opened));
        Self { generation, events }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = self.events.send((self.generation, Event::Closed));
    }
}

/// Done when the streams are to end and no call is open: kubelet closes its client as soon as a stream
/// ends, and would lose the answers.
async fn ended(mut stop: watch::Receiver<bool>, mut calls: watch::Receiver<usize>) {
    let _ = stop.wait_for(|stop| *stop).await;
    let _ = calls.wait_for(|open| *open == 0).await;
}

/// Sends the device set at once and after every change, until kubelet goes or `end` is done.
async fn send_devices(
    mut devices: watch::Receiver<Vec<Device>>,
    sender: mpsc::Sender<Result<ListAndWatchResponse, Status>>,
    end: impl Future<Output = ()>,
    debounce: Duration,
    _opened: Opened,
) {
    let send = async {
        loop {
            let set = devices.borrow_and_update().iter().map(to_wire).collect();
            if sender.send(Ok(ListAndWatchResponse { devices: set })).await.is_err() {
                return;
            }
            if devices.changed().await.is_err() {
                // The set is final. Ending the stream would make every device unhealthy.
                return std::future::pending().await;
            }
            tokio::time::sleep(debounce).await;
        }
    };
    tokio::select! {
        () = send => {}
        () = sender.closed() => {}
        () = end => {}
    }
}

fn to_wire(device: &Device) -> WireDevice {
    WireDevice {
        id: device.id.clone(),
        health: if device.healthy { HEALTHY } else { UNHEALTHY }.to_owned(),
        topology: device
            .numa_node
            .map(|node| TopologyInfo { nodes: vec![NumaNode { id: i64::from(node) }] }),
    }
}
