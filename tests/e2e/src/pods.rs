//! Tenants: pods that ask for shares, and what they say.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::deploy::{NAMESPACE, RESOURCE};
use crate::images;
use crate::kubectl::Kubectl;
use crate::process::Output;
use crate::suite::Suite;
use crate::wait::{self, Look};

const START: Duration = wait::LIMIT;
/// Waits for commands.
const IDLE: [&str; 2] = ["sleep", "2147483647"];

#[derive(Clone, Debug)]
pub struct Container(Value);

impl Container {
    /// A container with `shares` replicas that runs `command`.
    pub fn new(name: &str, shares: u64, command: &[&str]) -> Self {
        let mut container = json!({
            "name": name,
            "image": images::TENANT,
            "imagePullPolicy": "Never",
            "command": command,
        });
        if shares > 0 {
            container["resources"] = json!({"limits": {RESOURCE: shares.to_string()}});
        }
        Self(container)
    }

    /// A container that waits for commands by [`Pod::exec`].
    pub fn idle(name: &str, shares: u64) -> Self {
        Self::new(name, shares, &IDLE)
    }

    /// A container that takes so much memory, says so as its last word, and ends.
    pub fn greedy_once(shares: u64, at_most: &str) -> Self {
        let script = format!("tessera-tenant greedy --at-most {at_most} >/dev/termination-log");
        Self::new("main", shares, &["sh", "-c", &script])
    }

    /// With the shares of the pod's claim `gpu`: those of one request, or all.
    pub fn claiming(mut self, request: Option<&str>) -> Self {
        let claim = request.map_or_else(
            || json!({"name": "gpu"}),
            |request| json!({"name": "gpu", "request": request}),
        );
        match &mut self.0["resources"]["claims"] {
            Value::Array(claims) => claims.push(claim),
            claims => *claims = json!([claim]),
        }
        self
    }

    /// With an environment variable of the pod's own.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.0["env"] = json!([{"name": name, "value": value}]);
        self
    }

    /// As a restricted cluster wants it: no root, no rights, nothing writable.
    pub fn restricted(mut self) -> Self {
        self.0["securityContext"] = json!({
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "runAsNonRoot": true,
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        });
        self
    }
}

/// What becomes of a container that ends, in Kubernetes' words.
#[derive(Clone, Copy, Debug)]
pub enum Restart {
    Always,
    Never,
}

#[derive(Clone, Debug)]
pub struct Pod<'a> {
    kubectl: &'a Kubectl,
    name: String,
}

impl<'a> Pod<'a> {
    pub fn named(kubectl: &'a Kubectl, name: &str) -> Self {
        Self { kubectl, name: name.to_owned() }
    }

    /// Creates a pod of the tenants' namespace and does not wait for it.
    pub fn put(kubectl: &'a Kubectl, pod: &Value) -> Result<Self> {
        kubectl.create_pod(pod)?;
        Ok(Self::named(kubectl, pod["metadata"]["name"].as_str().context("a name")?))
    }

    pub fn create(
        kubectl: &'a Kubectl,
        name: &str,
        restart: Restart,
        init: &[Container],
        containers: &[Container],
    ) -> Result<Self> {
        Self::put(kubectl, &manifest(name, restart, init, containers))
    }

    /// One container named `main`, running when this returns.
    pub fn start(kubectl: &'a Kubectl, name: &str, container: Container) -> Result<Self> {
        let pod = Self::create(kubectl, name, Restart::Always, &[], &[container])?;
        pod.wait_until_running()?;
        Ok(pod)
    }

    /// An idle pod with one container of `shares` replicas.
    pub fn idle(kubectl: &'a Kubectl, name: &str, shares: u64) -> Result<Self> {
        Self::start(kubectl, name, Container::idle("main", shares))
    }

    pub fn object(&self) -> Result<Value> {
        self.kubectl.get(&["pod", "-n", NAMESPACE, &self.name])
    }

    pub fn status(&self) -> Result<Value> {
        Ok(self.object()?["status"].take())
    }

    /// Waits until its status is as `wanted`; that status.
    pub fn wait_for_status(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        wait::until(&format!("pod {}: {what}", self.name), START, || {
            let status = self.status()?;
            let seen = status.to_string();
            Ok(Look::found(Some(status).filter(&wanted), seen))
        })
    }

