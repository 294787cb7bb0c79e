//! Who uses a shared GPU without a share is flagged by name.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{NAMESPACE, PLUGIN_NAMESPACE, SIM_ON_NODE};
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

/// What the chart's `events.enabled` adds.
fn allow_events(suite: &Suite<'_>) -> Result<()> {
    let name = "tessera-e2e-events";
    let metadata = json!({"name": name, "labels": {"tessera.dev/e2e": "true"}});
    let group = "rbac.authorization.k8s.io";
    suite.kubectl.apply(&json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": metadata,
        "rules": [{"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}],
    }))?;
    suite.kubectl.apply(&json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": metadata,
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
        "subjects": [
            {"kind": "ServiceAccount", "name": "tessera", "namespace": PLUGIN_NAMESPACE}
        ],
    }))
}

pub fn refused_memory_is_told_in_the_pods_description(suite: &Suite<'_>) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    allow_events(suite)?;
    let before = suite.plugin.change_template(|template| {
        template["spec"]["automountServiceAccountToken"] = json!(true);
        let env = template["spec"]["containers"][0]["env"].as_array_mut();
        let field = json!({"fieldRef": {"fieldPath": "spec.nodeName"}});
        env.into_iter().for_each(|env| env.push(json!({"name": "NODE_NAME", "valueFrom": field})));
    })?;
    let command = ["tessera-tenant", "greedy", "--for", "0", "--retry-ms", "100"];
    let greedy = Pod::start(suite.kubectl, "greedy", Container::new("main", 1, &command))?;
    let told = wait::until("kubectl describe shows the refusal", wait::LIMIT, || {
        let text = suite.kubectl.run(&["describe", "pod", "greedy", "-n", NAMESPACE])?;
        Ok(Look::when(text.contains("GPUMemoryRefused"), text))
    });
    if told.is_err() {
        println!("     status warns: {}", suite.plugin.status()?["warnings"]);
    }
    greedy.delete()?;
    suite.plugin.change_template(|template| *template = before)?;
    suite.kubectl.run(&["delete", "clusterrole,clusterrolebinding", "tessera-e2e-events"])?;
    told?;
    neighbour.check_untouched()
}
