//! What has to hold whatever is restarted: nothing oversold at any time, no running pod disturbed, no
//! admission error that could be avoided, nothing left behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use crate::deploy::{NAMESPACE, PLUGIN_NAMESPACE, SHARE_BYTES};
use crate::kubectl::Kubectl;
use crate::pods::{Container, Pod, Restart};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

use crate::cases::delivery::check_fill;

const BETWEEN_SAMPLES: Duration = Duration::from_millis(500);

/// A server and a quiet container that nothing may disturb, and an eye on what is sold.
pub struct Invariants<'a> {
    suite: &'a Suite<'a>,
    server: Server<'a>,
    quiet: Pod<'a>,
    quiet_before: (u64, String),
    sampler: Sampler,
}

/// Which pods kubelet may have refused, by what a case does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusals {
    /// Those that came while the plugin, or kubelet, was being replaced in an orderly way.
    WhileReplaced,
    /// Also those that it was asked for when it was killed.
    WhenKilled,
}

/// What was seen; a case prints it.
#[derive(Debug, Default)]
pub struct Report {
    /// Looks at what is sold that the plugin answered.
    pub samples: usize,
    /// What kubelet said of pods that it did not admit.
    pub refusals: Vec<String>,
}

impl<'a> Invariants<'a> {
    /// Starts both pods, which take two of the shares.
    pub fn watch(suite: &'a Suite<'a>) -> Result<Self> {
        let idle = [Container::idle("main", 1)];
        let quiet = Pod::create(suite.kubectl, "quiet", Restart::Always, &[], &idle)?;
        let server = Server::start(suite.kubectl, "server")?;
        quiet.wait_until_running()?;
        let quiet_before = quiet.incarnation()?;
        let sampler = Sampler::start(suite.kubectl.clone());
        Ok(Self { suite, server, quiet, quiet_before, sampler })
    }

    /// Checks everything that can be checked at once; what is released after a grace is checked by
    /// [`nothing_is_left`]. `allowed` says which pods kubelet may have refused.
    pub fn finish(self, allowed: Refusals) -> Result<Report> {
        let report = Report {
            samples: self.sampler.stop()?,
            refusals: refusals(&self.suite.kubectl.items(&["pods", "-n", NAMESPACE])?),
        };
        self.server.check_untouched()?;
        self.quiet.check_incarnation(&self.quiet_before)?;
        // A process that first meets CUDA now, in a container from before.
        check_fill(self.quiet.fill(SHARE_BYTES)?, SHARE_BYTES)?;
        for refusal in &report.refusals {
            ensure!(
                is_unavoidable(refusal, allowed),
                "an admission error that could be avoided: {refusal}"
            );
        }
        Ok(report)
    }
}

/// Waits until the plugin knows of no allocation, its directories are gone, and no byte is charged.
/// No pod of ours may be there any more.
pub fn nothing_is_left(suite: &Suite<'_>) -> Result<()> {
    wait::until("everything is released", wait::LIMIT, || {
        let status = suite.plugin.status()?;
        let (directories, left) = (suite.directories()?, &status["allocations"]);
        let none = left.as_array().is_none_or(Vec::is_empty) && directories.is_empty();
        let ids: Vec<_> = left.as_array().into_iter().flatten().map(|a| &a["id"]).collect();
        Ok(Look::when(none, format!("allocations {ids:?}, directories {directories:?}")))
    })?;
    let status = suite.plugin.status()?;
    for gpu in status["gpus"].as_array().context("gpus")? {
        ensure!(gpu["memory_limits_bytes"] == 0 && gpu["memory_charged_bytes"] == 0, "{gpu}");
    }
    ensure!(status["warnings"].as_array().is_some_and(Vec::is_empty), "{}", status["warnings"]);
    Ok(())
}

