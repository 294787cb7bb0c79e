//! Puts the plugin on one node, as deploy/tessera.yaml describes it, but on simulated GPUs; and
//! takes it away again.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::dra::mode::{self, NVIDIA_ON_NODE, SIMULATED};
use crate::host::CONFIG;
use crate::images;
use crate::kubectl::Kubectl;
use crate::pods::{self, Container, Restart};
use crate::process::Output;
use crate::wait::{self, Look};

/// The plugin's namespace and the DaemonSet's name, as in the manifest.
pub const PLUGIN_NAMESPACE: &str = "tessera";
pub const NAMESPACE: &str = "tessera-e2e";
pub const RESOURCE: &str = "tessera.dev/gpu";
/// Where the node keeps the simulated driver and its state.
pub const SIM_ON_NODE: &str = "/var/lib/tessera-e2e";
/// Where the node keeps the pages, as in the manifest.
pub const PAGES_ON_NODE: &str = "/var/lib/kubelet/plugins/tessera.dev/pages";
/// Two GPUs of four replicas.
pub const REPLICAS: u64 = 8;
/// `share.memory` of overlay/config.toml.
pub const SHARE_BYTES: u64 = 900 << 20;
/// `gpus.context_overhead` of overlay/config.toml and overlay/simgpu.toml.
pub const CONTEXT_BYTES: u64 = 64 << 20;

/// What the configuration has beside [`CONFIG`] where the plugin is as it was deployed: the JSON API in reach of the
/// API server's proxy, as in the manifest.
const SERVED: &str = "\n[api]\nlisten = \":9481\"\nauthorisation = \"kubernetes\"\n";

pub fn as_deployed() -> String {
    format!("{CONFIG}{SERVED}")
}

const SELECTOR: &str = "app.kubernetes.io/name=tessera";
const READY: Duration = wait::LIMIT;

#[derive(Debug)]
pub struct Plugin<'a> {
    kubectl: &'a Kubectl,
    node: String,
    offers: AtomicU64,
}

impl<'a> Plugin<'a> {
    /// Deploys it and waits until the node offers every replica.
    pub fn deploy(cluster: &'a Cluster, repo: &Path, node: &str) -> Result<Self> {
        let kubectl = &cluster.kubectl;
        let offers = AtomicU64::new(REPLICAS);
        let plugin = Self { kubectl, node: node.to_owned(), offers };
        plugin.apply_as_deployed(repo)?;
        kubectl.create_pod(&images_in_use(node))?;
        match plugin.wait_until_offered() {
            Ok(()) => Ok(plugin),
            Err(error) => {
                println!("---- plugin's log\n{}", plugin.log());
                println!("---- kubelet's log\n{}", cluster.kubelet_log(node));
                Err(error)
            }
        }
    }

    /// Applies a manifest of `deploy/` on simulated GPUs, with this configuration; `change` sees the DaemonSet's pod.
    /// What is there already is rolled out again where it differs.
    pub fn apply(&self, manifest: &Path, config: &str, change: impl Fn(&mut Value)) -> Result<()> {
        for mut object in self.kubectl.read_manifest(manifest)? {
            match object["kind"].as_str() {
                Some("Namespace") => mark_as_ours(&mut object),
                Some("ConfigMap") => object["data"]["config.toml"] = json!(config),
                Some("DaemonSet") => {
                    overlay(&mut object, &self.node);
                    change(pod_spec(&mut object));
                }
                _ => {}
            }
            self.kubectl.apply(&object)?;
        }
        Ok(())
    }

    /// Applies deploy/tessera.yaml as [`Plugin::deploy`] does.
    pub fn apply_as_deployed(&self, repo: &Path) -> Result<()> {
        self.apply(&repo.join("deploy/tessera.yaml"), &as_deployed(), |_| {})
    }

    /// What of the plugin's own namespaces is on the cluster and not from these tests.
    pub fn check_absent(kubectl: &Kubectl) -> Result<()> {
        for name in [PLUGIN_NAMESPACE, NAMESPACE] {
            if let Some(found) = kubectl.find(&["namespace", name])? {
                ensure!(
                    found["metadata"]["labels"]["tessera.dev/e2e"] == "true",
                    "namespace {name} exists: these tests would damage the Tessera that is \
                     installed there"
                );
            }
        }
        Ok(())
    }

    /// The replicas that kubelet would admit now.
    pub fn allocatable(&self) -> Result<u64> {
        let node = self.kubectl.get(&["node", &self.node])?;
        let count = node["status"]["allocatable"][RESOURCE].as_str().unwrap_or("0");
        count.parse().with_context(|| format!("allocatable {count}"))
    }