    pub fn wait_until_running(&self) -> Result<()> {
        wait::until(&format!("pod {} runs", self.name), START, || {
            let status = self.status()?;
            if status["phase"] == "Failed" {
                bail!("pod {} failed: {} {}", self.name, status["reason"], status["message"]);
            }
            Ok(Look::when(is_ready(&status), status.to_string()))
        })
    }

    /// Checks that its first container was not started again since.
    pub fn check_incarnation(&self, before: &(u64, String)) -> Result<()> {
        let now = self.incarnation()?;
        ensure!(now == *before, "restarted: {before:?} became {now:?}");
        Ok(())
    }

    /// Checks that a process which first meets CUDA now is refused.
    pub fn check_refused(&self) -> Result<()> {
        let output = self.try_exec(&["tessera-tenant", "info"])?;
        ensure!(output.code != Some(0), "a GPU without a quota: {}", output.stdout);
        Ok(())
    }

    pub fn incarnation(&self) -> Result<(u64, String)> {
        let status = self.status()?;
        let first = &status["containerStatuses"][0];
        let id = first["containerID"].as_str().unwrap_or_default();
        Ok((first["restartCount"].as_u64().unwrap_or(0), id.to_owned()))
    }

    /// Waits until the first container has been restarted more than `count` times and runs.
    pub fn wait_for_restart(&self, count: u64) -> Result<()> {
        let restarted = |status: &Value| {
            let first = &status["containerStatuses"][0];
            first["restartCount"].as_u64() > Some(count) && first["state"]["running"].is_object()
        };
        self.wait_for_status("restarts", restarted).map(drop)
    }

    /// The pid on the node of the first container's first process; the node must be in reach.
    pub fn host_pid(&self, suite: &Suite<'_>) -> Result<String> {
        let (_, id) = self.incarnation()?;
        let id = id.rsplit('/').next().unwrap_or_default().to_owned();
        let pids = suite.host(&format!(
            "for p in $(contained); do
                 grep -qs {id} /proc/$p/cgroup && [ \"$(awk '/^NSpid:/ {{print $NF}}' /proc/$p/status)\" = 1 ] && echo $p
             done; true"
        ))?;
        pids.lines().next().map(str::to_owned).with_context(|| format!("{}: no process", self.name))
    }

    /// Kills the first container's first process, and waits until kubelet has started it again.
    pub fn restart_container(&self, suite: &Suite<'_>) -> Result<()> {
        let (restarts, _) = self.incarnation()?;
        suite.host(&format!("kill -9 {}", self.host_pid(suite)?))?;
        self.wait_for_restart(restarts)
    }

    /// The output of a command in a container, whatever its exit status.
    pub fn try_exec_in(&self, container: &str, command: &[&str]) -> Result<Output> {
        self.kubectl.try_exec([NAMESPACE, &self.name, container], command)
    }

    /// The output of a command in `main`, whatever its exit status.
    pub fn try_exec(&self, command: &[&str]) -> Result<Output> {
        self.try_exec_in("main", command)
    }

    /// Standard output of a command in `main` that has to succeed.
    pub fn exec(&self, command: &[&str]) -> Result<String> {
        self.try_exec(command)?.success(&command.join(" "))
    }

    /// What a container wrote so far, or what its predecessor wrote.
    pub fn log(&self, container: &str, previous: bool) -> Result<String> {
        let previous = format!("--previous={previous}");
        self.kubectl.run(&["logs", "-n", NAMESPACE, &self.name, "-c", container, &previous])
    }

    /// The last report of this event in a container's log, once there is one.
    pub fn wait_for_event(&self, container: &str, event: &str) -> Result<Value> {
        wait::until(&format!("{} reports {event}", self.name), START, || {
            let log = self.log(container, false)?;
            Ok(Look::found(events(&log, event).pop(), log))
        })
    }

    pub fn delete(&self) -> Result<()> {
        self.kubectl.run(&["delete", "pod", "-n", NAMESPACE, &self.name, "--wait=false"]).map(drop)
    }

    /// Waits until it is gone, as kubelet says when its containers have ended.
    pub fn wait_until_gone(&self) -> Result<()> {
        wait::until(&format!("pod {} is gone", self.name), wait::LIMIT, || {
            let pod = self.kubectl.find(&["pod", "-n", NAMESPACE, &self.name])?;
            Ok(pod.map_or(Look::Done(()), |pod| Look::NotYet(pod["status"].to_string())))
        })
    }

    pub fn end(&self) -> Result<()> {
        self.delete()?;
        self.wait_until_gone()
    }

    /// Removes it from the API at once.
    pub fn forget(&self) -> Result<()> {
        let delete = ["delete", "pod", "-n", NAMESPACE, &self.name, "--wait=false"];
        self.kubectl.run(&[&delete[..], &["--force", "--grace-period=0"]].concat()).map(drop)
    }

    /// `tessera-tenant info` in a container, for each GPU it sees.
    pub fn gpus(&self, container: &str) -> Result<Vec<GpuView>> {
        let output = self.try_exec_in(container, &["tessera-tenant", "info"])?;
        GpuView::parse(&output.success("tessera-tenant info")?)
    }

    /// The one GPU that `main` sees.
    pub fn gpu(&self) -> Result<GpuView> {
        let mut gpus = self.gpus("main")?;
        ensure!(gpus.len() == 1, "{} GPUs are visible", gpus.len());
        Ok(gpus.remove(0))
    }

    /// Takes all memory it can get, and says how much that was; never more than `at_most`.
    pub fn fill(&self, at_most: u64) -> Result<u64> {
        let at_most = at_most.to_string();
        self.exec(&["tessera-tenant", "greedy", "--at-most", &at_most])
            .and_then(|text| held(&text, "full"))
    }
}

/// The API object of a pod of these containers.
pub fn manifest(
    name: &str,
    restart: Restart,
    init: &[Container],
    containers: &[Container],
) -> Value {
    let values = |list: &[Container]| list.iter().map(|c| c.0.clone()).collect::<Vec<_>>();
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": format!("{restart:?}"),
            "initContainers": values(init),
            "containers": values(containers),
        },
    });
    adapt(&mut pod["spec"]);
    pod
}

