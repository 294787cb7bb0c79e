//! Why a front end is refused. The message reaches a pod's events, so it says what to do.

use tessera_model::allocation_id::AllocationId;
use tessera_model::quantity::{format_bytes, format_compared};
use tessera_region::layout;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("no replicas were asked for")]
    Empty,
    #[error(
        "unknown replica {0}: no GPU of this node has it; was the GPU replaced, or does another \
         plugin serve this resource name?"
    )]
    Unknown(String),
    #[error(
        "replica {id} of {resource} is retired: the configuration gives that GPU {replicas} of them \
         now; delete the pod, so that it is scheduled again"
    )]
    Retired { id: String, resource: String, replicas: u32 },
    #[error("GPU {uuid} is unhealthy ({reason}); the pod can run when another GPU has room")]
    Dead { uuid: String, reason: String },
    #[error("GPU {uuid} is {reason}; the pod can run when another GPU has room")]
    Cordoned { uuid: String, reason: String },
    #[error(
        "GPU {uuid} has no room for this allocation beside the limits of those that live there: \
         kubelet had not yet heard of a change; the pod can run when it is scheduled again"
    )]
    NoRoom { uuid: String },
    /// The capacity rule, for a container that starts with what others were given meanwhile.
    #[error(
        "the limits of others on GPU {uuid} have taken the room of this container since it was allocated: it starts \
         when one of them ends, or is lowered (`tessera status` lists them, `tessera quota set` changes one)"
    )]
    RoomTaken { uuid: String },
    #[error(
        "the {count} replicas of {resource} lie on {gpus} GPUs and share.split = \"reject\": no \
         single GPU had that many free; ask for fewer, or set share.split = \"spread\" (or split \
         in the resource's [[layout]]) if the program can use several GPUs"
    )]
    Split { resource: String, count: usize, gpus: usize },
    #[error(
        "the {count} replicas of {resource} lie on {gpus} of this node's GPUs and share.split = \"distinct\": there were \
         no {count} GPUs with one free; ask for fewer, or set share.split = \"spread\" (or split in the \
         resource's [[layout]]) if several shares of one GPU will do"
    )]
    NotDistinct { resource: String, count: usize, gpus: usize },
    #[error("{0} GPUs in one container; at most {max} are possible", max = layout::MAX_GPUS)]
    TooManyGpus(usize),
    #[error("allocation {0} has ended meanwhile; the pod can run when it is scheduled again")]
    Ended(AllocationId),
    #[error(
        "GPU {0} is not shared on this node; was it replaced, or does the configuration leave it out \
         (gpus.include, gpus.exclude)?"
    )]
    UnknownGpu(String),
    #[error(
        "{} of GPU {uuid} is not more than one CUDA context takes there ({}): nothing could run; ask for \
         more memory",
        format_compared(*.asked_bytes, *.context_bytes)[0],
        format_compared(*.asked_bytes, *.context_bytes)[1]
    )]
    TooSmall { uuid: String, asked_bytes: u64, context_bytes: u64 },
    #[error(
        "{} % of the time of GPU {uuid} is no share of a GPU: ask for 0.1 to 100 percent",
        f64::from(*.cores_millis) / 10.0
    )]
    BadCores { uuid: String, cores_millis: u32 },
    #[error(
        "GPU {uuid} has {} to share, of which others hold {}{}: {} do not fit; the pod can run when \
         something of it ends, or on another GPU",
        format_bytes(*.sellable_bytes),
        format_bytes(*.held_bytes),
        by_quota(*.grown_bytes),
        format_bytes(*.asked_bytes)
    )]
    MemoryOversold {
        uuid: String,
        asked_bytes: u64,
        held_bytes: u64,
        grown_bytes: u64,
        sellable_bytes: u64,
    },
    #[error(
        "{} % of the time of GPU {uuid} are allocated to others: {} % do not fit; the pod can run when \
         something of it ends, or on another GPU",
        f64::from(*.held_millis) / 10.0,
        f64::from(*.asked_millis) / 10.0
    )]
    CoresOversold { uuid: String, asked_millis: u32, held_millis: u32 },
    #[error(
        "GPU {uuid} is sold by {seller} on this node, as the configuration says (dra.gpus); the pod can \
         run when it asks there"
    )]
    OtherFrontEnd { uuid: String, seller: &'static str },
    #[error(
        "GPU {uuid} is moving from {from} to another front end, and {from} still has {live} of it \
         allocated; the pod can run when these have ended"
    )]
    Moving { uuid: String, from: &'static str, live: String },
}

/// What of the memory that others hold was not allocated to them.
fn by_quota(grown_bytes: u64) -> String {
    match grown_bytes {
        0 => String::new(),
        bytes => {
            format!(
                " ({} of it by `tessera quota set`, which `tessera quota reset` takes back)",
                format_bytes(bytes)
            )
        }
    }
}
