//! `[resource]`, `[gpus]` and `[share]`: what is shared, and what one replica is.

use crate::form::{auto, bytes, cores, list, whole, word};
use crate::name;
use crate::report::Checks;
use crate::table::table;
use crate::{MIB, SoldByOthers};
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::replica::MAX_PER_GPU;
use tessera_model::sharing::{Compute, Placement, Split};

table! {
    /// The extended resource.
    pub struct Resource {
        /// What pods ask for in `resources.limits`. A name that is no longer sold stays served while a
        /// container holds some of it.
        name: String = "tessera.dev/gpu".into(),
            name::resource("`domain/name`, an extended resource's name");
    }
}

table! {
    /// Which GPUs are shared, and what is kept back of each.
    pub struct Gpus {
        /// Which GPUs are shared: UUIDs, NVML indexes, or product names, in which `*` stands for anything. Of
        /// a GPU in MIG mode each means all its instances, and `0:1` is instance 1 of GPU 0.
        include: Vec<String> = vec!["*".into()], list(name::any(), "list of UUIDs, NVML indexes, product names");
        /// Which are not, likewise; wins over `gpus.include`. What runs on a GPU that is left out goes on.
        exclude: Vec<String> = Vec::new(), list(name::any(), "list, as `gpus.include`");
        /// Memory of each GPU that no replica gets: the driver itself needs some.
        reserve_bytes as "reserve": u64 = 512 * MIB, bytes(0, "");
        /// Memory charged for each CUDA context when it is made, less than a replica has. `auto` follows the
        /// GPU: what a bare context was seen to take with its driver, and until one was seen, 1 KiB for each
        /// thread that it can have resident and 1.5 MiB for each multiprocessor (an L4 174 MiB, an H100
        /// 462); 512 MiB where NVML does not tell. What processes hold beyond their charges is observed
        /// through NVML and taken from their quota too.
        context_overhead_bytes as "context_overhead": Option<u64> = None, auto(bytes(0, "")), NewPods;
        /// A container that holds more than this beyond its charges on a GPU is flagged in the log, the
        /// history and `tessera status`: something may go past the shim. Nothing is stopped.
        audit_slack_bytes as "audit_slack": u64 = 1024 * MIB, bytes(1, NO_SLACK);
        /// A GPU that another device plugin of this node sells too: nothing more of it is given out while
        /// that is so and running pods go on; or it is sold all the same and `status` warns; or nobody looks.
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
        /// Replicas of each GPU: the unit that kubelet hands out, `<UUID>::<n>`. Fewer: the highest ones are
        /// retired, and listed Unhealthy while they are held. More: they are there at once, as far as there
        /// is room beside what runs.
        replicas: u32 = 4, whole(1..=MAX_PER_GPU);
        /// Memory of one replica, more than `gpus.context_overhead`. `auto` divides what the reserve leaves
        /// evenly. A container with several replicas of one GPU gets their sum.
        memory_bytes as "memory": Option<u64> = None, auto(bytes(1, NO_MEMORY)), NewPods;
        /// Compute of one replica, a part of the GPU's time; times `share.replicas` at most 100%. `auto`
        /// divides evenly.
        cores_millis as "cores": Option<u32> = None, auto(cores()), NewPods;
        /// What that share means: a weight (idle time goes to whoever wants it), a cap, or no limit.
        compute: Compute = Compute::Burst, word(), NewPods;
        /// Which GPU is preferred: the fullest that has room, so that whole GPUs stay free, or the emptiest.
        placement: Placement = Placement::Packed, word();
        /// A container whose replicas lie on several GPUs is refused, or sees them all.
        split: Split = Split::Reject, word(), NewPods;
    }
}

fn check_share(share: &Share, checks: &mut Checks<'_, '_>) {
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
    Some(format!(
        "{} is not more than gpus.context_overhead ({}): not one CUDA context would fit; raise the \
         memory, or lower context_overhead if your GPUs need less",
        format_bytes(memory),
        format_bytes(overhead),
    ))
}
