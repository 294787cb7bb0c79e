//! What the tenants play on: a directory, the plugin's process, the stand-in for kubelet.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use tokio::process::{Child, Command};
use toml::{Table, Value};

use super::container::Surroundings;
use tessera_config::Config;
use tessera_fake_kubelet::Kubelet;
use tessera_gpu::Discovery;
use tessera_gpu::nvml::NvmlDiscovery;
use tessera_model::gpu::Gpu;
use tessera_run::{Artefact, SIM_CONTEXT_OVERHEAD, enter_simulation, find_artefact};

/// How long the plugin may take to register; NVML on a cold machine takes seconds.
const REGISTRATION: Duration = Duration::from_secs(20);
/// How long it may take to end when asked to.
const GOODBYE: Duration = Duration::from_secs(3);
const SIMULATION_CONFIG: &str = "simgpu.toml";
const SIMULATION_STATE: &str = "simgpu.state";
/// What the simulated GPU keeps for itself, bytes (its configuration's default).
const SIM_RESERVE: u64 = 256 << 20;
/// Two GPUs, small enough that replicas are of a size people know.
const SIMULATION: &str = r#"[[gpu]]
name = "Simulated GPU"
memory = "16GiB"

[[gpu]]
name = "Simulated GPU"
memory = "16GiB"

[[kernel]]
name = "spin_ns"
parameter = 0
"#;

/// A temporary directory, removed when dropped unless it is to be kept.
#[derive(Debug)]
pub(super) struct Scratch {
    path: PathBuf,
    keep: bool,
}

/// Tells this program, started again, that the directory is there already.
const SCRATCH: &str = "TESSERA_DEMO_DIR";

impl Scratch {
    /// A fresh directory, or the one made before this program started itself again.
    ///
    /// # Errors
    /// No place for temporary files.
    pub fn open(keep: bool) -> anyhow::Result<Self> {
        if let Some(path) = std::env::var_os(SCRATCH) {
            return Ok(Self { path: path.into(), keep });
        }
        let template = std::env::temp_dir().join("tessera-demo.XXXXXX");
        let path = nix::unistd::mkdtemp(&template)
            .with_context(|| format!("cannot make {}", template.display()))?;
        Ok(Self { path, keep })
    }

    /// Puts this process on a simulated machine of its own, by starting it again.
    ///
    /// # Errors
    /// No simulated GPU beside this program.
    pub fn simulate(&self) -> anyhow::Result<()> {
        let config = self.path.join(SIMULATION_CONFIG);
        fs::write(&config, SIMULATION)?;
        enter_simulation(&[
            (SCRATCH, &self.path),
            ("SIMGPU_CONFIG", &config),
            ("SIMGPU_STATE", &self.path.join(SIMULATION_STATE)),
        ])
    }

    /// An empty directory below.
    pub fn dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.keep {
            eprintln!("tessera: kept {}", self.path.display());
            return;
        }
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Everything but the tenants.
pub(super) struct Stage {
    /// GPUs in NVML's order.
    pub gpus: Vec<Gpu>,
    /// The extended resource.
    pub resource: String,
    /// The stand-in.
    pub kubelet: Kubelet,
    /// NVML's library, where it is not the loader's.
    pub nvml: Option<PathBuf>,
    /// What a tenant needs of the environment besides Allocate's answer.
    pub replicas_per_gpu: usize,
    /// Bytes charged for each context; the most of any GPU.
    pub context_overhead: u64,
    plugin: Child,
    /// After the plugin, so that it is gone before its files are.
    pub scratch: Scratch,
}

impl Stage {
    /// Starts the stand-in and the plugin, and waits until all replicas can be had.
    ///
    /// # Errors
    /// No GPU, no artefacts, a plugin that ends or does not register.
    pub async fn set(real: bool, scratch: Scratch, config: &Config) -> anyhow::Result<Self> {
        let shim = find_artefact(Artefact::Shim, None)?;
        let simulation = (!real).then(|| find_artefact(Artefact::Simulation, None)).transpose()?;
        let simulation = match simulation {
            None => None,
            Some(libraries) => {
                let config = scratch.path.join(SIMULATION_CONFIG);
                let state = scratch.path.join(SIMULATION_STATE);
                Some(Simulation { libraries, config, state })
            }
        };
        let kubelet = Kubelet::start(&scratch.dir("kubelet")?).await?;
        let file = scratch.path.join("config.toml");
        fs::write(
            &file,
            plugin_config(&scratch.path, &kubelet, &shim, simulation.as_ref(), config),
        )?;
        let mut plugin = start_plugin(&scratch.path, &file)?;
        let nvml = simulation.as_ref().map(|s| s.libraries.join("libnvidia-ml.so.1"));
        let nvml = nvml.or_else(|| config.paths.nvml.clone());
        let registered = tokio::select! {
            () = kubelet.wait_until(|k| k.allocatable(&config.resource.name) > 0) => Ok(()),
            status = plugin.wait() => Err(format!("ended ({})", status?)),
            () = tokio::time::sleep(REGISTRATION) => Err("did not register".to_owned()),
        };
        if let Err(what) = registered {
            let log = fs::read_to_string(scratch.path.join("plugin.log")).unwrap_or_default();
            anyhow::bail!("the plugin {what}; its log:\n{}", log.trim_end());
        }
        let gpus = NvmlDiscovery::new(nvml.clone()).gpus(&config.gpus)?;
        let of_gpus =
            gpus.iter().map(|gpu| gpu.context_overhead(config.gpus.context_overhead_bytes)).max();
        let context_overhead = of_gpus.filter(|_| real).unwrap_or(SIM_CONTEXT_OVERHEAD);
        let replicas = kubelet.devices(&config.resource.name).len();
        Ok(Self {
            replicas_per_gpu: replicas / gpus.len().max(1),
            gpus,
            resource: config.resource.name.clone(),
            kubelet,
            nvml,
            context_overhead,
            plugin,
            scratch,
        })
    }

