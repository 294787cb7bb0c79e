//! The DaemonSet's rolling update under running pods.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{NAMESPACE, REPLICAS, SHARE_BYTES};
use crate::invariants::{Invariants, Refusals};
use crate::pods::{self, Container, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// `maxUnavailable: 1`, no surge: for some seconds there is no plugin. Pods that come meanwhile wait,
/// but for those that were bound to the node already.
pub fn rolling_update_while_pods_come_and_run(suite: &Suite<'_>) -> Result<()> {
    let watched = Invariants::watch(suite)?;
    // What the cases after this one need anyway is as good an update as any.
    suite.plugin.begin_supervision()?;
    let script = format!("tessera-tenant greedy --at-most {SHARE_BYTES} >/dev/termination-log");
    let mut names = Vec::new();
    for n in 0..12 {
        let name = format!("coming-{n}");
        let main = [Container::new("main", 1, &["sh", "-c", &script])];
        suite.kubectl.create_all(vec![pods::manifest(&name, Restart::Never, &[], &main)])?;
        names.push(name);
        thread::sleep(Duration::from_millis(700));
    }
    suite.plugin.wait_for_roll_out()?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    let pods = wait_until_over(suite, "coming-", names.len())?;
    let mut succeeded = 0;
    for pod in &pods {
        let status = &pod["status"];
        if status["phase"] == "Succeeded" {
            check_fill(filled(pod)?, SHARE_BYTES)?;
            succeeded += 1;
        } else {
            ensure!(status["reason"] == "UnexpectedAdmissionError", "{status}");
        }
    }
    let report = watched.finish(false, Refusals::WhileReplaced)?;
    println!("     {succeeded} of {} pods ran; refused: {:?}", pods.len(), report.refusals);
    // Those bound in the seconds without a plugin, and no more.
    ensure!(succeeded * 2 > pods.len(), "only {succeeded} of {} ran", pods.len());
    Ok(())
}

/// Waits until all pods whose names begin so are over.
pub fn wait_until_over(
    suite: &Suite<'_>,
    prefix: &str,
    count: usize,
) -> Result<Vec<serde_json::Value>> {
    wait::until(&format!("{count} pods are over"), wait::LIMIT, || {
        let pods = of(suite, prefix)?;
        let over = pods.iter().filter(|pod| is_over(pod)).count();
        let seen = format!("{over} of {}", pods.len());
        Ok(if over == count { Look::Done(pods) } else { Look::NotYet(seen) })
    })
}

/// The pods whose names begin so.
pub fn of(suite: &Suite<'_>, prefix: &str) -> Result<Vec<serde_json::Value>> {
    let list = suite.kubectl.get(&["pods", "-n", NAMESPACE])?;
    let pods = list["items"].as_array().cloned().unwrap_or_default();
    let named = |pod: &serde_json::Value| {
        pod["metadata"]["name"].as_str().is_some_and(|name| name.starts_with(prefix))
    };
    Ok(pods.into_iter().filter(named).collect())
}

/// Whether a pod that is not restarted has ended.
pub fn is_over(pod: &serde_json::Value) -> bool {
    pod["status"]["phase"] == "Succeeded" || pod["status"]["phase"] == "Failed"
}

/// What a pod that filled its quota wrote as its last word.
pub fn filled(pod: &serde_json::Value) -> Result<u64> {
    let last = &pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"];
    pods::held(last.as_str().unwrap_or_default(), "full").with_context(|| pod["status"].to_string())
}
