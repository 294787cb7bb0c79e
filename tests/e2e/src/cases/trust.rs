//! A container that uses a shared GPU without a share, or past it, is flagged by name.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{NAMESPACE, SIM_ON_NODE};
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

/// No share, no shim, and a driver of its own: it sees all GPUs, as CUDA's images do under a toolkit that
/// lets them.
fn start_stranger<'a>(suite: &Suite<'a>) -> Result<Pod<'a>> {
    let script = "for n in 0 1; do tessera-tenant --device $n hold --bytes 100Mi & done; wait";
    let main = Container::new("loose", 0, &["sh", "-c", script]);
    let mut pod = pods::manifest("stranger", Restart::Always, &[], &[main]);
    pod["spec"]["volumes"] = json!([{"name": "sim", "hostPath": {"path": SIM_ON_NODE}}]);
    let env =
        |name: &str, file: &str| json!({"name": name, "value": format!("{SIM_ON_NODE}{file}")});
    let container = &mut pod["spec"]["containers"][0];
    container["env"] = json!([
        env("LD_LIBRARY_PATH", ""),
        env("SIMGPU_CONFIG", "/simgpu.toml"),
        env("SIMGPU_STATE", "/state"),
    ]);
    container["volumeMounts"] = json!([{"name": "sim", "mountPath": SIM_ON_NODE}]);
    suite.kubectl.create_pod(&pod)?;
    Ok(Pod::named(suite.kubectl, "stranger"))
}

fn wait_for_warning(suite: &Suite<'_>, parts: &[&str]) -> Result<()> {
    wait::until(&format!("status warns of {parts:?}"), wait::LIMIT, || {
        let warnings = suite.plugin.status()?["warnings"].clone();
        let all = warnings.as_array().into_iter().flatten().filter_map(Value::as_str);
        let found = all.into_iter().any(|w| parts.iter().all(|part| w.contains(part)));
        Ok(Look::when(found, warnings.to_string()))
    })
}

pub fn process_without_a_share_is_flagged_by_its_pods_name(suite: &Suite<'_>) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    start_stranger(suite)?.wait_until_running()?;
    let loose = format!("of pod {NAMESPACE}/stranger (container loose) uses");
    wait_for_warning(suite, &["no quota holds them", &loose])?;
    let log = suite.plugin.log();
    ensure!(log.contains("finding=\"stranger\"") || log.contains("finding=stranger"), "{log}");
    neighbour.check_untouched()
}

const PRELOAD: &str = "/etc/ld.so.preload";

fn make_empty_file(suite: &Suite<'_>) -> Result<()> {
    suite.kubectl.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "empty", "namespace": NAMESPACE}, "data": {"file": ""},
    }))
}

/// One pod with a container that asks for too much and one that empties its preload file: refusal and bypass.
pub fn what_concerns_a_pod_is_shown_in_its_description(suite: &Suite<'_>) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    make_empty_file(suite)?;
    let command = ["tessera-tenant", "greedy", "--for", "0", "--retry-ms", "100"];
    let greedy = Container::new("main", 1, &command);
    let loose = Container::new("loose", 1, &["tessera-tenant", "hold", "--bytes", "100Mi"]);
    let mut pod = pods::manifest("greedy", Restart::Always, &[], &[greedy, loose]);
    pod["spec"]["volumes"] = json!([{"name": "empty", "configMap": {"name": "empty"}}]);
    pod["spec"]["containers"][1]["volumeMounts"] =
        json!([{"name": "empty", "mountPath": PRELOAD, "subPath": "file"}]);
    suite.kubectl.create_pod(&pod)?;
    let reported = wait::until("kubectl describe shows all of it", wait::LIMIT, || {
        let text = suite.kubectl.run(&["describe", "pod", "greedy", "-n", NAMESPACE])?;
        let words = ["GPUMemoryRefused", "Ask for a larger share", "GPUQuotaBypassed"];
        Ok(Look::when(words.iter().all(|word| text.contains(word)), text))
    });
    if reported.is_err() {
        println!("     status warns: {}", suite.plugin.status()?["warnings"]);
    }
    Pod::named(suite.kubectl, "greedy").delete()?;
    reported?;
    neighbour.check_untouched()
}
