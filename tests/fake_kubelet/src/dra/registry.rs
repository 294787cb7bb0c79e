//! The plugin registry: registration sockets come and go.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use tessera_kubelet_api::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tonic::transport::Endpoint;
use tracing::warn;

use super::{Inner, Plugin, health};
use crate::http2::{Answer, Client};

/// How often the directory is read; the real one is woken by inotify.
const LOOK: Duration = Duration::from_millis(10);
/// Longest call. Kubelet has a second; the machines of tests are busier.
const INFO: Duration = Duration::from_secs(5);
const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";
const NOTIFY: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";

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

/// As `operation_generator.go`: GetInfo, then what the DRA manager says, each over a connection of its own. The inner
/// error is the DRA manager's; the outer says that nobody answered.
async fn register(
    inner: &Arc<Inner>,
    socket: &Path,
    identity: Identity,
) -> Result<Result<(), String>, String> {
    let info: PluginInfo = call(socket, GET_INFO, &InfoRequest {}).await?;
    let taken = take(inner, socket, identity, info);
    let status = RegistrationStatus {
        plugin_registered: taken.is_ok(),
        error: taken.clone().err().unwrap_or_default(),
    };
    let _: Result<RegistrationStatusResponse, String> = call(socket, NOTIFY, &status).await;
    Ok(taken)
}

/// A call with the percent-encoded path as `:authority`, as grpc-go dials a path.
async fn call<T: prost::Message + Default>(
    socket: &Path,
    path: &str,
    message: &impl prost::Message,
) -> Result<T, String> {
    let authority = socket.display().to_string().replace('/', "%2F");
    let asking = async {
        let mut client = Client::try_connect(socket, authority.as_bytes()).await?;
        client.try_call(path, message, 4096).await
    };
    match tokio::time::timeout(INFO, asking).await {
        Ok(Ok(Answer::Ok(answer))) => Ok(answer),
        Ok(Ok(Answer::Status(code, message))) => Err(format!("status {code}: {message}")),
        Ok(Ok(Answer::Reset(code))) => Err(format!("the stream was reset ({code})")),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("no answer in time".to_owned()),
    }
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
        let watching =
            health::follow(Arc::downgrade(inner), name, channel.clone(), behaviour.health_retry);
        tokio::spawn(watching)
    });
    state.registrations += 1;
    let order = state.registrations;
    let plugin = Plugin { order, identity, channel, endpoint, health };
    state.plugins.insert(socket.to_owned(), plugin);
    Ok(())
}
