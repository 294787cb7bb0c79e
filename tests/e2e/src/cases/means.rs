//! Kubernetes' own means work with shares as with any extended resource: quotas, limits, priorities.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::delivery::check_fill;
use crate::applied::Applied;
use crate::deploy::{NAMESPACE, RESOURCE, SHARE_BYTES};
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// An API of Kubernetes 1.23, which also is the first to enforce the namespace's labels (Pod Security
/// Admission, beta there).
const SINCE_POD_SECURITY: &str = "autoscaling/v2";

fn in_namespace(kind: &str, version: &str, spec: Value) -> Value {
    json!({
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "shares", "namespace": NAMESPACE},
        "spec": spec,
    })
}

/// What the API server says to a pod of this container.
fn refusal(suite: &Suite<'_>, name: &str, container: Container) -> Result<String> {
    let created = Pod::create(suite.kubectl, name, Restart::Never, &[], &[container]);
    let error = created.err().with_context(|| format!("pod {name} is accepted"))?;
    Ok(format!("{error:#}"))
}

pub fn quota_of_a_namespace_counts_each_resource(suite: &Suite<'_>) -> Result<()> {
    let large = format!("{RESOURCE}-large");
    let hard = json!({
        format!("requests.{RESOURCE}"): "2",
        format!("requests.{large}"): "0",
    });
    let object = in_namespace("ResourceQuota", "v1", json!({"hard": hard}));
    let quota = Applied::new(suite.kubectl, object)?;
    let used = |want: &str| {
        wait::until(&format!("{want} shares are counted"), wait::LIMIT, || {
            let status = quota.now()?["status"].clone();
            let used = &status["used"][format!("requests.{RESOURCE}")];
            Ok(Look::when(used == want, status.to_string()))
        })
    };
    used("0")?;
    let first = Pod::idle(suite.kubectl, "first", 2)?;
    used("2")?;
    let text = refusal(suite, "second", Container::idle("main", 1))?;
    ensure!(text.contains("exceeded quota: shares"), "{text}");
    ensure!(text.contains(&format!("requests.{RESOURCE}=2")), "does not say what is used: {text}");
    // Another of our resources has a count of its own, whatever nodes offer.
    let large = Container::idle("main", 0).asking(&[(&large, 1)]);
    let text = refusal(suite, "large", large)?;
    ensure!(text.contains("exceeded quota: shares"), "{text}");

    first.delete()?;
    used("0")?;
    let second = Pod::idle(suite.kubectl, "second", 1)?;
    check_fill(second.fill(SHARE_BYTES)?, SHARE_BYTES)
}

/// The shares that the API server makes a container ask for that asks for nothing.
fn default_shares(suite: &Suite<'_>, name: &str) -> Result<String> {
    let idle = [Container::idle("main", 0)];
    let pod = Pod::create(suite.kubectl, name, Restart::Never, &[], &idle)?;
    let limits = pod.object()?["spec"]["containers"][0]["resources"]["limits"].clone();
    pod.forget()?;
    Ok(limits[RESOURCE].as_str().unwrap_or("none").to_owned())
}

pub fn limit_range_bounds_a_container(suite: &Suite<'_>) -> Result<()> {
    let limits = |limit: Value| in_namespace("LimitRange", "v1", json!({"limits": [limit]}));
    let most = json!({"type": "Container", "max": {RESOURCE: "2"}});
    let _range = Applied::new(suite.kubectl, limits(most.clone()))?;
    let text = wait::until("a container with three shares is refused", wait::LIMIT, || {
        // The API server's admission hears of it a moment later.
        Ok(match refusal(suite, "three", Container::idle("main", 3)) {
            Ok(text) => Look::Done(text),
            Err(error) => {
                Pod::named(suite.kubectl, "three").forget()?;
                Look::NotYet(format!("{error:#}"))
            }
        })
    })?;
    ensure!(text.contains(&format!("maximum {RESOURCE} usage per Container is 2")), "{text}");
    let two = Pod::idle(suite.kubectl, "two", 2)?;
    ensure!(two.gpu()?.total == 2 * SHARE_BYTES, "{:?}", two.gpu()?);

    // The trap: `max` is the default, too, unless there is one.
    let shares = default_shares(suite, "trap")?;
    ensure!(shares == "2", "a container that asks for nothing gets {shares}");
    let mut with_default = most;
    with_default["default"] = json!({RESOURCE: "0"});
    with_default["defaultRequest"] = json!({RESOURCE: "0"});
    suite.kubectl.apply(&limits(with_default))?;
    // Kubelets of today start such a container; 1.20 does not (docs/coexistence.md).
    wait::until("a container that asks for nothing gets nothing", wait::LIMIT, || {
        let shares = default_shares(suite, "nothing")?;
        if shares != "0" {
            suite.kubectl.forget_pods(NAMESPACE)?;
        }
        Ok(Look::when(shares == "0", shares))
    })
}

