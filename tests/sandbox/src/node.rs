//! A node: a kubelet that runs no containers, and the plugin as a process of its own.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tessera_config::Config;
use tessera_fake_kubelet::Kubelet;
use tokio::process::{Child, Command};
use toml::Table;

use super::container::Surroundings;
use super::dra::{Dra, Size};
use super::machine::{self, Simulation};
use super::pod::Placement;
use super::scratch::MARK;

/// How long the plugin may take to register; NVML on a cold machine takes seconds.
const REGISTRATION: Duration = Duration::from_secs(20);
/// How long it may take to end when asked to.
const GOODBYE: Duration = Duration::from_secs(3);

/// How long it may take until it knows a pod by name.
const NAMED: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
pub struct NodeSpec {
    pub name: String,
    pub dir: PathBuf,
    /// The sandbox's directory, which its processes carry.
    pub mark: PathBuf,
    pub shim: PathBuf,
    /// The simulated machine; without one, this machine's GPUs.
    pub simulation: Option<Simulation>,
    /// The user's configuration.
    pub user: Table,
    /// Whether metrics and API are served, on ports that are free.
    pub listens: bool,
}

/// A node whose plugin may come and go.
#[derive(Debug)]
pub struct Node {
    pub spec: NodeSpec,
    pub kubelet: Kubelet,
    /// The plugin's configuration, as it was read from its file.
    pub config: Config,
    /// The cluster's side of claims, where the configuration serves them.
    pub dra: Option<Dra>,
    pub metrics: Option<SocketAddr>,
    pub api: Option<SocketAddr>,
    plugin: Option<Child>,
}

/// How `tessera` finds a node's plugin.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Asked {
    pub node: String,
    config: PathBuf,
    envs: BTreeMap<String, String>,
}

impl Asked {
    /// Gives it to a command that is `tessera`, with these arguments.
    pub fn give(&self, command: &mut std::process::Command, arguments: &[impl AsRef<OsStr>]) {
        command.arg("--config").arg(&self.config).args(arguments);
        // Neither the user's cluster nor what a plugin of this machine has left is the sandbox's.
        for name in ["KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"] {
            command.env_remove(name);
        }
        command.envs(&self.envs);
    }
}

/// Why a configuration cannot be tried: the text of `config check`, a problem in each line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadConfiguration(pub String);

impl Node {
    /// Starts a kubelet, and writes the plugin's configuration. No plugin runs yet.
    pub async fn prepare(spec: NodeSpec) -> anyhow::Result<Self> {
        let kubelet = Kubelet::start(&spec.dir.join("k")).await?;
        // A kubelet that lists no pods at all has just started, and is not believed.
        kubelet.run_other("kube-system", "tessera");
        let [metrics, api] = match spec.listens {
            true => free_ports()?.map(Some),
            false => [None, None],
        };
        let dra = match machine::serves_claims(&spec.user) {
            true => Some(Dra::start(&spec.dir, &spec.dir.join("k"), &spec.name)?),
            false => None,
        };
        let registry = dra.as_ref().map(Dra::registry);
        let text = machine::configuration(&spec, &kubelet, registry, [metrics, api]);
        let file = spec.dir.join("config.toml");
        fs::write(&file, &text).with_context(|| format!("cannot write {}", file.display()))?;
        let config = Config::find(Some(&file)).map_err(|e| BadConfiguration(e.to_string()))?;
        Ok(Self { spec, kubelet, config, dra, metrics, api, plugin: None })
    }

    pub fn file(&self) -> PathBuf {
        self.spec.dir.join("config.toml")
    }

    pub fn log(&self) -> PathBuf {
        self.spec.dir.join("plugin.log")
    }

    /// All resources that the configuration sells.
    pub fn resources(&self) -> Vec<String> {
        let shares = self.config.layouts.iter().flat_map(|layout| &layout.shares);
        let mut all = vec![self.config.resource.name.clone()];
        all.extend(shares.map(|share| share.resource.clone()));
        all.sort();
        all.dedup();
        all
    }

    /// How many of a resource are healthy and held by nobody.
    pub fn free(&self, resource: &str) -> usize {
        let held = self.kubelet.held(resource);
        let devices = self.kubelet.devices(resource);
        let is_free = |device: &&tessera_kubelet_api::deviceplugin::Device| {
            device.health == tessera_kubelet_api::deviceplugin::HEALTHY
                && !held.contains(&device.id)
        };
        devices.iter().filter(is_free).count()
    }

    /// `tessera`, with this node's configuration, on its machine; it dies with this process.
    pub fn command(&self, arguments: &[&str]) -> anyhow::Result<std::process::Command> {
        let mut command = Surroundings::default().command(&std::env::current_exe()?)?;
        self.asked().give(&mut command, arguments);
        command.stdin(Stdio::null()).env(MARK, &self.spec.mark);
        Ok(command)
    }

    /// How `tessera` finds this node's plugin.
    pub fn asked(&self) -> Asked {
        let (spec, text) = (&self.spec, |path: &Path| path.to_string_lossy().into_owned());
        let mut envs = vec![
            ("TESSERA_STATE_DIR", text(&spec.dir.join("state"))),
            ("NODE_NAME", spec.name.clone()),
        ];
        if let Some(dra) = &self.dra {
            envs.push(("KUBECONFIG", text(&dra.kubeconfig())));
            envs.push(("POD_UID", format!("plugin-of-{}", spec.name)));
        }
        let simulation = spec.simulation.as_ref().map(Simulation::envs).into_iter().flatten();
        envs.extend(simulation.map(|(name, path)| (name, text(path))));
        let envs = envs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Asked { node: spec.name.clone(), config: self.file(), envs }
    }

