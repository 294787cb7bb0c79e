//! The configuration, validated: once a [`Config`] exists, every value in it makes sense by itself.
//! What depends on the GPUs of the node is checked by `tessera_rules::capacity`.
//!
//! `config.toml` at the root of the repository is [`Config::default`] with comments; a test holds
//! the two equal.
#![forbid(unsafe_code)]

mod cdi;
mod choices;
mod current;
pub mod file;
pub mod health;
pub mod keys;
pub mod layout;
pub mod leases;
pub mod log_filter;
pub mod metrics;
mod parse;
mod problem;
mod reader;
mod trace;
pub mod xids;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tessera_system::files;

pub use cdi::{Cdi, GpuNames};
pub use current::Current;
pub use file::{ConfigFile, Given, Judged};
pub use health::{Health, XidAction};
pub use layout::{Amount, Layout, LayoutShare};
pub use leases::Leases;
pub use metrics::Metrics;
pub use problem::{ConfigError, MOST_PROBLEMS, Problem, first};
pub use tessera_model::sharing::{Compute, Placement, Split};

/// Where `tessera` looks when `--config` is not given. May be absent: the defaults hold then.
pub const DEFAULT_FILE: &str = "/etc/tessera/config.toml";

const MIB: u64 = 1 << 20;

/// The whole configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The extended resource.
    pub resource: Resource,
    /// Which GPUs are shared, and what is kept back of each.
    pub gpus: Gpus,
    /// What one replica is.
    pub share: Share,
    /// How GPU time is divided.
    pub compute: Leases,
    /// When a GPU is no longer sold, and when it is again.
    pub health: Health,
    /// GPUs that are cut in another way.
    pub layouts: Vec<Layout>,
    /// What a container is given besides its pages.
    pub container: Container,
    /// Where driver libraries and device nodes come from.
    pub driver: Driver,
    /// Specs for container runtimes.
    pub cdi: Cdi,
    /// Files, directories and sockets on the host.
    pub paths: Paths,
    /// The file system that holds the pages.
    pub pages: Pages,
    /// The durable record.
    pub ledger: Ledger,
    /// What Kubernetes is told.
    pub kubernetes: Kubernetes,
    /// Node labels.
    pub labels: Labels,
    /// Where metrics and probes are served.
    pub metrics: Metrics,
    /// What is logged and how.
    pub log: Log,
    /// Where each key was set, for errors that are found later.
    pub source: Source,
}

/// The extended resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Qualified name, as in a pod's `resources.limits`.
    pub name: String,
}

/// Which GPUs are shared, and what is kept back of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// UUIDs, indexes, or `*`.
    pub include: Vec<String>,
    /// UUIDs or indexes; wins over `include`.
    pub exclude: Vec<String>,
    /// Bytes of each GPU that no replica gets: what the driver itself needs.
    pub reserve_bytes: u64,
    /// Bytes charged for each CUDA context, `None`: by the GPU; what it takes beyond that is observed.
    pub context_overhead_bytes: Option<u64>,
    /// Bytes beyond its charges that a container may hold on a GPU before it is flagged.
    pub audit_slack_bytes: u64,
    /// What to do about GPUs that another plugin sells too.
    pub sold_by_others: SoldByOthers,
}

/// What to do about GPUs that another plugin sells too: `gpus.sold_by_others`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoldByOthers {
    /// Nothing more of them is given out.
    Refuse,
    /// They are sold, and `status` warns.
    Warn,
    /// They are sold, and nobody looks.
    Allow,
}

/// What one replica is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Replicas per GPU.
    pub replicas: u32,
    /// Memory limit of one replica, bytes; `None` divides the GPU evenly.
    pub memory_bytes: Option<u64>,
    /// Compute share of one replica, thousandths of a GPU; `None` divides evenly.
    pub cores_millis: Option<u32>,
    /// What the compute share means.
    pub compute: Compute,
    /// Which GPU is preferred.
    pub placement: Placement,
    /// What happens to a container whose replicas lie on several GPUs.
    pub split: Split,
}

/// What a container is given besides its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Mount `/etc/ld.so.preload`.
    pub inject_file: bool,
    /// Set `LD_PRELOAD`.
    pub inject_env: bool,
    /// How the container gets its GPUs.
    pub device_list_strategy: DeviceListStrategy,
}

