//! The simulated machine of a node, its GPUs as `docs/internals/simulator.md` configures them; and a plugin's configuration
//! in the sandbox: the user's own, with this machine's places in it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use tessera_fake_kubelet::Kubelet;
use tessera_run::{Artefact, SIM_CONTEXT_OVERHEAD, find_artefact};
use toml::{Table, Value};

use super::dra::Dra;
use super::node::NodeSpec;

/// What is not sold of each GPU, bytes: what its driver keeps, and `tessera_model::gpu::DRIVER_MARGIN`.
pub const RESERVE: u64 = (551 << 20) + tessera_model::gpu::DRIVER_MARGIN;
/// Most GPUs of a simulated machine.
pub const MOST_GPUS: u32 = 16;

/// GPUs of a node, all alike but for MIG.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    pub gpus: u32,
    /// Memory of each, bytes.
    pub memory: u64,
    pub name: String,
    /// GPUs in MIG mode, and the profiles of their instances.
    pub mig: Vec<Mig>,
}

/// Which GPU is in MIG mode (`None`: each), with which instances: `1g.10gb,2g.20gb`, or `0=1g.10gb,2g.20gb`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mig {
    pub gpu: Option<u32>,
    profiles: Vec<String>,
}

impl std::str::FromStr for Mig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (gpu, list) = match text.split_once('=') {
            Some((gpu, list)) => {
                let number = gpu.trim().parse();
                let wrong = |_| format!("{gpu:?} is not the number of a GPU; write 0=1g.10gb");
                (Some(number.map_err(wrong)?), list)
            }
            None => (None, text),
        };
        let profiles: Vec<String> = list.split(',').map(|one| one.trim().to_owned()).collect();
        let is_one = |one: &String| {
            !one.is_empty() && one.chars().all(|c| c.is_ascii_alphanumeric() || ".+-".contains(c))
        };
        match profiles.iter().find(|one| !is_one(one)) {
            None => Ok(Self { gpu, profiles }),
            Some(wrong) => Err(format!("{wrong:?} is not a profile such as 1g.10gb")),
        }
    }
}

impl Default for Machine {
    /// Two GPUs, small enough that replicas are of a size people know.
    fn default() -> Self {
        Self { gpus: 2, memory: 16 << 30, name: "Simulated GPU".into(), mig: Vec::new() }
    }
}

impl Machine {
    /// The simulator's configuration; UUIDs are of this node alone.
    pub fn toml(&self, node: usize) -> String {
        let name = toml::Value::from(self.name.clone());
        let mut text = String::new();
        for gpu in 0..self.gpus {
            text += &format!(
                "[[gpu]]\nname = {name}\nmemory = {}\nuuid = \
                 \"GPU-5e55e4a0-{node:04x}-4000-8000-{gpu:012x}\"\npci_bus_id = \"0000:{:02x}:00.0\"\n\
                 minor = {gpu}\n",
                self.memory,
                0x17 + 8 * gpu
            );
            let mig = self.mig.iter().rev().find(|mig| mig.gpu.is_none_or(|one| one == gpu));
            if let Some(mig) = mig {
                text += &format!("mig = {}\n", toml::Value::from(mig.profiles.clone()));
            }
            text += "\n";
        }
        text
    }
}

/// A simulated machine on the disk.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// Where the simulated driver's libraries are.
    pub libraries: PathBuf,
    /// Its configuration's file.
    pub config: PathBuf,
    /// Its state's file.
    pub state: PathBuf,
}

