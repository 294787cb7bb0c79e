//! Series of containers.

use std::fmt;

use tessera_view::status::Allocation;
use tessera_view::tenant::Use;

use super::writer::Writer;
use super::{Figure, Gpus, Snapshot};
use crate::metrics::families as f;
use crate::metrics::families::Family;
use crate::metrics::running_totals::Totals;

/// A container's labels, and where its allocation stands in the survey.
struct Container<'s> {
    allocation: &'s Allocation,
    totals: Totals,
    /// Its usage page could be read.
    read: bool,
    name: [&'s str; 3],
    /// Index and UUID of its GPU; empty where it has several.
    gpu: [&'s str; 2],
}

impl Container<'_> {
    fn labels(&self) -> [&str; 6] {
        self.labels_on(self.gpu)
    }

    fn labels_on<'l>(&'l self, [gpu, uuid]: [&'l str; 2]) -> [&'l str; 6] {
        let [namespace, pod, container] = self.name;
        [namespace, pod, container, gpu, uuid, &self.allocation.id]
    }
}

impl Snapshot {
    /// Allocations of containers, by the names that kubelet gave. A container may have several, also of one GPU; and
    /// where a pod has been replaced by one of the same name, the older allocation may still be there for a while.
    fn containers<'s>(&'s self, known: &'s Gpus<'s>) -> Vec<Container<'s>> {
        let index = |uuid: &str| known.get(uuid).map_or("", |known| known.index.as_str());
        let mut containers: Vec<Container<'s>> = self
            .survey
            .status
            .allocations
            .iter()
            .zip(&self.totals)
            .filter_map(|(allocation, totals)| {
                let holder = allocation.holder.as_ref()?;
                let gpu = match allocation.gpus.as_slice() {
                    [one] => [index(&one.gpu_uuid), one.gpu_uuid.as_str()],
                    _ => ["", ""],
                };
                Some(Container {
                    allocation,
                    totals: *totals,
                    read: !self.survey.unread.contains(&allocation.id),
                    name: [&holder.namespace, &holder.pod, &holder.container],
                    gpu,
                })
            })
            .collect();
        containers.sort_by(|a, b| a.labels().cmp(&b.labels()));
        containers
    }

    pub(super) fn write_containers(&self, out: &mut Writer<'_>, known: &Gpus<'_>) -> fmt::Result {
        let containers = self.containers(known);
        out.family(&f::CONTAINER_INFO, |series| {
            containers.iter().try_for_each(|container| {
                let allocation = container.allocation;
                let policy = allocation.gpus.first().map_or("", |used| used.policy.name());
                let claim = allocation.claim.as_ref().map_or("", |claim| claim.name.as_str());
                let resource = allocation.resource_name.as_str();
                let more = [resource, policy, claim];
                series.info(&[&container.labels()[..], &more].concat())
            })
        })?;
        write_memory(out, &containers, known)?;
        write_container_totals(out, &containers, known)
    }
}

