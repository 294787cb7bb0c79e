//! `[resource]`, `[gpus]`, `[share]` and `[compute]`.

use super::super::choices;
use super::Takes::{AtOnce, NewPods};
use super::{Key, one, toml};

pub(super) const KEYS: &[Key] = &[
    one(
        "resource.name",
        "`domain/name`, an extended resource's name",
        AtOnce,
        |c| toml::string(&c.resource.name),
        "What pods ask for in `resources.limits`. A name that is no longer sold stays served while a \
         container holds some of it.",
    ),
    one(
        "gpus.include",
        "list of UUIDs, NVML indexes, product names; `*` stands for anything",
        AtOnce,
        |c| toml::strings(&c.gpus.include),
        "Which GPUs are shared. Of a GPU in MIG mode each means all its instances, and `0:1` is \
         instance 1 of GPU 0.",
    ),
    one(
        "gpus.exclude",
        "as `gpus.include`",
        AtOnce,
        |c| toml::strings(&c.gpus.exclude),
        "Which are not; wins over `gpus.include`. What runs on a GPU that is left out goes on.",
    ),
    one(
        "gpus.reserve",
        "quantity, bytes",
        AtOnce,
        |c| toml::bytes(c.gpus.reserve_bytes),
        "Memory of each GPU that no replica gets: the driver itself needs some.",
    ),
    one(
        "gpus.context_overhead",
        "`auto`, or quantity, bytes; less than a replica's memory",
        NewPods,
        |c| toml::auto(c.gpus.context_overhead_bytes, toml::bytes),
        "Memory charged for each CUDA context when it is made. `auto` follows the GPU: what a bare \
         context was seen to take with its driver, and until one was seen, 1 KiB for each thread that it \
         can have resident and 1.5 MiB for each multiprocessor (an L4 174 MiB, an H100 462); 512 MiB \
         where NVML does not tell. What processes hold beyond their charges is observed \
         through NVML and taken from their quota too.",
    ),
    one(
        "gpus.audit_slack",
        "quantity, bytes; more than 0",
        AtOnce,
        |c| toml::bytes(c.gpus.audit_slack_bytes),
        "A container that holds more than this beyond its charges on a GPU is flagged. Nothing is \
         stopped.",
    ),
    one(
        "gpus.sold_by_others",
        "`refuse`, `warn`, `allow`",
        AtOnce,
        |c| toml::word(&c.gpus.sold_by_others, &choices::SOLD_BY_OTHERS),
        "A GPU that another device plugin of this node sells too: nothing more of it is given out \
         while that is so, or it is sold all the same and `status` warns, or nobody looks.",
    ),
    one(
        "share.replicas",
        "whole number from 1 to 256",
        AtOnce,
        |c| c.share.replicas.to_string(),
        "Replicas of each GPU: the unit that kubelet hands out. Fewer: the highest ones are retired, \
         and listed Unhealthy while they are held. More: they are there at once, as far as there is \
         room beside what runs.",
    ),
    one(
        "share.memory",
        "`auto`, or quantity, bytes; more than `gpus.context_overhead`",
        NewPods,
        |c| toml::auto(c.share.memory_bytes, toml::bytes),
        "Memory of one replica. `auto` divides what the reserve leaves evenly. A container with \
         several replicas of one GPU gets their sum.",
    ),
    one(
        "share.cores",
        "`auto`, or quantity, GPUs, more than 0 and at most 1; times `share.replicas` at most 1",
        NewPods,
        |c| toml::auto(c.share.cores_millis, toml::millis),
        "Compute of one replica: `250m` is a quarter of a GPU. `auto` divides evenly.",
    ),
    one(
        "share.compute",
        "`burst`, `strict`, `none`",
        NewPods,
        |c| toml::word(&c.share.compute, &choices::COMPUTE),
        "What that share means: a weight (idle time goes to whoever wants it), a cap, or no limit.",
    ),
    one(
        "share.placement",
        "`packed`, `distributed`",
        AtOnce,
        |c| toml::word(&c.share.placement, &choices::PLACEMENT),
        "Which GPU is preferred: the fullest that has room, or the emptiest.",
    ),
    one(
        "share.split",
        "`reject`, `spread`",
        NewPods,
        |c| toml::word(&c.share.split, &choices::SPLIT),
        "A container whose replicas lie on several GPUs is refused, or sees them all.",
    ),
];

pub(super) const COMPUTE: &[Key] = &[
    one(
        "compute.quantum",
        "time from 1ms to 1s",
        AtOnce,
        |c| toml::time(c.compute.quantum),
        "How long a tenant's lease of the GPU lasts while others wait. [compute.md](compute.md) has \
         the reasons for this whole section.",
    ),
    one(
        "compute.quantum_min",
        "time, at most `compute.quantum`",
        AtOnce,
        |c| toml::time(c.compute.quantum_min),
        "Shortest lease, where many wait.",
    ),
    one(
        "compute.quantum_max",
        "time, at least `compute.quantum`",
        AtOnce,
        |c| toml::time(c.compute.quantum_max),
        "Longest lease, where draining takes long.",
    ),
    one(
        "compute.window",
        "whole number from 2 to 65536",
        AtOnce,
        |c| c.compute.window.to_string(),
        "Operations (kernels, graphs) that a tenant may have in flight while its lease can end.",
    ),
    one(
        "compute.window_time",
        "time from 1ms to 1s",
        AtOnce,
        |c| toml::time(c.compute.window_time),
        "Work, as predicted, that a tenant may have in flight then. Smaller: leases end more precisely. \
         Larger: the GPU idles less between.",
    ),
    one(
        "compute.credit",
        "time from 1ms to 1s",
        AtOnce,
        |c| toml::time(c.compute.credit),
        "Most GPU time that is owed to a tenant that was idle and begins to want.",
    ),
    one(
        "compute.drain_min",
        "time, at most `compute.drain_max`",
        AtOnce,
        |c| toml::time(c.compute.drain_min),
        "How long a tenant whose lease has ended may take to drain, at least, before the next is let \
         in beside it.",
    ),
    one(
        "compute.drain_max",
        "time, at least `compute.drain_min`",
        AtOnce,
        |c| toml::time(c.compute.drain_max),
        "The same, at most (three times its longest drain lately, within these).",
    ),
];