    /// The replicas that the node offers when nothing is amiss: none while claims share its GPUs.
    pub fn offers(&self) -> u64 {
        self.offers.load(Ordering::Relaxed)
    }

    pub fn set_offers(&self, replicas: u64) {
        self.offers.store(replicas, Ordering::Relaxed);
    }

    pub fn wait_until_offered(&self) -> Result<()> {
        self.wait_for_replicas(self.offers())
    }

    pub fn wait_for_replicas(&self, count: u64) -> Result<()> {
        wait::until(&format!("the node offers {count} replicas"), READY, || {
            let now = self.allocatable()?;
            Ok(Look::when(now == count, format!("{now} replicas")))
        })
    }

    fn pods(&self) -> Result<Vec<Value>> {
        self.kubectl.items(&["pods", "-n", PLUGIN_NAMESPACE, "-l", SELECTOR])
    }

    /// The plugin's pods, without those that are to go and whose containers have ended: kubelets before
    /// 1.22 take up to a minute to say that such a pod is gone, and the DaemonSet waits for that.
    fn pods_that_stay(&self) -> Result<Vec<Value>> {
        let (ended, stay): (Vec<_>, Vec<_>) = self.pods()?.into_iter().partition(has_ended);
        for pod in ended {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            let delete = ["delete", "pod", name, "-n", PLUGIN_NAMESPACE, "--ignore-not-found"];
            self.kubectl.run(&[&delete[..], &["--force", "--grace-period=0"]].concat())?;
        }
        Ok(stay)
    }

    fn state(&self) -> Result<String> {
        let pods = self.pods()?;
        let state = |pod: &Value| {
            let status = &pod["status"];
            format!("{} {}", status["phase"], status["containerStatuses"][0]["state"])
        };
        Ok(pods.iter().map(state).collect::<Vec<_>>().join(", "))
    }

    pub fn pod(&self) -> Result<String> {
        match &self.pods()?[..] {
            [pod] => Ok(pod["metadata"]["name"].as_str().unwrap_or_default().to_owned()),
            pods => bail!("{} plugin pods", pods.len()),
        }
    }

    pub fn exec(&self, command: &[&str]) -> Result<String> {
        self.try_exec(command)?.success(&command.join(" "))
    }

    /// The output of a command in the plugin's container, whatever its exit status.
    pub fn try_exec(&self, command: &[&str]) -> Result<Output> {
        self.kubectl.try_exec([PLUGIN_NAMESPACE, &self.pod()?, "tessera"], command)
    }

    pub fn status(&self) -> Result<Value> {
        let text = self.exec(&["tessera", "status", "-o", "json"])?;
        serde_json::from_str(&text).with_context(|| text.clone())
    }

    /// Deletes the plugin's pod and waits until another has taken its place.
    pub fn replace_pod(&self) -> Result<()> {
        let old = self.pod()?;
        self.kubectl.run(&["delete", "pod", "-n", PLUGIN_NAMESPACE, &old, "--wait=false"])?;
        wait::until("another plugin pod is ready", READY, || {
            let pods = self.pods_that_stay()?;
            let ready = |pod: &&Value| {
                pod["metadata"]["name"] != old.as_str()
                    && pod["status"]["containerStatuses"][0]["ready"] == true
            };
            Ok(Look::when(pods.iter().any(|p| ready(&p)), self.state()?))
        })?;
        self.wait_until_offered()
    }

    /// Puts a loop around the plugin that starts it again at once whenever it ends, and none while
    /// [`crate::host::HOLD`] is there: so a case can kill it as often as it likes without kubelet's
    /// back-off, have it up while kubelet is down, and give it another configuration.
    pub fn supervise(&self) -> Result<()> {
        if self.is_supervised()? {
            return Ok(());
        }
        self.begin_supervision()?;
        self.wait_for_roll_out()?;
        self.wait_until_offered()
    }

    /// Whether it is in that loop, and may have another configuration than its pod.
    pub fn is_supervised(&self) -> Result<bool> {
        Ok(self.template()?["containers"][0]["command"][0] == "sh")
    }

    /// [`Plugin::supervise`] without waiting.
    pub fn begin_supervision(&self) -> Result<()> {
        self.begin_roll_out(&json!({"containers": [{
            "name": "tessera",
            "command": Self::supervised(),
        }]}))
    }

