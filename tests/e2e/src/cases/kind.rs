//! `deploy/examples/kind` as its README says, on this cluster: its images, its simulated driver, the chart with its
//! values as `tests/deploy/cases/kind.yaml` has it rendered, and its pod.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{self, NAMESPACE, REPLICAS};
use crate::images;
use crate::pods::{self, Pod};
use crate::suite::Suite;
use crate::wait::{self, Look};

const SIMULATOR: &str = "tessera-simulator";
/// Where the example installs its driver.
const ON_NODE: &str = "/var/lib/tessera-sim";

pub fn kind_example_comes_up_and_serves_a_pod(suite: &Suite<'_>) -> Result<()> {
    images::load_kind(suite.cluster, suite.repo, suite.artefacts)?;
    let outcome = serves(suite);
    if outcome.is_err() {
        suite.explain();
    }
    suite.remove_tenants()?;
    suite.plugin.apply_as_deployed(suite.repo)?;
    suite.plugin.wait_for_roll_out()?;
    suite.plugin.wait_until_offered()?;
    deploy::delete_namespace(suite.kubectl, SIMULATOR)?;
    outcome
}

fn serves(suite: &Suite<'_>) -> Result<()> {
    apply(suite, "deploy/examples/kind/simulator.yaml")?;
    let roll_out = |namespace: &str, name: &str| {
        wait::until(&format!("{name} is rolled out"), wait::LIMIT, || {
            let set = suite.kubectl.get(&["daemonset", name, "-n", namespace])?;
            let status = &set["status"];
            let is_ready = status["observedGeneration"] == set["metadata"]["generation"]
                && status["updatedNumberScheduled"] == 1
                && status["numberReady"] == 1;
            Ok(Look::when(is_ready, status.to_string()))
        })
    };
    roll_out(SIMULATOR, "simulator")?;
    apply(suite, "tests/deploy/cases/kind.yaml")?;
    suite.plugin.wait_for_roll_out()?;
    ensure!(suite.plugin.offers() == REPLICAS, "the example has as many replicas as these tests");
    suite.plugin.wait_until_offered()?;

    let objects = read(suite, "deploy/examples/kind/pod.yaml")?;
    let [pod] = objects.as_slice() else { anyhow::bail!("{} objects", objects.len()) };
    let mut pod = pod.clone();
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    pod["spec"]["hostNetwork"] = json!(true);
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    suite.kubectl.create_pod(&pod)?;
    let chat = Pod::named(suite.kubectl, "chat");
    chat.wait_until_running()?;
    wait::until("it serves requests", wait::LIMIT, || {
        let log = chat.log("server", false)?;
        let reports = pods::events(&log, "progress");
        let failed = reports.iter().find(|report| report["errors"] != 0);
        ensure!(failed.is_none(), "{failed:?}");
        let served = reports.iter().filter(|report| report["requests"].as_u64() > Some(0)).count();
        Ok(Look::when(served >= 2, log))
    })?;
    wait::until("status names the pod", wait::LIMIT, || {
        let text = suite.plugin.exec(&["tessera", "status"])?;
        Ok(Look::when(text.contains("chat"), text))
    })?;
    let status = suite.plugin.status()?;
    ensure!(status["warnings"] == json!([]), "{}", status["warnings"]);

    // The README's trouble.
    let head = ["exec", "-n", SIMULATOR, "daemonset/simulator", "--"];
    let simulator = |args: &[&str]| suite.kubectl.run(&[&head[..], args].concat());
    simulator(&["simgpu-ctl", "xid", "0", "79"])?;
    suite.plugin.wait_for_replicas(REPLICAS / 2)?;
    let text = suite.plugin.exec(&["tessera", "status"])?;
    ensure!(text.contains("79"), "does not say why: {text}");
    simulator(&["sh", "-c", &format!("rm -rf {ON_NODE}/*")]).map(drop)
}

fn read(suite: &Suite<'_>, file: &str) -> Result<Vec<Value>> {
    suite.kubectl.read_manifest(&suite.repo.join(file).display().to_string())
}

/// As it is there, on the node of these tests and without a pod network.
fn apply(suite: &Suite<'_>, file: &str) -> Result<()> {
    for mut object in read(suite, file).with_context(|| file.to_owned())? {
        match object["kind"].as_str() {
            Some("Namespace") => deploy::mark_as_ours(&mut object),
            Some("DaemonSet") => {
                let pod = deploy::pod_spec(&mut object);
                pod["hostNetwork"] = json!(true);
                pod["nodeSelector"] = json!({"kubernetes.io/hostname": suite.node});
                // The root of kind's nodes is a shared mount, which what follows later mounts needs; of others it may
                // be private.
                for mount in
                    pod["containers"][0]["volumeMounts"].as_array_mut().into_iter().flatten()
                {
                    let path = mount["mountPath"].as_str().unwrap_or_default();
                    let is_driver = path.starts_with(ON_NODE);
                    if let Some(mount) = mount.as_object_mut().filter(|_| is_driver) {
                        mount.remove("mountPropagation");
                    }
                }
            }
            _ => {}
        }
        suite.kubectl.apply(&object)?;
    }
    Ok(())
}
