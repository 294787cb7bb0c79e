//! Claims of a node: an API server that keeps its slices and claims, kubelet's DRA manager, and what the scheduler and
//! the container runtime would do.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use tessera_cluster::fixtures::ApiServer;
use tessera_fake_kubelet::RunOptions;
use tessera_fake_kubelet::dra::{AllocatedClaim, ClaimName, DraKubelet, PreparedDevice};
use tessera_kubelet_api::deviceplugin::Mount;
use tessera_model::quantity::format_bytes;

use super::claim::{Consumed, Size, consumed, whole};

/// In slices and claims.
const DRIVER: &str = "gpu.tessera.dev";
/// How long the plugin may take to publish its devices.
const PUBLISHED: Duration = Duration::from_secs(20);
const STEP: Duration = Duration::from_millis(50);

/// The cluster's side of a node.
#[derive(Debug)]
pub struct Dra {
    api: ApiServer,
    kubelet: DraKubelet,
    node: String,
    dir: PathBuf,
    held: Vec<Held>,
    claims: u64,
}

/// A claim that is prepared for a pod.
#[derive(Debug)]
struct Held {
    /// `namespace/name`.
    pod: String,
    claim: ClaimName,
    device: String,
    consumed: Consumed,
}

/// What a pod got by its claim.
#[derive(Debug)]
pub struct Claimed {
    pub claim: ClaimName,
    pub devices: Vec<PreparedDevice>,
    /// What its container is given.
    pub options: RunOptions,
}

impl Dra {
    /// For a node of this name, whose kubelet is below `kubelet`; what it writes is below `dir`.
    pub fn start(dir: &Path, kubelet: &Path, node: &str) -> anyhow::Result<Self> {
        let kubelet = DraKubelet::start(kubelet, DRIVER).context("no registry of DRA drivers")?;
        let api = ApiServer::start(dir);
        api.with(|store| store.nodes.insert(node.to_owned(), format!("uid-of-{node}")));
        let dra = Self {
            api,
            kubelet,
            node: node.to_owned(),
            dir: dir.to_owned(),
            held: Vec::new(),
            claims: 0,
        };
        std::fs::write(dra.kubeconfig(), dra.api.kubeconfig())?;
        Ok(dra)
    }

    /// How the plugin reaches the API server.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }

    /// Where drivers register.
    pub fn registry(&self) -> &Path {
        self.kubelet.registry()
    }

    /// Where CDI specs are, below the node's directory.
    pub fn cdi(dir: &Path) -> PathBuf {
        dir.join("cdi")
    }

    fn devices(&self) -> Vec<Value> {
        let of_slice =
            |slice: &Value| slice["spec"]["devices"].as_array().cloned().unwrap_or_default();
        let node = self.node.clone();
        self.api.with(|store| store.slices(Some(DRIVER), Some(&node)).flat_map(of_slice).collect())
    }

    /// Waits until kubelet knows the driver and its devices are published.
    pub async fn await_published(&self) -> anyhow::Result<()> {
        let published = async {
            self.kubelet.wait_registered().await;
            while self.devices().is_empty() {
                tokio::time::sleep(STEP).await;
            }
        };
        tokio::time::timeout(PUBLISHED, published).await.with_context(|| {
            format!(
                "the DRA driver of {} published nothing; `tessera sandbox logs plugin` says why",
                self.node
            )
        })
    }

    /// The first device with room, and what is taken of it.
    fn choose(&self, size: Size) -> anyhow::Result<(String, Consumed)> {
        let mut left = Vec::new();
        for device in self.devices() {
            let name = device["name"].as_str().unwrap_or_default().to_owned();
            let (Some(all), Some(wants)) = (whole(&device), consumed(&device, size)) else {
                continue;
            };
            let held = || self.held.iter().filter(|held| held.device == name);
            let memory = all.memory.saturating_sub(held().map(|one| one.consumed.memory).sum());
            let cores = all.cores.saturating_sub(held().map(|one| one.consumed.cores).sum());
            if wants.memory <= memory && wants.cores <= cores {
                return Ok((name, wants));
            }
            left.push(format!("{name} has {} and {cores} % left", format_bytes(memory)));
        }
        match left.as_slice() {
            [] => bail!("{} publishes no device: `tessera sandbox status` says why", self.node),
            left => bail!("{size} does not fit: {}; remove a pod, or claim less", left.join(", ")),
        }
    }

