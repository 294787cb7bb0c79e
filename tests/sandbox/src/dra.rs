//! Claims of a node: an API server that keeps its slices and claims, kubelet's DRA manager, and what the scheduler and
//! the container runtime would do.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tessera_cluster::fixtures::ApiServer;
use tessera_fake_kubelet::RunOptions;
use tessera_fake_kubelet::dra::{
    AllocatedClaim, ClaimName, DraKubelet, PreparedDevice, run_options,
};
use tessera_model::quantity::{format_bytes, parse_bytes};

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
            Ok((run_options(&Self::cdi(&self.dir), &devices)?, devices))
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

/// Capacity of one request: bytes, and percent of the GPU's time; what is left out is the device's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Bytes.
    pub memory: Option<u64>,
    /// Percent.
    pub cores: Option<u64>,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const GOOD: &str = "write memory=4Gi, cores=30, or memory=4Gi,cores=30";
        let mut size = Size::default();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| GOOD.to_owned())?;
            let of = match name.trim() {
                "memory" => &mut size.memory,
                "cores" => &mut size.cores,
                other => return Err(format!("a device has no {other:?}; {GOOD}")),
            };
            if of.is_some() {
                return Err(format!("{} is said twice", name.trim()));
            }
            let value = value.trim();
            let number = match name.trim() {
                "memory" => parse_bytes(value).map_err(|error| format!("memory: {error}"))?,
                _ => value.strip_suffix('%').unwrap_or(value).parse().unwrap_or(0),
            };
            if number == 0 {
                let range = if name.trim() == "cores" { "from 1 to 100" } else { "more than 0" };
                return Err(format!("{}: {value:?} is no number {range}", name.trim()));
            }
            *of = Some(number);
        }
        match size.cores {
            Some(101..) => Err("cores: a GPU has 100".to_owned()),
            _ => Ok(size),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.memory.map(|bytes| format!("memory={}", format_bytes(bytes)));
        let cores = self.cores.map(|cores| format!("cores={cores}"));
        f.write_str(&memory.into_iter().chain(cores).collect::<Vec<_>>().join(","))
    }
}

/// What a claim has of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Consumed {
    /// Bytes.
    pub memory: u64,
    /// Percent.
    pub cores: u64,
}

/// What a device of a slice has in all; `None` for one that has no such capacity.
pub fn whole(device: &Value) -> Option<Consumed> {
    let of = |name: &str| number(&device["capacity"][name]["value"]);
    Some(Consumed { memory: of("memory")?, cores: of("cores")? })
}

/// What this size takes of it: the policy's default where nothing is asked, else whole steps (KEP 5075).
pub fn consumed(device: &Value, size: Size) -> Option<Consumed> {
    let of = |name: &str, asked: Option<u64>| {
        let capacity = &device["capacity"][name];
        let policy = &capacity["requestPolicy"];
        let Some(asked) = asked else { return number(&policy["default"]) };
        let range = &policy["validRange"];
        let min = number(&range["min"]).unwrap_or(0);
        let step = number(&range["step"]).filter(|step| *step > 0).unwrap_or(1);
        let above = asked.max(min) - min;
        above.checked_next_multiple_of(step)?.checked_add(min)
    };
    Some(Consumed { memory: of("memory", size.memory)?, cores: of("cores", size.cores)? })
}

fn number(quantity: &Value) -> Option<u64> {
    match quantity {
        Value::String(text) => parse_bytes(text).ok(),
        Value::Number(number) => number.as_u64(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_size_is_memory_cores_or_both() {
        let size = |text: &str| text.parse::<Size>();
        assert_eq!(
            size("memory=4Gi,cores=30"),
            Ok(Size { memory: Some(4 << 30), cores: Some(30) })
        );
        assert_eq!(size("cores=30%"), Ok(Size { memory: None, cores: Some(30) }));
        for (wrong, says) in [
            ("", "write memory=4Gi"),
            ("4Gi", "write memory=4Gi"),
            ("memory=lots", "memory: "),
            ("memory=0", "more than 0"),
            ("cores=0", "from 1 to 100"),
            ("cores=half", "from 1 to 100"),
            ("cores=101", "has 100"),
            ("gpus=1", "no \"gpus\""),
            ("cores=1,cores=2", "said twice"),
            ("memory=1Gi,", "write memory=4Gi"),
        ] {
            let error = size(wrong).unwrap_err();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }

    #[test]
    fn what_is_consumed_is_a_whole_number_of_steps_or_the_default() {
        let policy = |default: &str, min: &str, step: &str| json!({ "default": default, "validRange": { "min": min, "step": step } });
        let device = json!({ "capacity": {
            "memory": { "value": "15872Mi", "requestPolicy": policy("3968Mi", "128Mi", "64Mi") },
            "cores": { "value": "100", "requestPolicy": policy("25", "1", "1") },
        }});
        let of = |text: &str| consumed(&device, text.parse().unwrap()).unwrap();
        assert_eq!(of("memory=1000Mi,cores=30"), Consumed { memory: 1024 << 20, cores: 30 });
        assert_eq!(of("cores=30"), Consumed { memory: 3968 << 20, cores: 30 });
        assert_eq!(of("memory=1Mi"), Consumed { memory: 128 << 20, cores: 25 });
    }
}
