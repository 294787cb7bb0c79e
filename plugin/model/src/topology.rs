//! How near the GPUs of a node are to each other. Pure; NVML is asked in `nvml_near`.

use crate::gpu::Gpu;

/// How near two GPUs are. Later is nearer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// Nobody knows.
    #[default]
    Unknown,
    /// Over the interconnect between NUMA nodes.
    System,
    /// On one NUMA node.
    Node,
    /// Below one host bridge.
    HostBridge,
    /// Behind the same PCIe switches, several of them.
    Switches,
    /// Behind one PCIe switch.
    Switch,
    /// On one board, or instances of one GPU.
    Board,
    /// By so many NVLinks, directly or through NVSwitches.
    NvLink(u32),
}

impl Nearness {
    /// For sums over the pairs of a set. The steps are those of NVIDIA's go-gpuallocator
    /// (`gpuallocator/device.go`): an NVLink outweighs every PCIe path, and several links one.
    pub fn weight(self) -> u32 {
        match self {
            Nearness::Unknown => 0,
            Nearness::System => 10,
            Nearness::Node => 20,
            Nearness::HostBridge => 30,
            Nearness::Switches => 40,
            Nearness::Switch => 50,
            Nearness::Board => 60,
            Nearness::NvLink(links) => 100 * links.clamp(1, 1000),
        }
    }
}

/// The nearness of each pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Sorted.
    uuids: Vec<String>,
    /// Row by row, in the order of `uuids`.
    pairs: Vec<Nearness>,
}

impl Topology {
    /// With what `pair` says of each two GPUs; what it does not know, NUMA nodes tell.
    pub fn of(gpus: &[Gpu], mut pair: impl FnMut(&Gpu, &Gpu) -> Nearness) -> Self {
        let mut sorted: Vec<&Gpu> = gpus.iter().collect();
        sorted.sort_by(|a, b| a.uuid.cmp(&b.uuid));
        let mut topology = Topology {
            uuids: sorted.iter().map(|gpu| gpu.uuid.clone()).collect(),
            pairs: vec![Nearness::Unknown; sorted.len() * sorted.len()],
        };
        for (i, a) in sorted.iter().enumerate() {
            for (j, b) in sorted.iter().enumerate().skip(i + 1) {
                let nearness = match pair(a, b) {
                    Nearness::Unknown => by_numa(a, b),
                    known => known,
                };
                topology.pairs[i * sorted.len() + j] = nearness;
                topology.pairs[j * sorted.len() + i] = nearness;
            }
        }
        topology
    }

    /// With nothing but NUMA nodes.
    pub fn by_numa(gpus: &[Gpu]) -> Self {
        Self::of(gpus, |_, _| Nearness::Unknown)
    }

    pub fn uuids(&self) -> &[String] {
        &self.uuids
    }

    /// How near two are; nothing is known of a GPU that it does not have, or of one and itself.
    pub fn nearness(&self, a: &str, b: &str) -> Nearness {
        let place = |uuid: &str| self.uuids.binary_search_by(|known| known.as_str().cmp(uuid)).ok();
        match (place(a), place(b)) {
            (Some(a), Some(b)) => self.pairs[a * self.uuids.len() + b],
            _ => Nearness::Unknown,
        }
    }
}

fn by_numa(a: &Gpu, b: &Gpu) -> Nearness {
    match (a.numa_node, b.numa_node) {
        (Some(a), Some(b)) if a == b => Nearness::Node,
        (Some(_), Some(_)) => Nearness::System,
        _ => Nearness::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str, numa_node: Option<u32>) -> Gpu {
        Gpu { numa_node, ..Gpu::example(uuid, 0) }
    }

    #[test]
    fn each_step_is_nearer_and_weighs_more() {
        let steps = [
            Nearness::Unknown,
            Nearness::System,
            Nearness::Node,
            Nearness::HostBridge,
            Nearness::Switches,
            Nearness::Switch,
            Nearness::Board,
            Nearness::NvLink(1),
            Nearness::NvLink(4),
        ];
        assert!(steps.windows(2).all(|w| w[0] < w[1] && w[0].weight() < w[1].weight()));
    }

    #[test]
    fn numa_nodes_tell_what_the_driver_does_not() {
        let gpus = [gpu("c", Some(1)), gpu("a", Some(0)), gpu("b", Some(0)), gpu("d", None)];
        let topology = Topology::of(&gpus, |a, b| {
            if a.uuid == "a" && b.uuid == "c" { Nearness::NvLink(2) } else { Nearness::Unknown }
        });
        assert_eq!(topology.nearness("a", "b"), Nearness::Node);
        assert_eq!(topology.nearness("c", "a"), Nearness::NvLink(2));
        assert_eq!(topology.nearness("b", "c"), Nearness::System);
        assert_eq!(topology.nearness("d", "a"), Nearness::Unknown);
        assert_eq!(topology.nearness("z", "a"), Nearness::Unknown);
        assert_eq!(topology.nearness("a", "a"), Nearness::Unknown);
    }
}