/// How a container gets its GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES`, read by NVIDIA's container toolkit.
    Envvar,
    /// `/dev/null` mounted once per GPU, which NVIDIA's container toolkit reads as the list.
    VolumeMounts,
    /// Names of CDI devices in the container's annotations, read by the runtime.
    CdiAnnotations,
    /// Names of CDI devices in the CRI's own field: Kubernetes 1.28 and later.
    CdiCri,
    /// Device nodes, as `driver.device_nodes` lists them.
    DeviceNodes,
    /// Nothing: the simulated GPU needs none.
    None,
}

/// Where driver libraries and device nodes come from, beyond NVIDIA's own toolkit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Host directory with libcuda and libnvidia-ml, mounted at [`CONTAINER_DRIVER_DIR`] and named
    /// by `LD_LIBRARY_PATH`; `None` leaves both to the runtime.
    pub libraries: Option<PathBuf>,
    /// Root of a driver's installation on the host, below which its libraries are found, each
    /// mounted in [`CONTAINER_DRIVER_DIR`]; `None` as above.
    pub root: Option<PathBuf>,
    /// Device nodes for [`DeviceListStrategy::DeviceNodes`]; `{minor}` is the GPU's minor number.
    pub device_nodes: Vec<String>,
    /// More mounts for every container.
    pub mounts: Vec<Mount>,
    /// More variables for every container.
    pub env: BTreeMap<String, String>,
}

/// Where the driver's libraries are mounted in a container.
pub const CONTAINER_DRIVER_DIR: &str = "/usr/local/tessera/driver";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Path on the host.
    pub host: PathBuf,
    /// Path in the container.
    pub container: PathBuf,
    /// Mounted read-only.
    pub read_only: bool,
}

/// Files, directories and sockets on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Kubelet's device-plugin directory.
    pub kubelet: PathBuf,
    /// Kubelet's PodResources socket.
    pub pod_resources: PathBuf,
    /// Kubelet's directory of links to containers' logs, of which names alone are read.
    pub container_logs: PathBuf,
    /// Pages, one directory per allocation; a tmpfs of its own.
    pub pages: PathBuf,
    /// Installed shims; persistent, not mounted noexec.
    pub shim: PathBuf,
    /// The shim to install; `None` looks beside the executable.
    pub shim_source: Option<PathBuf>,
    /// The durable record.
    pub ledger: PathBuf,
    /// The admin socket, root only.
    pub admin: PathBuf,
    /// libnvidia-ml; `None` lets the loader find `libnvidia-ml.so.1`.
    pub nvml: Option<PathBuf>,
}

/// The file system that holds the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pages {
    /// What to do when `paths.pages` is not a tmpfs of its own and none can be mounted.
    pub tmpfs: TmpfsPolicy,
    /// Size of the tmpfs, bytes.
    pub size_bytes: u64,
}

/// What to do when `paths.pages` is not a tmpfs of its own and none can be mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TmpfsPolicy {
    /// Do not start.
    Require,
    /// Start, warn and say so in `tessera status`.
    Prefer,
    /// Use the directory as it is.
    Off,
}

/// The durable record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// Wait for the disk before each answer.
    pub fsync: bool,
    /// How long kubelet must have left a container out before its replicas are released.
    pub release_after: Duration,
}

/// What Kubernetes is told, beyond what kubelet asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kubernetes {
    /// Events on pods.
    pub events: Events,
}

/// Whether events are sent to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Events {
    /// Where the pod has a service account's token.
    Auto,
    /// Never.
    Off,
}

/// Node labels, by which pods choose among unlike nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// The features file for node feature discovery; `None`: no labels.
    pub nfd_file: Option<PathBuf>,
}

/// What is logged and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// `tracing` filter, for instance `info` or `tessera=debug`.
    pub filter: String,
    /// Line format.
    pub format: LogFormat,
}

