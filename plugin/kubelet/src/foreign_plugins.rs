//! Whether another device plugin on this node sells a GPU of ours too.
//!
//! A pod with the GPU from the other plugin has no quota, and takes memory that ours were promised. So by
//! default a GPU that another plugin offers, or that a pod holds through one, is not allocated here: its
//! free replicas are Unhealthy until no other plugin has offered it for a while. Existing allocations go on.
//!
//! [`judge()`] goes from what kubelet knows to a finding per GPU.
//!
//! Nothing here is in the path of Allocate, and Allocate never refuses because of it: kubelet may have
//! assigned the replica before it heard of the change, or an init container may pass it on.
//!
//! A device id is any text of at most 63 bytes. What plugins for NVIDIA's GPUs use:
//!
//! | Plugin | Ids |
//! |---|---|
//! | NVIDIA's | the UUID; shared: `UUID::n`; MIG: `MIG-…`. `deviceIDStrategy = index` changes what the container gets, never these |
//! | HAMi, Volcano, gpushare | the UUID with a suffix: `UUID-n`, `UUID-_-n` |
//! | GKE's | `nvidia0` by minor number, with `/gi1` or `/vgpu2` after it |
//! | KubeVirt's, SR-IOV | IOMMU groups or PCI addresses, of GPUs that NVML does not see |
//!
//! So a UUID or a PCI address is looked for anywhere in the id, as a whole word. A bare number means an
//! index only under a name that is NVIDIA's own for GPUs; anybody may call a device `0`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use tessera_model::gpu::Gpu;

