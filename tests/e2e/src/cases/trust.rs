//! Who uses a shared GPU without a share is flagged by name.

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