    pub fn supervised() -> Value {
        let script = format!(
            "trap 'kill $p; wait $p; exit 0' TERM
             while :; do
                 while [ -e {} ]; do sleep 0.1; done
                 config=/etc/tessera/config.toml; [ ! -e {configured} ] || config={configured}
                 tessera -c $config serve & p=$!
                 wait $p
             done",
            crate::host::HOLD,
            configured = crate::host::CONFIGURED,
        );
        json!(["sh", "-c", script])
    }

    pub fn template(&self) -> Result<Value> {
        let set = self.kubectl.get(&["daemonset/tessera", "-n", PLUGIN_NAMESPACE])?;
        Ok(set["spec"]["template"]["spec"].clone())
    }

    /// Changes the pod template; the pod is replaced even if the specification stays the same.
    pub fn begin_roll_out(&self, spec: &Value) -> Result<()> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let patch = json!({"spec": {"template": {
            "metadata": {"annotations": {"tessera.dev/e2e-roll-out": now.as_nanos().to_string()}},
            "spec": spec,
        }}});
        let (set, patch) = ("daemonset/tessera", patch.to_string());
        self.kubectl.run(&["patch", "-n", PLUGIN_NAMESPACE, set, "-p", &patch]).map(drop)
    }

    pub fn wait_for_roll_out(&self) -> Result<()> {
        wait::until("the rolling update is done", READY, || {
            let pods = self.pods_that_stay()?.len();
            let (done, status) = rolled_out(self.kubectl, PLUGIN_NAMESPACE, "tessera")?;
            Ok(Look::when(done && pods == 1, status))
        })
    }

    /// What the plugin's containers wrote, and what its process wrote before its last restart.
    pub fn log(&self) -> String {
        let mut all = String::new();
        for (container, previous) in [
            ("prepare-host", false),
            ("install-simgpu", false),
            ("tessera", true),
            ("tessera", false),
        ] {
            let previous = format!("--previous={previous}");
            let head = ["logs", "-n", PLUGIN_NAMESPACE, "-l", SELECTOR, "--tail=60"];
            match self.kubectl.try_run(&[&head[..], &["-c", container, &previous]].concat(), None) {
                Ok(output) => all += &format!("[{container}] {}{}", output.stdout, output.stderr),
                Err(error) => all += &format!("[{container}] {error:#}"),
            }
            all.push('\n');
        }
        all
    }
}

/// Whether a DaemonSet's one pod is of the newest template and ready, and its status.
pub fn rolled_out(kubectl: &Kubectl, namespace: &str, name: &str) -> Result<(bool, String)> {
    let set = kubectl.get(&["daemonset", name, "-n", namespace])?;
    let status = &set["status"];
    let done = status["observedGeneration"] == set["metadata"]["generation"]
        && status["updatedNumberScheduled"] == 1
        && status["numberReady"] == 1;
    Ok((done, status.to_string()))
}

/// Whether a pod is being deleted and none of its containers runs any more.
fn has_ended(pod: &Value) -> bool {
    let containers = pod["status"]["containerStatuses"].as_array();
    pod["metadata"]["deletionTimestamp"].is_string()
        && containers.is_some_and(|all| all.iter().all(|c| c["state"]["terminated"].is_object()))
}

/// Removes plugin, tenants, and what lies on the node, also of a run that was killed.
pub fn remove(kubectl: &Kubectl, repo: &Path, node: &str) -> Result<()> {
    for name in [NAMESPACE, PLUGIN_NAMESPACE] {
        delete_namespace(kubectl, name)?;
    }
    // Those of single cases.
    let ours = ["delete", "namespace", "-l", "tessera.dev/e2e=true", "--timeout=50s"];
    kubectl.run(&ours)?;
    mode::remove(kubectl, repo)?;
    for mut object in kubectl.read_manifest(&repo.join("deploy/cleanup.yaml"))? {
        if object["kind"] == "Namespace" {
            mark_as_ours(&mut object);
        } else {
            let pod = pod_spec(&mut object);
            on_node(pod, node);
            // The manifest's own cleaning, then that of the simulated GPU and of its CDI devices.
            let mut simgpu = pod["initContainers"][0].clone();
            simgpu["name"] = json!("clean-simgpu");
            simgpu["command"] = json!([
                "sh",
                "-c",
                format!(
                    "rm -rf {SIM_ON_NODE}/* {SIM_ON_NODE}/.[!.]*; \
                     if grep -qs {SIMULATED} {NVIDIA_ON_NODE}; then rm {NVIDIA_ON_NODE}; fi"
                ),
            ]);
            push(&mut simgpu["volumeMounts"], json!({"name": "sim", "mountPath": SIM_ON_NODE}));
            push(&mut pod["volumes"], sim_volume());
            push(&mut pod["initContainers"], simgpu);
        }
        kubectl.apply(&object)?;
    }
    let cleaned = wait::until("the node is clean", READY, || {
        let pods = kubectl.items(&["pods", "-n", "tessera-cleanup"])?;
        let pod = pods.first().map_or(&Value::Null, |pod| &pod["status"]);
        let ready = pod["containerStatuses"][0]["ready"] == true;
        Ok(Look::when(ready, pod["initContainerStatuses"].to_string()))
    });
    if cleaned.is_err() {
        let logs =
            ["logs", "-n", "tessera-cleanup", "-l", "app.kubernetes.io/name=tessera-cleanup"];
        let output = kubectl.try_run(&[&logs[..], &["-c", "clean"]].concat(), None)?;
        println!("---- cleanup's log\n{}{}", output.stdout, output.stderr);
    }
    delete_namespace(kubectl, "tessera-cleanup")?;
    cleaned
}

