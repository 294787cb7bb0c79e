//! Kubelet's side of the plugin: the device plugin server, registration and its upkeep, and the pod
//! resources client.
//!
//! The seam is [`DevicePlugin`]: the plugin's decisions. Everything specific to kubelet's protocol stays
//! here: [`serve`] listens, registers, and re-registers whenever kubelet restarts, wipes the socket or
//! drops the device stream. [`Report`] has the state.
//!
//! - `service`: the five RPCs over the seam
//! - `registration`: the pure state machine; `driver` feeds it and does its I/O
//! - [`sockets`]: services on sockets; `directory`: names there, and kubelet's restarts
//! - [`pod_resources`]: the holder of each replica
#![forbid(unsafe_code)]

pub mod checkpoint;
mod directory;
mod driver;
pub mod foreign_plugins;
pub mod pod_resources;
mod registration;
mod service;
pub mod sockets;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use sockets::SocketError;
pub use tessera_kubelet_api::deviceplugin::{
    CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{error, info};

/// One unit that kubelet hands out; for Tessera, a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Unique, at most 63 bytes.
    pub id: String,
    pub healthy: bool,
    /// The NUMA node it is near, where known. As soon as one device has one, kubelet's topology
    /// manager takes the resource into account.
    pub numa_node: Option<u32>,
}

/// What the plugin decides. The methods are called from the server's tasks, several at a time.
pub trait DevicePlugin: Send + Sync + 'static {
    /// The complete set of devices, now and after every change. Changes are sent on with a delay of
    /// about 50 ms, so that a burst becomes one message.
    fn devices(&self) -> watch::Receiver<Vec<Device>>;

    /// Which `size` of the `available` devices are best, `must_include` among them. A hint to
    /// kubelet. An error rejects the pod, so answer with what there is wherever possible.
    ///
    /// Errors: A gRPC status; kubelet shows its message in the pod's event.
    fn preferred(
        &self,
        available: &[String],
        must_include: &[String],
        size: usize,
    ) -> Result<Vec<String>, tonic::Status>;

    /// Grants devices to containers; kubelet asks for one container at a time, says nothing about
    /// the pod, has no time limit and admits no other pod meanwhile.
    ///
    /// Errors: A gRPC status; the pod fails with `UnexpectedAdmissionError` and its message.
    fn allocate(
        &self,
        containers: Vec<Vec<String>>,
    ) -> impl Future<Output = Result<Vec<ContainerAllocateResponse>, tonic::Status>> + Send;

    /// A container that holds these devices is about to start, for the first time or again. Kubelet
    /// waits up to 30 s.
    ///
    /// Errors: A gRPC status; kubelet does not start the container and tries again with its back-off.
    fn pre_start(&self, ids: Vec<String>)
    -> impl Future<Output = Result<(), tonic::Status>> + Send;
}

#[derive(Clone, Debug)]
pub struct Timing {
    pub debounce: Duration,
    /// Longest Register call; kubelet dials back meanwhile, for up to 10 s.
    pub register_timeout: Duration,
    /// How long after an accepted Register kubelet may take to open ListAndWatch.
    pub live_timeout: Duration,
    /// First wait after a failure; doubles up to `max_backoff`.
    pub min_backoff: Duration,
    pub max_backoff: Duration,
    /// How often sockets are looked at: kubelet's own, and ours.
    pub poll_interval: Duration,
    pub drain_timeout: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            debounce: Duration::from_millis(50),
            register_timeout: Duration::from_secs(15),
            live_timeout: Duration::from_secs(10),
            min_backoff: Duration::from_millis(200),
            max_backoff: Duration::from_secs(30),
            poll_interval: Duration::from_millis(250),
            drain_timeout: Duration::from_secs(2),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Not registered: there is no kubelet, or it refused, or it has restarted.
    #[default]
    Waiting,
    /// Kubelet accepted Register, but has not opened ListAndWatch yet.
    Accepted,
    /// Kubelet reads ListAndWatch: the node offers the resource.
    Live,
    Stopped,
}

/// The state of registration and its history since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub phase: Phase,
    pub registered_at: Option<SystemTime>,
    pub registrations: u64,
    /// The latest failure to register; `None` after a success.
    pub last_error: Option<String>,
}

/// The registration of each resource that is served, now and after every change.
pub type Reports = watch::Receiver<BTreeMap<String, Report>>;

#[derive(Debug)]
pub struct Serving {
    reports: Reports,
    task: JoinHandle<()>,
}

impl Serving {
    /// How each resource stands with kubelet. Clones may outlive this.
    pub fn reports(&self) -> Reports {
        self.reports.clone()
    }

