//! The plugin as a process of its own, on simulated GPUs, beside the fake kubelet.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tessera_fake_kubelet::Kubelet;

use super::node::unlisted;
use super::{GPU, Held, bounded, id_of, pod, until};
use crate::{Owned, Worked, artefacts, own_paths};

/// A command of the program under test. What a plugin of this machine has left is not this test's.
pub fn tessera() -> Command {
    let mut command = Command::new(artefacts().tessera());
    command.env("TESSERA_STATE_DIR", std::env::temp_dir().join("tessera-without-state"));
    command
}

/// What it wrote for people.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A node with simulated GPUs and the plugin as a process.
pub struct Simulated {
    /// Ends before what it works on goes.
    pub plugin: Option<Owned>,
    /// What it writes is below this.
    pub dir: tempfile::TempDir,
    pub kubelet: Kubelet,
    /// What is run; a copy of another version in tests of upgrades.
    pub program: PathBuf,
    /// What the plugin itself has in its environment besides.
    pub envs: Vec<(&'static str, std::ffi::OsString)>,
    /// The simulator's configuration; none for its default.
    machine: Option<PathBuf>,
}

impl Simulated {
    /// On the simulator's default machine, with a file in the shim's place.
    pub async fn new(share: &str) -> Self {
        Self::build(share, "", None).await
    }

    /// With four replicas of each of its GPUs, which kubelet knows.
    pub async fn serving() -> Self {
        let mut node = Self::new("replicas = 4").await;
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        node
    }

    /// On a machine of this configuration of the simulator, with these settings of `gpus`, two replicas
    /// of each, and the built shim.
    pub async fn on(machine: &str, gpus: &str) -> Self {
        Self::build("replicas = 2", gpus, Some(machine)).await
    }

    async fn build(share: &str, gpus: &str, machine: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(&dir.path().join("kubelet")).await.unwrap();
        let shim = if machine.is_some() {
            artefacts().shim()
        } else {
            let path = dir.path().join("libtessera.so");
            std::fs::write(&path, b"\x7fELF").unwrap();
            path
        };
        let machine = machine.map(|text| {
            let path = dir.path().join("machine.toml");
            std::fs::write(&path, text).unwrap();
            path
        });
        let paths = own_paths(
            dir.path(),
            &[
                ("kubelet", kubelet.device_plugins_dir()),
                ("pod_resources", kubelet.pod_resources_socket()),
                ("shim_source", &shim),
                ("nvml", &artefacts().libnvml()),
            ],
        );
        let context = match gpus.contains("context_overhead") {
            true => "",
            false => "context_overhead = \"64Mi\"\n",
        };
        let listen = unlisted(share);
        let config = format!("[share]\n{share}\n[gpus]\n{context}{gpus}\n{paths}{listen}");
        std::fs::write(dir.path().join("config.toml"), config).unwrap();
        let program = artefacts().tessera();
        Self { dir, kubelet, plugin: None, program, envs: Vec::new(), machine }
    }

    /// The plugin's configuration.
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("config.toml")
    }

    /// Writes something else in its place into that file.
    pub fn configure(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(self.file()).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(self.file(), text.replace(from, to)).unwrap();
    }

    /// A command of the program with the node's configuration.
    pub fn command(&self) -> Command {
        let mut command = self.on_machine(Command::new(&self.program));
        command.arg("--config").arg(self.file());
        command
    }

    pub fn on_machine(&self, mut command: Command) -> Command {
        command.env("SIMGPU_STATE", self.dir.path().join("simgpu.state"));
        if let Some(machine) = &self.machine {
            command.env("SIMGPU_CONFIG", machine);
        }
        command
    }

    /// Makes something happen to the machine.
    pub fn control(&self, args: &[&str]) {
        let output = self.on_machine(Command::new(artefacts().simgpu_ctl())).args(args).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    }

    /// What a GPU did for a process, by the simulator's account.
    pub fn worked(&self, gpu: usize, pid: u32) -> Worked {
        Worked::of(&mut self.on_machine(Command::new(artefacts().simgpu_ctl())), gpu, pid)
    }

    /// Runs a command to its end.
    pub fn run(&self, args: &[&str]) -> Output {
        self.command().args(args).output().unwrap()
    }

    /// What `status -o json` prints; null while no plugin answers.
    pub fn json(&self) -> Value {
        let output = self.run(&["status", "-o", "json"]);
        if output.status.code() == Some(69) && output.stdout.is_empty() {
            return Value::Null;
        }
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)))
    }

    /// Starts the plugin and waits until kubelet knows its replicas.
    pub async fn serve(&mut self) {
        self.launch();
        bounded(self.kubelet.wait_until(|kubelet| kubelet.allocatable(GPU) > 0)).await;
    }

    /// Starts it, and waits neither for kubelet nor for anything.
    pub fn launch(&mut self) {
        let log = self.dir.path().join("log");
        let log = std::fs::File::options().append(true).create(true).open(log).unwrap();
        let mut command = self.command();
        command.arg("serve").envs(self.envs.iter().cloned()).stderr(log).stdin(Stdio::null());
        let plugin = command.spawn().unwrap();
        self.plugin = Some(Owned(plugin));
    }

    /// Lets the plugin, and nothing else, be started by this command of a shell.
    pub fn wrap(&mut self, wrapper: &str) {
        let script = self.dir.path().join("wrapped");
        let text = format!("#!/bin/sh\n{wrapper} {} \"$@\"\n", self.program.display());
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        self.program = script;
    }

    /// The pages of these replicas.
    pub fn pages(&self, ids: &[String]) -> PathBuf {
        self.dir.path().join("pages").join(id_of(ids).as_str())
    }

    /// The tenant program under the shim, with the pages of these replicas.
    pub fn tenant(&self, ids: &[String]) -> Command {
        let mut tenant = self.on_machine(Command::new(artefacts().tenant()));
        tenant.env("LD_LIBRARY_PATH", artefacts().sim_dir());
        tenant.env("LD_PRELOAD", artefacts().shim());
        tenant.env(tessera_region::layout::PAGES_DIR_ENV, self.pages(ids));
        tenant
    }

    /// Runs a pod of one container with so many replicas.
    pub async fn start_pod(&self, name: &str, replicas: usize) -> Held {
        let admitted = bounded(self.kubelet.run(&pod(name, replicas))).await.unwrap().remove(0);
        Held { pages: self.pages(&admitted.device_ids), ids: admitted.device_ids }
    }

    /// Waits until the plugin knows a pod by its name.
    pub async fn named(&self, pod: &str) {
        until(|| {
            let status = self.json();
            let mut all = status["allocations"].as_array()?.iter();
            all.any(|one| one["holder"]["pod"] == pod).then_some(())
        })
        .await;
    }

    /// Where metrics and probes, or the JSON API, are served, as the log says.
    pub async fn address(&self) -> SocketAddr {
        let log = self.dir.path().join("log");
        until(|| {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            let word = log.split("address=").nth(1)?.split_whitespace().next()?;
            word.trim_matches('"').parse().ok()
        })
        .await
    }

    pub fn kill(&mut self) {
        drop(self.plugin.take().unwrap());
    }

    /// Asks it to end (SIGTERM), and gives its exit status.
    pub async fn terminate(&mut self) -> Option<i32> {
        let mut plugin = self.plugin.take().unwrap();
        let pid = nix::unistd::Pid::from_raw(i32::try_from(plugin.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        until(|| plugin.try_wait().unwrap()).await.code()
    }
}
