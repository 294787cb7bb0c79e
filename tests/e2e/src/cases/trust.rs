//! A tenant that asks for more than its share, and the rights that deploy/tessera.yaml leaves the plugin.

use anyhow::{Context, Result, ensure};

use super::delivery::check_fill;
use crate::deploy::{NAMESPACE, SHARE_BYTES};
use crate::pods::{Container, Pod};
use crate::suite::{Server, Suite};
use crate::wait::{self, Look};

pub fn over_quota_is_refused_and_described_and_the_neighbour_runs_on(
    suite: &Suite<'_>,
) -> Result<()> {
    let neighbour = Server::start(suite.kubectl, "neighbour")?;
    // Fills its quota, and goes on asking for more.
    let command = ["tessera-tenant", "greedy", "--for", "0", "--retry-ms", "10"];
    let greedy = Pod::start(suite.kubectl, "greedy", Container::new("main", 1, &command))?;
    let given = |pod: &Pod<'_>| pod.exec(&["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"]);
    let (one, other) = (given(&neighbour.pod)?, given(&greedy)?);
    ensure!(one == other, "not on one GPU: {one} {other}");
    wait::until("kubectl describe shows the refusal", wait::LIMIT, || {
        let text = suite.kubectl.run(&["describe", "pod", "greedy", "-n", NAMESPACE])?;
        let words = ["GPUMemoryRefused", "Ask for a larger share"];
        Ok(Look::when(words.iter().all(|word| text.contains(word)), text))
    })?;
    neighbour.check_untouched()?;
    let report = greedy.wait_for_event("main", "progress")?;
    check_fill(report["held"].as_u64().unwrap_or(u64::MAX), SHARE_BYTES)?;
    ensure!(report["refused"].as_u64() > Some(50), "it did not go on asking: {report}");
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
