//! A container that uses a shared GPU without a share, or past it, is flagged by name; and the rights that
//! deploy/tessera.yaml leaves the plugin.

use anyhow::{Context, Result, ensure};
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
    Pod::put(suite.kubectl, &pod)
}

const PRELOAD: &str = "/etc/ld.so.preload";

/// A container that asks for too much, and one that empties its preload file: refusal and bypass.
fn start_greedy<'a>(suite: &Suite<'a>) -> Result<Pod<'a>> {
    suite.kubectl.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "empty", "namespace": NAMESPACE}, "data": {"file": ""},
    }))?;
    let command = ["tessera-tenant", "greedy", "--for", "0", "--retry-ms", "100"];
    let greedy = Container::new("main", 1, &command);
    let loose = Container::new("loose", 1, &["tessera-tenant", "hold", "--bytes", "100Mi"]);
    let mut pod = pods::manifest("greedy", Restart::Always, &[], &[greedy, loose]);
    pod["spec"]["volumes"] = json!([{"name": "empty", "configMap": {"name": "empty"}}]);
    pod["spec"]["containers"][1]["volumeMounts"] =
        json!([{"name": "empty", "mountPath": PRELOAD, "subPath": "file"}]);
    Pod::put(suite.kubectl, &pod)
}

/// In status and log, and for the pod that has a share in its description.
pub fn processes_without_a_share_or_past_it_are_flagged_by_name(suite: &Suite<'_>) -> Result<()> {
    start_stranger(suite)?;
    start_greedy(suite)?;
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    let loose = format!("of pod {NAMESPACE}/stranger (container loose) uses");
    wait::until("status warns of the stranger", wait::LIMIT, || {
        let warnings = suite.plugin.status()?["warnings"].clone();
        let mut all = warnings.as_array().into_iter().flatten().filter_map(Value::as_str);
        let found = all.any(|w| w.contains(&loose));
        Ok(Look::when(found, warnings.to_string()))
    })?;
    let log = suite.plugin.log();
    ensure!(log.contains("finding=\"stranger\"") || log.contains("finding=stranger"), "{log}");
    wait::until("kubectl describe shows refusal and bypass", wait::LIMIT, || {
        let text = suite.kubectl.run(&["describe", "pod", "greedy", "-n", NAMESPACE])?;
        let words = ["GPUMemoryRefused", "Ask for a larger share", "GPUQuotaBypassed"];
        Ok(Look::when(words.iter().all(|word| text.contains(word)), text))
    })?;
    neighbour.check_untouched()
}

pub fn plugin_has_no_rights_to_speak_of(suite: &Suite<'_>) -> Result<()> {
    // What is executed in the container gets what the plugin itself has.
    let own = suite.plugin.exec(&["cat", "/proc/self/status"])?;
    let field = |name: &str| own.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    for set in ["CapEff:", "CapPrm:", "CapBnd:", "CapInh:", "CapAmb:"] {
        ensure!(field(set) == Some("0000000000000000"), "{set} {:?}", field(set));
    }
    ensure!(field("NoNewPrivs:") == Some("1"), "NoNewPrivs {:?}", field("NoNewPrivs:"));
    ensure!(field("Seccomp:") == Some("2"), "no seccomp filter: {:?}", field("Seccomp:"));
    for path in ["/", "/usr/local/bin", "/var/lib/kubelet/pod-resources", "/etc/tessera"] {
        let written = suite.plugin.exec(&["touch", &format!("{path}/written")]);
        let error = written.err().with_context(|| format!("{path} can be written"))?;
        ensure!(format!("{error:#}").contains("Read-only file system"), "{path}: {error:#}");
    }
    let pod = suite.plugin.pod()?;
    let pod = suite.kubectl.get(&["pod", &pod, "-n", crate::deploy::PLUGIN_NAMESPACE])?;
    ensure!(pod["spec"]["containers"][0]["livenessProbe"].is_object(), "no liveness probe");
    let plugin = format!("--as=system:serviceaccount:{}:tessera", crate::deploy::PLUGIN_NAMESPACE);
    let may = |verb: &str, what: &str| {
        // Exit status 1 is a no.
        let said = suite.kubectl.run(&["auth", "can-i", verb, what, "--all-namespaces", &plugin]);
        said.is_ok_and(|said| said.trim() == "yes")
    };
    ensure!(may("create", "events") && may("patch", "events"), "it may not write events");
    for (verb, what) in [
        ("get", "events"),
        ("delete", "events"),
        ("get", "pods"),
        ("create", "pods"),
        ("get", "secrets"),
        ("patch", "nodes"),
        ("create", "pods/exec"),
        ("create", "serviceaccounts/token"),
    ] {
        ensure!(!may(verb, what), "it may {verb} {what}");
    }
    Ok(())
}