/// What kubelet said of the pods that it did not admit.
fn refusals(pods: &[Value]) -> Vec<String> {
    let pods = pods.iter();
    pods.filter(|pod| pod["status"]["reason"] == "UnexpectedAdmissionError")
        .map(|pod| pod["status"]["message"].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// Whether no plugin could have avoided it: there was none when kubelet asked, or it died while it was
/// asked. Whatever a plugin says itself is avoidable.
pub fn is_unavoidable(message: &str, allowed: Refusals) -> bool {
    let is = |causes: &[&str]| causes.iter().any(|cause| message.contains(cause));
    match allowed {
        Refusals::WhileReplaced => is(NO_PLUGIN) || is(CLIENT_CLOSED),
        Refusals::WhenKilled => is(NO_PLUGIN) || is(CLIENT_CLOSED) || is(SERVER_DIED),
    }
}

/// There was no plugin when kubelet asked.
const NO_PLUGIN: &[&str] = &[
    // Its devices are unhealthy to kubelet from the moment its stream ends.
    "requested number of devices unavailable",
    // Kubelet has restarted and admits before any plugin can have registered.
    "can't allocate unregistered device",
    "no healthy devices present",
    "endpoint not found in cache",
    "has been stopped",
    // Its connection is gone, and it makes another (grpc-go: clientconn.go, http2_client.go).
    "code = Unavailable desc = all SubConns are in TransientFailure",
    "code = Unavailable desc = last connection error",
    "code = Unavailable desc = connection error: desc = \"transport: Error while dialing",
    "code = Unavailable desc = the connection is draining",
    "code = Unavailable desc = the stream is rejected because server is draining",
];

/// Kubelet closes its own client as soon as the plugin's ListAndWatch ends (pkg/kubelet/cm/devicemanager:
/// `endpointImpl.stop` after `run`, since 1.25 `server.runClient`, `client.Disconnect`), and with it what
/// it has just begun to ask (grpc-go: `ErrClientConnClosing`, `ErrConnClosing`). A plugin can avoid that
/// for calls that it has, by ending the stream last; not for those that are under way to it.
const CLIENT_CLOSED: &[&str] = &[
    "code = Canceled desc = grpc: the client connection is closing",
    "code = Canceled desc = context canceled",
    "code = Unavailable desc = transport is closing",
    "code = Unavailable desc = grpc: the connection is closing",
];

/// The other end of the connection died in the middle of a call (grpc-go: http2_client.go, `reader`,
/// `Close`; what the socket said follows). A plugin that ends in an orderly way says GOAWAY
/// first, and calls that it no longer takes are begun again.
const SERVER_DIED: &[&str] = &[
    "code = Unavailable desc = error reading from server",
    "code = Unavailable desc = closing transport due to",
    "code = Unavailable desc = connection error: desc = \"error reading",
    "code = Unavailable desc = connection error: desc = \"transport: ",
    "code = Unavailable desc = transport: ",
    "code = Unavailable desc = unexpected EOF",
    "code = Unavailable desc = EOF",
    "code = Internal desc = unexpected EOF",
];

/// Looks at what is sold, again and again, from a thread.
struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<usize>>,
}

impl Sampler {
    fn start(kubectl: Kubectl) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut samples = 0;
            let place = [PLUGIN_NAMESPACE, "daemonset/tessera", "tessera"];
            while !stopping.load(Ordering::Relaxed) {
                // Often there is no plugin: that is what these cases are about.
                // Nor is what it says whole when kubelet, which passes it on, ends meanwhile.
                if let Ok(output) = kubectl.try_exec(place, &["tessera", "status", "-o", "json"])
                    && output.code == Some(0)
                    && let Ok(status) = serde_json::from_str::<Value>(&output.stdout)
                {
                    nothing_is_oversold(&status)?;
                    samples += 1;
                }
                thread::sleep(BETWEEN_SAMPLES);
            }
            Ok(samples)
        });
        Self { stop, thread }
    }

    fn stop(self) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        let samples = self.thread.join().map_err(|_| anyhow!("the sampler panicked"))??;
        ensure!(samples >= 2, "only {samples} looks at what is sold were answered");
        Ok(samples)
    }
}

