//! A container that uses a shared GPU without a share, or covers the files that limit it, is flagged by name.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{NAMESPACE, PLUGIN_NAMESPACE, SHARE_BYTES, SIM_ON_NODE};
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

const PAGES: &str = "/usr/local/tessera/pages";
const SHIM: &str = "/usr/local/tessera/libtessera.so";
const PRELOAD: &str = "/etc/ld.so.preload";

/// A volume of the pod's, and where it is mounted: `dir`, `node` (of the host), `file` (an empty one of
/// the host), `none` (an empty file of a ConfigMap).
type Over = (&'static str, &'static str);

/// Containers, each with what its pod mounts over what it is given.
fn shadowed(name: &str, containers: &[(&Container, &[Over])]) -> Value {
    let plain: Vec<Container> = containers.iter().map(|(one, _)| (*one).clone()).collect();
    let mut pod = pods::manifest(name, Restart::Always, &[], &plain);
    pod["spec"]["volumes"] = json!([
        {"name": "dir", "emptyDir": {}},
        {"name": "node", "hostPath": {"path": SIM_ON_NODE}},
        {"name": "file", "hostPath": {"path": format!("{SIM_ON_NODE}/empty"), "type": "FileOrCreate"}},
        {"name": "none", "configMap": {"name": "empty"}},
    ]);
    for (at, (_, over)) in containers.iter().enumerate() {
        let mount = |(volume, path): &Over| match *volume {
            "none" => json!({"name": "none", "mountPath": path, "subPath": "file"}),
            volume => json!({"name": volume, "mountPath": path}),
        };
        pod["spec"]["containers"][at]["volumeMounts"] = over.iter().map(mount).collect();
    }
    pod
}

fn make_empty_file(suite: &Suite<'_>) -> Result<()> {
    suite.kubectl.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "empty", "namespace": NAMESPACE}, "data": {"file": ""},
    }))
}

/// The value of the one series of this metric with these words in its labels.
fn metric(suite: &Suite<'_>, name: &str, words: &[&str]) -> Result<f64> {
    let pod = suite.plugin.pod()?;
    let path = format!("/api/v1/namespaces/{PLUGIN_NAMESPACE}/pods/{pod}:9464/proxy/metrics");
    let text = suite.kubectl.run(&["get", "--raw", &path])?;
    let is_it = |line: &&str| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'))
            && words.iter().all(|word| line.contains(word))
    };
    let line = text.lines().find(is_it).with_context(|| format!("no {name} of {words:?}"))?;
    let value = line.rsplit(' ').next().unwrap_or_default();
    value.parse().with_context(|| line.to_owned())
}

/// Which of two mounts of one path lies on top is the container runtime's affair: it makes what has fewer
/// parts first, and some runtimes the rest in an order that depends on their number.
pub fn volumes_over_what_a_container_is_given_are_flagged(suite: &Suite<'_>) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    make_empty_file(suite)?;
    let named: Vec<Container> = ["pages", "quota", "session", "shim", "preload", "either", "above"]
        .map(|name| Container::idle(name, 1))
        .into();
    let over: [&[Over]; 7] = [
        // With one more of theirs, containerd 1.6 mounts the volume after ours, as newer ones always do.
        &[("dir", PAGES), ("dir", "/one/more/of/theirs")],
        &[("none", "/usr/local/tessera/pages/quota")],
        &[("none", "/usr/local/tessera/pages/session.sock")],
        &[("file", SHIM)],
        &[("none", PRELOAD)],
        &[("node", PAGES)],
        &[("dir", "/usr/local/tessera")],
    ];
    let containers: Vec<(&Container, &[Over])> = named.iter().zip(over).collect();
    suite.kubectl.create_pod(&shadowed("shadowed", &containers))?;
    let pod = Pod::named(suite.kubectl, "shadowed");
    pod.wait_until_running()?;

    // The share's own directory is named by its allocation, which no pod knows beforehand.
    let beside = format!("something else is mounted in {PAGES}, as if it were a share");
    let [shim, preload] = [SHIM, PRELOAD].map(|at| format!("something else is mounted over {at}"));
    let flagged =
        [("quota", &beside), ("session", &beside), ("shim", &shim), ("preload", &preload)];
    for (name, what) in flagged {
        wait_for_warning(suite, &[&format!("{NAMESPACE}/shadowed ({name}): "), what])?;
        let words = [r#"pod="shadowed""#, &format!("container=\"{name}\"")];
        let amiss = metric(suite, "tessera_container_damaged_mounts", &words)?;
        ensure!(amiss >= 1.0, "{name}: {amiss}");
    }
    let findings = metric(suite, "tessera_findings_total", &[r#"finding="mount""#])?;
    ensure!(findings >= 4.0, "{findings} findings");
    let reported = suite.plugin.exec(&[
        "tessera",
        "explain",
        &format!("{NAMESPACE}/shadowed"),
        "-o",
        "wide",
    ])?;
    for (_, what) in flagged {
        let line = format!("tampered with: {what}");
        ensure!(reported.contains(&line), "no {line:?} in {reported}");
    }
    // What lies beside our share, as if it were pages, adds nothing and takes nothing away.
    for name in ["session", "quota"] {
        let gpus = pod.gpus(name)?;
        ensure!(gpus.len() == 1 && gpus[0].total == SHARE_BYTES, "{name}: {gpus:?}");
    }
    // What lies under ours takes nothing away; what lies over it closes and is flagged.
    let warnings = suite.plugin.status()?["warnings"].to_string();
    for name in ["pages", "either", "above"] {
        let is_flagged = warnings.contains(&format!("shadowed ({name})"));
        ensure!(name != "above" || !is_flagged, "{warnings}");
        match pod.gpus(name) {
            Ok(gpus) => {
                ensure!(!is_flagged, "{name} is held and flagged: {warnings}");
                ensure!(gpus.len() == 1 && gpus[0].total == SHARE_BYTES, "{name}: {gpus:?}");
            }
            Err(error) => ensure!(is_flagged, "{name} is closed and not flagged: {error:#}"),
        }
    }
    ensure!(!warnings.contains("neighbour"), "{warnings}");
    neighbour.check_untouched()
}

/// One pod with a container that asks for too much and one that empties its preload file: refusal, bypass
/// and tampering.
pub fn what_concerns_a_pod_is_shown_in_its_description(suite: &Suite<'_>) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    make_empty_file(suite)?;
    let command = ["tessera-tenant", "greedy", "--for", "0", "--retry-ms", "100"];
    let greedy = Container::new("main", 1, &command);
    let loose = Container::new("loose", 1, &["tessera-tenant", "hold", "--bytes", "100Mi"]);
    let pod = shadowed("greedy", &[(&greedy, &[]), (&loose, &[("none", PRELOAD)])]);
    suite.kubectl.create_pod(&pod)?;
    let reported = wait::until("kubectl describe shows all of it", wait::LIMIT, || {
        let text = suite.kubectl.run(&["describe", "pod", "greedy", "-n", NAMESPACE])?;
        let words =
            ["GPUMemoryRefused", "Ask for a larger share", "GPUQuotaBypassed", "GPUQuotaTampered"];
        Ok(Look::when(words.iter().all(|word| text.contains(word)), text))
    });
    if reported.is_err() {
        println!("     status warns: {}", suite.plugin.status()?["warnings"]);
    }
    Pod::named(suite.kubectl, "greedy").delete()?;
    reported?;
    neighbour.check_untouched()
}
