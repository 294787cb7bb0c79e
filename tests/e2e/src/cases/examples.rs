//! What `deploy/` offers users, tried as it is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::deploy::NAMESPACE;
use crate::suite::Suite;

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