/// Every replica is in one live allocation at most, and per GPU what is sold and what is offered fit.
fn nothing_is_oversold(status: &Value) -> Result<()> {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut holder: BTreeMap<String, String> = BTreeMap::new();
    let mut sold: BTreeMap<String, u64> = BTreeMap::new();
    for allocation in list(&status["allocations"]) {
        if allocation["state"] == "parked" {
            continue;
        }
        for replica in list(&allocation["replica_ids"]) {
            let before = holder.insert(replica.to_string(), allocation["id"].to_string());
            ensure!(before.is_none(), "{replica} is in two live allocations: {status}");
        }
        for gpu in list(&allocation["gpus"]) {
            *sold.entry(gpu["gpu_uuid"].to_string()).or_default() +=
                number(&gpu["memory_limit_bytes"]);
        }
    }
    for gpu in list(&status["gpus"]) {
        let free = list(&gpu["replicas"]).into_iter().filter(|replica| {
            replica["health"] == "healthy" && replica["allocation_id"].as_str() == Some("")
        });
        let offered: u64 = free.map(|replica| number(&replica["memory_limit_bytes"])).sum();
        let sold = sold.get(&gpu["uuid"].to_string()).copied().unwrap_or(0);
        let room = number(&gpu["memory_total_bytes"]) - number(&gpu["memory_reserve_bytes"]);
        ensure!(sold + offered <= room, "{sold} sold + {offered} offered > {room}: {gpu}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(limits: &[u64], free: &[u64]) -> Value {
        let allocations: Vec<_> = limits
            .iter()
            .enumerate()
            .map(|(n, limit)| {
                json!({"id": n, "state": "started", "replica_ids": [format!("G::{n}")],
                   "gpus": [{"gpu_uuid": "G", "memory_limit_bytes": limit}]})
            })
            .collect();
        let free: Vec<_> = free.iter().map(|limit| {
            json!({"health": "healthy", "allocation_id": "", "memory_limit_bytes": limit})
        }).collect();
        json!({"allocations": allocations, "gpus": [{
            "uuid": "G", "memory_total_bytes": 100, "memory_reserve_bytes": 10, "replicas": free,
        }]})
    }

    #[test]
    fn what_is_sold_and_offered_beyond_the_gpu_is_an_error() {
        nothing_is_oversold(&status(&[40, 20], &[30])).unwrap();
        assert!(nothing_is_oversold(&status(&[40, 20], &[31])).is_err());
        assert!(nothing_is_oversold(&status(&[91], &[])).is_err());
    }

    #[test]
    fn one_replica_in_two_live_allocations_is_an_error_and_a_parked_one_is_not() {
        let mut two = status(&[1, 1], &[]);
        two["allocations"][1]["replica_ids"] = json!(["G::0"]);
        assert!(nothing_is_oversold(&two).is_err());
        two["allocations"][1]["state"] = json!("parked");
        nothing_is_oversold(&two).unwrap();
    }

    const ASKED: &str = "Pod Allocate failed due to device plugin GetPreferredAllocation rpc failed \
                         with err: rpc error: ";

    #[test]
    fn what_the_plugin_says_itself_is_avoidable() {
        let unavailable =
            "Allocate failed due to requested number of devices unavailable for tessera.dev/gpu";
        let own = [
            "code = NotFound desc = unknown replica",
            "code = Unavailable desc = the GPU is unhealthy",
            "code = Internal desc = ledger: unexpected EOF",
        ];
        for allowed in [Refusals::WhileReplaced, Refusals::WhenKilled] {
            assert!(is_unavoidable(unavailable, allowed));
            for message in own {
                assert!(!is_unavoidable(&format!("{ASKED}{message}"), allowed), "{message}");
            }
        }
    }

    #[test]
    fn a_client_that_kubelet_closes_is_unavoidable_where_its_plugin_ends() {
        let message = format!(
            "{ASKED}code = Canceled desc = grpc: the client connection is closing, which is unexpected"
        );
        assert!(is_unavoidable(&message, Refusals::WhenKilled));
        assert!(is_unavoidable(&message, Refusals::WhileReplaced));
    }

    #[test]
    fn a_connection_that_breaks_in_a_call_is_avoidable_unless_the_plugin_is_killed() {
        for cause in [
            "error reading from server: EOF",
            "error reading from server: read unix @->/a.sock: use of closed network connection",
            "closing transport due to: connection error: desc = \"error reading from server: EOF\"",
            "connection error: desc = \"transport: failed to write client preface: broken pipe\"",
        ] {
            let message = format!("{ASKED}code = Unavailable desc = {cause}, which is unexpected");
            assert!(is_unavoidable(&message, Refusals::WhenKilled), "{cause}");
            assert!(!is_unavoidable(&message, Refusals::WhileReplaced), "{cause}");
        }
    }
}