/// What runs in it first: a namespace is gone only when its pods are.
pub fn delete_namespace(kubectl: &Kubectl, name: &str) -> Result<()> {
    kubectl.run(&["delete", "daemonset", "--all", "-n", name])?;
    kubectl.delete_pods(name)?;
    kubectl.run(&["delete", "namespace", name, "--ignore-not-found", "--timeout=50s"]).map(drop)
}

/// Labels a namespace as one that these tests may remove.
pub fn mark_as_ours(namespace: &mut Value) {
    namespace["metadata"]["labels"]["tessera.dev/e2e"] = json!("true");
}

pub fn pod_spec(daemonset: &mut Value) -> &mut Value {
    &mut daemonset["spec"]["template"]["spec"]
}

fn push(array: &mut Value, item: Value) {
    match array {
        Value::Array(items) => items.push(item),
        other => *other = json!([item]),
    }
}

/// A pod that does nothing but keep both images on the node: kubelets whose disk is rather full remove
/// those that no container uses, and during a roll-out none does.
fn images_in_use(node: &str) -> Value {
    let command = ["sh", "-c", "trap 'exit 0' TERM; sleep 2147483647 & wait"];
    let containers = ["plugin", "tenant"].map(|name| Container::new(name, 0, &command));
    let mut pod = pods::manifest("images-in-use", Restart::Always, &[], &containers);
    pod["metadata"]["namespace"] = json!(PLUGIN_NAMESPACE);
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    pod["spec"]["containers"][0]["image"] = json!(images::PLUGIN);
    pod
}

fn sim_volume() -> Value {
    json!({"name": "sim", "hostPath": {"path": SIM_ON_NODE, "type": "DirectoryOrCreate"}})
}

/// Only this node, our image, and no need of a pod network.
fn on_node(pod: &mut Value, node: &str) {
    pod["hostNetwork"] = json!(true);
    pod["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    if let Some(affinity) = pod.as_object_mut() {
        affinity.remove("affinity");
    }
    for list in ["initContainers", "containers"] {
        for container in pod[list].as_array_mut().into_iter().flatten() {
            container["image"] = json!(images::PLUGIN);
            container["imagePullPolicy"] = json!("Never");
        }
    }
}

/// The manifest's DaemonSet on the simulated GPU.
fn overlay(daemonset: &mut Value, node: &str) {
    let pod = pod_spec(daemonset);
    on_node(pod, node);
    let sim_mount = json!({"name": "sim", "mountPath": SIM_ON_NODE});
    push(&mut pod["volumes"], sim_volume());
    // As a driver's installer would: new files beside the old ones, then renamed over them.
    let install = format!(
        "for f in {from}/*.*; do cp $f {SIM_ON_NODE}/.new && mv {SIM_ON_NODE}/.new {SIM_ON_NODE}/${{f##*/}}; done",
        from = images::SIM_DIR,
    );
    push(
        &mut pod["initContainers"],
        json!({
            "name": "install-simgpu",
            "image": images::TENANT,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", install],
            "volumeMounts": [sim_mount],
        }),
    );
    let plugin = &mut pod["containers"][0];
    // Cases wait for it some twenty times.
    plugin["readinessProbe"]["periodSeconds"] = json!(2);
    push(&mut plugin["volumeMounts"], sim_mount);
    for (name, file) in [("SIMGPU_CONFIG", "simgpu.toml"), ("SIMGPU_STATE", "state")] {
        push(&mut plugin["env"], json!({"name": name, "value": format!("{SIM_ON_NODE}/{file}")}));
    }
}