/// Devices of one resource, offered by its plugin or held by a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub resource: String,
    pub device_ids: Vec<String>,
    /// `namespace/pod` of the holder; `None` for what a plugin offers.
    pub holder: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignSale {
    /// Under which name; the first of several.
    pub resource: String,
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
    gpus: &[Gpu],
) -> BTreeMap<String, ForeignSale> {
    let mut sales = Vec::new();
    for offer in offers.iter().filter(|offer| !ours.contains(&offer.resource)) {
        for id in &offer.device_ids {
            let (found, unclear) = match meaning(&offer.resource, id, gpus) {
                Meaning::Ours(found) => (found, false),
                Meaning::Unclear => ((0..gpus.len()).collect(), true),
                Meaning::Other => continue,
            };
            let sale = ForeignSale {
                resource: offer.resource.clone(),
                device_id: id.clone(),
                holder: offer.holder.clone(),
                unclear,
            };
            sales.extend(found.into_iter().map(|gpu| (gpus[gpu].uuid.clone(), sale.clone())));
        }
    }
    // A certain finding before an unclear one, a plugin that offers before a pod that holds: the last one stands.
    sales.sort_by_key(|(_, sale)| (sale.unclear, sale.holder.is_some()));
    sales.into_iter().rev().collect()
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

    pub fn current(&self) -> BTreeMap<String, ForeignSale> {
        self.current.iter().map(|(uuid, (finding, _))| (uuid.clone(), finding.clone())).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Meaning {
    /// These of our GPUs, by position in the list.
    Ours(Vec<usize>),
    /// No GPU of ours, as far as known.
    Other,
    /// An unknown NVIDIA GPU of this node.
    Unclear,
}

fn meaning(resource: &str, id: &str, ours: &[Gpu]) -> Meaning {
    let matching = |is_it: &dyn Fn(&Gpu) -> bool| -> Option<Meaning> {
        let found: Vec<usize> = (0..ours.len()).filter(|at| is_it(&ours[*at])).collect();
        (!found.is_empty()).then_some(Meaning::Ours(found))
    };
    if let Some(meaning) = matching(&|gpu| names(gpu, id)) {
        return meaning;
    }
    if has_gpu_uuid(id) || !is_nvidia_gpu(resource) {
        return Meaning::Other;
    }
    if let Ok(index) = id.parse::<u32>() {
        return matching(&|gpu| gpu.index == index).unwrap_or(Meaning::Other);
    }
    if let Some(minor) = device_node(id) {
        return matching(&|gpu| gpu.minor == minor).unwrap_or(Meaning::Other);
    }
    Meaning::Unclear
}

fn names(gpu: &Gpu, id: &str) -> bool {
    if has_word(id, &gpu.uuid) {
        return true;
    }
    // Until driver 470 a MIG instance was `MIG-<UUID of its GPU>/<instance>/<compute instance>`. One
    // that is ours has been found above; a neighbour of ours is none of our business.
    let is_instance = id.get(..4).is_some_and(|head| head.eq_ignore_ascii_case("MIG-"));
    if let Some(instance) = &gpu.mig
        && !is_instance
        && has_word(id, &instance.parent_uuid)
    {
        return true;
    }
    let (_, short) = gpu.pci_bus_id.split_at(gpu.pci_bus_id.len().saturating_sub(12));
    short.len() == 12 && has_word(id, short)
}

/// Whether `word` stands in `text`, with nothing that could be a part of it before or after.
fn has_word(text: &str, word: &str) -> bool {
    let (text, word) = (text.to_ascii_lowercase(), word.to_ascii_lowercase());
    let outside = |byte: Option<&u8>| byte.is_none_or(|byte| !byte.is_ascii_alphanumeric());
    !word.is_empty()
        && text.match_indices(&word).any(|(at, _)| {
            let (before, after) = (&text.as_bytes()[..at], &text.as_bytes()[at + word.len()..]);
            // NVML's PCI addresses have four more digits of the domain in front.
            (outside(before.last()) || before.ends_with(b"0000")) && outside(after.first())
        })
}

/// Whether there is a well-formed UUID of a GPU or MIG instance in it, which then is not ours.
fn has_gpu_uuid(id: &str) -> bool {
    let is_uuid = |text: &str| {
        let mut parts = text.splitn(5, '-');
        let lengths = [8, 4, 4, 4];
        lengths.iter().all(|length| parts.next().is_some_and(|part| is_hex(part, *length)))
            && parts.next().and_then(|rest| rest.get(..12)).is_some_and(|part| is_hex(part, 12))
    };
    ["GPU-", "MIG-"].iter().any(|head| id.match_indices(head).any(|(at, _)| is_uuid(&id[at + 4..])))
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// NVIDIA's names for GPUs and their parts: `nvidia.com/gpu`, `nvidia.com/gpu.shared`,
/// `nvidia.com/mig-1g.10gb`, `nvidia.com/mig-1g.10gb.shared`. Others of the domain are no such thing,
/// or their ids are UUIDs anyway.
fn is_nvidia_gpu(resource: &str) -> bool {
    resource
        .strip_prefix("nvidia.com/")
        .is_some_and(|leaf| leaf == "gpu" || leaf == "gpu.shared" || leaf.starts_with("mig-"))
}

/// The number of `nvidia<n>`, `nvidia<n>/gi<m>` or `nvidia<n>/vgpu<m>`.
fn device_node(id: &str) -> Option<u32> {
    id.strip_prefix("nvidia")?.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tessera_model::mig::MigInstance;

    fn gpus() -> Vec<Gpu> {
        vec![Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1)]
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

    const A: &str = "GPU-8f2c1d90-3e5a-4b17-9c2e-5da9abb51763";
    const B: &str = "GPU-8f2c1d90-3e5a-4b17-9c2e-5da9abb51764";
    const MIG: &str = "MIG-0a1b2c3d-3e5a-4b17-9c2e-5da9abb51765";
    const FOREIGN: &str = "GPU-00000000-3e5a-4b17-9c2e-5da9abb51763";

    /// Two whole GPUs, and an instance on a third.
    fn ours() -> Vec<Gpu> {
        let known = |uuid: &str, index, minor, bus: &str| Gpu {
            minor,
            pci_bus_id: bus.into(),
            ..Gpu::example(uuid, index)
        };
        let instance = MigInstance {
            parent_uuid: "GPU-77777777-3e5a-4b17-9c2e-5da9abb51763".into(),
            parent_index: 2,
            index: 0,
            gpu_instance: 0,
            compute_instance: 0,
        };
        vec![
            known(A, 0, 0, "00000000:17:00.0"),
            known(B, 1, 3, "00000000:65:00.0"),
            Gpu { mig: Some(instance), ..known(MIG, 2, 2, "00000000:CA:00.0") },
        ]
    }

    fn gpu(id: &str) -> Meaning {
        meaning("nvidia.com/gpu", id, &ours())
    }

    #[test]
    fn the_ids_of_known_plugins_are_understood() {
        for (resource, id, expected) in [
            ("nvidia.com/gpu", A.to_owned(), 0),
            ("nvidia.com/gpu.shared", format!("{B}::3"), 1),
            ("nvidia.com/gpu", format!("{B}-7"), 1),
            ("volcano.sh/vgpu-number", format!("{A}-0"), 0),
            ("aliyun.com/gpu-mem", format!("{A}-_-14"), 0),
            ("nvidia.com/mig-1g.10gb", MIG.to_owned(), 2),
            ("nvidia.com/mig-1g.10gb.shared", format!("{MIG}::1"), 2),
            ("nvidia.com/mig-1g.5gb", format!("MIG-{A}/1/0"), 0),
            ("nvidia.com/gpu", "1".to_owned(), 1),
            ("nvidia.com/gpu", "nvidia3".to_owned(), 1),
            ("nvidia.com/gpu", "nvidia3/vgpu1".to_owned(), 1),
            ("nvidia.com/gpu", "nvidia0/gi4".to_owned(), 0),
            ("example.com/passthrough", "0000:65:00.0".to_owned(), 1),
            ("example.com/passthrough", "00000000:ca:00.0".to_owned(), 2),
        ] {
            let found = meaning(resource, &id, &ours());
            assert_eq!(found, Meaning::Ours(vec![expected]), "{resource} {id}");
        }
    }

    #[test]
    fn a_mig_instance_is_sold_with_its_gpu_and_not_with_its_neighbour() {
        let parent = "GPU-77777777-3e5a-4b17-9c2e-5da9abb51763";
        assert_eq!(gpu(parent), Meaning::Ours(vec![2]));
        assert_eq!(gpu(&format!("{parent}::0")), Meaning::Ours(vec![2]));
        assert_eq!(gpu(&format!("MIG-{parent}/2/0")), Meaning::Other);
        assert_eq!(gpu("MIG-11111111-3e5a-4b17-9c2e-5da9abb51765"), Meaning::Other);
    }

    #[test]
    fn another_gpus_uuid_and_number_are_not_ours() {
        for id in [FOREIGN, "17", "nvidia9", "nvidia9/vgpu0"] {
            assert_eq!(gpu(id), Meaning::Other, "{id}");
        }
        assert_eq!(gpu(&format!("{FOREIGN}::0")), Meaning::Other);
        // One digit more is another device.
        assert_eq!(meaning("example.com/x", &format!("{A}5"), &ours()), Meaning::Other);
        assert_eq!(meaning("example.com/x", "0000:65:00.01", &ours()), Meaning::Other);
    }

    #[test]
    fn numbers_of_other_vendors_mean_nothing() {
        for (resource, id) in [
            ("amd.com/gpu", "0"),
            ("amd.com/gpu", "0000:03:00.0"),
            ("gpu.intel.com/i915", "card0-1"),
            ("smarter-devices/fuse", "1"),
            ("nvidia.com/GA102GL_A10", "12"),
            ("nvidia.com/gpumem", "3"),
            ("rdma/hca", "nvidia0"),
        ] {
            assert_eq!(meaning(resource, id, &ours()), Meaning::Other, "{resource} {id}");
        }
    }

    #[test]
    fn what_nvidia_calls_a_gpu_and_cannot_be_identified_is_unclear() {
        for id in ["tegra", "gpu-slot-a", "", "-1"] {
            assert_eq!(gpu(id), Meaning::Unclear, "{id}");
        }
        assert_eq!(meaning("nvidia.com/mig-1g.5gb", "0:1", &ours()), Meaning::Unclear);
    }

    proptest! {
        #[test]
        fn any_text_has_a_meaning(resource in ".{0,40}", id in "\\PC{0,63}") {
            let _ = meaning(&resource, &id, &ours());
            let _ = meaning("nvidia.com/gpu", &id, &ours());
        }

        #[test]
        fn a_uuid_is_found_whatever_stands_around_it(
            before in "([a-z0-9]{0,6}[-:/_.])?", after in "([-:/_.][a-z0-9]{0,6})?",
        ) {
            let id = format!("{before}{B}{after}");
            prop_assert_eq!(meaning("example.com/x", &id, &ours()), Meaning::Ours(vec![1]));
        }
    }
}
