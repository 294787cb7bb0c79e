//! The plugin's process, and what is asked of it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tessera_view::change::{QuotaResponse, ResetQuotaRequest, SetQuotaRequest};
use tessera_web::client::{Client, ClientError};

use tessera_harness::exposition::Exposition;

use tessera_harness::plugin::{GPU, Simulated, bounded, id_of, pod, target, until};

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
        let log = self.node.dir.path().join("log");
        let _ = std::fs::remove_file(&log);
        let before = self.node.kubelet.lists();
        self.node.launch();
        bounded(self.node.kubelet.wait_until(|kubelet| kubelet.lists() > before)).await;
        until(|| {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            let word = log.split("address=").nth(1)?.split_whitespace().next()?;
            word.trim_matches('"').parse().ok()
        })
        .await
    }

    /// A pod that runs, and has a name: where its pages are.
    pub async fn run(&self, name: &str) -> PathBuf {
        let ids = self.node.kubelet.run(&pod(name, 1)).await.unwrap().remove(0).device_ids;
        self.node.dir.path().join("pages").join(id_of(&ids).as_str())
    }

    /// Waits until kubelet has said that these run, and that no others do.
    pub async fn named(&self, names: &[String]) {
        bounded(async {
            loop {
                let status = self.node.json();
                let all = status["allocations"].as_array().unwrap();
                let has = |name: &&String| all.iter().any(|a| a["holder"]["pod"] == **name);
                if all.len() == names.len() && names.iter().all(|name| has(&name)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
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

/// Events sent, failed and dropped.
pub fn events(metrics: &Exposition) -> [f64; 3] {
    ["sent", "failed", "dropped"]
        .map(|outcome| metrics.sum("tessera_kubernetes_events_total", &[("outcome", outcome)]))
}

pub use tessera_harness::metrics::{scrape, scrape_until};
pub use tessera_harness::plugin::admin;

/// One MiB.
pub const MIB: u64 = 1 << 20;
