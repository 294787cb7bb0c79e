//! What every case is given, and what a failed one leaves on the terminal.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::cluster::{Cluster, Kubelet};
use crate::deploy::{NAMESPACE, Plugin};
use crate::dra::mode;
use crate::kubectl::{self, Kubectl};
use crate::pods::{self, Container, Pod};
use crate::wait::{self, Look};

use std::collections::BTreeSet;
use std::path::Path;

#[derive(Debug)]
pub struct Suite<'a> {
    pub cluster: &'a Cluster,
    pub kubectl: &'a Kubectl,
    pub repo: &'a Path,
    pub artefacts: &'a Path,
    pub node: String,
    pub plugin: Plugin<'a>,
}

impl<'a> Suite<'a> {
    /// Makes the tenants' namespace; [`Suite::clear`] empties it.
    pub fn new(
        cluster: &'a Cluster,
        repo: &'a Path,
        artefacts: &'a Path,
        node: String,
        plugin: Plugin<'a>,
    ) -> Result<Self> {
        let kubectl = &cluster.kubectl;
        kubectl.apply(&kubectl::namespace(NAMESPACE))?;
        Ok(Self { cluster, kubectl, repo, artefacts, node, plugin })
    }

    /// Removes every tenant, and checks that the node offers everything to the next case.
    pub fn clear(&self) -> Result<()> {
        if self.plugin.offers() == 0 {
            mode::clear(self)?;
        } else {
            self.remove_tenants()?;
            self.plugin.wait_until_offered()?;
        }
        self.forget_warnings()
    }

    /// The plugin warns for hours of what happened in a case, and the next may look for warnings: another instance
    /// knows none of them.
    fn forget_warnings(&self) -> Result<()> {
        if self.plugin.status()?["warnings"] == json!([]) {
            return Ok(());
        }
        self.plugin.replace_pod()?;
        match self.plugin.offers() {
            0 => mode::clear(self),
            _ => self.plugin.wait_until_offered(),
        }
    }

    /// Removes every tenant, not by kubelet's leave, which takes some seconds; how pods end in an orderly way is
    /// for cases to try.
    pub fn remove_tenants(&self) -> Result<()> {
        let uids = uids(&self.kubectl.get(&["pods", "-n", NAMESPACE])?);
        // Of cgroups whose names are systemd's, or kubelet's.
        let both = |uid: &String| [format!("-e {uid}"), format!("-e {}", uid.replace('-', "_"))];
        let cgroups = uids.iter().flat_map(both);
        let cgroups = cgroups.collect::<Vec<_>>().join(" ");
        if cgroups.is_empty() {
            return Ok(());
        }
        self.kubectl.forget_pods(NAMESPACE)?;
        self.kill_all_of(&cgroups)
    }

    /// Stops kubelet and starts it again; the node is ready and offers every replica after.
    pub fn restart_kubelet(&self) -> Result<()> {
        self.stop_kubelet()?;
        self.start_kubelet()?;
        self.plugin.wait_until_offered()
    }

    pub fn stop_kubelet(&self) -> Result<()> {
        self.cluster.kubelet(&self.node, Kubelet::Stop)
    }

    /// Starts kubelet and waits until it has said so to the API server, and knows its pods: a heartbeat comes
    /// before them.
    pub fn start_kubelet(&self) -> Result<()> {
        let before = self.heartbeat()?;
        self.cluster.kubelet(&self.node, Kubelet::Start)?;
        wait::until("kubelet is back", wait::LIMIT, || {
            let (ready, at) = self.heartbeat()?;
            Ok(Look::when(ready && at != before.1, format!("ready {ready} at {at}")))
        })?;
        wait::until("kubelet knows its pods", wait::LIMIT, || {
            // What it serves them by may come up after the heartbeat.
            let known = match self.kubelets_pods() {
                Ok(known) => known,
                Err(error) => return Ok(Look::worked(Err(error))),
            };
            let bound = self.bound_pods()?;
            let missing: Vec<_> = bound.difference(&known).collect();
            Ok(Look::when(missing.is_empty(), format!("{missing:?} of {}", bound.len())))
        })
    }

    /// Pods that the API server has bound to the node and that are not over, by UID.
    fn bound_pods(&self) -> Result<BTreeSet<String>> {
        let here =
            format!("spec.nodeName={},status.phase!=Succeeded,status.phase!=Failed", self.node);
        let list = self.kubectl.get(&["pods", "-A", "--field-selector", &here])?;
        Ok(uids(&list))
    }

