//! Runs the registration machine: servers, the Register call, timers, looks at the directory.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tessera_kubelet_api::deviceplugin::device_plugin_server::DevicePluginServer;
use tessera_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use tessera_kubelet_api::deviceplugin::{
    DevicePluginOptions, KUBELET_SOCKET, RegisterRequest, VERSION,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::transport::{Channel, Endpoint};

use super::directory::{Identity, Names};
use super::pod_resources::PodResources;
use super::registration::{Action, Event, Machine};
use super::service::{Events, Service};
use super::sockets::{Server, Socket, SocketError, remove_stale};
use super::{DevicePlugin, Options, Phase, Report};
use tessera_model::printable::causes;

/// Kubelet has it compiled in (`DevicePluginPath` of its device plugin API), so it does not move with --root-dir, as
/// pod-resources, plugins and `plugins_registry` do.
const DIRECTORY: &str = "/var/lib/kubelet/device-plugins";
/// Longest pause between two looks whether kubelet offers the resource.
const VERIFY_PAUSE: Duration = Duration::from_secs(2);

pub(super) struct Driver<P> {
    resource_name: String,
    dir: PathBuf,
    kubelet: PathBuf,
    plugin: Arc<P>,
    options: Options,
    /// Of all resources; this one's is there.
    reports: watch::Sender<BTreeMap<String, Report>>,
    names: Names,
    seen: Option<Identity>,
    server: Option<Server>,
    /// Grows with every socket; what is said about an earlier one is void.
    generation: u64,
    sender: Events,
    receiver: mpsc::UnboundedReceiver<(u64, Event)>,
    call: Option<JoinHandle<()>>,
    verification: Option<JoinHandle<()>>,
    /// Failed Registers in a row, for a log that neither hides nor floods.
    refusals: u64,
}

impl<P: DevicePlugin> Driver<P> {
    /// Makes the first socket, so that the caller learns of an unusable directory.
    pub(super) fn new(
        resource_name: &str,
        dir: &Path,
        plugin: Arc<P>,
        options: Options,
        reports: watch::Sender<BTreeMap<String, Report>>,
    ) -> Result<Self, SocketError> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut driver = Self {
            resource_name: resource_name.to_owned(),
            dir: dir.to_path_buf(),
            kubelet: dir.join(KUBELET_SOCKET),
            plugin,
            options,
            reports,
            names: Names::new(resource_name),
            seen: None,
            server: None,
            generation: 0,
            sender,
            receiver,
            call: None,
            verification: None,
            refusals: 0,
        };
        driver.listen()?;
        let report = (resource_name.to_owned(), Report::default());
        driver.reports.send_modify(|reports| reports.extend([report]));
        Ok(driver)
    }

    pub(super) async fn run(mut self, shutdown: impl Future<Output = ()> + Send) {
        let mut machine = Machine::new(self.options.timing.clone());
        // The first socket has been made in `new`.
        let mut todo: VecDeque<Action> = machine.on(self.listening()).into();
        let mut wake: Option<Instant> = None;
        let mut looks = tokio::time::interval(self.options.timing.poll_interval);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let own = self.endpoint();
        // Two plugins for one resource are a mistake, but not one that silence would mend.
        for socket in remove_stale(&self.dir, |name| self.names.is_ours(name) && name != own) {
            tracing::warn!(
                socket,
                "another running plugin serves this resource on this node; each will keep taking it from the other: \
                 stop one"
            );
        }
        let mut shutdown = std::pin::pin!(shutdown);
        loop {
            while let Some(action) = todo.pop_front() {
                match action {
                    Action::Wake(after) => wake = Some(Instant::now() + after),
                    Action::Report(phase) => self.report(phase),
                    Action::Register => self.register(),
                    Action::Verify => self.verify(),
                    Action::Listen => {
                        self.end_server().await;
                        let event = match self.listen() {
                            Ok(()) => self.listening(),
                            Err(error) => {
                                self.complain(&error.to_string());
                                Event::ListenFailed
                            }
                        };
                        todo.extend(machine.on(event));
                    }
                }
            }
            let timer = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = &mut shutdown => break,
                _ = looks.tick() => if let Some(event) = self.look() {
                    todo.extend(machine.on(event));
                },
                Some((generation, event)) = self.receiver.recv() => {
                    if generation == self.generation {
                        self.tell(&event);
                        todo.extend(machine.on(event));
                    }
                }
                () = timer => {
                    wake = None;
                    todo.extend(machine.on(Event::Timer));
                }
            }
        }
        self.end_server().await;
        self.report(Phase::Stopped);
    }

    fn listen(&mut self) -> Result<(), SocketError> {
        if !self.dir.is_dir() {
            return Err(SocketError(format!(
                "kubelet's device plugin directory {} does not exist: kubelet makes {DIRECTORY} at its start, whatever \
                 its --root-dir; set paths.kubelet to that, and mount it into this container",
                self.dir.display()
            )));
        }
        let socket = Socket::listen(&self.dir.join(self.names.next()), "end it first")?;
        self.generation += 1;
        self.seen = Identity::of(&self.kubelet);
        self.server = Some(Server::start(socket, |stop| {
            DevicePluginServer::new(Service {
                plugin: Arc::clone(&self.plugin),
                debounce: self.options.timing.debounce,
                generation: self.generation,
                events: self.sender.clone(),
                stop,
                calls: watch::Sender::new(0),
            })
        }));
        Ok(())
    }

    /// The file name of the socket, by which kubelet knows it.
    fn endpoint(&self) -> String {
        let path = self.server.as_ref().and_then(|server| server.socket.path.file_name());
        path.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn listening(&self) -> Event {
        let kubelet = self.seen.is_some();
        if !kubelet {
            let missing = format!("waiting for kubelet: there is no {}", self.kubelet.display());
            tracing::info!("{missing}");
            self.failed(&missing);
        }
        Event::Listening { kubelet }
    }

    /// Removes the socket, lets open calls end, then the streams.
    async fn end_server(&mut self) {
        for task in [self.call.take(), self.verification.take()].into_iter().flatten() {
            task.abort();
        }
        // From here on, events of this server are void.
        self.generation += 1;
        if let Some(server) = self.server.take() {
            server.end(self.options.timing.drain_timeout).await;
        }
    }

    /// Looks at the directory; gives what has happened since the last look.
    fn look(&mut self) -> Option<Event> {
        let before = std::mem::replace(&mut self.seen, Identity::of(&self.kubelet));
        match (before, self.seen) {
            (None, None) => None,
            (Some(_), None) => {
                tracing::info!("kubelet's socket is gone; waiting for it");
                self.failed("waiting for kubelet: its socket is gone");
                Some(Event::KubeletGone)
            }
            // A new kubelet brings a new socket of ours anyway.
            (before, now) if before != now => {
                tracing::info!("kubelet has (re)started; registering");
                Some(Event::KubeletAppeared)
            }
            _ => {
                self.server.as_ref().filter(|server| server.socket.is_gone())?;
                tracing::warn!("the plugin's socket was removed; making a new one");
                Some(Event::SocketLost)
            }
        }
    }

    fn register(&mut self) {
        let (kubelet, endpoint) = (self.kubelet.clone(), self.endpoint());
        let (resource_name, timeout) =
            (self.resource_name.clone(), self.options.timing.register_timeout);
        let (generation, events) = (self.generation, self.sender.clone());
        self.call = Some(tokio::spawn(async move {
            let event = match register(&kubelet, endpoint, resource_name, timeout).await {
                Ok(()) => Event::Accepted,
                Err(error) => Event::Refused(error),
            };
            let _ = events.send((generation, event));
        }));
    }

    /// Asks pod resources, where known, whether the node offers any of our healthy devices. Only two
    /// clear answers of "none" count: an old kubelet, or none, cannot say.
    fn verify(&mut self) {
        let Some(socket) = self.options.pod_resources.clone() else { return };
        let (generation, events) = (self.generation, self.sender.clone());
        let (plugin, resource_name) = (Arc::clone(&self.plugin), self.resource_name.clone());
        let pause = VERIFY_PAUSE.min(self.options.timing.live_timeout / 4);
        let task = tokio::spawn(async move {
            let pod_resources = PodResources::new(&socket);
            for _ in 0..2 {
                tokio::time::sleep(pause).await;
                let Ok(offered) = pod_resources.allocatable(&resource_name).await else { return };
                let healthy = plugin.devices().borrow().iter().any(|device| device.healthy);
                if !healthy || !offered.is_empty() {
                    return;
                }
            }
            let _ = events.send((generation, Event::NotOffered));
        });
        if let Some(earlier) = self.verification.replace(task) {
            earlier.abort();
        }
    }

    fn report(&self, phase: Phase) {
        if phase == Phase::Live {
            tracing::info!(
                resource = self.resource_name,
                "registered; kubelet watches the devices"
            );
        }
        self.change_report(|report| std::mem::replace(&mut report.phase, phase) != phase);
    }

    fn change_report(&self, change: impl FnOnce(&mut Report) -> bool) {
        let own = |reports: &mut BTreeMap<_, Report>| {
            reports.get_mut(&self.resource_name).is_some_and(change)
        };
        self.reports.send_if_modified(own);
    }

    fn failed(&self, error: &str) {
        self.change_report(|report| {
            report.last_error = Some(error.to_owned());
            true
        });
    }

    fn tell(&mut self, event: &Event) {
        match event {
            Event::Accepted => {
                self.refusals = 0;
                self.change_report(|report| {
                    report.registered_at = Some(SystemTime::now());
                    report.registrations += 1;
                    report.last_error = None;
                    true
                });
            }
            Event::Refused(error) => self.complain(error),
            Event::Closed => tracing::info!(
                "kubelet has closed the device stream: it stops or restarts, or another plugin \
                 registered the same resource"
            ),
            Event::NotOffered => {
                self.complain("kubelet accepted the plugin but does not offer its resource");
            }
            _ => {}
        }
    }

    /// A failure, logged the 1st, 2nd, 4th, 8th … time in a row.
    fn complain(&mut self, error: &str) {
        self.refusals += 1;
        self.failed(error);
        if self.refusals.is_power_of_two() {
            tracing::warn!(
                attempts = self.refusals,
                resource = self.resource_name,
                "not registered, trying again: {error}"
            );
        }
    }
}

/// What the plugin implements of the API; kubelet asks again after Register and goes by that answer.
pub(super) const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: true };

/// Announces `endpoint`, the file name of our socket, as the server of `resource_name`.
async fn register(
    kubelet: &Path,
    endpoint: String,
    resource_name: String,
    timeout: Duration,
) -> Result<(), String> {
    let call = async {
        let channel = connect(kubelet).await.map_err(|error| {
            format!("cannot reach kubelet at {}: {}", kubelet.display(), causes(&error))
        })?;
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint,
            resource_name,
            options: Some(OPTIONS),
        };
        let answer = RegistrationClient::new(channel).register(request).await;
        answer.map(drop).map_err(|status| format!("kubelet refused Register: {}", status.message()))
    };
    tokio::time::timeout(timeout, call).await.map_err(|_| {
        format!(
            "kubelet did not answer Register within {timeout:?}: it dials the plugin's socket back first; is the \
             directory the one that kubelet sees?"
        )
    })?
}

pub(super) async fn connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("unix://{}", path.display()))?.connect().await
}
