//! The configuration, validated: every value in a [`Config`] makes sense by itself.
//! `tessera_rules::capacity` checks what depends on the GPUs of the node.
//!
//! Each key is declared once, in `tables/`; `table.rs` says what follows from a declaration.
//!
//! This crate may use `model` and `system`. It knows no GPU, kubelet or ledger, and starts nothing.
#![forbid(unsafe_code)]

#[cfg(test)]
mod agreement;
mod amount;
mod current;
pub mod file;
mod form;
pub mod keys;
mod listen;
pub mod log_filter;
mod name;
mod parse;
mod pattern;
mod problem;
mod report;
mod steps;
mod table;
mod tables;
mod trace;
mod words;
pub mod xids;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tessera_system::files;

use report::{Checks, line_of};
use table::table;

pub use amount::Amount;
pub use current::Current;
pub use file::{CannotAsk, ConfigFile, Forbidden, Judged, LoadedConfig};
pub use listen::parse as addresses;
pub use problem::{ConfigError, MOST_PROBLEMS, Problem, first, together};
pub use tables::{
    Advice, Api, CONTAINER_DRIVER_DIR, Cdi, Container, Dra, Driver, Gpus, Health, History,
    Kubernetes, Labels, Layout, LayoutShare, Leases, Ledger, Log, Metrics, Mount, Pages, Paths,
    Resource, Share,
};
pub use tessera_model::sharing::{Compute, Placement, Split};
pub use trace::state_dir;
pub use xids::XidAction;

/// Where `tessera` looks when `--config` is not given. May be absent: the defaults hold then.
pub const DEFAULT_FILE: &str = "/etc/tessera/config.toml";

const MIB: u64 = 1 << 20;

table! {
    /// The whole configuration.
    pub struct Config: check {
        /// The extended resource that pods ask for.
        resource: Resource = Resource::default(), form::section();
        /// Which GPUs are shared, and how much of each is reserved.
        gpus: Gpus = Gpus::default(), form::section();
        /// What one replica is.
        share: Share = Share::default(), form::section();
        /// GPUs that are divided into unequal shares, each with its own resource name.
        layouts as "layout": Vec<Layout> = Vec::new(), form::tables();
        /// Dynamic Resource Allocation: pods claim a part of a GPU of any size. [dra.md](dra.md) says which of the
        /// two ways suits which cluster.
        dra: Dra = Dra::default(), form::section();
        /// How GPU time is divided where `share.compute` is not `none`: one tenant at a time has a lease of the GPU.
        /// [compute.md](internals/compute.md) has the reasons.
        compute: Leases = Leases::default(), form::section();
        /// When a GPU is no longer sold, and when it is again.
        health: Health = Health::default(), form::section();
        /// How the shim and the GPU get into a container.
        container: Container = Container::default(), form::section();
        /// Where driver libraries and device nodes come from, beyond NVIDIA's own toolkit.
        driver: Driver = Driver::default(), form::section();
        /// Specs for container runtimes, where `container.device_list_strategy` asks for them.
        cdi: Cdi = Cdi::default(), form::section();
        /// Files, directories and sockets on the host.
        paths: Paths = Paths::default(), form::section();
        /// The file system that holds the pages.
        pages: Pages = Pages::default(), form::section();
        /// The durable record.
        ledger: Ledger = Ledger::default(), form::section();
        /// What pods and GPUs used and waited for, in buckets of time.
        history: History = History::default(), form::section();
        /// What the plugin reports to Kubernetes, beyond what kubelet asks.
        kubernetes: Kubernetes = Kubernetes::default(), form::section();
        /// What `tessera recommend` and `tessera waste` judge by. [views.md](views.md#advice) says how.
        advice: Advice = Advice::default(), form::section();
        /// Where metrics and probes are served.
        metrics: Metrics = Metrics::default(), form::section();
        /// The JSON API and the page of this node.
        api: Api = Api::default(), form::section();
        /// Node labels, with which pods choose among different nodes.
        labels: Labels = Labels::default(), form::section();
        /// Which messages are logged, and how.
        log: Log = Log::default(), form::section();
        + /// Where each key was set, for errors that are found later.
        source: Source;
    }
}

fn check(config: &Config, checks: &mut Checks<'_, '_>) {
    tables::check_terms(&config.layouts, checks);
    tables::check_memory(config, checks);
    tables::check_step(config, checks);
    tables::check_api(config, checks);
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

/// What makes a GPU's taint evict the pods that have claimed it: `dra.no_execute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoExecute {
    /// Its health keeps it from being sold.
    Unhealthy,
    /// It is cordoned.
    Cordoned,
}

/// How the shim gets into a container's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inject {
    /// `/etc/ld.so.preload`.
    File,
    /// `LD_PRELOAD`.
    Env,
}

/// What a GPU is called in NVIDIA's spec, as `nvidia-ctk cdi generate --device-name-strategy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuNames {
    /// By UUID.
    Uuid,
    /// By NVML's index.
    Index,
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

/// Whether events are sent to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Events {
    /// Where the pod has a service account's token.
    Auto,
    /// Never.
    Off,
}

/// What a caller of the JSON API must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiAuthorisation {
    /// A token where the pod has a service account's token, else nothing.
    Auto,
    /// Nothing: on loopback alone.
    None,
    /// A token that the API server accepts.
    Kubernetes,
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

impl DeviceListStrategy {
    /// Whether containers get pages and shim through a CDI spec.
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
            problems: vec![Problem::new("", None, &file::unread(&error))],
        })?;
        accept(parse::parse(&text, Some(file)), Some(file))
    }

    /// The file that was asked for, or [`DEFAULT_FILE`] where it exists, or the defaults.
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
    pub fn problem(&self, key: &str, message: String) -> Problem {
        Problem::new(key, self.line(key), &message)
    }

    /// Where `key` was set; none for one that was not.
    pub fn line_set(&self, key: &str) -> Option<usize> {
        self.lines.get(key).copied()
    }

    /// Where `key` was set; for one that was not, where the table that it belongs into begins.
    pub fn line(&self, key: &str) -> Option<usize> {
        line_of(&self.lines, key)
    }

    /// A sentence about `key`, with the place where it was set.
    pub fn remark(&self, key: &str, message: String) -> String {
        let problems = vec![self.problem(key, message)];
        ConfigError { file: self.file.clone(), problems }.to_string()
    }
}
