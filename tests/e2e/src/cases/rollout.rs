//! The plugin's pod and process are replaced under running pods, and its configuration changes without a restart.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{NAMESPACE, REPLICAS, SHARE_BYTES};
use crate::host::{CONFIG, CONFIGURED};
use crate::invariants::{Invariants, Refusals};
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::{Server, Suite};
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

/// The plugin's pod is replaced; then its process is killed, and kubelet starts its container again. On any cluster: where the
/// node is in reach, the cases of roll-outs, churn and kubelet show more.
pub fn plugin_is_replaced_and_killed_under_running_pods(suite: &Suite<'_>) -> Result<()> {
    let server = Server::start(suite.kubectl, "server")?;
    let quiet = Pod::idle(suite.kubectl, "quiet", 2)?;
    let before = quiet.incarnation()?;
    suite.plugin.replace_pod()?;
    server.check_untouched()?;
    suite.plugin.kill()?;
    // A process that first meets CUDA after the restart, in a container from before.
    check_fill(quiet.fill(2 * SHARE_BYTES)?, 2 * SHARE_BYTES)?;
    ensure!(quiet.incarnation()? == before, "restarted");
    let fresh = Pod::idle(suite.kubectl, "fresh", 1)?;
    check_fill(fresh.fill(SHARE_BYTES)?, SHARE_BYTES)?;
    server.check_untouched()
}

/// The configuration changes under a running pod, without a restart of the plugin.
pub fn configuration_changes_under_a_running_pod(suite: &Suite<'_>) -> Result<()> {
    suite.reconfigure(Some(CONFIG))?;
    let rest = Pod::idle(suite.kubectl, "rest", 1)?;
    let plugin = suite.host("serving")?;
    let outcome = (|| {
        // Eight of 450 MiB each: of the 3840 MiB of the one GPU 900 are held, and six of seven fit beside.
        let eight = CONFIG
            .replace("replicas = 4", "replicas = 8")
            .replace("memory = \"900Mi\"", "memory = \"450Mi\"");
        publish(suite, "1", &eight)?;
        suite.plugin.wait_for_replicas(15)?;
        check_fill(rest.fill(SHARE_BYTES)?, SHARE_BYTES)?;
        let small = Pod::idle(suite.kubectl, "small", 1)?;
        check_fill(small.fill(450 << 20)?, 450 << 20)?;
        small.delete()?;
        // Three of 1200 MiB each: beside what is held, with its limit of before, two fit.
        let three = CONFIG
            .replace("replicas = 4", "replicas = 3")
            .replace("memory = \"900Mi\"", "memory = \"1200Mi\"");
        publish(suite, "2", &three)?;
        suite.plugin.wait_for_free(5)?;
        let large = Pod::idle(suite.kubectl, "large", 1)?;
        check_fill(large.fill(1200 << 20)?, 1200 << 20)?;
        check_fill(rest.fill(SHARE_BYTES)?, SHARE_BYTES)?;
        large.delete()?;
        ensure!(suite.host("serving")? == plugin, "the plugin started again");
        rest.delete()
    })();
    let dir = directory();
    suite.host(&format!("rm -rf {dir}/..1 {dir}/..2 {dir}/..data {CONFIGURED}"))?;
    suite.reconfigure(Some(CONFIG))?;
    outcome
}

fn directory() -> &'static str {
    CONFIGURED.trim_end_matches("/config.toml")
}

/// As kubelet updates a ConfigMap's volume: a new directory, and a link to it that is renamed over the old.
fn publish(suite: &Suite<'_>, version: &str, toml: &str) -> Result<()> {
    let script = format!(
        "cd {} && mkdir -p ..{version} && cat >..{version}/config.toml <<'END'\n{toml}\nEND\n\
         ln -sfn ..{version} ..data_tmp && mv -T ..data_tmp ..data\n\
         [ -L config.toml ] || {{ ln -s ..data/config.toml link && mv -T link config.toml; }}\n",
        directory()
    );
    suite.host(&script).map(drop)
}
