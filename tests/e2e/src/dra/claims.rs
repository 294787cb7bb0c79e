//! Claims of shares, and pods that use them.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{CLASS, DRIVER};
use crate::deploy::NAMESPACE;
use crate::pods::{self, Container, Pod, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

#[derive(Clone, Debug)]
pub struct Request(Value);

impl Request {
    /// A share of a GPU, of the sizes that the driver's policy gives by default.
    pub fn new(name: &str) -> Self {
        Self(json!({"name": name, "exactly": {"deviceClassName": CLASS}}))
    }

    /// A share of so much memory (a quantity) and so many percent of the GPU's time.
    pub fn share(name: &str, memory: &str, cores: u32) -> Self {
        let mut share = Self::new(name);
        share.0["exactly"]["capacity"] =
            json!({"requests": {"memory": memory, "cores": cores.to_string()}});
        share
    }
}

#[derive(Clone, Debug)]
pub struct Claim(Value);

impl Claim {
    pub fn of(requests: &[Request]) -> Self {
        let requests: Vec<_> = requests.iter().map(|request| &request.0).collect();
        Self(json!({"devices": {"requests": requests}}))
    }

    /// A claim of one request `gpu` for so much memory and so many percent of time.
    pub fn share(memory: &str, cores: u32) -> Self {
        Self::of(&[Request::share("gpu", memory, cores)])
    }

    /// All its shares from one GPU, or each from another.
    pub fn constrained(mut self, constraint: &str) -> Self {
        let attribute = format!("{DRIVER}/uuid");
        self.0["devices"]["constraints"] = json!([{constraint: attribute}]);
        self
    }

    /// Creates a template of this name, of which each pod gets a claim of its own.
    pub fn create_template(&self, suite: &Suite<'_>, name: &str) -> Result<()> {
        put(suite, "ResourceClaimTemplate", name, &json!({"spec": self.0}))
    }

    pub fn create(&self, suite: &Suite<'_>, name: &str) -> Result<()> {
        put(suite, "ResourceClaim", name, &self.0)
    }
}

fn put(suite: &Suite<'_>, kind: &str, name: &str, spec: &Value) -> Result<()> {
    suite.kubectl.create_all(vec![json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    })])
}

#[derive(Clone, Copy, Debug)]
pub enum Source<'n> {
    Template(&'n str),
    /// A claim of this name, that others may use too.
    Shared(&'n str),
}

/// The API object of a pod with the claim `gpu`.
pub fn manifest(
    name: &str,
    restart: Restart,
    source: Source<'_>,
    containers: &[Container],
) -> Value {
    let mut pod = pods::manifest(name, restart, &[], containers);
    pod["spec"]["resourceClaims"] = match source {
        Source::Template(template) => {
            json!([{"name": "gpu", "resourceClaimTemplateName": template}])
        }
        Source::Shared(claim) => json!([{"name": "gpu", "resourceClaimName": claim}]),
    };
    pod
}

pub fn create<'a>(
    suite: &Suite<'a>,
    name: &str,
    source: Source<'_>,
    containers: &[Container],
) -> Result<Pod<'a>> {
    Pod::put(suite.kubectl, &manifest(name, Restart::Always, source, containers))
}

/// An idle pod whose container `main` has all shares of a claim from `source`; running when this returns.
pub fn idle<'a>(suite: &Suite<'a>, name: &str, source: Source<'_>) -> Result<Pod<'a>> {
    let pod = idle_waiting(suite, name, source)?;
    pod.wait_until_running()?;
    Ok(pod)
}

/// A template of the pod's own name for `claim`, and an idle pod of it, running when this returns.
pub fn pod<'a>(suite: &Suite<'a>, name: &str, claim: &Claim) -> Result<Pod<'a>> {
    claim.create_template(suite, name)?;
    idle(suite, name, Source::Template(name))
}

/// As [`pod`], without waiting.
pub fn waiting<'a>(suite: &Suite<'a>, name: &str, claim: &Claim) -> Result<Pod<'a>> {
    claim.create_template(suite, name)?;
    idle_waiting(suite, name, Source::Template(name))
}

/// As [`idle`], without waiting.
fn idle_waiting<'a>(suite: &Suite<'a>, name: &str, source: Source<'_>) -> Result<Pod<'a>> {
    create(suite, name, source, &[Container::idle("main", 0).claiming(None)])
}

/// The claim `gpu` of a pod, or the one that the scheduler wrote for its extended resources.
pub fn of_pod(suite: &Suite<'_>, pod: &Pod<'_>) -> Result<Value> {
    let object = pod.object()?;
    let status = &object["status"];
    let name = [
        &status["resourceClaimStatuses"][0]["resourceClaimName"],
        &status["extendedResourceClaimStatus"]["resourceClaimName"],
        &object["spec"]["resourceClaims"][0]["resourceClaimName"],
    ];
    let name = name.into_iter().find_map(Value::as_str).with_context(|| status.to_string())?;
    named(suite, name)
}

pub fn named(suite: &Suite<'_>, name: &str) -> Result<Value> {
    suite.kubectl.get(&["resourceclaim", name, "-n", NAMESPACE])
}

pub fn results(claim: &Value) -> Result<Vec<Value>> {
    let results = claim["status"]["allocation"]["devices"]["results"].as_array();
    results.cloned().with_context(|| format!("not allocated: {claim}"))
}

pub fn wait_until_refused(pod: &Pod<'_>, why: &str) -> Result<()> {
    wait::until(&format!("the scheduler says {why:?}"), wait::LIMIT, || {
        let object = pod.object()?;
        ensure!(object["spec"]["nodeName"].is_null(), "it was scheduled: {}", object["status"]);
        let conditions = object["status"]["conditions"].to_string();
        Ok(Look::when(conditions.contains(why), conditions))
    })
}

/// Removes every claim and template of the tenants' namespace, and waits until kubelet and the scheduler have let
/// go of them. Their pods have to be removed before.
pub fn remove_all(suite: &Suite<'_>) -> Result<()> {
    const BOTH: &str = "resourceclaimtemplates,resourceclaims";
    suite.kubectl.run(&["delete", BOTH, "--all", "-n", NAMESPACE, "--wait=false"])?;
    wait::until("no claim is left", wait::LIMIT, || {
        let left = suite.kubectl.items(&[BOTH, "-n", NAMESPACE])?;
        Ok(Look::when(left.is_empty(), format!("{left:?}")))
    })
}
