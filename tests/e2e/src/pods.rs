//! Tenants: pods that ask for shares, and what they say.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::deploy::{NAMESPACE, RESOURCE, SIM_ON_NODE};
use crate::images;
use crate::kubectl::Kubectl;
use crate::process::Output;
use crate::suite::Suite;
use crate::wait::{self, Look};

const START: Duration = wait::LIMIT;

/// A container of a pod that is being described.
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
        Self::new(name, shares, &["sleep", "2147483647"])
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

/// What becomes of a container that ends.
#[derive(Clone, Copy, Debug)]
pub enum Restart {
    /// It is started again.
    Always,
    /// The pod is over.
    Never,
}

#[derive(Clone, Debug)]
pub struct Pod<'a> {
    kubectl: &'a Kubectl,
    name: String,
}

impl<'a> Pod<'a> {
    /// A pod that exists already.
    pub fn named(kubectl: &'a Kubectl, name: &str) -> Self {
        Self { kubectl, name: name.to_owned() }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Creates a pod and does not wait for it.
    pub fn create(
        kubectl: &'a Kubectl,
        name: &str,
        restart: Restart,
        init: &[Container],
        containers: &[Container],
    ) -> Result<Self> {
        kubectl.create_pod(&manifest(name, restart, init, containers))?;
        Ok(Self::named(kubectl, name))
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

    /// Waits until every container runs.
    pub fn wait_until_running(&self) -> Result<()> {
        wait::until(&format!("pod {} runs", self.name), START, || {
            let pod = self.object()?;
            let status = &pod["status"];
            if status["phase"] == "Failed" {
                bail!("pod {} failed: {} {}", self.name, status["reason"], status["message"]);
            }
            let running = status["conditions"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|c| c["type"] == "Ready" && c["status"] == "True");
            Ok(Look::when(running, status.to_string()))
        })
    }

    /// Waits until the pod is over; its phase.
    pub fn wait_until_over(&self) -> Result<Value> {
        wait::until(&format!("pod {} is over", self.name), START, || {
            let pod = self.object()?;
            Ok(match pod["status"]["phase"].as_str() {
                Some("Succeeded" | "Failed") => Look::Done(pod),
                phase => Look::NotYet(format!("phase {phase:?}")),
            })
        })
    }

    /// Restarts of the first container, and its id.
    pub fn incarnation(&self) -> Result<(u64, String)> {
        let pod = self.object()?;
        let status = &pod["status"]["containerStatuses"][0];
        let id = status["containerID"].as_str().unwrap_or_default();
        Ok((status["restartCount"].as_u64().unwrap_or(0), id.to_owned()))
    }

    /// Waits until the first container has been restarted more than `count` times and runs.
    pub fn wait_for_restart(&self, count: u64) -> Result<()> {
        wait::until(&format!("pod {} restarts", self.name), wait::LIMIT, || {
            let pod = self.object()?;
            let status = &pod["status"]["containerStatuses"][0];
            let restarts = status["restartCount"].as_u64().unwrap_or(0);
            let running = status["state"]["running"].is_object();
            Ok(Look::when(restarts > count && running, status.to_string()))
        })
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
        let head = ["exec", "-n", NAMESPACE, &self.name, "-c", container, "--"];
        self.kubectl.try_run(&[&head[..], command].concat(), None)
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
            Ok(match events(&log, event).pop() {
                Some(found) => Look::Done(found),
                None => Look::NotYet(log),
            })
        })
    }

    /// Deletes it without waiting.
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
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": match restart {
                Restart::Always => "Always",
                Restart::Never => "Never",
            },
            "hostNetwork": true, // needs no pod network
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "initContainers": values(init),
            "containers": values(containers),
        },
    })
}

/// What one process sees of one GPU.
#[derive(Clone, Debug)]
pub struct GpuView {
    /// `cuDeviceGetUuid`.
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

/// The environment that stands for the simulated hardware; all else is the tenant's to clear.
pub fn hardware() -> [String; 2] {
    [("SIMGPU_CONFIG", "simgpu.toml"), ("SIMGPU_STATE", "state")]
        .map(|(name, file)| format!("{name}={SIM_ON_NODE}/{file}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_found_among_other_lines() {
        let text = "a line\n{\"event\":\"full\",\"held\":7}\n{\"event\":\"done\",\"held\":8}\n";
        assert_eq!(held(text, "full").unwrap(), 7);
        assert!(held(text, "progress").is_err());
    }

    #[test]
    fn views_that_disagree_are_an_error() {
        let view = |nvml: u64| {
            json!({"devices": [{
                "uuid": "GPU-1",
                "device_total_mem": 9,
                "mem_get_info": {"free": 5, "total": 9},
                "nvml": {"total": nvml, "v2": {"total": 9}},
            }]})
            .to_string()
        };
        assert_eq!(GpuView::parse(&view(9)).unwrap()[0].free, 5);
        assert!(GpuView::parse(&view(10)).unwrap_err().to_string().contains("disagree"));
    }
}
