//! What the figures were measured on.

use serde_json::{Value, json};

use crate::world::SIMULATION;

/// For the summary's `metadata`.
pub fn metadata() -> Value {
    json!({
        "driver": "simulated (tests/sim), not a GPU",
        "simulation": SIMULATION,
        "cpu": cpu(),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "kernel": kernel(),
        "unix_time": std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        "tessera": env!("CARGO_PKG_VERSION"),
    })
}

/// One line for people.
pub fn describe() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("simulated driver, {cores} cores of {}, Linux {}", cpu(), kernel())
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| "an unknown CPU".into(), |(_, name)| name.trim().to_owned())
}

fn kernel() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}
