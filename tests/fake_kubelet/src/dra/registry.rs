//! The plugin registry: registration sockets come and go, and drivers say how their devices are.

use std::collections::BTreeMap;
use std::error::Error;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use tessera_kubelet_api::dra_health::{v1, v1alpha1};
use tessera_kubelet_api::pluginregistration::registration_client::RegistrationClient;
use tessera_kubelet_api::pluginregistration::{InfoRequest, PluginInfo, RegistrationStatus};
use tokio_stream::StreamExt;
use tonic::transport::{Channel, Endpoint};
use tracing::warn;

use super::{Inner, Plugin};

/// How often the directory is read; the real one is woken by inotify.
const LOOK: Duration = Duration::from_millis(10);
/// Longest call. Kubelet has a second; the machines of tests are busier.
const INFO: Duration = Duration::from_secs(5);

/// Distinguishes a socket from another of its name.
pub(super) type Identity = (u64, u64, Option<SystemTime>);

/// Registers what appears and forgets what is gone, for as long as the stand-in lives.
pub(super) async fn watch(kubelet: Weak<Inner>) {
    // A driver that was refused is not tried again before its socket changes (kubelet before 1.36); one that did not
    // answer is.
    let mut refused: BTreeMap<PathBuf, Identity> = BTreeMap::new();
    loop {
        let Some(inner) = kubelet.upgrade() else { return };
        let sockets = sockets(&inner.registry);
        let forgotten = {
            let mut state = inner.state();
            let before = state.plugins.len();
            state.plugins.retain(|path, plugin| sockets.get(path) == Some(&plugin.identity));
            if state.plugins.is_empty() {
                state.health.all_unknown();
            }
            state.plugins.len() != before
        };
        refused.retain(|path, identity| sockets.get(path) == Some(identity));
        if forgotten {
            inner.tick();
        }
        for (path, identity) in sockets {
            let known = inner.state().plugins.contains_key(&path) || refused.contains_key(&path);
            if known {
                continue;
            }
            match register(&inner, &path, identity).await {
                Ok(Ok(())) => {}
                Ok(Err(why)) => {
                    warn!(socket = %path.display(), "refused: {why}");
                    refused.insert(path, identity);
                }
                Err(why) => warn!(socket = %path.display(), "not registered yet: {why}"),
            }
            inner.tick();
        }
        drop(inner);
        tokio::time::sleep(LOOK).await;
    }
}

fn sockets(registry: &Path) -> BTreeMap<PathBuf, Identity> {
    let entries = std::fs::read_dir(registry).into_iter().flatten().flatten();
    let identity = |entry: std::fs::DirEntry| {
        let meta = entry.path().symlink_metadata().ok()?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        let identity = (meta.dev(), meta.ino(), meta.created().ok());
        (meta.file_type().is_socket() && !hidden).then(|| (entry.path(), identity))
    };
    entries.filter_map(identity).collect()
}

/// As `operation_generator.go`: GetInfo, then what the DRA manager says. The inner
/// error is the DRA manager's; the outer says that nobody answered.
async fn register(
    inner: &Arc<Inner>,
    socket: &Path,
    identity: Identity,
) -> Result<Result<(), String>, String> {
    let asked = async {
        let address = Endpoint::try_from(format!("unix:{}", socket.display()))?;
        let mut client = RegistrationClient::new(address.connect().await?);
        let info = client.get_info(InfoRequest {}).await?.into_inner();
        let taken = take(inner, socket, identity, info);
        let status = RegistrationStatus {
            plugin_registered: taken.is_ok(),
            error: taken.clone().err().unwrap_or_default(),
        };
        // It hears of it or not: the real one does not care.
        let _ = client.notify_registration_status(status).await;
        Ok(taken)
    };
    let asked: Result<_, Box<dyn Error + Send + Sync>> =
        tokio::time::timeout(INFO, asked).await.unwrap_or_else(|_| Err("no answer in time".into()));
    asked.map_err(|error| error.to_string())
}

fn take(
    inner: &Arc<Inner>,
    socket: &Path,
    identity: Identity,
    info: PluginInfo,
) -> Result<(), String> {
    let mut state = inner.state();
    let behaviour = state.behaviour.clone();
    if let Some(why) = behaviour.reject {
        return Err(why);
    }
    if info.r#type != "DRAPlugin" || info.name != inner.driver {
        return Err(format!("{} {} is not what is expected here", info.r#type, info.name));
    }
    if !info.supported_versions.iter().any(|name| name == "v1.DRAPlugin") {
        return Err("the plugin does not serve v1.DRAPlugin".to_owned());
    }
    let endpoint = PathBuf::from(&info.endpoint);
    if state.plugins.values().any(|plugin| plugin.endpoint == endpoint) {
        return Err(format!("endpoint {} already registered", endpoint.display()));
    }
    let address = format!("unix:{}", endpoint.display());
    let channel = Endpoint::try_from(address).map_err(|error| error.to_string())?.connect_lazy();
    let health = behaviour.health.filter(|name| info.supported_versions.iter().any(|v| v == name));
    let health = health.map(|name| {
        let watching = follow(Arc::downgrade(inner), name, channel.clone(), behaviour.health_retry);
        tokio::spawn(watching)
    });
    state.registrations += 1;
    let order = state.registrations;
    let plugin = Plugin { order, identity, channel, endpoint, health };
    state.plugins.insert(socket.to_owned(), plugin);
    Ok(())
}

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

// === What drivers say of their devices' health ===

/// By pool and name.
#[derive(Debug, Default)]
pub(super) struct Health {
    devices: BTreeMap<(String, String), Reported>,
    messages: u64,
}

impl Health {
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
async fn follow(kubelet: Weak<Inner>, service: &str, channel: Channel, retry: Duration) {
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

fn state(number: i32) -> DeviceState {
    match number {
        1 => DeviceState::Healthy,
        2 => DeviceState::Unhealthy,
        _ => DeviceState::Unknown,
    }
}

/// One stream, to its end; the messages of both versions are the same, and types of their own.
macro_rules! follow {
    ($name:ident, $version:ident) => {
        async fn $name(kubelet: &Weak<Inner>, channel: Channel) -> Result<(), tonic::Status> {
            let mut client =
                $version::dra_resource_health_client::DraResourceHealthClient::new(channel);
            let request = $version::NodeWatchResourcesRequest {};
            let mut stream = client.node_watch_resources(request).await?.into_inner();
            while let Some(list) = stream.next().await {
                let device = |device: $version::DeviceHealth| {
                    let id = device.device.unwrap_or_default();
                    let reported =
                        Reported { state: state(device.health), message: device.message };
                    ((id.pool_name, id.device_name), reported)
                };
                let Some(inner) = kubelet.upgrade() else { return Ok(()) };
                inner.state().health.take(list?.devices.into_iter().map(device).collect());
                inner.tick();
            }
            Ok(())
        }
    };
}

follow!(follow_v1, v1);
follow!(follow_v1alpha1, v1alpha1);
