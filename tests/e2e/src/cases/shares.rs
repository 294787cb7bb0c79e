//! Unequal shares, under a resource name for each size: memory and GPU time are divided as they say.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::delivery::check_fill;
use crate::deploy::REPLICAS;
use crate::host::CONFIG;
use crate::images::SIM_DIR;
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

const LARGE: &str = "tessera.dev/gpu-large";
const SMALL: &str = "tessera.dev/gpu-small";
const LARGE_BYTES: u64 = 1 << 30;
const SMALL_BYTES: u64 = 600 << 20;
/// Three to one to one, of the first GPU alone.
const LAYOUT: &str = r#"
[[layout]]
gpus = ["GPU-e2e00000-0000-4000-8000-000000000000"]
shares = [
  { resource = "tessera.dev/gpu-large", memory = "1Gi", cores = "60%" },
  { resource = "tessera.dev/gpu-small", count = 2, memory = "600Mi", cores = "20%" },
]
"#;
/// How long shares are measured.
const OBSERVATION: Duration = Duration::from_secs(8);
/// How far a share may be off, of one. The division itself is a hundred times finer; the rest is a node
/// whose control plane takes the CPUs that tenants need to be woken on. Undivided, the GPU's own time
/// slices give equal parts: 25 points less than the largest share below.
const OFF: f64 = 0.06;

pub fn unequal_shares_divide_memory_and_time_by_name(suite: &Suite<'_>) -> Result<()> {
    suite.reconfigure(Some(&format!("{CONFIG}{LAYOUT}")))?;
    let outcome = wait::until("the node offers the large share", wait::LIMIT, || {
        let node = suite.kubectl.get(&["node", &suite.node])?;
        let offered = node["status"]["allocatable"][LARGE].clone();
        Ok(Look::when(offered == "1", offered.to_string()))
    })
    .and_then(|()| suite.plugin.wait_for_replicas(REPLICAS / 2))
    .and_then(|()| refused(suite))
    .and_then(|()| fills(suite))
    .and_then(|()| divides(suite));
    suite.remove_tenants()?;
    suite.reconfigure(None)?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    outcome
}

/// A container that asks for two of our resources does not start.
fn refused(suite: &Suite<'_>) -> Result<()> {
    let greedy = Container::idle("main", 0).asking(&[(LARGE, 1), (SMALL, 1)]);
    let greedy = Pod::create(suite.kubectl, "greedy", Restart::Always, &[], &[greedy])?;
    wait::until("the start is refused", wait::LIMIT, || {
        let text = json!(suite.events_of("greedy")?).to_string();
        Ok(Look::when(text.contains("can hold only one of Tessera's resources"), text))
    })?;
    let status = greedy.object()?["status"].clone();
    ensure!(status["phase"] == "Pending", "it runs: {status}");
    // Nothing of the pod runs that would take time to end.
    greedy.forget()
}

/// Each share holds its own memory, to a chunk.
fn fills(suite: &Suite<'_>) -> Result<()> {
    let containers = [("large", LARGE), ("small", SMALL)]
        .map(|(name, resource)| Container::idle(name, 0).asking(&[(resource, 1)]));
    let pod = Pod::create(suite.kubectl, "filled", Restart::Always, &[], &containers)?;
    pod.wait_until_running()?;
    for (name, bytes) in [("large", LARGE_BYTES), ("small", SMALL_BYTES)] {
        let text = pod.try_exec_in(name, &["tessera-tenant", "greedy"])?.success("greedy")?;
        check_fill(pods::held(&text, "full")?, bytes).context(name)?;
    }
    pod.delete()?;
    pod.wait_until_gone()
}

/// One each in two containers of a pod is no such thing. The two have 75 and 25 % of the time while they are two, and
/// 60, 20 and 20 % with a third, by the simulated driver's own account of who ran.
fn divides(suite: &Suite<'_>) -> Result<()> {
    let backlog = |name: &'static str, resource| {
        let load = ["tessera-tenant", "load", "--kernel-us", "500", "--name", name];
        Container::new(name, 0, &load).asking(&[(resource, 1)])
    };
    let containers = [backlog("large", LARGE), backlog("small", SMALL)];
    let pair = Pod::create(suite.kubectl, "pair", Restart::Always, &[], &containers)?;
    pair.wait_until_running()?;
    pair.wait_for_event("large", "ready")?;
    pair.wait_for_event("small", "ready")?;
    divided(&pair, &[("large", 0.75), ("small", 0.25)]).context("two containers")?;
    let third = Pod::start(suite.kubectl, "third", backlog("third", SMALL))?;
    third.wait_for_event("third", "ready")?;
    let three = [("large", 0.6), ("small", 0.2), ("third", 0.2)];
    divided(&pair, &three).context("three containers")?;

    // Kubelet reports holders a moment later.
    wait::until("status names all three", wait::LIMIT, || {
        let status = suite.plugin.status()?;
        let allocations = status["allocations"].as_array().context("allocations")?;
        let mut names: Vec<_> =
            allocations.iter().map(|a| [&a["holder"]["container"], &a["resource_name"]]).collect();
        names.sort_by_key(|name| name[0].to_string());
        let want = json!([["large", LARGE], ["small", SMALL], ["third", SMALL]]);
        // Nobody rationed himself: the arbiter was there all the time.
        let timed_out = allocations.iter().any(|a| a["gate_timeouts"] != 0);
        ensure!(!timed_out, "{status}");
        Ok(Look::when(json!(names) == want, json!(names).to_string()))
    })?;

    let (large, small) = (pair.gpus("large")?, pair.gpus("small")?);
    ensure!(large[0].uuid == small[0].uuid, "two GPUs: {large:?}, {small:?}");
    Ok(())
}

/// Measures, from inside the pod, what part of the first GPU's work each process does.
fn divided(pod: &Pod<'_>, want: &[(&str, f64)]) -> Result<()> {
    let before = busy(pod)?;
    thread::sleep(OBSERVATION);
    let after = busy(pod)?;
    let ns = |account: &Value, name: &str| -> f64 {
        let contexts = account["contexts"].as_array().into_iter().flatten();
        let own = contexts.filter(|context| context["name"] == name);
        own.filter_map(|context| context["busy_ns"].as_f64()).sum()
    };
    let got: Vec<f64> = want.iter().map(|(name, _)| ns(&after, name) - ns(&before, name)).collect();
    let all: f64 = got.iter().sum();
    let parts: Vec<f64> = got.iter().map(|part| part / all).collect();
    let line: Vec<_> =
        want.iter().zip(&parts).map(|((name, _), part)| format!("{name} {part:.3}")).collect();
    println!("     {}", line.join(", "));
    let off = want.iter().zip(&parts).any(|((_, share), part)| (share - part).abs() > OFF);
    ensure!(!off, "{line:?} instead of {want:?}");
    Ok(())
}

/// The simulated driver's account of the first GPU.
fn busy(pod: &Pod<'_>) -> Result<Value> {
    let ctl = format!("{SIM_DIR}/bin/simgpu-ctl");
    let text = pod.try_exec_in("large", &[&ctl, "account"])?.success("simgpu-ctl account")?;
    let line = text.lines().next().context("no GPU in the account")?;
    serde_json::from_str(line).with_context(|| line.to_owned())
}
