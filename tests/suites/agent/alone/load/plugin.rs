//! The plugin's process, and what is asked of it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tessera_view::change::{QuotaResponse, ResetQuotaRequest, SetQuotaRequest};
use tessera_web::client::{Client, ClientError};

use tessera_harness::CProgram;
use tessera_harness::exposition::Exposition;
use tessera_harness::plugin::{GPU, Simulated, bounded, pod, target, until};

/// 32 shares of 256 MiB of each of two GPUs of 16 GiB, pods forgotten soon, GPUs that recover soon.
pub const SHARE: &str = "replicas = 32\nmemory = \"256Mi\"\n[metrics]\nlisten = \"127.0.0.1:0\"\n\
    [ledger]\nfsync = false\nrelease_after = \"1s\"\n\
    [health]\nprobe_interval = \"100ms\"\nrecovery = \"100ms\"\nrecovery_max = \"100ms\"\n";

/// The plugin under test.
pub struct Plugin {
    pub node: Simulated,
}

impl Plugin {
    /// Not started yet.
    pub async fn new() -> Self {
        Plugin { node: Simulated::new(SHARE).await }
    }

    /// Starts it, and gives where its metrics are.
    pub async fn serve(&mut self) -> SocketAddr {
        let address = self.serve_any().await;
        bounded(self.node.kubelet.wait_allocatable(GPU, 64)).await;
        address
    }

    /// As [`Plugin::serve`], also where little or nothing is left to sell.
    pub async fn serve_any(&mut self) -> SocketAddr {
        let _ = std::fs::remove_file(self.node.dir.path().join("log"));
        let before = self.node.kubelet.lists();
        self.node.launch();
        bounded(self.node.kubelet.wait_until(|kubelet| kubelet.lists() > before)).await;
        self.node.metrics().await
    }

    /// A pod that runs, and has a name: where its pages are.
    pub async fn run(&self, name: &str) -> PathBuf {
        let ids = self.node.kubelet.run(&pod(name, 1)).await.unwrap().remove(0).device_ids;
        self.node.pages(&ids)
    }

    /// Waits until kubelet has said that these run, and that no others do.
    pub async fn named(&self, names: &[String]) {
        until(|| {
            let status = self.node.json();
            let all = status["allocations"].as_array()?;
            let has = |name: &String| all.iter().any(|a| a["holder"]["pod"] == **name);
            (all.len() == names.len() && names.iter().all(has)).then_some(())
        })
        .await;
    }

    /// What `explain -o json` says of a pod.
    pub fn explain(&self, name: &str) -> Value {
        let output = self.node.run(&["explain", name, "-o", "json"]);
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Memory of the process that no file backs, bytes (proc_pid_smaps(5)).
    pub fn anonymous(&self) -> u64 {
        let pid = self.node.plugin.as_ref().unwrap().id();
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

/// A request for memory, with a reason by which the trail is searched.
pub fn memory(name: &str, bytes: u64, reason: &str) -> SetQuotaRequest {
    SetQuotaRequest {
        target: target(name),
        memory_limit_bytes: Some(bytes),
        reason: reason.into(),
        ..Default::default()
    }
}

pub fn reset(name: &str, reason: &str) -> ResetQuotaRequest {
    ResetQuotaRequest { target: target(name), reason: reason.into(), ..Default::default() }
}

pub async fn set(admin: &Client, request: SetQuotaRequest) -> Result<QuotaResponse, ClientError> {
    bounded(admin.call(&request)).await
}

/// Containers that have series, by their pods' names.
pub fn pods_of(metrics: &Exposition) -> Vec<String> {
    let mut names: Vec<String> =
        metrics.of("tessera_container_info").map(|s| s.labels["pod"].clone()).collect();
    names.sort();
    names
}

pub use tessera_harness::metrics::{scrape, scrape_until};

/// One MiB.
pub const MIB: u64 = 1 << 20;

/// An hour, in the seconds that a [`Clock`] is set by.
pub const HOUR: i64 = 3600;

/// The wall clock of every process with [`Clock::envs`], every other clock being the machine's; and what that has
/// on its heap.
pub struct Clock {
    library: PathBuf,
    shared: PathBuf,
}

impl Clock {
    pub fn new(dir: &Path) -> Self {
        let library = CProgram::new("around").shared().build();
        let shared = dir.join("around");
        std::fs::write(&shared, [0; 16]).unwrap();
        Self { library, shared }
    }

    pub fn envs(&self) -> Vec<(&'static str, OsString)> {
        vec![("LD_PRELOAD", (&self.library).into()), ("AROUND", (&self.shared).into())]
    }

    /// So many seconds before or after the machine's.
    pub fn set(&self, seconds: i64) {
        // In place: it is mapped.
        let file = std::fs::File::options().write(true).open(&self.shared).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    /// Bytes on the heap when the clock was last read.
    pub fn heap(&self) -> u64 {
        let mut word = [0; 8];
        std::fs::File::open(&self.shared).unwrap().read_exact_at(&mut word, 8).unwrap();
        u64::from_ne_bytes(word)
    }
}
