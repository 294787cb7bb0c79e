//! The cluster that the tests run on: one that was found, or one started for them.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::kubectl::Kubectl;
use crate::process;

/// Names another script than `../shared/cluster/cluster`, with the same commands.
const SCRIPT: &str = "TESSERA_E2E_CLUSTER";

/// The first start of a cluster may build it.
const START: Duration = Duration::from_secs(900);
const STEP: Duration = Duration::from_secs(120);

/// How images get onto the nodes, and how kubelet is restarted.
#[derive(Debug)]
enum Provider {
    /// The script that starts Kubernetes on this machine; see its README.
    Script(PathBuf),
    /// `kind`, by its cluster's name.
    Kind(String),
}

#[derive(Debug)]
pub struct Cluster {
    provider: Provider,
    started: bool,
    pub kubectl: Kubectl,
}

#[derive(Clone, Copy, Debug)]
pub enum Kubelet {
    /// Ends it; containers run on.
    Stop,
    Start,
}

impl Cluster {
    /// The cluster that `KUBECONFIG` names; else one started with the script of `TESSERA_E2E_CLUSTER`, or with
    /// `../shared/cluster/cluster`.
    pub fn find_or_start(repo: &Path) -> Result<Self> {
        let script = match env::var_os(SCRIPT).filter(|name| !name.is_empty()) {
            Some(name) => Some(PathBuf::from(&name).canonicalize().with_context(|| {
                format!("{SCRIPT}={}: name a script that starts a cluster", name.display())
            })?),
            None => repo.join("../shared/cluster/cluster").canonicalize().ok(),
        };
        let running = env::var_os("CLUSTER_RUN").map_or("/run/test-cluster".into(), PathBuf::from);
        let own_config = running.join("kubeconfig");
        match (env::var_os("KUBECONFIG").filter(|name| !name.is_empty()), script) {
            (Some(config), Some(script)) if Path::new(&config) == own_config => {
                Ok(Self::scripted(script, own_config, false))
            }
            (Some(config), _) => Self::found(config.into()),
            (None, Some(script)) => {
                ensure!(nix::unistd::geteuid().is_root(), "starting a cluster needs root");
                // Idempotent, as `up` is; what somebody else started stays up afterwards.
                let started = !own_config.exists();
                if started {
                    println!("starting a cluster (the first time it is built: some minutes)");
                }
                process::run(Command::new(&script).arg("up"), None, START)?
                    .success("cluster up")?;
                Ok(Self::scripted(script, own_config, started))
            }
            (None, None) => bail!(
                "no cluster: set KUBECONFIG to one (`kind create cluster` makes one), or {SCRIPT} to a \
                 script that starts one, or put that at {}",
                repo.join("../shared/cluster/cluster").display()
            ),
        }
    }

    fn scripted(script: PathBuf, config: PathBuf, started: bool) -> Self {
        let home = env::var_os("CLUSTER_HOME").map_or("/opt/test-cluster".into(), PathBuf::from);
        let kubectl = Kubectl::new(home.join("bin/kubectl"), config);
        Self { provider: Provider::Script(script), started, kubectl }
    }

    fn found(config: PathBuf) -> Result<Self> {
        let kubectl = Kubectl::new("kubectl".into(), config);
        let context = kubectl.run(&["config", "current-context"])?;
        let name = context.trim().strip_prefix("kind-");
        let name =
            name.context("KUBECONFIG names no cluster of kind's: its node is out of reach")?;
        Ok(Self { provider: Provider::Kind(name.to_owned()), started: false, kubectl })
    }

    /// Stops what [`Cluster::find_or_start`] started.
    pub fn leave(&self) -> Result<()> {
        match (&self.provider, self.started) {
            (Provider::Script(script), true) => {
                process::run(Command::new(script).arg("down"), None, STEP)?
                    .success("cluster down")
                    .map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Makes an image out of a root file system and puts it on the nodes.
    ///
    /// # Errors
    /// The tools for this kind of cluster are missing or fail.
    pub fn load_image(&self, name: &str, rootfs: &Path) -> Result<()> {
        match &self.provider {
            Provider::Script(script) => {
                let mut command = Command::new(script);
                command.args(["image", name]).arg(rootfs).args(["sleep", "2147483647"]);
                process::run(&mut command, None, STEP)?.success("cluster image").map(drop)
            }
            Provider::Kind(cluster) => {
                let file = rootfs.with_extension("dockerfile");
                let text = "FROM scratch\nCOPY . /\nENV PATH=/usr/local/bin:/bin\n";
                fs::write(&file, text).context("the Dockerfile of an image")?;
                let mut build = Command::new("docker");
                build.args(["build", "-q", "-t", name, "-f"]).arg(&file).arg(rootfs);
                process::run(&mut build, None, STEP)?.success("docker build")?;
                let mut load = Command::new("kind");
                load.args(["load", "docker-image", name, "--name", cluster]);
                process::run(&mut load, None, STEP)?.success("kind load").map(drop)
            }
        }
    }

    /// A program on `node`: the script with its own words, or another inside kind's container.
    fn on(&self, node: &str, own: &[&str], inside: &[&str]) -> Command {
        let (program, words) = match &self.provider {
            Provider::Script(script) => (script.as_path(), own.to_vec()),
            Provider::Kind(_) => (Path::new("docker"), [&["exec", node][..], inside].concat()),
        };
        let mut command = Command::new(program);
        command.args(words);
        command
    }

    pub fn kubelet(&self, node: &str, what: Kubelet) -> Result<()> {
        let (own, verb) = match what {
            Kubelet::Stop => ("kubelet-stop", "stop"),
            Kubelet::Start => ("kubelet-start", "start"),
        };
        let mut command = self.on(node, &[own], &["systemctl", verb, "kubelet"]);
        process::run(&mut command, None, STEP)?.success("restarting kubelet").map(drop)
    }

    /// Runs a bash script as root on the node itself, outside every container.
    pub fn on_host(&self, node: &str, script: &str) -> Result<String> {
        let mut command = match &self.provider {
            Provider::Script(_) => Command::new("bash"),
            Provider::Kind(_) => self.on(node, &[], &["bash"]),
        };
        command.args(["-ec", script]);
        process::run(&mut command, None, STEP)?.success("a script on the node")
    }

    /// The last lines of kubelet's log, or why they cannot be had.
    pub fn kubelet_log(&self, node: &str) -> String {
        let inside = ["journalctl", "-u", "kubelet", "-n", "100"];
        let mut log = self.on(node, &["log", "kubelet", "100"], &inside);
        match process::run(&mut log, None, STEP) {
            Ok(output) => output.stdout + &output.stderr,
            Err(error) => format!("({error:#})"),
        }
    }
}