    /// Runs `config check` on what the plugin would be started with.
    pub fn check(&self) -> anyhow::Result<()> {
        let output = self.command(&["config", "check"])?.output().context("cannot check")?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(BadConfiguration(said.trim_end().to_owned()).into())
    }

    /// Starts the plugin, and waits until kubelet knows what it sells.
    pub async fn start_plugin(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.plugin_runs(), "the plugin of {} runs already", self.spec.name);
        let log = fs::File::options().create(true).append(true).open(self.log())?;
        let begin = log.metadata()?.len();
        let mut command = self.command(&["serve"])?;
        command.stdout(log.try_clone()?).stderr(log);
        let mut command = Command::from(command);
        // Not the terminal's Ctrl-C: the sandbox ends it in order.
        command.process_group(0).kill_on_drop(true);
        let mut plugin = command.spawn().context("cannot start the plugin")?;
        let registered = tokio::select! {
            offered = self.await_offered() => offered.map_err(|_| "did not register".to_owned()),
            status = plugin.wait() => Err(format!("ended ({})", status?)),
        };
        if let Err(what) = registered {
            let log = fs::read(self.log()).unwrap_or_default();
            let own = log.get(usize::try_from(begin).unwrap_or(0)..).unwrap_or_default();
            let own = String::from_utf8_lossy(own);
            anyhow::bail!("the plugin of {} {what}; its log:\n{}", self.spec.name, own.trim_end());
        }
        self.plugin = Some(plugin);
        Ok(())
    }

    /// Waits until kubelet knows something that the plugin sells.
    pub async fn await_offered(&self) -> anyhow::Result<()> {
        if let Some(dra) = &self.dra {
            // It may sell nothing else.
            return dra.await_published().await;
        }
        let resources = self.resources();
        let offered = self.kubelet.wait_until(|kubelet| {
            resources.iter().any(|resource| kubelet.allocatable(resource) > 0)
        });
        let name = &self.spec.name;
        tokio::time::timeout(REGISTRATION, offered).await.with_context(|| {
            format!("the plugin of {name} did not register; `tessera sandbox logs plugin` says why")
        })
    }

    /// Waits until the plugin knows a pod by its name, which it learns when it next asks kubelet: a user who sees
    /// the pod can ask for it then. A plugin that does not run, or takes longer than anybody waits, is not waited for.
    pub async fn await_named(&mut self, namespace: &str, pod: &str) {
        let end = tokio::time::Instant::now() + NAMED;
        while self.plugin_runs() && tokio::time::Instant::now() < end {
            if let Ok(status) = tessera_api::admin::ask(&self.config.paths.admin).await {
                let mut holders = status.allocations.iter().filter_map(|one| one.holder.as_ref());
                if holders.any(|holder| holder.namespace == namespace && holder.pod == pod) {
                    return;
                }
            }
            tokio::time::sleep(STEP).await;
        }
    }

    /// Places a pod with a claim of this size.
    /// Errors: The node serves no claims; it does not fit; what the driver says. Nothing is left of it then.
    pub async fn claim(
        &mut self,
        pod: (&str, &str),
        size: Size,
        scratch: PathBuf,
    ) -> anyhow::Result<Placement> {
        let dra = self.dra.as_mut().context("this node serves no claims")?;
        let claimed = dra.prepare(pod, size).await?;
        let placement = Placement::of_claim(&self.kubelet, pod, claimed, scratch);
        if placement.is_err() {
            dra.unprepare(&format!("{}/{}", pod.0, pod.1)).await;
        }
        placement
    }

    /// The claim of a pod, where it had one, is given back.
    pub async fn unprepare(&mut self, pod: &str) {
        if let Some(dra) = &mut self.dra {
            dra.unprepare(pod).await;
        }
    }

    pub fn plugin_runs(&mut self) -> bool {
        self.plugin.as_mut().is_some_and(|plugin| matches!(plugin.try_wait(), Ok(None)))
    }

    /// The plugin's pid, while it runs.
    pub fn plugin_pid(&self) -> Option<u32> {
        self.plugin.as_ref().and_then(Child::id)
    }

    /// Asks the plugin to end, and waits until it has; kills one that does not.
    pub async fn stop_plugin(&mut self) {
        let Some(mut plugin) = self.plugin.take() else { return };
        if let Some(pid) = plugin.id().and_then(|pid| i32::try_from(pid).ok()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        if tokio::time::timeout(GOODBYE, plugin.wait()).await.is_err() {
            let _ = plugin.kill().await;
        }
    }

    /// Kills the plugin, as a node's trouble would.
    pub async fn kill_plugin(&mut self) {
        if let Some(mut plugin) = self.plugin.take() {
            let _ = plugin.kill().await;
        }
    }

    /// Ends plugin and kubelet.
    pub async fn strike(mut self) {
        self.stop_plugin().await;
        self.kubelet.stop().await;
    }
}

/// Two ports of this machine that nobody listens on now.
fn free_ports() -> anyhow::Result<[SocketAddr; 2]> {
    let open = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    // Both are held until both are known.
    let (a, b) = (open()?, open()?);
    Ok([a.local_addr()?, b.local_addr()?])
}

/// The last lines of a file, for an error.
pub fn last_lines(file: &Path, count: usize) -> String {
    let text = fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