    /// Pods that kubelet knows, by UID.
    fn kubelets_pods(&self) -> Result<BTreeSet<String>> {
        let path = format!("/api/v1/nodes/{}/proxy/pods", self.node);
        let list = match self.kubectl.run(&["get", "--raw", &path]) {
            // A kubelet on a loopback address: newer API servers pass nothing on to one.
            Err(error) if format!("{error:#}").contains("address not allowed") => {
                self.host("curl -fsk https://127.0.0.1:10250/pods")?
            }
            list => list?,
        };
        Ok(uids(&serde_json::from_str(&list).context("kubelet's pods")?))
    }

    fn heartbeat(&self) -> Result<(bool, String)> {
        let node = self.kubectl.get(&["node", &self.node])?;
        let conditions = node["status"]["conditions"].as_array();
        let ready = conditions
            .into_iter()
            .flatten()
            .find(|c| c["type"] == "Ready")
            .context("no Ready condition")?;
        Ok((ready["status"] == "True", ready["lastHeartbeatTime"].to_string()))
    }

    pub fn events_of(&self, pod: &str) -> Result<Vec<Value>> {
        let field = format!("involvedObject.name={pod}");
        self.kubectl.items(&["events", "-n", NAMESPACE, "--field-selector", &field])
    }

    /// Prints what helps to understand a failure.
    pub fn explain(&self) {
        let section = |title: &str, text: &str| {
            println!("---- {title}");
            // Kubelet's chatter about cgroups and volumes says nothing here.
            let noise = ["perf_event", "MountVolume", "VerifyControllerAttachedVolume", "PLEG"];
            let lines = text.lines().filter(|line| !noise.iter().any(|word| line.contains(word)));
            for line in lines.rev().take(120).collect::<Vec<_>>().into_iter().rev() {
                println!("     {}", line.chars().take(300).collect::<String>());
            }
        };
        let show = |title: &str, args: &[&str]| match self.kubectl.try_run(args, None) {
            Ok(output) => section(title, &(output.stdout + &output.stderr)),
            Err(error) => section(title, &format!("{error:#}")),
        };
        show("tenants", &["describe", "pods", "-n", NAMESPACE]);
        for pod in self.kubectl.items(&["pods", "-n", NAMESPACE]).unwrap_or_default() {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            let args = ["logs", "-n", NAMESPACE, name, "--all-containers", "--tail=15"];
            show(&format!("log of {name}"), &args);
        }
        show("plugin", &["get", "pods", "-n", "tessera", "-o", "wide"]);
        section("plugin's log", &self.plugin.log());
        section("kubelet's log", &self.cluster.kubelet_log(&self.node));
    }
}

fn uids(list: &Value) -> BTreeSet<String> {
    let pods = list["items"].as_array().into_iter().flatten();
    pods.filter_map(|pod| pod["metadata"]["uid"].as_str().map(str::to_owned)).collect()
}

/// An inference server whose requests must keep succeeding.
#[derive(Debug)]
pub struct Server<'a> {
    pub pod: Pod<'a>,
    incarnation: (u64, String),
}

impl<'a> Server<'a> {
    /// A pod with one share that serves requests until it is deleted.
    pub fn start(kubectl: &'a Kubectl, name: &str) -> Result<Self> {
        Self::serving(Pod::start(kubectl, name, Self::container(1))?)
    }

    pub fn container(shares: u64) -> Container {
        let command =
            ["tessera-tenant", "infer", "--weights", "256Mi", "--rate", "20", "--kernel-us", "500"];
        Container::new("main", shares, &command)
    }

    pub fn serving(pod: Pod<'a>) -> Result<Self> {
        pod.wait_for_event("main", "progress")?;
        let incarnation = pod.incarnation()?;
        Ok(Self { pod, incarnation })
    }

    /// Waits until its container, which was started again, serves.
    pub fn wait_until_serving(&self) -> Result<()> {
        wait::until("the server serves again", wait::LIMIT, || {
            let log = self.pod.log("main", false).unwrap_or_default();
            Ok(Look::when(!pods::events(&log, "progress").is_empty(), log))
        })
    }

    /// Checks that it was never restarted, no request ever failed, and it goes on serving.
    pub fn check_untouched(&self) -> Result<()> {
        let reports = || anyhow::Ok(pods::events(&self.pod.log("main", false)?, "progress"));
        let before = reports()?.len();
        wait::until("two more seconds of requests are served", wait::LIMIT, || {
            let now = reports()?.len();
            Ok(Look::when(now >= before + 2, format!("{now} reports after {before}")))
        })?;
        for report in reports()? {
            for failure in ["out_of_memory", "errors", "corrupted"] {
                ensure!(report[failure] == 0, "{failure} in {report}");
            }
            if report["requests"] == 0 {
                bail!("a second without requests: {report}");
            }
        }
        self.pod.check_incarnation(&self.incarnation)
    }
}