    /// What the plugin shows of itself: its pid, while it runs.
    pub fn plugin_pid(&self) -> Option<u32> {
        self.plugin.id()
    }

    /// Ends plugin and stand-in.
    pub async fn strike(mut self) {
        if let Some(pid) = self.plugin.id().and_then(|pid| i32::try_from(pid).ok()) {
            let pid = nix::unistd::Pid::from_raw(pid);
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        }
        if tokio::time::timeout(GOODBYE, self.plugin.wait()).await.is_err() {
            let _ = self.plugin.kill().await;
        }
        self.kubelet.stop().await;
    }
}

/// Where the simulated GPU is.
struct Simulation {
    libraries: PathBuf,
    config: PathBuf,
    state: PathBuf,
}

fn start_plugin(dir: &Path, config: &Path) -> anyhow::Result<Child> {
    let log = fs::File::create(dir.join("plugin.log"))?;
    // Through the same door as the tenants, so that it cannot outlive the demo.
    let mut command = Command::from(Surroundings::default().command(&std::env::current_exe()?)?);
    command
        .arg("--config")
        .arg(config)
        .arg("serve")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        // Not the terminal's Ctrl-C: the demo ends it in order.
        .process_group(0)
        .kill_on_drop(true);
    command.spawn().context("cannot start the plugin")
}

/// The plugin's configuration: the user's GPUs and shares, everything on the host below `dir`.
fn plugin_config(
    dir: &Path,
    kubelet: &Kubelet,
    shim: &Path,
    simulation: Option<&Simulation>,
    config: &Config,
) -> String {
    let text = |path: &Path| Value::from(path.to_string_lossy().into_owned());
    let bytes = |bytes: u64| Value::from(bytes.to_string());
    let list = |names: &[String]| Value::from(names.to_vec());
    let mut sections = vec![
        ("resource", vec![("name", Value::from(config.resource.name.clone()))]),
        (
            "share",
            vec![
                ("replicas", Value::from(i64::from(config.share.replicas))),
                ("memory", config.share.memory_bytes.map_or(Value::from("auto"), bytes)),
            ],
        ),
        (
            "paths",
            vec![
                ("kubelet", text(kubelet.device_plugins_dir())),
                ("pod_resources", text(kubelet.pod_resources_socket())),
                ("pages", text(&dir.join("pages"))),
                ("shim", text(&dir.join("shim"))),
                ("shim_source", text(shim)),
                ("ledger", text(&dir.join("ledger.redb"))),
                ("admin", text(&dir.join("admin.sock"))),
                ("nvml", text(config.paths.nvml.as_deref().unwrap_or(Path::new("")))),
            ],
        ),
        ("pages", vec![("tmpfs", Value::from("off"))]),
        // A port of the machine is not the demo's to take.
        ("metrics", vec![("listen", Value::from(""))]),
        // Device nodes and driver are the host's own; a process needs neither handed to it.
        ("container", vec![("device_list_strategy", Value::from("none"))]),
    ];
    let mut driver = Vec::new();
    match simulation {
        None => sections.push((
            "gpus",
            vec![
                ("include", list(&config.gpus.include)),
                ("exclude", list(&config.gpus.exclude)),
                ("reserve", bytes(config.gpus.reserve_bytes)),
                (
                    "context_overhead",
                    config.gpus.context_overhead_bytes.map_or(Value::from("auto"), bytes),
                ),
            ],
        )),
        Some(simulation) => {
            sections.push((
                "gpus",
                vec![
                    ("reserve", bytes(SIM_RESERVE)),
                    ("context_overhead", bytes(SIM_CONTEXT_OVERHEAD)),
                ],
            ));
            let env = [("SIMGPU_CONFIG", &simulation.config), ("SIMGPU_STATE", &simulation.state)];
            let env: Table = env.into_iter().map(|(k, v)| (k.to_owned(), text(v))).collect();
            driver = vec![("libraries", text(&simulation.libraries)), ("env", Value::from(env))];
        }
    }
    sections.push(("driver", driver));
    let whole: Table = sections
        .into_iter()
        .map(|(name, keys)| {
            let keys: Table =
                keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
            (name.to_owned(), Value::from(keys))
        })
        .collect();
    format!("# Written by `tessera demo`.\n{whole}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_plugins_configuration_is_one_it_accepts() {
        let scratch = Scratch::open(false).unwrap();
        let dir = &scratch.path;
        let kubelet = Kubelet::start(&dir.join("kubelet")).await.unwrap();
        let simulation = Simulation {
            libraries: "/sim".into(),
            config: dir.join("simgpu.toml"),
            state: dir.join("state"),
        };
        let mut users = Config::default();
        users.share.replicas = 3;
        for simulation in [None, Some(&simulation)] {
            let text = plugin_config(dir, &kubelet, Path::new("/shim.so"), simulation, &users);
            let config = Config::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!(config.share.replicas, 3);
            assert_eq!(config.paths.shim_source.as_deref(), Some(Path::new("/shim.so")));
            assert_eq!(config.driver.libraries.is_some(), simulation.is_some());
        }
        kubelet.stop().await;
    }

    #[test]
    fn the_directory_goes_unless_it_is_to_be_kept() {
        let scratch = Scratch::open(false).unwrap();
        let dir = scratch.dir("a/b").unwrap();
        assert!(dir.is_dir());
        drop(scratch);
        assert!(!dir.exists());
    }
}
