//! What `deploy/` offers users, tried as it is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{self, NAMESPACE, REPLICAS};
use crate::images;
use crate::pods::{self, Pod};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// Every example, and what the chart renders for every set of values, judged by the API server itself, as far
/// as it has the API.
pub fn manifests_are_what_the_api_server_takes(suite: &Suite<'_>) -> Result<()> {
    let mut files = Vec::new();
    let all = ["deploy/examples", "deploy/examples/dra", "deploy/policies", "tests/deploy/cases"];
    for directory in all {
        let directory = suite.repo.join(directory);
        for entry in fs::read_dir(&directory).with_context(|| directory.display().to_string())? {
            let path = entry?.path();
            let name = path.to_string_lossy();
            if name.ends_with(".yaml") && !name.ends_with(".values.yaml") {
                files.push(path);
            }
        }
    }
    let kinds = suite.kubectl.kinds()?;
    let mut judged = 0;
    for file in &files {
        judged += judge(suite, file, &kinds).with_context(|| file.display().to_string())?;
    }
    println!("     {judged} objects of {} files", files.len());
    ensure!(files.len() >= 12 && judged >= 40, "{judged} objects of {} files", files.len());
    Ok(())
}

/// How many objects of the file the server has taken; `kinds` are those it has.
fn judge(suite: &Suite<'_>, file: &Path, kinds: &BTreeSet<(String, String)>) -> Result<usize> {
    let text = fs::read_to_string(file)?;
    // Documents of kinds that this server lacks are for others to try: kubectl can't even read them.
    let mut known = String::new();
    let mut count = 0;
    for document in text.split("\n---\n") {
        let field = |name: &str| {
            document.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
        };
        let (version, kind) = (field("apiVersion:"), field("kind:"));
        ensure!(!version.is_empty() && !kind.is_empty(), "no object: {document}");
        // So are fields that came with a kind: what is rendered for Kubernetes 1.30 has AppArmor's.
        let since_1_30 = document.contains("\n        appArmorProfile:");
        let policy = ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy");
        let has =
            |(version, kind): (&str, &str)| kinds.contains(&(version.to_owned(), kind.to_owned()));
        // And pods with claims; and the surge of a DaemonSet, which the driver's has (Kubernetes 1.22).
        let claims = document.contains("resourceClaims:") || document.contains("maxSurge: 1");
        let claim = ("resource.k8s.io/v1", "ResourceClaim");
        if has((version, kind)) && (!since_1_30 || has(policy)) && (!claims || has(claim)) {
            known += &format!("---\n{document}\n");
            count += 1;
        }
    }
    if count > 0 {
        let apply = ["apply", "--dry-run=server", "--validate=true", "-n"];
        // What names a namespace of its own goes there, and must not name another.
        let namespace =
            if text.contains("\n  namespace: tessera\n") { "tessera" } else { NAMESPACE };
        let args = [&apply[..], &[namespace, "-f", "-"]].concat();
        suite.kubectl.try_run(&args, Some(&known))?.success("kubectl apply --dry-run=server")?;
    }
    Ok(count)
}

// `deploy/examples/kind` as its README says, on this cluster: its images, its simulated driver, the chart with its
// values as `tests/deploy/cases/kind.yaml` has it rendered, and its pod.

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
    wait::until("the simulator is rolled out", wait::LIMIT, || {
        let (done, status) = deploy::rolled_out(suite.kubectl, SIMULATOR, "simulator")?;
        Ok(Look::when(done, status))
    })?;
    apply(suite, "tests/deploy/cases/kind.yaml")?;
    suite.plugin.wait_for_roll_out()?;
    ensure!(suite.plugin.offers() == REPLICAS, "the example has as many replicas as these tests");
    suite.plugin.wait_until_offered()?;

    let objects = objects_of(suite, "deploy/examples/kind/pod.yaml")?;
    let [pod] = objects.as_slice() else { anyhow::bail!("{} objects", objects.len()) };
    let mut pod = pod.clone();
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    pod["spec"]["hostNetwork"] = json!(true);
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    let chat = Pod::put(suite.kubectl, &pod)?;
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

fn objects_of(suite: &Suite<'_>, file: &str) -> Result<Vec<Value>> {
    suite.kubectl.read_manifest(&suite.repo.join(file))
}

/// As it is there, on the node of these tests and without a pod network.
fn apply(suite: &Suite<'_>, file: &str) -> Result<()> {
    for mut object in objects_of(suite, file).with_context(|| file.to_owned())? {
        match object["kind"].as_str() {
            Some("Namespace") => deploy::mark_as_ours(&mut object),
            Some("DaemonSet") => {
                let pod = deploy::pod_spec(&mut object);
                pod["hostNetwork"] = json!(true);
                pod["nodeSelector"] = json!({"kubernetes.io/hostname": suite.node});
                // The root of kind's nodes is a shared mount, which what follows later mounts needs; of others it may
                // be private.
                let mounts = pod["containers"][0]["volumeMounts"].as_array_mut();
                for mount in mounts.into_iter().flatten() {
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
