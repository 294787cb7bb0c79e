//! A pod that asks for shares gets what belongs to them.

use std::env;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::deploy::{CONTEXT_BYTES, RESOURCE, SHARE_BYTES};
use crate::host::CONFIG;
use crate::kubectl::Applied;
use crate::pods::{self, Container, Pod, Restart, manifest};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// The one share's, as a shell names it.
const PAGES: &str = "/usr/local/tessera/pages/*";

pub fn container_gets_shim_pages_and_preload(suite: &Suite<'_>) -> Result<()> {
    let pod = Pod::idle(suite.kubectl, "tenant", 1)?;

    let object = pod.object()?;
    ensure!(object["spec"]["nodeName"] == suite.node.as_str(), "{}", object["spec"]["nodeName"]);
    let events = suite.events_of("tenant")?;
    let scheduled = events.iter().find(|e| e["reason"] == "Scheduled").context("not scheduled")?;
    let by = [&scheduled["source"]["component"], &scheduled["reportingComponent"]];
    ensure!(by.iter().any(|who| **who == "default-scheduler"), "{scheduled}");

    let preload = pod.exec(&["cat", "/etc/ld.so.preload"])?;
    ensure!(preload == "/usr/local/tessera/libtessera.so\n", "/etc/ld.so.preload: {preload:?}");
    pod.exec(&["test", "-r", "/usr/local/tessera/libtessera.so"])?;
    pod.exec(&["sh", "-c", &format!("test -S {PAGES}/session.sock")])?;

    let magic = |file: &str| pod.exec(&["sh", "-c", &format!("head -c 8 {PAGES}/{file}")]);
    ensure!(magic("quota")? == "TSRQUOTA", "no quota page");
    ensure!(magic("usage")? == "TSRUSAGE", "no usage page");

    // Root in the container, and still only the usage page can be written.
    let refused = |script: &str| -> Result<()> {
        let output = pod.try_exec(&["sh", "-c", script])?;
        ensure!(output.code != Some(0), "{script} succeeded");
        Ok(())
    };
    // A shell expands no pattern in a redirection.
    pod.exec(&["sh", "-c", &format!("cd {PAGES} && : >> usage")])?;
    pod.exec(&["sh", "-c", &format!("cd {PAGES} && cat quota >/dev/null")])?;
    refused(&format!("cd {PAGES} && : >> quota"))?;
    refused(&format!("cd {PAGES} && rm quota"))?;
    refused(&format!("cd {PAGES} && touch more"))?;
    refused(&format!("umount {PAGES}"))?;
    refused(": >> /usr/local/tessera/libtessera.so")?;
    refused(": > /etc/ld.so.preload")?;
    refused("rm /etc/ld.so.preload")?;

    let gpu = pod.gpu()?;
    ensure!(gpu.total == SHARE_BYTES, "{gpu:?}");
    ensure!(gpu.free == SHARE_BYTES - CONTEXT_BYTES, "{gpu:?}");
    Ok(())
}

/// One process that took all it could get holds its limit less one context, to a chunk.
pub fn check_fill(held: u64, limit: u64) -> Result<()> {
    let most = limit - CONTEXT_BYTES;
    ensure!(held <= most, "{held} bytes held, {most} allowed");
    ensure!(held > most - (8 << 20), "refused at {held} bytes though {most} are allowed");
    Ok(())
}

// Kubernetes' own means work with shares as with any extended resource: quotas, limits, pod security.

/// An API of Kubernetes 1.23, which also is the first to enforce the namespace's labels (Pod Security
/// Admission, beta there).
const SINCE_POD_SECURITY: &str = "autoscaling/v2";

