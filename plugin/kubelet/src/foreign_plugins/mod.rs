//! Whether another device plugin on this node sells a GPU of ours too.
//!
//! A pod with the GPU from the other plugin has no quota, and takes memory that ours were promised. So by
//! default a GPU that another plugin offers, or that a pod holds through one, is not allocated here: its
//! free replicas are Unhealthy until no other plugin has offered it for a while. Existing allocations go on.
//!
//! - [`ids`]: which of our GPUs a foreign device id means
//! - [`judge()`]: from what kubelet knows to a finding per GPU, and how long it stands; pure
//! - [`checkpoint`]: the source for older kubelets
//!
//! Nothing here is in the path of Allocate, and Allocate never refuses because of it: kubelet may have
//! assigned the replica before it heard of the change, or an init container may pass it on.

pub mod checkpoint;
pub mod ids;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

pub use ids::Known;
use ids::{Meaning, meaning};

/// Devices of one resource, offered by its plugin or held by a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub resource: String,
    pub device_ids: Vec<String>,
    /// `namespace/pod` of the holder; `None` for what a plugin offers.
    pub holder: Option<String>,
}

/// How another plugin sells a GPU of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignSale {
    /// Under which name; the first of several.
    pub resource: String,
    /// One device id, as an example.
    pub device_id: String,
    /// A pod that holds it, where no plugin offers it any more or kubelet does not tell.
    pub holder: Option<String>,
    /// The id does not tell which GPU it means.
    pub unclear: bool,
}

impl std::fmt::Display for ForeignSale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ForeignSale { resource, device_id, holder, unclear } = self;
        match holder {
            Some(pod) => write!(f, "pod {pod} holds it as {resource} (device {device_id})")?,
            None => write!(f, "another device plugin sells it as {resource} (device {device_id})")?,
        }
        if *unclear {
            f.write_str(", or another GPU of this node: the id does not tell")?;
        }
        Ok(())
    }
}

/// Which of `gpus` others sell, by UUID. `ours` are resources that are our own, now or from an earlier
/// configuration.
pub fn judge(
    offers: &[Offer],
    ours: &BTreeSet<String>,
    gpus: &[Known],
) -> BTreeMap<String, ForeignSale> {
    let mut findings = BTreeMap::new();
    let foreign = || offers.iter().filter(|offer| !ours.contains(&offer.resource));
    // A certain finding before an unclear one, a plugin that offers before a pod that holds.
    for wanted_unclear in [false, true] {
        for wanted_held in [false, true] {
            for offer in foreign().filter(|offer| offer.holder.is_some() == wanted_held) {
                for id in &offer.device_ids {
                    let (found, unclear) = match meaning(&offer.resource, id, gpus) {
                        Meaning::Ours(found) => (found, false),
                        Meaning::Unclear => ((0..gpus.len()).collect(), true),
                        Meaning::Other => continue,
                    };
                    if unclear != wanted_unclear {
                        continue;
                    }
                    for gpu in found {
                        findings.entry(gpus[gpu].uuid.clone()).or_insert_with(|| ForeignSale {
                            resource: offer.resource.clone(),
                            device_id: id.clone(),
                            holder: offer.holder.clone(),
                            unclear,
                        });
                    }
                }
            }
        }
    }
    findings
}

/// The findings that stand. One stands from the moment it is made until it has not been made for a
/// while: a plugin that is updated is away for some seconds, and means to come back.
#[derive(Clone, Debug)]
pub struct CurrentFindings {
    grace: Duration,
    current: BTreeMap<String, (ForeignSale, Instant)>,
}

impl CurrentFindings {
    /// No findings; each will stand for `grace` after it was last made.
    pub fn new(grace: Duration) -> Self {
        CurrentFindings { grace, current: BTreeMap::new() }
    }

    /// Takes what kubelet answered at `now`; the caller leaves this out where kubelet did not answer.
    pub fn observe(&mut self, findings: BTreeMap<String, ForeignSale>, now: Instant) {
        for (uuid, finding) in findings {
            self.current.insert(uuid, (finding, now));
        }
        let grace = self.grace;
        self.current.retain(|_, (_, at)| now.saturating_duration_since(*at) < grace);
    }

    /// GPUs with a standing finding.
    pub fn current(&self) -> BTreeMap<String, ForeignSale> {
        self.current.iter().map(|(uuid, (finding, _))| (uuid.clone(), finding.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus() -> Vec<Known> {
        let known = |uuid: &str, index| Known {
            uuid: uuid.into(),
            parent_uuid: None,
            index,
            minor: index,
            pci_bus_id: format!("00000000:{index:02x}:00.0"),
        };
        vec![known("GPU-a", 0), known("GPU-b", 1)]
    }

    fn offer(resource: &str, ids: &[&str], holder: Option<&str>) -> Offer {
        Offer {
            resource: resource.into(),
            device_ids: ids.iter().map(ToString::to_string).collect(),
            holder: holder.map(str::to_owned),
        }
    }

    fn judged(offers: &[Offer]) -> BTreeMap<String, ForeignSale> {
        judge(offers, &["tessera.dev/gpu".to_owned()].into(), &gpus())
    }

    #[test]
    fn our_own_resources_are_no_others() {
        assert!(judged(&[offer("tessera.dev/gpu", &["GPU-a::0"], None)]).is_empty());
        assert!(judged(&[offer("tessera.dev/gpu", &["GPU-a::0"], Some("n/p"))]).is_empty());
        let second = judged(&[offer("tessera.dev/other", &["GPU-a::0"], None)]);
        assert_eq!(second.keys().collect::<Vec<_>>(), ["GPU-a"]);
    }

    #[test]
    fn the_reason_names_resource_device_and_holder() {
        let sold = judged(&[
            offer("nvidia.com/gpu", &["GPU-b"], Some("ml/train")),
            offer("nvidia.com/gpu.shared", &["GPU-b::0", "GPU-b::1"], None),
        ]);
        assert_eq!(
            sold["GPU-b"].to_string(),
            "another device plugin sells it as nvidia.com/gpu.shared (device GPU-b::0)"
        );
        let held = judged(&[offer("nvidia.com/gpu", &["GPU-b"], Some("ml/train"))]);
        assert_eq!(
            held["GPU-b"].to_string(),
            "pod ml/train holds it as nvidia.com/gpu (device GPU-b)"
        );
    }

    #[test]
    fn an_id_that_tells_nothing_concerns_every_gpu() {
        let found = judged(&[offer("nvidia.com/gpu", &["slot-7"], None)]);
        assert_eq!(found.len(), 2);
        assert!(found["GPU-a"].to_string().contains("the id does not tell"));
        // A certain finding is reported as such.
        let found = judged(&[offer("nvidia.com/gpu", &["slot-7", "GPU-a"], None)]);
        assert!(!found["GPU-a"].unclear && found["GPU-b"].unclear);
    }

    #[test]
    fn a_finding_stands_until_it_has_not_been_made_for_a_while() {
        let (start, grace) = (Instant::now(), Duration::from_secs(60));
        let findings = || judged(&[offer("nvidia.com/gpu", &["GPU-a"], None)]);
        let mut others = CurrentFindings::new(grace);
        others.observe(findings(), start);
        assert_eq!(others.current(), findings());
        others.observe(BTreeMap::new(), start + grace / 2);
        assert_eq!(others.current(), findings(), "it may be restarting");
        others.observe(findings(), start + grace);
        others.observe(BTreeMap::new(), start + grace * 2 - Duration::from_millis(1));
        assert_eq!(others.current(), findings());
        others.observe(BTreeMap::new(), start + grace * 2);
        assert!(others.current().is_empty());
    }
}
