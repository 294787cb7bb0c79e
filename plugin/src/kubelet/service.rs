//! The five RPCs, over the [`DevicePlugin`] seam.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tessera_kubelet::deviceplugin::device_plugin_server::DevicePlugin as Rpcs;
use tessera_kubelet::deviceplugin::{
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
use super::{Device, DevicePlugin, register};

/// Events with the generation of the socket they are about.
pub(super) type Events = mpsc::UnboundedSender<(u64, Event)>;

/// One socket's server.
pub(super) struct Service<P> {
    pub(super) plugin: Arc<P>,
    pub(super) debounce: Duration,
    pub(super) generation: u64,
    pub(super) events: Events,
    /// Becomes true when the streams are to end.
    pub(super) stop: watch::Receiver<bool>,
}

#[tonic::async_trait]
impl<P: DevicePlugin> Rpcs for Service<P> {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(register::OPTIONS))
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
        tokio::spawn(send_devices(devices, sender, self.stop.clone(), self.debounce, opened));
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

/// Sends the device set at once and after every change, until kubelet goes or `stop` says so.
async fn send_devices(
    mut devices: watch::Receiver<Vec<Device>>,
    sender: mpsc::Sender<Result<ListAndWatchResponse, Status>>,
    mut stop: watch::Receiver<bool>,
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
        _ = stop.wait_for(|stop| *stop) => {}
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