/// Line format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Where each key was set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The file, if one was read.
    pub file: Option<PathBuf>,
    lines: BTreeMap<String, usize>,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Config {
            resource: Resource { name: "tessera.dev/gpu".into() },
            gpus: Gpus {
                include: vec!["*".into()],
                exclude: Vec::new(),
                reserve_bytes: 512 * MIB,
                context_overhead_bytes: None,
                audit_slack_bytes: 1024 * MIB,
                sold_by_others: SoldByOthers::Refuse,
            },
            share: Share {
                replicas: 4,
                memory_bytes: None,
                cores_millis: None,
                compute: Compute::Burst,
                placement: Placement::Packed,
                split: Split::Reject,
            },
            compute: Leases::default(),
            health: Health::default(),
            layouts: Vec::new(),
            container: Container {
                inject_file: true,
                inject_env: false,
                device_list_strategy: DeviceListStrategy::Envvar,
            },
            driver: Driver {
                libraries: None,
                root: None,
                device_nodes: [
                    "/dev/nvidia{minor}",
                    "/dev/nvidiactl",
                    "/dev/nvidia-uvm",
                    "/dev/nvidia-uvm-tools",
                ]
                .map(String::from)
                .to_vec(),
                mounts: Vec::new(),
                env: BTreeMap::new(),
            },
            cdi: Cdi::default(),
            paths: Paths {
                kubelet: "/var/lib/kubelet/device-plugins".into(),
                pod_resources: "/var/lib/kubelet/pod-resources/kubelet.sock".into(),
                container_logs: "/var/log/containers".into(),
                pages: "/run/tessera/pages".into(),
                shim: "/var/lib/tessera/shim".into(),
                shim_source: None,
                ledger: "/var/lib/tessera/ledger.redb".into(),
                admin: "/run/tessera/admin.sock".into(),
                nvml: None,
            },
            pages: Pages { tmpfs: TmpfsPolicy::Prefer, size_bytes: 64 * MIB },
            ledger: Ledger { fsync: true, release_after: Duration::from_secs(30) },
            kubernetes: Kubernetes { events: Events::Auto },
            labels: Labels::default(),
            metrics: Metrics::default(),
            log: Log { filter: "info".into(), format: LogFormat::Text },
            source: Source::default(),
        }
    }
}

impl DeviceListStrategy {
    /// Whether containers get pages and shim through a CDI spec.
    #[must_use]
    pub fn is_cdi(self) -> bool {
        matches!(self, DeviceListStrategy::CdiAnnotations | DeviceListStrategy::CdiCri)
    }
}

impl Config {
    /// Reads `text` as TOML over the defaults.
    ///
    /// # Errors
    /// All problems at once, each with key and line.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        accept(parse::parse(text, None), None)
    }

    /// Reads a file over the defaults.
    ///
    /// # Errors
    /// An unreadable file, or all problems at once, each with key and line.
    pub fn load(file: &Path) -> Result<Self, ConfigError> {
        let text = files::text(file, files::CONFIGURATION).map_err(|error| ConfigError {
            file: Some(file.to_owned()),
            problems: vec![Problem::new("", None, &format!("cannot read the file: {error}"))],
        })?;
        accept(parse::parse(&text, Some(file)), Some(file))
    }

    /// The file that was asked for, or [`DEFAULT_FILE`] where it exists, or the defaults.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn find(asked: Option<&Path>) -> Result<Self, ConfigError> {
        match asked {
            Some(file) => Config::load(file),
            None => {
                let judged = ConfigFile::default().judge();
                accept((judged.config, judged.problems), Some(Path::new(DEFAULT_FILE)))
            }
        }
    }
}

fn accept(
    (config, problems): (Config, Vec<Problem>),
    file: Option<&Path>,
) -> Result<Config, ConfigError> {
    match problems.is_empty() {
        true => Ok(config),
        false => Err(ConfigError { file: file.map(Path::to_owned), problems }),
    }
}

// === impl Source ===

impl Source {
    /// A [`Problem`] at the line where `key` was set.
    #[must_use]
    pub fn problem(&self, key: &str, message: String) -> Problem {
        Problem::new(key, self.line(key), &message)
    }

    /// Where `key` was set; none for one that was not.
    #[must_use]
    pub fn line_set(&self, key: &str) -> Option<usize> {
        self.lines.get(key).copied()
    }

    /// Where `key` was set; for one that was not, where the table that it belongs into begins.
    #[must_use]
    pub fn line(&self, key: &str) -> Option<usize> {
        let parent = || key.rsplit_once('.').and_then(|(table, _)| self.lines.get(table));
        self.lines.get(key).or_else(parent).copied()
    }

    /// A sentence about `key`, with the place where it was set.
    #[must_use]
    pub fn remark(&self, key: &str, message: String) -> String {
        let problems = vec![self.problem(key, message)];
        ConfigError { file: self.file.clone(), problems }.to_string()
    }
}