fn write_memory(
    out: &mut Writer<'_>,
    containers: &[Container<'_>],
    known: &Gpus<'_>,
) -> fmt::Result {
    /// Bytes, or `None` where they are not known now.
    type Bytes = fn(&Use, bool) -> Option<u64>;
    let families: [(&Family, Bytes); 5] = [
        (&f::CONTAINER_MEMORY_USED, |used, read| read.then_some(used.memory_used_bytes)),
        (&f::CONTAINER_MEMORY_LIMIT, |used, _| Some(used.memory_limit_bytes)),
        (&f::CONTAINER_MEMORY_PEAK, |used, read| read.then_some(used.memory_peak_bytes)),
        (&f::CONTAINER_MEMORY_OVERHEAD, |used, _| Some(used.memory_overhead_bytes)),
        (&f::CONTAINER_MEMORY_NVML, |used, _| used.memory_nvml_bytes),
    ];
    for (family, bytes) in families {
        out.family(family, |series| {
            each_gpu(containers, known, |container, used, labels| {
                match bytes(used, container.read) {
                    // A page is its tenant's word: nobody holds more than there is.
                    Some(bytes) => {
                        let gpu = known.get(used.gpu_uuid.as_str());
                        series.gauge(labels, gpu.map_or(bytes, |gpu| bytes.min(gpu.memory_bytes)))
                    }
                    None => Ok(()),
                }
            })
        })?;
    }
    out.family(&f::CONTAINER_CORES, |series| {
        each_gpu(containers, known, |_, used, labels| {
            series.gauge(labels, f64::from(used.cores_millis) / 1000.0)
        })
    })
}

fn write_container_totals(
    out: &mut Writer<'_>,
    containers: &[Container<'_>],
    known: &Gpus<'_>,
) -> fmt::Result {
    let divided = |container: &Container<'_>| container.allocation.compute.is_some();
    let seconds = |us: u64| us as f64 / 1e6;
    out.family(&f::CONTAINER_GPU_TIME, |series| {
        // All at once, so each GPU had the same.
        each_gpu(containers, known, |container, _, labels| match divided(container) {
            true => series.counter(labels, seconds(container.totals.leased_us)),
            false => Ok(()),
        })
    })?;
    out.family(&f::CONTAINER_GPU_USED, |series| {
        each_gpu(containers, known, |container, _, labels| {
            match container.allocation.compute.as_ref().and_then(|compute| compute.used_10s_millis)
            {
                Some(_) => series.counter(labels, seconds(container.totals.used_us)),
                None => Ok(()),
            }
        })
    })?;
    out.family(&f::CONTAINER_GATE_WAIT, |series| {
        let mut waited = containers.iter().filter(|one| divided(one));
        waited.try_for_each(|one| series.counter(&one.labels(), seconds(one.totals.waited_us)))
    })?;
    out.family(&f::CONTAINER_GATE_WAITING, |series| {
        containers.iter().try_for_each(|one| match &one.allocation.compute {
            Some(compute) => series.gauge(&one.labels(), seconds(compute.waiting_us.unwrap_or(0))),
            None => Ok(()),
        })
    })?;
    let counters: [Figure<Totals, u64>; 9] = [
        (&f::CONTAINER_LEASES, |totals| totals.leases),
        (&f::CONTAINER_OVERLAPS, |totals| totals.overlaps),
        (&f::CONTAINER_OUT_OF_MEMORY, |totals| totals.refusals),
        (&f::CONTAINER_DRIVER_REFUSALS, |totals| totals.driver_refusals),
        (&f::CONTAINER_LAUNCHES, |totals| totals.launches),
        (&f::CONTAINER_DELAYED, |totals| totals.gate_waits),
        (&f::CONTAINER_SELF_RATIONED, |totals| totals.gate_timeouts),
        (&f::CONTAINER_TAMPERINGS, |totals| totals.tamperings),
        (&f::CONTAINER_UNACCOUNTED, |totals| totals.unaccounted),
    ];
    for (family, count) in counters {
        out.family(family, |series| {
            containers.iter().try_for_each(|one| series.counter(&one.labels(), count(&one.totals)))
        })?;
    }
    out.family(&f::CONTAINER_IDLE, |series| {
        let mut all = containers.iter();
        all.try_for_each(|one| series.gauge(&one.labels(), one.totals.idle.as_secs_f64()))
    })?;
    out.family(&f::CONTAINER_PROCESSES, |series| {
        let mut read = containers.iter().filter(|one| one.read);
        read.try_for_each(|one| series.gauge(&one.labels(), one.allocation.processes.len() as u64))
    })
}

/// Each container's GPUs, with its labels on each.
fn each_gpu(
    containers: &[Container<'_>],
    known: &Gpus<'_>,
    mut write: impl FnMut(&Container<'_>, &Use, &[&str]) -> fmt::Result,
) -> fmt::Result {
    containers.iter().try_for_each(|container| {
        container.allocation.gpus.iter().try_for_each(|used| {
            let uuid = used.gpu_uuid.as_str();
            let index = known.get(uuid).map_or("", |known| known.index.as_str());
            write(container, used, &container.labels_on([index, uuid]))
        })
    })
}
