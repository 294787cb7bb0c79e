//! Kubernetes' own means work with shares as with any extended resource: quotas, limits, pod security.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::delivery::check_fill;
use crate::deploy::{NAMESPACE, RESOURCE, SHARE_BYTES};
use crate::kubectl::Applied;
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// An API of Kubernetes 1.23, which also is the first to enforce the namespace's labels (Pod Security
/// Admission, beta there).
const SINCE_POD_SECURITY: &str = "autoscaling/v2";

fn in_namespace(kind: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": "shares", "namespace": NAMESPACE},
        "spec": spec,
    })
}

/// What the API server says to a pod of this container, once it refuses it: its admission hears of an object a moment
/// later.
fn wait_until_refused(suite: &Suite<'_>, container: &Container, words: &str) -> Result<()> {
    wait::until(&format!("a pod is refused: {words}"), wait::LIMIT, || {
        let containers = [container.clone()];
        match Pod::create(suite.kubectl, "refused", Restart::Never, &[], &containers) {
            Ok(pod) => {
                pod.forget()?;
                Ok(Look::NotYet("it is accepted".to_owned()))
            }
            Err(error) => {
                Ok(Look::when(format!("{error:#}").contains(words), format!("{error:#}")))
            }
        }
    })
}

/// A ResourceQuota and a LimitRange judge our resources as any extended one, and so before anything of ours hears of a
/// pod.
pub fn quotas_and_limit_ranges_count_each_resource(suite: &Suite<'_>) -> Result<()> {
    let large = format!("{RESOURCE}-large");
    let hard = json!({
        format!("requests.{RESOURCE}"): "2",
        format!("requests.{large}"): "0",
    });
    let quota = Applied::new(suite.kubectl, in_namespace("ResourceQuota", json!({"hard": hard})))?;
    wait_until_refused(suite, &Container::idle("main", 3), "exceeded quota: shares")?;
    // Another of our resources has a count of its own, whatever nodes offer.
    let asking = Container::idle("main", 0).asking(&[(&large, 1)]);
    wait_until_refused(suite, &asking, "exceeded quota: shares")?;
    drop(quota);

    // The trap: `max` is the default, too, unless there is one.
    let most = json!({"type": "Container", "max": {RESOURCE: "2"}});
    let _range =
        Applied::new(suite.kubectl, in_namespace("LimitRange", json!({"limits": [most]})))?;
    let words = format!("maximum {RESOURCE} usage per Container is 2");
    wait_until_refused(suite, &Container::idle("main", 3), &words)?;
    let idle = [Container::idle("main", 0)];
    let pod = Pod::create(suite.kubectl, "trap", Restart::Never, &[], &idle)?;
    let limits = pod.object()?["spec"]["containers"][0]["resources"]["limits"].clone();
    ensure!(limits[RESOURCE] == "2", "a container that asks for nothing gets {limits}");
    pod.forget()
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
    // With a root file system that cannot be written, too.
    let greedy = [Container::new("main", 1, &["tessera-tenant", "greedy"]).restricted()];
    let mut pod = pods::manifest("tenant", Restart::Never, &[], &greedy);
    pod["metadata"]["namespace"] = json!(RESTRICTED);
    let spec = &mut pod["spec"];
    // A cluster that is old enough to have no pod security may also have no pod network.
    spec["hostNetwork"] = json!(!suite.kubectl.has_api(SINCE_POD_SECURITY)?);
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
    check_fill(pods::held(&log, "full")?, SHARE_BYTES)
}
