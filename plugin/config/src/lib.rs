//! The configuration, validated: every value in a [`Config`] makes sense by itself.
//! `tessera_rules::capacity` checks what depends on the GPUs of the node.
//!
//! Each key is declared once, in `tables/`; `table.rs` says what follows from a declaration.
//!
//! This crate may use `model` and `system`. It knows no GPU, kubelet or ledger, and starts nothing.
#![forbid(unsafe_code)]

mod between;
pub mod file;
mod form;
mod grammar;
pub mod keys;
mod parse;
mod table;
mod tables;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

use table::{section, table};

pub use file::{ConfigFile, Judged, LoadedConfig, state_dir};
pub use form::Amount;
pub use grammar::{addresses, log_filter};
pub use parse::{ConfigError, Problem};
pub use tables::{
    Advice, Api, CONTAINER_DRIVER_DIR, Cdi, Container, Dra, Driver, Gpus, Health, History,
    Kubernetes, Labels, Layout, LayoutShare, Leases, Ledger, Log, Metrics, Mount, Pages, Paths,
    Resource, Share,
};
pub use tessera_model::sharing::{Compute, Placement, Split};
pub use words::{
    ApiAuthorisation, DeviceListStrategy, Events, GpuNames, Inject, LogFormat, NoExecute,
    SoldByOthers, TmpfsPolicy, XidAction,
};

/// Where `tessera` looks when `--config` is not given. May be absent: the defaults hold then.
pub const DEFAULT_FILE: &str = "/etc/tessera/config.toml";

const MIB: u64 = 1 << 20;

table! {
    /// The whole configuration.
    pub struct Config {
        /// The extended resource that pods ask for.
        resource: Resource = Resource::default(), section();
        /// Which GPUs are shared, and how much of each is reserved.
        gpus: Gpus = Gpus::default(), section();
        /// What one replica is.
        share: Share = Share::default(), section();
        /// GPUs that are divided into unequal shares, each with its own resource name.
        layouts as "layout": Vec<Layout> = Vec::new(), table::tables(None);
        /// Dynamic Resource Allocation: pods claim a part of a GPU of any size. [dra.md](dra.md) says which of the
        /// two ways suits which cluster.
        dra: Dra = Dra::default(), section();
        /// How GPU time is divided where `share.compute` is not `none`: one tenant at a time has a lease of the GPU.
        /// [compute.md](internals/compute.md) has the reasons.
        compute: Leases = Leases::default(), section();
        /// When a GPU is no longer sold, and when it is again.
        health: Health = Health::default(), section();
        /// How the shim and the GPU get into a container.
        container: Container = Container::default(), section();
        /// Where driver libraries and device nodes come from, beyond NVIDIA's own toolkit.
        driver: Driver = Driver::default(), section();
        /// Specs for container runtimes, where `container.device_list_strategy` asks for them.
        cdi: Cdi = Cdi::default(), section();
        /// Files, directories and sockets on the host.
        paths: Paths = Paths::default(), section();
        /// The file system that holds the pages.
        pages: Pages = Pages::default(), section();
        /// The durable record.
        ledger: Ledger = Ledger::default(), section();
        /// What pods and GPUs used and waited for, in buckets of time.
        history: History = History::default(), section();
        /// What the plugin reports to Kubernetes, beyond what kubelet asks.
        kubernetes: Kubernetes = Kubernetes::default(), section();
        /// What `tessera recommend` and `tessera waste` judge by. [views.md](views.md#advice) says how.
        advice: Advice = Advice::default(), section();
        /// Where metrics and probes are served.
        metrics: Metrics = Metrics::default(), section();
        /// The JSON API and the page of this node.
        api: Api = Api::default(), section();
        /// Node labels, with which pods choose among different nodes.
        labels: Labels = Labels::default(), section();
        /// Which messages are logged, and how.
        log: Log = Log::default(), section();
        + /// Where each key was set, for errors that are found later.
        source: Source;
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    pub file: Option<PathBuf>,
    lines: BTreeMap<String, usize>,
}

// === impl Config ===

impl Config {
    /// Reads `text` as TOML over the defaults.
    /// Errors: All wrong values, or else all contradictions, each with key and line.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let (config, problems) = parse::parse(text, None);
        Judged { config, text: String::new(), problems }.sound()
    }

    /// The file that was asked for, or [`DEFAULT_FILE`] where it exists, or the defaults.
    pub fn find(asked: Option<&Path>) -> Result<Self, ConfigError> {
        ConfigFile { asked: asked.map(Path::to_owned) }.judge().sound()
    }
}

// === impl Source ===

impl Source {
    pub fn problem(&self, key: &str, message: String) -> Problem {
        Problem::new(key, self.line(key), &message)
    }

    /// Where `key` was set; none for one that was not.
    pub fn line_set(&self, key: &str) -> Option<usize> {
        self.lines.get(key).copied()
    }

    /// Where `key` was set; for one that was not, where the table that it belongs into begins.
    pub fn line(&self, key: &str) -> Option<usize> {
        let table = || key.rsplit_once('.').and_then(|(table, _)| self.lines.get(table));
        self.lines.get(key).or_else(table).copied()
    }

    /// A sentence about `key`, with the place where it was set.
    pub fn remark(&self, key: &str, message: String) -> String {
        let problems = vec![self.problem(key, message)];
        ConfigError { file: self.file.clone(), problems }.to_string()
    }
}

/// The configuration in force: shared by all readers, replaced as a whole. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Current(Arc<watch::Sender<Arc<Config>>>);

impl Current {
    /// A caller that needs several related values takes them from one answer.
    pub fn get(&self) -> Arc<Config> {
        Arc::clone(&self.0.borrow())
    }

    /// Replaces the configuration. The caller sees to it that what was made of the one before
    /// follows.
    pub fn set(&self, config: Arc<Config>) {
        self.0.send_replace(config);
    }

    /// Hears of each that takes its place, the newest only.
    pub fn changes(&self) -> watch::Receiver<Arc<Config>> {
        self.0.subscribe()
    }
}

impl From<Config> for Current {
    fn from(config: Config) -> Self {
        Current(Arc::new(watch::Sender::new(Arc::new(config))))
    }
}
