//! What `deploy/` offers users, tried as it is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::deploy::{NAMESPACE, SHARE_BYTES};
use crate::images;
use crate::pods;
use crate::suite::Suite;
use crate::wait::{self, Look};

/// Where the stages listen: they share the node's network here.
const FIRST_PORT: u64 = 25_051;

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

/// `deploy/examples/pipeline.yaml`: three stages, each a pod with a share, on one GPU; all answers are right.
pub fn pipeline_of_three_pods_shares_one_gpu(suite: &Suite<'_>) -> Result<()> {
    let outcome = pipeline(suite);
    // What would make new pods after the case's are removed.
    let delete = ["delete", "deployments,jobs,services", "--all", "-n", NAMESPACE];
    suite.kubectl.run(&[&delete[..], &["--wait=false"]].concat())?;
    wait::until("no deployment makes pods", wait::LIMIT, || {
        let left = suite.kubectl.get(&["replicasets,jobs", "-n", NAMESPACE])?;
        let count = left["items"].as_array().map_or(0, Vec::len);
        Ok(Look::when(count == 0, left.to_string()))
    })?;
    outcome
}

fn pipeline(suite: &Suite<'_>) -> Result<()> {
    let file: PathBuf = suite.repo.join("deploy/examples/pipeline.yaml");
    let mut objects = suite.kubectl.read_manifest(&file.display().to_string())?;
    objects.iter_mut().for_each(overlay);
    suite.kubectl.create_all(objects)?;
    let logs = ["logs", "-n", NAMESPACE, "job/pipeline-client"];
    let log = wait::until("the pipeline's client is done", wait::LIMIT, || {
        let job = suite.kubectl.get(&["job", "pipeline-client", "-n", NAMESPACE])?;
        let status = &job["status"];
        if status["failed"].as_u64() > Some(0) {
            let log = suite.kubectl.run(&logs)?;
            anyhow::bail!("the client failed: {log}");
        }
        Ok(match status["succeeded"].as_u64() {
            Some(1) => Look::Done(suite.kubectl.run(&logs)?),
            _ => Look::NotYet(status.to_string()),
        })
    })?;
    let done = pods::events(&log, "done").pop().with_context(|| log.clone())?;
    println!(
        "     {} requests, p50 {} µs, p99 {} µs",
        done["requests"], done["p50_us"], done["p99_us"]
    );
    ensure!(done["wrong"] == 0 && done["failed"] == 0 && done["requests"] == 300, "{done}");
    let stages = done["stages"].as_array().context("stages")?;
    let names: Vec<_> = stages.iter().filter_map(|stage| stage["stage"].as_str()).collect();
    ensure!(names == ["preprocess", "model", "postprocess"], "{done}");
    let distinct = |key: &str| stages.iter().map(|s| s[key].to_string()).collect::<BTreeSet<_>>();
    ensure!(distinct("host").len() == 3 && distinct("gpu").len() == 1, "{done}");
    // Each sees its share, and the plugin knows whose it is.
    ensure!(stages.iter().all(|stage| stage["memory"] == SHARE_BYTES), "{done}");
    let status = suite.plugin.status()?;
    let known = status["allocations"].to_string();
    let all = stages.iter().filter_map(|stage| stage["host"].as_str());
    for pod in all {
        ensure!(known.contains(pod), "{pod} is not in {known}");
    }
    Ok(())
}

/// An object of the example in the tests' namespace, with their image and without a pod network: each stage
/// has a port of its own, and names are addresses.
fn overlay(object: &mut Value) {
    object["metadata"]["namespace"] = json!(NAMESPACE);
    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let Some(spec) = object.pointer_mut("/spec/template/spec") else { return };
    spec["hostNetwork"] = json!(true);
    spec["automountServiceAccountToken"] = json!(false);
    spec["terminationGracePeriodSeconds"] = json!(1);
    let container = &mut spec["containers"][0];
    container["image"] = json!(images::TENANT);
    container["imagePullPolicy"] = json!("Never");
    let port = |stage: &str| {
        FIRST_PORT
            + ["preprocess", "model", "postprocess"].iter().position(|s| *s == stage).unwrap_or(0)
                as u64
    };
    for variable in container["env"].as_array_mut().into_iter().flatten() {
        let value = variable["value"].as_str().unwrap_or_default().to_owned();
        if let Some(stage) = value.strip_prefix("http://").and_then(|rest| rest.split(':').next()) {
            variable["value"] = json!(format!("http://127.0.0.1:{}", port(stage)));
        }
        // Right answers count here; how fast a busy machine is does not.
        if variable["name"] == "MAX_P99_MS" {
            variable["value"] = json!("0");
        }
    }
    if container["ports"].is_array() {
        container["ports"][0]["containerPort"] = json!(port(&name));
        container["ports"][0]["hostPort"] = json!(port(&name));
        if let Some(env) = container["env"].as_array_mut() {
            env.push(json!({"name": "LISTEN", "value": format!("0.0.0.0:{}", port(&name))}));
        }
    }
}