/// In a namespace that admits "restricted" pods only. Clusters before 1.23 admit any; then this shows
/// that such a pod has its quota.
pub fn namespace_of_restricted_pods_admits_tenants(suite: &Suite<'_>) -> Result<()> {
    const RESTRICTED: &str = "tessera-e2e-restricted";
    let label = ("pod-security.kubernetes.io/enforce", "restricted");
    let _namespace = Applied::namespace(suite.kubectl, RESTRICTED, label)?;
    // With a root file system that cannot be written, too.
    let greedy = [Container::new("main", 1, &["tessera-tenant", "greedy"]).restricted()];
    let mut pod = pods::manifest("tenant", Restart::Never, &[], &greedy);
    pod["metadata"]["namespace"] = json!(RESTRICTED);
    let spec = &mut pod["spec"];
    // A cluster that is old enough to have no pod security may also have no pod network.
    spec["hostNetwork"] = json!(!suite.kubectl.has_api(SINCE_POD_SECURITY)?);
    // The namespace's service account takes a moment.
    wait::until("the pod is admitted", wait::LIMIT, || {
        Ok(Look::worked(suite.kubectl.create_pod(&pod)))
    })?;
    let over = wait::until("the tenant is over", wait::LIMIT, || {
        let status = suite.kubectl.get(&["pod", "tenant", "-n", RESTRICTED])?["status"].clone();
        let seen = status.to_string();
        Ok(Look::found(Some(status).filter(pods::is_over), seen))
    })?;
    let log = suite.kubectl.run(&["logs", "tenant", "-n", RESTRICTED])?;
    ensure!(over["phase"] == "Succeeded", "{over} {log}");
    check_fill(pods::held(&log, "full")?, SHARE_BYTES)
}

// Which pods get a share when there are few.

/// Both GPUs are full: a pod waits, one of a higher priority takes the place of another, and the first gets that of one
/// that is deleted by force and may still be dying. Neither inherits a byte.
pub fn pods_beyond_the_last_share_wait_and_get_what_is_freed_at_once(
    suite: &Suite<'_>,
) -> Result<()> {
    let _class = Applied::new(
        suite.kubectl,
        json!({
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "tessera-e2e-urgent"},
            "value": 1000,
        }),
    )?;
    let hold = [Container::new("main", 4, &["tessera-tenant", "hold", "--bytes", "3Gi"])];
    let start = |name: &str| Pod::create(suite.kubectl, name, Restart::Always, &[], &hold);
    let low = [start("low-0")?, start("low-1")?];
    let mut uuids = Vec::new();
    for pod in &low {
        pod.wait_until_running()?;
        pod.wait_for_event("main", "ready")?;
        uuids.push(pod.gpu()?.uuid);
    }
    ensure!(uuids[0] != uuids[1], "both on one GPU");
    let idle = [Container::idle("main", 4)];
    let third = Pod::create(suite.kubectl, "third", Restart::Always, &[], &idle)?;
    let insufficient = format!("Insufficient {RESOURCE}");
    third.wait_for_status("is unschedulable", |status| {
        status["conditions"].to_string().contains(&insufficient)
    })?;

    let mut urgent = pods::manifest("urgent", Restart::Always, &[], &idle);
    urgent["spec"]["priorityClassName"] = json!("tessera-e2e-urgent");
    let urgent = Pod::put(suite.kubectl, &urgent)?;
    urgent.wait_until_running()?;
    let stay = low.iter().zip(&uuids).find(|(pod, _)| pod.gpu().is_ok());
    let (stay, uuid) = stay.context("both pods were preempted")?;
    ensure!(urgent.gpu()?.uuid != *uuid, "not the GPU that became free");
    check_fill(urgent.fill(4 * SHARE_BYTES)?, 4 * SHARE_BYTES)?;

    stay.forget()?;
    third.wait_until_running()?;
    ensure!(third.gpu()?.uuid == *uuid, "not the GPU that became free");
    // The driver itself gives the memory back only when the old process is gone.
    wait::until("the successor gets its whole quota", wait::LIMIT, || {
        let filled = third.fill(4 * SHARE_BYTES).and_then(|held| check_fill(held, 4 * SHARE_BYTES));
        Ok(Look::worked(filled))
    })
}

// `container.device_list_strategy` on a real kubelet and runtime, as far as it needs no toolkit.

/// Runs `then` with the plugin under another configuration.
fn under(suite: &Suite<'_>, config: &str, then: impl FnOnce() -> Result<()>) -> Result<()> {
    suite.reconfigure(Some(config))?;
    let outcome = then();
    // Its containers would be restarted by what they were given.
    suite.remove_tenants()?;
    suite.reconfigure(None)?;
    outcome
}

/// One share of the first GPU; the simulated driver shows the others as well where no toolkit hides
/// them.
fn tenant(name: &str) -> Container {
    let until_asked = ["sh", "-c", "until [ -e /end ]; do sleep 0.2; done"];
    Container::new(name, 1, &until_asked).env("CUDA_VISIBLE_DEVICES", "0")
}