/// Makes a pod need no pod network and no token, and end soon.
fn adapt(spec: &mut Value) {
    spec["hostNetwork"] = json!(true);
    spec["automountServiceAccountToken"] = json!(false);
    spec["terminationGracePeriodSeconds"] = json!(1);
}

/// Makes an example's pod one of the tests', whose containers wait for commands.
pub fn adapt_example(spec: &mut Value) {
    adapt(spec);
    for container in spec["containers"].as_array_mut().into_iter().flatten() {
        container["image"] = json!(images::TENANT);
        container["imagePullPolicy"] = json!("Never");
        container["command"] = json!(IDLE);
        container["args"] = json!([]);
    }
}

/// Whether a pod, or a node, of this status is ready.
pub fn is_ready(status: &Value) -> bool {
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    conditions.any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Whether a pod of this status has ended and is not restarted.
pub fn is_over(status: &Value) -> bool {
    status["phase"] == "Succeeded" || status["phase"] == "Failed"
}

#[derive(Clone, Debug)]
pub struct GpuView {
    pub uuid: String,
    /// `cuMemGetInfo`'s free bytes.
    pub free: u64,
    /// What `cuMemGetInfo`, `cuDeviceTotalMem` and NVML agree on.
    pub total: u64,
}

impl GpuView {
    fn parse(text: &str) -> Result<Vec<Self>> {
        let info: Value = serde_json::from_str(text).context("tessera-tenant info")?;
        let devices = info["devices"].as_array().context("devices")?;
        devices.iter().map(Self::read).collect()
    }

    fn read(device: &Value) -> Result<Self> {
        let number = |value: &Value| value.as_u64().context(device.to_string());
        let total = number(&device["mem_get_info"]["total"])?;
        for other in
            [&device["device_total_mem"], &device["nvml"]["total"], &device["nvml"]["v2"]["total"]]
        {
            ensure!(number(other)? == total, "views of one GPU disagree: {device}");
        }
        Ok(Self {
            uuid: device["uuid"].as_str().unwrap_or_default().to_owned(),
            free: number(&device["mem_get_info"]["free"])?,
            total,
        })
    }
}

/// The reports of one kind among a tenant's output.
pub fn events(text: &str, event: &str) -> Vec<Value> {
    text.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|report| report["event"] == event)
        .collect()
}

/// The bytes held according to the one report of this kind.
pub fn held(text: &str, event: &str) -> Result<u64> {
    let reports = events(text, event);
    let report = reports.first().with_context(|| format!("no {event} in: {text}"))?;
    report["held"].as_u64().with_context(|| report.to_string())
}
