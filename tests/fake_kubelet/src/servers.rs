//! The stand-in's gRPC: Registration, pod resources, and the stream from each plugin.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tessera_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use tessera_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use tessera_kubelet_api::deviceplugin::{Empty, KUBELET_SOCKET, RegisterRequest, VERSION};
use tessera_kubelet_api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use tessera_kubelet_api::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices,
    ContainerResources, GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest,
    ListPodResourcesResponse, PodResources,
};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint as Address, Server};
use tonic::{Request, Response, Status};

use super::{Allocatable, Endpoint, Inner};

/// How long Register may take to reach the plugin, as kubelet has it.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The running servers; they end when this is dropped.
#[derive(Debug)]
pub(super) struct Running {
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Running {
    /// Ends the servers and waits for them.
    pub(super) async fn stop(mut self) {
        self.stop.send_replace(true);
        for task in std::mem::take(&mut self.tasks) {
            // A client that keeps its connection open must not hold up the end.
            let abort = task.abort_handle();
            if tokio::time::timeout(Duration::from_millis(500), task).await.is_err() {
                abort.abort();
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// Removes all sockets from the device plugin directory, and nothing else, as kubelet does.
pub(super) fn wipe_sockets(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_socket() {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Serves Registration and pod resources.
pub(super) fn run(inner: &Arc<Inner>) -> io::Result<Running> {
    let pod_resources = &inner.pod_resources_socket;
    if pod_resources.exists() {
        std::fs::remove_file(pod_resources)?;
    }
    let pod_resources = UnixListener::bind(pod_resources)?;
    let registration = UnixListener::bind(inner.device_plugins_dir.join(KUBELET_SOCKET))?;
    let (stop, stopped) = watch::channel(false);
    // The servers must not keep the stand-in alive.
    let service = Service(Arc::downgrade(inner));
    let tasks = vec![
        tokio::spawn(serve(
            RegistrationServer::new(service.clone()),
            registration,
            stopped.clone(),
        )),
        tokio::spawn(serve(PodResourcesListerServer::new(service), pod_resources, stopped)),
    ];
    Ok(Running { stop, tasks })
}

async fn serve<S>(service: S, listener: UnixListener, mut stopped: watch::Receiver<bool>)
where
    S: tonic::codegen::Service<
            tonic::codegen::http::Request<tonic::body::Body>,
            Response = tonic::codegen::http::Response<tonic::body::Body>,
            Error = std::convert::Infallible,
        > + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    let stop = async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let incoming = UnixListenerStream::new(listener);
    if let Err(error) =
        Server::builder().serve_with_incoming_shutdown(service, incoming, stop).await
    {
        tracing::warn!(%error, "the stand-in's server ended");
    }
}

#[derive(Clone, Debug)]
struct Service(Weak<Inner>);

impl Service {
    fn inner(&self) -> Result<Arc<Inner>, Status> {
        self.0.upgrade().ok_or_else(|| Status::unavailable("the stand-in has ended"))
    }
}

#[tonic::async_trait]
impl Registration for Service {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let inner = self.inner()?;
        let request = request.into_inner();
        let behaviour = inner.state().behaviour.clone();
        tokio::time::sleep(behaviour.delay).await;
        if let Some(message) = behaviour.refuse {
            return Err(Status::unknown(message));
        }
        if request.version != VERSION {
            return Err(Status::unknown(format!("unsupported API version {}", request.version)));
        }
        if !request.resource_name.contains('/') || request.endpoint.contains('/') {
            return Err(Status::unknown("invalid resource name or endpoint"));
        }
        let socket = inner.device_plugins_dir.join(&request.endpoint);
        let dial = async {
            let address = Address::from_shared(format!("unix://{}", socket.display()))
                .map_err(|error| Status::unknown(error.to_string()))?;
            let channel = address.connect().await.map_err(|error| {
                Status::unknown(format!("failed to dial {}: {error}", request.endpoint))
            })?;
            let mut client = DevicePluginClient::new(channel);
            let options = client.get_device_plugin_options(Empty {}).await?.into_inner();
            Ok::<_, Status>((client, options))
        };
        let (client, options) = tokio::time::timeout(DIAL_TIMEOUT, dial)
            .await
            .map_err(|_| Status::deadline_exceeded("the plugin's socket does not answer"))??;

        let mut state = inner.state();
        let id = state.manager.next_id();
        let stream = if behaviour.no_stream {
            tokio::spawn(std::future::pending())
        } else {
            let (inner, resource_name) = (Arc::downgrade(&inner), request.resource_name.clone());
            tokio::spawn(watch_devices(inner, client.clone(), resource_name, id))
        };
        let endpoint = Endpoint { client, options, stream, socket: request.endpoint };
        state.manager.connect(&request.resource_name, id, endpoint);
        state.registrations += 1;
        drop(state);
        inner.tick();
        Ok(Response::new(Empty {}))
    }
}

/// Reads a plugin's device stream to its end.
async fn watch_devices(
    inner: Weak<Inner>,
    mut client: DevicePluginClient<tonic::transport::Channel>,
    resource_name: String,
    id: u64,
) {
    if let Ok(stream) = client.list_and_watch(Empty {}).await {
        let mut stream = stream.into_inner();
        while let Ok(Some(list)) = stream.message().await {
            let Some(inner) = inner.upgrade() else { return };
            let mut state = inner.state();
            state.lists += 1;
            state.manager.list(&resource_name, id, list.devices);
            drop(state);
            inner.tick();
        }
    }
    if let Some(inner) = inner.upgrade() {
        inner.state().manager.ended(&resource_name, id);
        inner.tick();
    }
}

impl Inner {
    /// Pods with what their app containers hold. Ordinary init containers are not listed, as with the
    /// real one.
    fn pod_resources(&self) -> Vec<PodResources> {
        let mut pods = BTreeMap::<(String, String), BTreeMap<String, Vec<ContainerDevices>>>::new();
        for other in &self.state().others {
            pods.entry(other.clone()).or_default();
        }
        let claiming = self.state().claiming.clone();
        for (pod, (container, _)) in &claiming {
            pods.entry(pod.clone()).or_default().entry(container.clone()).or_default();
        }
        let claimed = |pod: &(String, String), container: &str| match claiming.get(pod) {
            Some((of, resources)) if of == container => resources.clone(),
            _ => Vec::new(),
        };
        for (key, assignment) in self.state().manager.assignments() {
            let pod = pods.entry((key.namespace.clone(), key.pod.clone())).or_default();
            if !assignment.init {
                pod.entry(key.container.clone()).or_default().push(ContainerDevices {
                    resource_name: key.resource_name.clone(),
                    device_ids: assignment.device_ids.clone(),
                    topology: None,
                });
            }
        }
        pods.into_iter()
            .map(|(pod, containers)| {
                let of = |(name, devices): (String, Vec<ContainerDevices>)| ContainerResources {
                    dynamic_resources: claimed(&pod, &name),
                    name,
                    devices,
                    ..ContainerResources::default()
                };
                let containers = containers.into_iter().map(of).collect();
                PodResources { namespace: pod.0.clone(), name: pod.1.clone(), containers }
            })
            .collect()
    }
}

#[tonic::async_trait]
impl PodResourcesLister for Service {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let inner = self.inner()?;
        inner.state().pod_lists += 1;
        let pod_resources = inner.pod_resources();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let inner = self.inner()?;
        let state = inner.state();
        match state.behaviour.allocatable {
            Allocatable::Served => {}
            // The real one's words.
            Allocatable::Disabled => {
                let message = "Pod Resources API GetAllocatableResources disabled";
                return Err(Status::unknown(message));
            }
            Allocatable::Unimplemented => {
                return Err(Status::unimplemented("unknown method GetAllocatableResources"));
            }
        }
        let devices = state
            .manager
            .resources()
            .map(|resource_name| ContainerDevices {
                resource_name: resource_name.clone(),
                device_ids: state.manager.healthy(resource_name).into_iter().collect(),
                topology: None,
            })
            .collect();
        Ok(Response::new(AllocatableResourcesResponse {
            devices,
            ..AllocatableResourcesResponse::default()
        }))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("the stand-in lists pods"))
    }
}
