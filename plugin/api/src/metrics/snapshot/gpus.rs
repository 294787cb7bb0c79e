//! Series of GPUs.

use std::fmt;

use prometheus_client::encoding::EncodeGaugeValue;
use tessera_arbiter::policy::Cause;
use tessera_view::status::{Gpu, GpuState, Health, Replica};

use super::writer::{Series, Writer};
use super::{Figure, Gpus, Snapshot};
use crate::metrics::families as f;

/// Index and UUID.
fn labels<'s>(gpu: &'s Gpu, known: &'s Gpus<'_>) -> [&'s str; 2] {
    [&known[gpu.uuid.as_str()].index, &gpu.uuid]
}

pub(super) fn write_gpus(
    out: &mut Writer<'_>,
    (gpus, silent): (&[Gpu], &[Gpu]),
    known: &Gpus<'_>,
    snapshot: &Snapshot,
) -> fmt::Result {
    out.family(&f::GPU_INFO, |series| {
        gpus.iter().try_for_each(|gpu| {
            let [index, uuid] = labels(gpu, known);
            let numa = gpu.numa_node.map_or_else(String::new, |node| node.to_string());
            series.info(&[index, uuid, &gpu.name, &gpu.pci_bus_id, &numa])
        })
    })?;
    let bytes: [Figure<Gpu, u64>; 5] = [
        (&f::GPU_MEMORY_TOTAL, |gpu| gpu.memory_total_bytes),
        (&f::GPU_MEMORY_USED, |gpu| gpu.memory_used_bytes),
        (&f::GPU_MEMORY_RESERVED, |gpu| gpu.memory_reserve_bytes),
        (&f::GPU_MEMORY_SOLD, |gpu| gpu.memory_limits_bytes),
        (&f::GPU_MEMORY_CHARGED, |gpu| gpu.memory_charged_bytes.min(gpu.memory_total_bytes)),
    ];
    write_figures(out, gpus.iter(), known, &bytes)?;
    write_outside(out, gpus, known, snapshot)?;
    out.family(&f::GPU_CONTEXT, |series| {
        gpus.iter().try_for_each(|gpu| {
            let [index, uuid] = labels(gpu, known);
            let source = gpu.context_overhead_source.as_str();
            series.gauge(&[index, uuid, source], gpu.context_overhead_bytes)
        })
    })?;
    let cores: Figure<Gpu, f64> = (&f::GPU_CORES_SOLD, |gpu| f64::from(gpu.cores_millis) / 1000.0);
    write_figures(out, gpus.iter(), known, &[cores])?;
    out.family(&f::GPU_HEALTH, |series| {
        gpus.iter().try_for_each(|gpu| {
            let [index, uuid] = labels(gpu, known);
            write_state(series, [index, uuid], gpu.state)
        })?;
        silent
            .iter()
            .try_for_each(|gpu| write_state(series, [&gpu.index.to_string(), &gpu.uuid], gpu.state))
    })?;
    out.family(&f::GPU_SOLD_HERE, |series| {
        gpus.iter().try_for_each(|gpu| {
            let is_sold = gpu.health == Health::Healthy && gpu.cordon.is_empty();
            series.gauge(&labels(gpu, known), u64::from(is_sold))
        })?;
        let mut silent = silent.iter();
        silent.try_for_each(|gpu| series.gauge(&[&gpu.index.to_string(), &gpu.uuid], 0u64))
    })?;
    let cordoned: Figure<Gpu, u64> = (&f::GPU_CORDONED, |gpu| u64::from(!gpu.cordon.is_empty()));
    write_figures(out, gpus.iter(), known, &[cordoned])
}

fn write_state(series: &mut Series<'_, '_>, of: [&str; 2], now: GpuState) -> fmt::Result {
    let states = [
        ("healthy", GpuState::Healthy),
        ("suspect", GpuState::Suspect),
        ("unhealthy", GpuState::Unhealthy),
        ("recovering", GpuState::Recovering),
    ];
    states
        .into_iter()
        .try_for_each(|(name, state)| series.gauge(&[of[0], of[1], name], u64::from(now == state)))
}