    /// Allocates a claim for a pod as the scheduler would, and prepares it as kubelet would.
    pub async fn prepare(
        &mut self,
        (namespace, pod): (&str, &str),
        size: Size,
    ) -> anyhow::Result<Claimed> {
        let (device, consumed) = self.choose(size)?;
        self.claims += 1;
        let (name, uid) = (format!("{pod}-gpu"), format!("claim-{}-{}", self.node, self.claims));
        let claim = ClaimName { namespace: namespace.to_owned(), name, uid };
        let (memory, cores) = (consumed.memory.to_string(), consumed.cores.to_string());
        let allocated = AllocatedClaim::new(claim.clone(), DRIVER, &self.node);
        let allocated = allocated.asking("gpu", &device, &memory, &cores);
        self.api.with(|store| store.put_claim(allocated.object(pod)));
        let full = format!("{namespace}/{pod}");
        self.held.push(Held { pod: full.clone(), claim: claim.clone(), device, consumed });
        let prepared = self.kubelet.prepare(&full, std::slice::from_ref(&claim)).await;
        let options = prepared.map_err(anyhow::Error::from).and_then(|devices| {
            let devices = devices.into_iter().next().unwrap_or_default();
            Ok((options(&Self::cdi(&self.dir), &devices)?, devices))
        });
        match options {
            Ok((options, devices)) => Ok(Claimed { claim, devices, options }),
            Err(error) => {
                self.unprepare(&full).await;
                Err(error)
            }
        }
    }

    /// The pod is gone, and its claim with it.
    pub async fn unprepare(&mut self, pod: &str) {
        let Some(at) = self.held.iter().position(|held| held.pod == pod) else { return };
        let Held { claim, .. } = self.held.remove(at);
        // A plugin that does not run finds out when it starts that the claim is gone.
        let _ = self.kubelet.unprepare(pod).await;
        self.api.with(|store| store.remove_claim(&claim.namespace, &claim.name));
    }
}

/// What a container runtime makes of these devices: the edits of their CDI specs.
fn options(dir: &Path, devices: &[PreparedDevice]) -> anyhow::Result<RunOptions> {
    let mut options = RunOptions::default();
    let named: Vec<&String> = devices.iter().flat_map(|device| &device.cdi_devices).collect();
    for entry in
        std::fs::read_dir(dir).with_context(|| format!("no CDI specs in {}", dir.display()))?
    {
        let file = entry?.path();
        if file.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let spec: Value = serde_json::from_slice(&std::fs::read(&file)?)
            .with_context(|| format!("the CDI spec {}", file.display()))?;
        let kind = spec["kind"].as_str().unwrap_or_default();
        let of_spec = spec["devices"].as_array().into_iter().flatten();
        let is_named = |device: &&Value| {
            let name = device["name"].as_str().unwrap_or_default();
            named.iter().any(|named| **named == format!("{kind}={name}"))
        };
        let mut any = false;
        for device in of_spec.filter(is_named) {
            edit(&mut options, &device["containerEdits"]);
            any = true;
        }
        if any {
            edit(&mut options, &spec["containerEdits"]);
        }
    }
    Ok(options)
}

fn edit(options: &mut RunOptions, edits: &Value) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    for pair in edits["env"].as_array().into_iter().flatten() {
        if let Some((name, value)) = pair.as_str().and_then(|pair| pair.split_once('=')) {
            options.envs.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
    }
    for mount in edits["mounts"].as_array().into_iter().flatten() {
        let is_read_only = mount["options"].as_array().into_iter().flatten().any(|one| one == "ro");
        let mount = Mount {
            host_path: text(&mount["hostPath"]),
            container_path: text(&mount["containerPath"]),
            read_only: is_read_only,
        };
        if !options.mounts.iter().any(|one| one.container_path == mount.container_path) {
            options.mounts.push(mount);
        }
    }
}