    /// Waits until everything has stopped: the shutdown future is done, the sockets are removed and
    /// open calls have ended or run out of time.
    pub async fn finished(self) {
        // The task can only be cancelled by the runtime's own end, and a panic has been reported.
        let _ = self.task.await;
    }
}

#[derive(Clone, Debug, Default)]
pub struct Options {
    pub timing: Timing,
    /// Kubelet's pod resources socket. Where given, the plugin asks there after registering whether
    /// the node really offers the resource (some kubelets lose a registration to the end of an older
    /// stream), and registers again if not.
    pub pod_resources: Option<PathBuf>,
}

struct Servers<F> {
    dir: PathBuf,
    make: F,
    options: Options,
    /// What stops each, which its drop does too, and its task.
    members: BTreeMap<String, (watch::Sender<bool>, JoinHandle<()>)>,
    reports: watch::Sender<BTreeMap<String, Report>>,
}

/// Serves each of `resources`, with the plugin that `make` gives for it, to the kubelet whose device plugin directory is
/// `dir`, until `shutdown` is done. Follows `resources` when they change. Returns as soon as the sockets listen;
/// registration and its upkeep go on in a task.
///
/// A missing kubelet is not an error: it is waited for. Sockets of earlier instances that nobody listens
/// on any more are removed.
///
/// Errors: [`SocketError`] if one of the first resources has no socket; its message says what to do. Later ones
/// are tried again.
pub fn serve<P, F>(
    mut resources: watch::Receiver<BTreeSet<String>>,
    dir: &Path,
    make: F,
    shutdown: impl Future<Output = ()> + Send + 'static,
    options: Options,
) -> Result<Serving, SocketError>
where
    P: DevicePlugin,
    F: Fn(&str) -> Arc<P> + Send + 'static,
{
    let (reports, reported) = watch::channel(BTreeMap::new());
    let mut servers =
        Servers { dir: dir.to_owned(), make, options, members: BTreeMap::new(), reports };
    let first = resources.borrow_and_update().clone();
    for resource in &first {
        servers.join(resource)?;
    }
    let task = tokio::spawn(servers.run(resources, shutdown));
    Ok(Serving { reports: reported, task })
}

impl<P: DevicePlugin, F: Fn(&str) -> Arc<P> + Send + 'static> Servers<F> {
    fn join(&mut self, resource: &str) -> Result<(), SocketError> {
        let (stop, mut stopped) = watch::channel(false);
        let until = async move {
            // An error means that the member has been dropped.
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        let (plugin, reports) = ((self.make)(resource), self.reports.clone());
        let driver =
            driver::Driver::new(resource, &self.dir, plugin, self.options.clone(), reports)?;
        self.members.insert(resource.to_owned(), (stop, tokio::spawn(driver.run(until))));
        Ok(())
    }

    async fn run(
        mut self,
        mut resources: watch::Receiver<BTreeSet<String>>,
        shutdown: impl Future<Output = ()> + Send,
    ) {
        let mut shutdown = std::pin::pin!(shutdown);
        let mut missing = false;
        loop {
            let again = async {
                match missing {
                    true => tokio::time::sleep(self.options.timing.max_backoff).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                () = &mut shutdown => break,
                () = again => {}
                changed = resources.changed() => if changed.is_err() {
                    // The set is final.
                    (&mut shutdown).await;
                    break;
                },
            }
            let wanted = resources.borrow_and_update().clone();
            missing = self.follow(&wanted).await;
        }
        let members = std::mem::take(&mut self.members);
        for (stop, _) in members.values() {
            stop.send_replace(true);
        }
        for (_, task) in members.into_values() {
            // A panic has been reported.
            let _ = task.await;
        }
    }

    /// Serves what is wanted and nothing else. True if something could not be served.
    async fn follow(&mut self, wanted: &BTreeSet<String>) -> bool {
        let mut missing = false;
        for resource in wanted {
            if self.members.contains_key(resource) {
                continue;
            }
            match self.join(resource) {
                Ok(()) => info!(resource, "serving one more resource"),
                Err(error) => {
                    error!(resource, %error, "a resource cannot be served");
                    missing = true;
                }
            }
        }
        let gone: Vec<String> =
            self.members.keys().filter(|name| !wanted.contains(*name)).cloned().collect();
        for resource in gone {
            if let Some((stop, task)) = self.members.remove(&resource) {
                stop.send_replace(true);
                let _ = task.await;
                self.reports.send_modify(|reports| drop(reports.remove(&resource)));
                info!(resource, "no longer serving a retired resource: nobody holds it");
            }
        }
        missing
    }
}