impl Simulation {
    /// Where they are for a node in `dir`.
    pub fn of(dir: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            libraries: find_artefact(Artefact::SIMULATION, None)?,
            config: dir.join("simgpu.toml"),
            state: dir.join("simgpu.state"),
        })
    }

    /// The variables by which a process finds the machine.
    pub fn envs(&self) -> [(&'static str, &Path); 2] {
        [("SIMGPU_CONFIG", &self.config), ("SIMGPU_STATE", &self.state)]
    }

    /// NVML's library.
    pub fn nvml(&self) -> PathBuf {
        self.libraries.join("libnvidia-ml.so.1")
    }

    /// Runs the simulator's own control program; what it prints.
    pub fn control(&self, args: &[&str]) -> anyhow::Result<String> {
        let program = self.libraries.join("simgpu-ctl");
        let mut command = Command::new(&program);
        command.args(args).envs(self.envs()).stdin(Stdio::null());
        let output = command.output().with_context(|| {
            format!("{} cannot be run; `make debug` makes it", program.display())
        })?;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "{}", said.trim_end());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Sections of a user's configuration that describe a host, and are the sandbox's here.
const OF_THE_HOST: [&str; 4] = ["paths", "pages", "driver", "cdi"];
/// Single keys of the same kind.
const OF_THE_HOST_TOO: [(&str, &str); 7] = [
    ("metrics", "listen"),
    ("api", "listen"),
    ("api", "authorisation"),
    ("api", "tls_cert"),
    ("api", "tls_key"),
    ("container", "device_list_strategy"),
    ("labels", "nfd_file"),
];

/// The configuration's text: what the user's says, but for what describes a host. `registry` is where DRA drivers register,
/// where claims are served; metrics and API are served nowhere without an address.
pub fn configuration(
    node: &NodeSpec,
    kubelet: &Kubelet,
    registry: Option<&Path>,
    [metrics, api]: [Option<SocketAddr>; 2],
) -> String {
    let mut user = node.user.clone();
    // What a real machine's GPUs are reached by is its own.
    let nvml = user.get("paths").and_then(|paths| paths.get("nvml")).cloned();
    for section in OF_THE_HOST {
        user.remove(section);
    }
    for (section, key) in OF_THE_HOST_TOO {
        if let Some(table) = user.get_mut(section).and_then(Value::as_table_mut) {
            table.remove(key);
        }
    }
    let path = |path: &Path| Value::from(path.to_string_lossy().into_owned());
    let address = |at: Option<SocketAddr>| at.map_or_else(String::new, |at| at.to_string());
    let at = |name: &str| path(&node.dir.join(name));
    let nvml = match &node.simulation {
        Some(simulation) => path(&simulation.nvml()),
        None => nvml.unwrap_or_else(|| "".into()),
    };
    let mut ours = vec![
        ("paths", "kubelet", path(kubelet.device_plugins_dir())),
        ("paths", "pod_resources", path(kubelet.pod_resources_socket())),
        ("paths", "plugins_registry", registry.map_or_else(|| at("registry"), path)),
        ("paths", "dra", at("dra")),
        ("paths", "container_logs", at("logs")),
        ("paths", "pages", at("pages")),
        ("paths", "shim", at("shim")),
        ("paths", "shim_source", path(&node.shim)),
        ("paths", "ledger", at("ledger.redb")),
        ("paths", "admin", at("admin.sock")),
        ("paths", "nvml", nvml),
        // The plugin removes specs there that are of no allocation of its own: never those of a real one.
        ("cdi", "directory", path(&Dra::cdi(&node.dir))),
        // Root alone may mount one, and nothing here fills a disk.
        ("pages", "tmpfs", "off".into()),
        ("metrics", "listen", address(metrics).into()),
        ("api", "listen", address(api).into()),
        // One's own machine, and nobody there to ask for rights.
        ("api", "authorisation", "none".into()),
        // Device nodes and driver are the host's own; a process needs neither handed to it.
        ("container", "device_list_strategy", "none".into()),
    ];
    // Nobody at a sandbox waits for minutes.
    let mut defaults = vec![
        ("ledger", "release_after", Value::from("2s")),
        ("health", "recovery", Value::from("5s")),
    ];
    if let Some(simulation) = &node.simulation {
        let envs = simulation.envs().map(|(name, file)| (name.to_owned(), path(file)));
        ours.push(("driver", "libraries", path(&simulation.libraries)));
        ours.push(("driver", "env", envs.into_iter().collect::<Table>().into()));
        defaults.push(("gpus", "reserve", RESERVE.to_string().into()));
        defaults.push(("gpus", "context_overhead", SIM_CONTEXT_OVERHEAD.to_string().into()));
    }
    for (section, key, value) in ours {
        if let Some(table) = section_of(&mut user, section) {
            table.insert(key.to_owned(), value);
        }
    }
    for (section, key, value) in defaults {
        if let Some(table) = section_of(&mut user, section) {
            table.entry(key).or_insert(value);
        }
    }
    format!("# Written by `tessera sandbox`.\n{user}")
}

/// Whether the user's configuration sells GPUs by claims.
pub fn serves_claims(user: &Table) -> bool {
    let enabled = user.get("dra").and_then(|dra| dra.get("enabled"));
    enabled.and_then(Value::as_bool).unwrap_or(false)
}

/// What of the user's configuration does not count here, as dotted names.
pub fn set_aside(user: &Table) -> Vec<String> {
    let sections = OF_THE_HOST.iter().filter(|name| user.contains_key(**name));
    let keys = OF_THE_HOST_TOO.iter().filter(|(section, key)| {
        let table = user.get(*section).and_then(Value::as_table);
        table.is_some_and(|table| table.contains_key(*key))
    });
    let keys = keys.map(|(section, key)| format!("{section}.{key}"));
    sections.map(|name| format!("[{name}]")).chain(keys).collect()
}

fn section_of<'a>(whole: &'a mut Table, name: &str) -> Option<&'a mut Table> {
    whole.entry(name).or_insert_with(|| Table::new().into()).as_table_mut()
}