fn check_quota(pod: &Pod<'_>) -> Result<()> {
    let gpu = pod.gpu()?;
    ensure!(gpu.total == SHARE_BYTES, "{gpu:?}");
    check_fill(pod.fill(SHARE_BYTES)?, SHARE_BYTES)
}

/// The toolkit is disabled, whatever image and pod say.
fn check_void(pod: &Pod<'_>) -> Result<()> {
    let visible = pod.exec(&["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"])?;
    ensure!(visible == "void\n", "NVIDIA_VISIBLE_DEVICES={visible}");
    Ok(())
}

/// With a runtime that knows CDI a container gets all by it; with one that does not, nothing: no
/// pages, no driver, no GPU. Never a GPU without a quota. `TESSERA_E2E_CDI` says that it must.
pub fn cdi_annotations_give_all_or_nothing(suite: &Suite<'_>) -> Result<()> {
    let config = CONFIG.replace(
        "[paths]",
        "[container]\ndevice_list_strategy = \"cdi-annotations\"\n\
         [cdi]\ngpu_kind = \"\"\n[driver]\ndevice_nodes = []\n[paths]",
    );
    under(suite, &config, || {
        let pod = Pod::start(suite.kubectl, "by-name", tenant("main"))?;
        let spec = suite.plugin.exec(&["sh", "-c", "cat /var/run/cdi/tessera.dev-share_*.json"])?;
        ensure!(spec.contains("\"kind\": \"tessera.dev/share\""), "{spec}");
        check_void(&pod)?;
        let has = |path: &str| anyhow::Ok(pod.try_exec(&["test", "-e", path])?.code == Some(0));
        if !has("/usr/local/tessera/pages")? {
            ensure!(env::var_os("TESSERA_E2E_CDI").is_none(), "the runtime ignores CDI");
            println!(
                "     this runtime knows no CDI: all that can be seen is that it stays closed"
            );
            for path in ["/usr/local/tessera", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"] {
                ensure!(!has(path)?, "{path} is there");
            }
            ensure!(pod.gpu().is_err(), "a GPU without a quota");
            return Ok(());
        }
        check_quota(&pod)?;
        let preload = pod.exec(&["cat", "/etc/ld.so.preload"])?;
        ensure!(preload == "/usr/local/tessera/libtessera.so\n", "{preload:?}");
        // Not every shell expands a pattern after `>>`.
        let append =
            |page: &str| format!("for f in /usr/local/tessera/pages/*/{page}; do : >> $f; done");
        let refused = pod.try_exec(&["sh", "-c", &append("quota")])?;
        ensure!(refused.code != Some(0), "the quota page can be written");
        pod.exec(&["sh", "-c", &append("usage")])?;

        // As after a reboot: the container starts again from the name that kubelet remembers.
        suite.plugin.exec(&["sh", "-c", "rm /var/run/cdi/tessera.dev-share_*"])?;
        let (restarts, _) = pod.incarnation()?;
        pod.exec(&["touch", "/end"])?;
        pod.wait_for_restart(restarts)?;
        check_quota(&pod)?;

        // What a pod mounts over the pages, or says of the variable, is not what counts.
        let shadowing = shadowing_pod(suite)?;
        shadowing.wait_until_running()?;
        let quota = shadowing.exec(&["sh", "-c", "head -c 8 /usr/local/tessera/pages/*/quota"])?;
        ensure!(quota == "TSRQUOTA", "a pod's volume lies over the pages");
        check_void(&shadowing)?;
        check_quota(&shadowing)
    })
}

fn shadowing_pod<'a>(suite: &Suite<'a>) -> Result<Pod<'a>> {
    let mut pod = manifest("shadowing", Restart::Always, &[], &[tenant("main")]);
    let container = &mut pod["spec"]["containers"][0];
    container["env"] = json!([
        {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
    ]);
    container["volumeMounts"] = json!([{"name": "mine", "mountPath": "/usr/local/tessera/pages"}]);
    pod["spec"]["volumes"] = json!([{"name": "mine", "emptyDir": {}}]);
    Pod::put(suite.kubectl, &pod)
}
