//! What the plugin listens at, under floods, with few descriptors, and beside a second plugin: the plugin as a
//! process of its own, so that what is counted is its own.

mod attack;
mod descriptors;
mod probes;

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;

use tessera_harness::plugin::{Simulated, until};

/// Metrics at a port of their own.
const METRICS: &str = "replicas = 16\nmemory = \"256Mi\"\n[ledger]\nfsync = false\n[metrics]\n\
    listen = \"127.0.0.1:0\"\n";

/// A plugin that serves, and where its metrics are.
async fn serving() -> (Simulated, SocketAddr) {
    serving_with(None).await
}

/// The same, with at most so many descriptors.
async fn serving_with(descriptors: Option<u32>) -> (Simulated, SocketAddr) {
    let mut node = Simulated::new(METRICS).await;
    if let Some(most) = descriptors {
        let script = node.dir.path().join("limited");
        let program = node.program.display();
        let text = format!("#!/bin/sh\nulimit -n {most}\nexec '{program}' \"$@\"\n");
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        node.program = script;
    }
    node.serve().await;
    let log = node.dir.path().join("log");
    let address = until(|| {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        let word = log.split("address=").nth(1)?.split_whitespace().next()?;
        word.trim_matches('"').parse().ok()
    })
    .await;
    (node, address)
}

/// CPU time of the plugin so far, in clock ticks (proc_pid_stat(5)).
fn ticks(node: &Simulated) -> u64 {
    let pid = node.plugin.as_ref().unwrap().id();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Descriptors that the plugin has open.
fn open_descriptors(node: &Simulated) -> usize {
    let pid = node.plugin.as_ref().unwrap().id();
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}
