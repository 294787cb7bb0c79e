//! `[resource]`, `[gpus]` and `[share]`: what is shared, and what one replica is.

use crate::form::{auto, bytes, cores, list, whole, word};
use crate::name;
use crate::parse::Checks;
use crate::table::table;
use crate::{MIB, SoldByOthers};
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_compared;
use tessera_model::replica::MAX_PER_GPU;
use tessera_model::sharing::{Compute, Placement, Split};

table! {
    /// The extended resource that pods ask for.
    pub struct Resource {
        /// Its name in `resources.limits`. An earlier one is served as long as a container holds some of it.
        name: String = "tessera.dev/gpu".into(),
            name::resource("`domain/name`, an extended resource's name");
    }
}

table! {
    /// Which GPUs are shared, and how much of each is reserved.
    pub struct Gpus {
        /// GPUs that are shared. A product name may have `*`. A GPU in MIG mode means all its instances; `0:1`
        /// is instance 1 of GPU 0.
        include: Vec<String> = vec!["*".into()],
            list(name::any(), "list of UUIDs, NVML indexes, PCI addresses, product names");
        /// GPUs that are not shared, although `gpus.include` has them. Running containers on such a GPU go on.
        exclude: Vec<String> = Vec::new(), list(name::any(), "list, as `gpus.include`");
        /// Memory of each GPU that is not sold. Where the driver keeps more than 384 MiB for itself (551 MiB of
        /// an H100), it is that and 128 MiB.
        reserve_bytes as "reserve": u64 = 512 * MIB, bytes(0, "");
        /// Memory charged for each CUDA context; less than a replica's memory. `auto` is what a bare context
        /// took with this GPU and driver, until then a formula (174 MiB on an L4, 462 MiB on an H100), or 512
        /// MiB where NVML does not tell. [Observed overhead](internals/plugin.md#memory-that-no-hook-sees) covers the
        /// difference.
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
    /// What one replica is.
    pub struct Share: check_share {
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

fn check_share(share: &Share, checks: &mut Checks<'_>) {
    if let Some(cores) = share.cores_millis.map(u64::from)
        && cores * u64::from(share.replicas) > 1000
        && checks.are_sound(&["cores", "replicas"])
    {
        let message = format!(
            "{} replicas of {} are more than one GPU; lower cores or replicas",
            share.replicas,
            format_cores(cores),
        );
        checks.problem("cores", &message);
    }
}

/// Why no replica can have so little `memory`, whatever GPUs there are.
pub(super) fn too_little(memory: u64, gpus: &Gpus) -> Option<String> {
    let overhead = gpus.context_overhead_bytes.filter(|overhead| memory <= *overhead)?;
    let [memory, overhead] = format_compared(memory, overhead);
    Some(format!(
        "{memory} is not more than gpus.context_overhead ({overhead}): not one CUDA context would fit; \
         raise the memory, or lower context_overhead if your GPUs need less"
    ))
}
