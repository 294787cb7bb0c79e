//! GPU time, divided among pods.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::shares::{LARGE, with_layout};
use crate::deploy::REPLICAS;
use crate::images::SIM_DIR;
use crate::pods::{Container, Pod};
use crate::suite::Suite;

const SMALL: &str = "tessera.dev/gpu-small";
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

/// Two pods have 75 and 25 % while they are two, and 60, 20 and 20 % with a third, by the simulated
/// driver's own account of who ran.
pub fn gpu_time_follows_the_shares_as_a_third_comes_and_goes(suite: &Suite<'_>) -> Result<()> {
    with_layout(suite, LAYOUT, REPLICAS / 2, || {
        let backlog = |name: &'static str, resource| {
            let load = ["tessera-tenant", "load", "--kernel-us", "500", "--name", name];
            let main = Container::new("main", 0, &load).asking(&[(resource, 1)]);
            let pod = Pod::start(suite.kubectl, name, main)?;
            pod.wait_for_event("main", "ready")?;
            Ok::<_, anyhow::Error>(pod)
        };
        let large = backlog("large", LARGE)?;
        let small = backlog("small", SMALL)?;
        let two = [("large", 0.75), ("small", 0.25)];
        divided(&large, &two).context("two pods")?;
        let third = backlog("third", SMALL)?;
        let three = [("large", 0.6), ("small", 0.2), ("third", 0.2)];
        divided(&large, &three).context("three pods")?;
        let status = suite.plugin.status()?;
        let asked = status["allocations"].as_array().context("allocations")?;
        ensure!(
            asked.iter().all(|a| a["compute"]["got_10s_millis"].as_u64() > Some(0)),
            "{status}"
        );
        third.delete()?;
        divided(&large, &two).context("two pods again")?;
        // Nobody rationed himself: the arbiter was there all the time.
        let status = suite.plugin.status()?;
        let asked = status["allocations"].as_array().context("allocations")?;
        ensure!(asked.iter().all(|a| a["gate_timeouts"] == 0), "{status}");
        drop(small);
        Ok(())
    })
}

/// Measures, from inside `pod`, what part of the first GPU's work each process does.
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
    let text = pod.exec(&[&format!("{SIM_DIR}/bin/simgpu-ctl"), "account"])?;
    let line = text.lines().next().context("no GPU in the account")?;
    serde_json::from_str(line).with_context(|| line.to_owned())
}
