//! `[resource]`, `[gpus]`, `[share]`, `[[layout]]` and `[dra]`: what is shared, and what a share is.

use tessera_model::replica::MAX_PER_GPU;
use tessera_model::sharing::{Compute, Placement, Split};

use crate::form::{
    Amount, auto, boolean, bytes, cores, given, part_of_memory, whole, whole_mib, word,
};
use crate::grammar::{any_name, gpu_name, resource_name};
use crate::table::{list, table, tables};
use crate::{MIB, NoExecute, SoldByOthers};

table! {
    pub struct Resource {
        /// Its name in `resources.limits`. An earlier one is served as long as a container holds some of it.
        name: String = "tessera.dev/gpu".into(),
            resource_name("`domain/name`, an extended resource's name");
    }
}

table! {
    pub struct Gpus {
        /// GPUs that are shared. A product name may have `*`. A GPU in MIG mode means all its instances; `0:1`
        /// is instance 1 of GPU 0.
        include: Vec<String> = vec!["*".into()],
            list(any_name(), "list of UUIDs, NVML indexes, PCI addresses, product names", None);
        /// GPUs that are not shared, although `gpus.include` has them. Running containers on such a GPU go on.
        exclude: Vec<String> = Vec::new(), list(any_name(), "list, as `gpus.include`", None);
        /// Memory of each GPU that is not sold. Where the driver keeps more than 384 MiB for itself (551 MiB of
        /// an H100), it is that and 128 MiB.
        reserve_bytes as "reserve": u64 = 512 * MIB, bytes(0, "");
        /// Memory charged for each CUDA context; less than a replica's memory. `auto` is a formula (174 MiB on
        /// an L4, 462 MiB on an H100), or 512 MiB where NVML does not tell.
        /// [Observed overhead](internals/plugin.md#memory-that-no-hook-sees) covers the difference.
        context_overhead_bytes as "context_overhead": Option<u64> = None, auto(bytes(0, "")), NewPods;
        /// A container that holds more than this beyond its charges on a GPU is reported: a program may bypass
        /// the shim. Nothing is stopped.
        audit_slack_bytes as "audit_slack": u64 = 1024 * MIB, bytes(1, NO_SLACK);
        /// A GPU that another device plugin of this node sells too: `refuse` gives out no more of it, `warn`
        /// sells it and warns, `allow` does not check.
        sold_by_others: SoldByOthers = SoldByOthers::Refuse, word();
    }
}

const NO_SLACK: &str = "would flag every container; use what your applications may take beyond \
                        gpus.context_overhead, 1Gi for instance";

/// What is wrong with a memory of 0.
pub(super) const NO_MEMORY: &str = "is not more than 0: not one CUDA context would fit";

table! {
    pub struct Share {
        /// Replicas of each GPU. With fewer, the highest ones are retired; with more, new ones appear as far as
        /// there is room.
        replicas: u32 = 4, whole(1..=MAX_PER_GPU);
        /// Memory of one replica, more than `gpus.context_overhead`. `auto` divides what the reserve leaves. A
        /// container with several of a GPU gets their sum.
        memory_bytes as "memory": Option<u64> = None, auto(bytes(1, NO_MEMORY)), NewPods;
        /// Compute of one replica: a part of the GPU's time, at most 100% together. `auto` divides evenly.
        cores_millis as "cores": Option<u32> = None, auto(cores()), NewPods;
        /// What that part means: `burst` is a weight (idle time is anybody's), `strict` also a cap, `none` no
        /// limit.
        compute: Compute = Compute::Burst, word(), NewPods;
        /// Which GPU is preferred: the fullest with room, so that whole GPUs stay free, or the emptiest.
        placement: Placement = Placement::Packed, word();
        /// Where the replicas of one container lie: `reject`: on one GPU, or it is refused; `spread`: on as few
        /// as have room; `distinct`: each on another GPU, or it is refused, as by
        /// [claims](dra.md#ask-for-a-share).
        split: Split = Split::Reject, word(), NewPods;
    }
}

/// Two layouts as they stand in a file, for `config.toml`.
#[cfg(test)]
pub(crate) const EXAMPLE: &str = r#"[[layout]]
gpus = ["GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28", "0"]
shares = [{ resource = "tessera.dev/gpu-whole" }]

[[layout]]
gpus = ["NVIDIA A100*"]
shares = [
  { resource = "tessera.dev/gpu-large", count = 1, memory = "50%", cores = "50%" },
  { resource = "tessera.dev/gpu-small", count = 2, memory = "25%", cores = "25%",
    compute = "strict", placement = "distributed", split = "spread" },
]
"#;

const NO_GPUS: &str = "must name GPUs: UUIDs, indexes, or product names such as \"NVIDIA A100*\"";
const NO_SHARES: &str = "must list at least one { resource = \"tessera.dev/gpu-large\", count = 1, \
                         memory = \"50%\", cores = \"50%\" }; use gpus.exclude for a GPU that is \
                         not to be shared";

table! {
    pub struct Layout {
        /// GPUs that are divided so. The first layout that names a GPU applies to it, `[share]` to all others.
        gpus: Vec<String> = Vec::new(), list(gpu_name(),
            "list, as `gpus.include`", Some(NO_GPUS)), AtOnce, required NO_GPUS;
        /// The shares of each of these GPUs; each resource appears once.
        shares: Vec<LayoutShare> = Vec::new(), tables(Some(NO_SHARES)), AtOnce, required NO_SHARES;
    }
}

table! {
    /// Equal replicas of each GPU of a layout.
    pub struct LayoutShare {
        /// What pods ask for; once in a layout.
        resource: String = String::new(),
            resource_name("`domain/name`"), AtOnce,
            required "is missing: the name that pods ask for";
        /// Number of replicas on each GPU.
        count: u32 = 1, whole(1..=MAX_PER_GPU);
        /// Memory of one replica: bytes, or a part of what the reserve leaves. `auto` divides what the other
        /// shares leave.
        memory: Amount = Amount::Auto, part_of_memory(NO_MEMORY), NewPods;
        /// Compute of one replica: a part of the GPU's time, rounded down to 0.1%. `auto` divides what the
        /// other shares leave.
        cores_millis as "cores": Option<u32> = None, auto(cores()), NewPods;
        /// As `share.compute`, which it is where left out.
        compute: Option<Compute> = None, given(word()), NewPods;
        /// As `share.placement`, likewise; the same wherever the resource is sold.
        placement: Option<Placement> = None, given(word());
        /// As `share.split`, likewise; the same wherever the resource is sold.
        split: Option<Split> = None, given(word()), NewPods;
    }
}

/// What is wrong with a step of 0.
const NO_STEP: &str = "must be at least 1Mi; 64Mi is the default";

table! {
    pub struct Dra {
        /// Whether this node has a DRA driver, `gpu.tessera.dev`, beside the device plugin.
        enabled: bool = false, boolean(), Restart;
        /// GPUs that the DRA driver sells and the device plugin does not. No layout may name one of them. One
        /// that moves is withdrawn at once, and sold by the other when its last container has ended.
        gpus: Vec<String> = vec!["*".into()], list(gpu_name(), "list, as `gpus.include`", None);
        /// Memory is claimed in multiples of this, rounded up. Not more than one replica's share of a GPU.
        memory_step_bytes as "memory_step": u64 = 64 * MIB, whole_mib(MIB, NO_STEP);
        /// What makes Kubernetes evict pods from a GPU. Else a GPU that is not sold gets no new pods, and those
        /// that it has go on.
        no_execute: Vec<NoExecute> = Vec::new(), list(word(), "list of `unhealthy`, `cordoned`", None);
    }
}
