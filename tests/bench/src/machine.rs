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
        "realtime": goes_first(),
        "unix_time": std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        "tessera": env!("CARGO_PKG_VERSION"),
    })
}

/// Puts this process, and all that it starts from now on, before everything else on the machine
/// (`SCHED_RR`): what others do there is then not in the figures.
///
/// # Errors
/// The kernel's; it takes root.
pub fn go_first() -> std::io::Result<()> {
    let parameter = libc::sched_param { sched_priority: 1 };
    // SAFETY: a valid parameter, for this process.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const parameter) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Whether [`go_first`] holds.
pub fn goes_first() -> bool {
    // SAFETY: a query about this process.
    unsafe { libc::sched_getscheduler(0) == libc::SCHED_RR }
}

/// One line for people.
pub fn describe() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let first = if goes_first() { ", with real-time priority" } else { "" };
    format!("simulated driver, {cores} cores of {}, Linux {}{first}", cpu(), kernel())
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