#[cfg(test)]
mod tests {
    use tessera_config::Config;

    use super::*;

    #[test]
    fn nodes_have_gpus_of_their_own() {
        let machine = Machine { gpus: 3, ..Machine::default() };
        let uuids = |node| -> Vec<String> {
            let table: toml::Table = machine.toml(node).parse().unwrap();
            let gpus = table["gpu"].as_array().unwrap();
            gpus.iter().map(|gpu| gpu["uuid"].as_str().unwrap().to_owned()).collect()
        };
        let (a, b) = (uuids(0), uuids(1));
        assert_eq!(a.len(), 3);
        assert!(a.iter().all(|uuid| !b.contains(uuid)), "{a:?} {b:?}");
        assert_ne!(a[0], a[1]);
    }

    #[test]
    fn mig_is_said_for_one_gpu_or_for_all() {
        // Attributes of profiles, as `nvidia-smi mig -lgip` lists them.
        for profile in ["1g.10gb+me", "1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me"] {
            let parsed = profile.parse::<Mig>();
            assert!(parsed.is_ok(), "{profile}: {parsed:?}");
        }
        let mig = vec!["1g.10gb".parse().unwrap(), "1=2g.20gb,1g.10gb".parse().unwrap()];
        let table: toml::Table = Machine { mig, ..Machine::default() }.toml(0).parse().unwrap();
        let profiles = |gpu: usize| table["gpu"][gpu]["mig"].as_array().unwrap().len();
        assert_eq!((profiles(0), profiles(1)), (1, 2));
        for wrong in ["", "x=1g.10gb", "1g 10gb", "1g.10gb,"] {
            assert!(wrong.parse::<Mig>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_name_with_quotes_stays_a_name() {
        let name = "a \"b\"\n[[gpu]]".to_owned();
        let table: toml::Table =
            Machine { name: name.clone(), ..Machine::default() }.toml(0).parse().unwrap();
        assert_eq!(table["gpu"].as_array().unwrap().len(), 2);
        assert_eq!(table["gpu"][0]["name"].as_str(), Some(name.as_str()));
    }

    fn own_paths(config: &Config) -> Vec<&Path> {
        let paths = &config.paths;
        [
            &paths.kubelet,
            &paths.pod_resources,
            &paths.plugins_registry,
            &paths.dra,
            &paths.container_logs,
            &paths.pages,
            &paths.shim,
            &paths.ledger,
            &paths.admin,
            &config.cdi.directory,
        ]
        .map(std::path::PathBuf::as_path)
        .to_vec()
    }

    #[tokio::test]
    async fn what_is_written_is_a_configuration_with_the_users_shares_and_our_places() {
        let tmp = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::start(&tmp.path().join("k")).await.unwrap();
        let simulation = Simulation {
            libraries: "/sim".into(),
            config: tmp.path().join("simgpu.toml"),
            state: tmp.path().join("state"),
        };
        let user: Table =
            "[share]\nreplicas = 3\n[paths]\nledger = \"/var/lib/x\"\n[driver]\nroot = \"/run\"\n\
                           [metrics]\nlisten = \":9464\"\n[ledger]\nrelease_after = \"9s\"\n"
                .parse()
                .unwrap();
        assert_eq!(set_aside(&user), ["[paths]", "[driver]", "metrics.listen"]);
        let listens = ["127.0.0.1:4711", "127.0.0.1:4712"].map(|at| at.parse().ok());
        for simulation in [None, Some(simulation)] {
            let node = NodeSpec {
                name: "n".to_owned(),
                dir: tmp.path().to_owned(),
                mark: tmp.path().to_owned(),
                shim: "/shim.so".into(),
                simulation,
                user: user.clone(),
                listens: true,
            };
            let text = configuration(&node, &kubelet, None, listens);
            let config = Config::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!(config.share.replicas, 3);
            assert_eq!(config.ledger.release_after, std::time::Duration::from_secs(9));
            for own in own_paths(&config) {
                assert!(own.starts_with(tmp.path()), "{}", own.display());
            }
            assert_eq!(config.paths.shim_source.as_deref(), Some(Path::new("/shim.so")));
            assert_eq!(config.driver.libraries.is_some(), node.simulation.is_some());
            assert_eq!(config.driver.root, Config::default().driver.root);
            assert_eq!(config.metrics.listen, ["127.0.0.1:4711".parse().unwrap()]);
            assert_eq!(config.api.listen, ["127.0.0.1:4712".parse().unwrap()]);
        }
        kubelet.stop().await;
    }
}