pub fn pod_of_higher_priority_takes_a_share(suite: &Suite<'_>) -> Result<()> {
    let _class = Applied::new(
        suite.kubectl,
        json!({
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "tessera-e2e-urgent"},
            "value": 1000,
        }),
    )?;
    let hold = ["tessera-tenant", "hold", "--bytes", "3Gi"];
    let low: Vec<Pod<'_>> = ["low-0", "low-1"]
        .into_iter()
        .map(|name| Pod::start(suite.kubectl, name, Container::new("main", 4, &hold)))
        .collect::<Result<_>>()?;
    for pod in &low {
        pod.wait_for_event("main", "ready")?;
    }
    let idle = [Container::idle("main", 3)];
    let mut pod = pods::manifest("urgent", Restart::Always, &[], &idle);
    pod["spec"]["priorityClassName"] = json!("tessera-e2e-urgent");
    suite.kubectl.create_pod(&pod)?;
    let urgent = Pod::named(suite.kubectl, "urgent");
    urgent.wait_until_running()?;
    let stay: Vec<&Pod<'_>> = low.iter().filter(|pod| pod.gpu().is_ok()).collect();
    ensure!(stay.len() == 1, "{} of two pods were not preempted", stay.len());
    ensure!(stay[0].gpu()?.uuid != urgent.gpu()?.uuid, "not the share that became free");
    check_fill(urgent.fill(3 * SHARE_BYTES)?, 3 * SHARE_BYTES)
}

/// In a namespace that admits "restricted" pods only. Clusters before 1.23 admit any; then this shows
/// that such a pod has its quota.
pub fn namespace_of_restricted_pods_admits_tenants(suite: &Suite<'_>) -> Result<()> {
    const RESTRICTED: &str = "tessera-e2e-restricted";
    let _namespace = Applied::new(
        suite.kubectl,
        json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": RESTRICTED, "labels": {
                "tessera.dev/e2e": "true",
                "pod-security.kubernetes.io/enforce": "restricted",
            }},
        }),
    )?;
    let info = [Container::new("main", 1, &["tessera-tenant", "info"])];
    let mut pod = pods::manifest("tenant", Restart::Never, &[], &info);
    pod["metadata"]["namespace"] = json!(RESTRICTED);
    let spec = &mut pod["spec"];
    // A cluster that is old enough to have no pod security may also have no pod network.
    spec["hostNetwork"] = json!(!suite.kubectl.has_api(SINCE_POD_SECURITY)?);
    spec["securityContext"] = json!({
        "runAsNonRoot": true,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    spec["containers"][0]["securityContext"] =
        json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    // The namespace's service account takes a moment.
    wait::until("the pod is admitted", wait::LIMIT, || {
        Ok(match suite.kubectl.create_pod(&pod) {
            Ok(()) => Look::Done(()),
            Err(error) => Look::NotYet(format!("{error:#}")),
        })
    })?;
    let over = wait::until("the tenant is over", wait::LIMIT, || {
        let status = suite.kubectl.get(&["pod", "tenant", "-n", RESTRICTED])?["status"].clone();
        let over = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
        Ok(if over { Look::Done(status) } else { Look::NotYet(status.to_string()) })
    })?;
    let log = suite.kubectl.run(&["logs", "tenant", "-n", RESTRICTED])?;
    ensure!(over["phase"] == "Succeeded", "{over} {log}");
    let info: Value = serde_json::from_str(&log).with_context(|| log.clone())?;
    ensure!(info["devices"][0]["mem_get_info"]["total"] == SHARE_BYTES, "{info}");
    Ok(())
}
