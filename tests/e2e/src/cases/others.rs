//! Another plugin on the node, and the rights that deploy/tessera.yaml leaves ours.

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::delivery::check_fill;
use crate::deploy::{NAMESPACE, REPLICAS, SHARE_BYTES, SIM_ON_NODE};
use crate::images;
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

/// What the other plugin sells.
const FOREIGN: &str = "example.com/gpu";

/// A device plugin of another name that sells one GPU of ours: ours, without quotas of anybody's.
fn start_foreign<'a>(suite: &Suite<'a>, uuid: &str) -> Result<Pod<'a>> {
    let config = format!(
        "[resource]\nname = \"{FOREIGN}\"\n\
         [gpus]\ninclude = [\"{uuid}\"]\nsold_by_others = \"allow\"\nreserve = \"256Mi\"\n\
         context_overhead = \"64Mi\"\n[share]\nreplicas = 2\n\
         [paths]\npages = \"/tmp/pages\"\nshim = \"/tmp/shim\"\nledger = \"/tmp/ledger\"\n\
         admin = \"/tmp/admin.sock\"\nnvml = \"{SIM_ON_NODE}/libnvidia-ml.so.1\"\n\
         [pages]\ntmpfs = \"off\"\n[metrics]\nlisten = \"\"\n[api]\nlisten = \"\"\n"
    );
    let host = |name: &str, path: &str| json!({"name": name, "hostPath": {"path": path}});
    let (plugins, resources) =
        ("/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources");
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
    let env =
        |name: &str, file: &str| json!({"name": name, "value": format!("{SIM_ON_NODE}/{file}")});
    let script = "printf %s \"$CONFIG\" >/tmp/config.toml; exec tessera -c /tmp/config.toml serve";
    let main = Container::new("main", 0, &["sh", "-c", script]);
    let mut pod = pods::manifest("foreign", Restart::Always, &[], &[main]);
    let spec = &mut pod["spec"];
    spec["nodeSelector"] = json!({"kubernetes.io/hostname": suite.node});
    spec["volumes"] =
        json!([host("plugins", plugins), host("resources", resources), host("sim", SIM_ON_NODE)]);
    let container = &mut spec["containers"][0];
    container["image"] = json!(images::PLUGIN);
    container["env"] = json!([
        {"name": "CONFIG", "value": config},
        env("SIMGPU_CONFIG", "simgpu.toml"),
        env("SIMGPU_STATE", "state"),
    ]);
    container["volumeMounts"] = json!([
        mount("plugins", plugins),
        mount("resources", resources),
        mount("sim", SIM_ON_NODE)
    ]);
    suite.kubectl.create_pod(&pod)?;
    Ok(Pod::named(suite.kubectl, "foreign"))
}

pub fn gpu_that_another_plugin_sells_is_given_out_no_more(suite: &Suite<'_>) -> Result<()> {
    let server = Server::start(suite.kubectl, "server")?;
    let shared = server.pod.gpus("main")?.remove(0).uuid;
    let foreign = start_foreign(suite, &shared)?;
    // All of the other GPU, and the share that is in use.
    let other_gpu = REPLICAS / 2;
    suite.plugin.wait_for_replicas(other_gpu + 1)?;
    let now = suite.plugin.status()?;
    let gpus = now["gpus"].as_array().context("gpus")?;
    let gpu = gpus.iter().find(|gpu| gpu["uuid"] == shared.as_str()).context("the GPU")?;
    let reason = gpu["health_reason"].as_str().unwrap_or_default();
    ensure!(reason.contains(FOREIGN), "does not name the resource: {gpu}");
    let warnings = now["warnings"].to_string();
    ensure!(warnings.contains("gpus.exclude"), "does not say what to do: {warnings}");
    ensure!(now["plugin"]["others_seen_by"] != "", "{}", now["plugin"]);

    let four = Pod::idle(suite.kubectl, "four", other_gpu)?;
    ensure!(four.gpu()?.uuid != shared, "got the GPU that is sold twice");
    check_fill(four.fill(other_gpu * SHARE_BYTES)?, other_gpu * SHARE_BYTES)?;
    server.check_untouched()?;

    foreign.delete()?;
    wait::until("the other plugin is gone", wait::LIMIT, || {
        let pod = suite.kubectl.find(&["pod", "foreign", "-n", NAMESPACE])?.unwrap_or_default();
        let state = &pod["status"]["containerStatuses"][0]["state"];
        Ok(Look::when(!state["running"].is_object(), state.to_string()))
    })?;
    // Older kubelets remember a plugin for five minutes, or until they restart.
    suite.stop_kubelet()?;
    suite.start_kubelet()?;
    // And the plugin takes what it found for half a minute, unless it looks for the first time.
    suite.reconfigure(None)?;
    wait::until("the GPU is given out again", wait::LIMIT, || {
        let now = suite.plugin.allocatable()?;
        Ok(Look::when(now == REPLICAS, format!("{now} replicas")))
    })?;
    server.check_untouched()?;
    ensure!(
        suite.plugin.status()?["warnings"] == json!([]),
        "{}",
        suite.plugin.status()?["warnings"]
    );
    Ok(())
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
