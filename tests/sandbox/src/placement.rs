//! A pod that kubelet has admitted: what it was given, and the surroundings of its container.

use std::path::PathBuf;

use anyhow::Context;
use tessera_fake_kubelet::{Container, Kubelet, Pod};
use tessera_region::quota::QuotaReader;

use super::container::Surroundings;
use super::dra::Claimed;

/// The name of a pod's only container.
pub const CONTAINER: &str = "main";

/// A pod with one container.
#[derive(Debug)]
pub struct Placement {
    pub pod: Pod,
    /// The devices that kubelet chose.
    pub device_ids: Vec<String>,
    /// What its container runs in.
    pub surroundings: Surroundings,
    /// Its quota, as the shim reads it.
    pub quota: QuotaReader,
    is_claim: bool,
}

impl Placement {
    /// Admits a pod that asks for `count` of `resource`, and starts its container, as kubelet would. `scratch` is
    /// an empty directory.
    ///
    /// # Errors
    /// What the plugin answered, or an answer that no container could use; the pod is gone then.
    pub async fn of(
        kubelet: &Kubelet,
        (namespace, name): (&str, &str),
        (resource, count): (&str, usize),
        scratch: PathBuf,
    ) -> anyhow::Result<Self> {
        let container = Container::new(CONTAINER).asking(resource, count);
        let pod = Pod::new(namespace, name).with(container);
        let admitted = kubelet.admit(&pod).await.with_context(|| format!("pod {name}"))?;
        let device_ids = admitted.first().map(|a| a.device_ids.clone()).unwrap_or_default();
        let started = async {
            let options = kubelet.start_container(&pod, CONTAINER).await?;
            let surroundings = Surroundings::of(options, scratch);
            let pages = surroundings.pages().context("Allocate's answer has no pages")?;
            let quota = QuotaReader::attach(pages)
                .map_err(|e| anyhow::anyhow!("the quota page of {name}: {e}"))?;
            anyhow::Ok((surroundings, quota))
        };
        match started.await {
            Ok((surroundings, quota)) => {
                Ok(Self { pod, device_ids, surroundings, quota, is_claim: false })
            }
            Err(error) => {
                kubelet.remove(namespace, name);
                Err(error)
            }
        }
    }

    /// A pod whose container has what a claim was allocated. `scratch` is an empty directory.
    ///
    /// # Errors
    /// An answer that no container could use; the pod is gone then.
    pub fn of_claim(
        kubelet: &Kubelet,
        (namespace, name): (&str, &str),
        claimed: Claimed,
        scratch: PathBuf,
    ) -> anyhow::Result<Self> {
        let pod = Pod::new(namespace, name).with(Container::new(CONTAINER));
        let Claimed { claim, devices, options } = claimed;
        let surroundings = Surroundings::of(options, scratch);
        let pages = surroundings.pages().context("the claim's CDI specs have no pages")?;
        let quota = QuotaReader::attach(pages)
            .map_err(|e| anyhow::anyhow!("the quota page of {name}: {e}"))?;
        kubelet.run_claiming((namespace, name), CONTAINER, &claim, &devices);
        let device_ids = devices.into_iter().map(|device| device.device).collect();
        Ok(Self { pod, device_ids, surroundings, quota, is_claim: true })
    }

    /// Starts the container again, as kubelet does after a crash: PreStartContainer, no Allocate.
    pub async fn restart(&mut self, kubelet: &Kubelet, scratch: PathBuf) -> anyhow::Result<()> {
        // What a claim was prepared for stays as it is while the pod is there.
        if !self.is_claim {
            let options = kubelet.start_container(&self.pod, CONTAINER).await?;
            self.surroundings = Surroundings::of(options, scratch);
        }
        Ok(())
    }

    /// Bytes that it may hold of its first GPU.
    pub fn memory(&self) -> u64 {
        self.quota.memory_limit(0)
    }

    pub fn uuids(&self) -> Vec<String> {
        (0..self.quota.gpu_count()).map(|gpu| self.quota.uuid(gpu).to_owned()).collect()
    }
}
