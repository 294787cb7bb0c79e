//! Who goes past the quota is flagged by name, and pods are told by Kubernetes.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{NAMESPACE, SIM_ON_NODE};
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

/// A volume in the pages' place.
fn start_shadowed<'a>(suite: &Suite<'a>) -> Result<Pod<'a>> {
    let main = Container::idle("main", 1);
    let mut pod = pods::manifest("shadowed", Restart::Always, &[], &[main]);
    pod["spec"]["volumes"] = json!([{"name": "over", "emptyDir": {}}]);
    pod["spec"]["containers"][0]["volumeMounts"] =
        json!([{"name": "over", "mountPath": "/usr/local/tessera/pages"}]);
    suite.kubectl.create_pod(&pod)?;
    Ok(Pod::named(suite.kubectl, "shadowed"))
}

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

pub fn shadowed_pages_and_strangers_are_flagged_by_name(suite: &Suite<'_>) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    start_shadowed(suite)?.wait_until_running()?;
    start_stranger(suite)?.wait_until_running()?;
    let pages = "something else is mounted over /usr/local/tessera/pages";
    wait_for_warning(suite, &[&format!("{NAMESPACE}/shadowed (main)"), pages])?;
    let loose = format!("of pod {NAMESPACE}/stranger (container loose) uses");
    wait_for_warning(suite, &["no quota holds them", &loose])?;
    let log = suite.plugin.log();
    ensure!(log.contains("finding=\"stranger\"") || log.contains("finding=stranger"), "{log}");
    neighbour.check_untouched()
}

/// With the token and the right that docs/trust.md names, for as long as this case lasts.
pub fn pod_is_told_by_kubernetes_what_was_refused(suite: &Suite<'_>) -> Result<()> {
    let name = json!({"name": "tessera-e2e-events"});
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": name,
        "rules": [{"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]}],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": name,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                    "name": "tessera-e2e-events"},
        "subjects": [{"kind": "ServiceAccount", "name": "tessera", "namespace": "tessera"}],
    });
    suite.kubectl.apply(&role)?;
    suite.kubectl.apply(&binding)?;
    let before = suite.plugin.change_template(|template| {
        template["spec"]["automountServiceAccountToken"] = json!(true);
    })?;
    let outcome = is_told(suite);
    suite.plugin.change_template(|template| *template = before)?;
    for kind in ["clusterrolebinding", "clusterrole"] {
        suite.kubectl.run(&["delete", kind, "tessera-e2e-events"])?;
    }
    outcome
}

fn is_told(suite: &Suite<'_>) -> Result<()> {
    start_shadowed(suite)?.wait_until_running()?;
    wait::until("kubectl describe tells of it", wait::LIMIT, || {
        let text = suite.kubectl.run(&["describe", "pod", "-n", NAMESPACE, "shadowed"])?;
        let told = text.lines().any(|line| {
            line.contains("GPUQuotaTampered")
                && line.contains("Warning")
                && line.contains("tessera")
        });
        Ok(Look::when(told, text))
    })?;
    ensure!(
        suite.plugin.status()?["warnings"].to_string().contains("shadowed"),
        "status says nothing"
    );
    Ok(())
}