/// What uses GPUs beside containers with shares. Where nobody has looked there is no series: 0 would be a guess.
fn write_outside(
    out: &mut Writer<'_>,
    gpus: &[Gpu],
    known: &Gpus<'_>,
    snapshot: &Snapshot,
) -> fmt::Result {
    let outside = |gpu: &Gpu| snapshot.outside.get(&gpu.uuid);
    out.family(&f::GPU_MEMORY_OUTSIDE, |series| {
        let mut seen = gpus.iter().filter_map(|gpu| Some((gpu, outside(gpu)?)));
        seen.try_for_each(|(gpu, outside)| series.gauge(&labels(gpu, known), outside.bytes))
    })?;
    out.family(&f::GPU_STRANGERS, |series| {
        let mut seen = gpus.iter().filter_map(|gpu| Some((gpu, outside(gpu)?.strangers?)));
        seen.try_for_each(|(gpu, strangers)| series.gauge(&labels(gpu, known), strangers))
    })
}

/// Gauges with one value for each GPU.
fn write_figures<'g, V: EncodeGaugeValue>(
    out: &mut Writer<'_>,
    gpus: impl Iterator<Item = &'g Gpu> + Clone,
    known: &Gpus<'_>,
    figures: &[Figure<Gpu, V>],
) -> fmt::Result {
    figures.iter().try_for_each(|(family, figure)| {
        out.family(family, |series| {
            gpus.clone().try_for_each(|gpu| series.gauge(&labels(gpu, known), figure(gpu)))
        })
    })
}

pub(super) fn write_replicas(out: &mut Writer<'_>, gpus: &[Gpu], known: &Gpus<'_>) -> fmt::Result {
    let state = |replica: &Replica| match (replica.allocation_id.is_empty(), replica.health) {
        (false, _) => "held",
        (true, Health::Healthy) => "free",
        (true, _) => "unhealthy",
    };
    out.family(&f::GPU_REPLICAS, |series| {
        gpus.iter().try_for_each(|gpu| {
            let mut resources: Vec<&str> =
                gpu.replicas.iter().map(|replica| replica.resource_name.as_str()).collect();
            resources.sort_unstable();
            resources.dedup();
            resources.into_iter().try_for_each(|resource| {
                ["free", "held", "unhealthy"].into_iter().try_for_each(|name| {
                    let of_it = gpu.replicas.iter().filter(|replica| {
                        replica.resource_name == resource && state(replica) == name
                    });
                    let [index, uuid] = labels(gpu, known);
                    series.gauge(&[index, uuid, resource, name], of_it.count() as u64)
                })
            })
        })
    })
}

/// Of GPUs that some container has; of the others the arbiter knows nothing.
pub(super) fn write_leases(
    out: &mut Writer<'_>,
    gpus: &[Gpu],
    known: &Gpus<'_>,
    snapshot: &Snapshot,
) -> fmt::Result {
    let arbiter = snapshot.survey.arbiter.as_ref();
    let arbitrated = arbiter.map(|view| view.gpus.as_slice()).unwrap_or_default();
    let shared = gpus.iter().filter(|gpu| arbitrated.iter().any(|share| share.uuid == gpu.uuid));
    let figures: [Figure<Gpu, f64>; 3] = [
        (&f::GPU_LEASE_HELD, |gpu| f64::from(u8::from(!gpu.lease_holder.is_empty()))),
        (&f::GPU_LEASE_WAITING, |gpu| f64::from(gpu.lease_waiting)),
        (&f::GPU_LEASE_QUANTUM, |gpu| gpu.lease_quantum_us as f64 / 1e6),
    ];
    write_figures(out, shared, known, &figures)?;
    let Some(view) = arbiter else { return Ok(()) };
    out.family(&f::GPU_IDLE_WANTED, |series| {
        for gpu in gpus {
            let [index, uuid] = labels(gpu, known);
            let Some(idle) = view.idle.get(uuid) else { continue };
            for (cause, ns) in Cause::ALL.into_iter().zip(idle) {
                series.counter(&[index, uuid, cause.name()], *ns as f64 / 1e9)?;
            }
        }
        Ok(())
    })
}
