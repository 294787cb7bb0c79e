//! One look at everything, and the series of it.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Instant;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;
use tessera_kubelet::admin::{
    Allocation, AllocationState, ComputePolicy, Gpu, GpuState, Health, Registration, Replica,
};
use tessera_region::abi;

use super::account::{Accounts, Totals};
use super::families::{self as f, Family};
use super::histogram::Counts;
use super::meters::{Call, Outcome, Reloads};
use super::process::Process;
use crate::admin::{Sources, Survey};
use crate::regions::Region;
use crate::trust;

/// A family, and what it shows of one container or GPU.
type Figure<T, V> = (&'static Family, fn(&T) -> V);

/// What is known of a GPU by its UUID.
struct Known {
    index: String,
    memory_bytes: u64,
}

/// GPUs by UUID.
type Gpus<'s> = HashMap<&'s str, Known>;

/// Everything there is to tell at one moment.
#[derive(Debug)]
pub(super) struct Scene {
    survey: Survey,
    /// Of each allocation, in the survey's order.
    totals: Vec<Totals>,
    ready: bool,
    started_unix_ms: i64,
    calls: Vec<(Call, Timed)>,
    reloads: Option<Reloads>,
    commits: Option<(u64, u64)>,
    findings: Option<[(trust::Kind, u64); trust::Kind::ALL.len()]>,
    /// How many of a container's mounts are amiss, by allocation.
    damaged: HashMap<String, u64>,
    events: Option<[(&'static str, u64); 3]>,
    process: Process,
}

type Timed = Vec<(std::sync::Arc<str>, Outcome, Counts)>;

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
    fn labels(&self) -> [&str; 5] {
        let [namespace, pod, container] = self.name;
        let [gpu, uuid] = self.gpu;
        [namespace, pod, container, gpu, uuid]
    }
}

impl Scene {
    /// Looks at everything, but changes nothing and waits for no tenant. Blocking: asks the driver.
    pub fn look(sources: &Sources, accounts: &mut Accounts) -> Self {
        let survey = sources.survey(&Region::peek);
        let now = Instant::now();
        let node = sources.node();
        let adopted = node.map_or(0, |node| node.adopted_until());
        let allocations = &survey.status.allocations;
        let totals = allocations
            .iter()
            .map(|allocation| {
                let said = !survey.unread.contains(&allocation.id);
                accounts.see(allocation, said, allocation.generation <= adopted, now)
            })
            .collect();
        accounts.keep(allocations);
        let calls = [Call::Allocate, Call::PreStart];
        Scene {
            totals,
            ready: sources.amiss().is_empty(),
            started_unix_ms: sources.started_unix_ms(),
            calls: node.map_or_else(Vec::new, |node| {
                calls.into_iter().map(|call| (call, node.meters().calls(call))).collect()
            }),
            reloads: node.map(|node| node.meters().reloads()),
            commits: node.map(|node| node.commits().counts()),
            findings: node.map(|node| node.trust().counts()),
            damaged: node.map_or_else(HashMap::new, |node| {
                let damages = node.trust().damages().into_iter();
                damages.map(|(id, list)| (id.to_string(), list.len() as u64)).collect()
            }),
            events: node.map(|node| node.trust().events().all()),
            process: Process::read(),
            survey,
        }
    }

    /// As OpenMetrics' text; `None` would be a bug.
    pub fn text(self) -> Option<String> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        encode(&mut text, &registry).ok()?;
        Some(text)
    }

    /// Containers by the names that kubelet gave, each name and GPU once: where a pod has been replaced by
    /// one of the same name, the older allocation may still be there for a while.
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
        containers.sort_by_key(|container| std::cmp::Reverse(container.allocation.generation));
        let mut taken = HashSet::new();
        containers.retain(|container| {
            let uuids = container.allocation.gpus.iter().map(|used| used.gpu_uuid.as_str());
            let keys: Vec<_> =
                uuids.chain([container.gpu[1]]).map(|uuid| (container.name, uuid)).collect();
            let is_new = keys.iter().all(|key| !taken.contains(key));
            taken.extend(is_new.then_some(keys).into_iter().flatten());
            is_new
        });
        containers.sort_by(|a, b| a.labels().cmp(&b.labels()));
        containers
    }

    fn write_containers(&self, out: &mut Out<'_>, known: &Gpus<'_>) -> fmt::Result {
        let containers = self.containers(known);
        out.family(&f::CONTAINER_INFO, |series| {
            containers.iter().try_for_each(|container| {
                let allocation = container.allocation;
                let policy = allocation.gpus.first().map_or("", |used| match used.policy() {
                    ComputePolicy::Burst => "burst",
                    ComputePolicy::Strict => "strict",
                    ComputePolicy::None => "none",
                    ComputePolicy::Unspecified => "",
                });
                let more = [allocation.resource_name.as_str(), allocation.id.as_str(), policy];
                series.info(&[&container.labels()[..], &more].concat())
            })
        })?;
        write_memory(out, &containers, known)?;
        write_container_totals(out, &containers, known)?;
        out.family(&f::CONTAINER_DAMAGED, |series| {
            containers.iter().try_for_each(|one| {
                let amiss = self.damaged.get(&one.allocation.id).copied().unwrap_or(0);
                series.gauge(&one.labels(), amiss)
            })
        })
    }

    fn write_plugin(&self, out: &mut Out<'_>) -> fmt::Result {
        let plugin = self.survey.status.plugin.clone().unwrap_or_default();
        let abi = abi::version().to_string();
        out.family(&f::BUILD, |series| series.info(&[&plugin.version, &abi]))?;
        out.gauge(&f::READY, u64::from(self.ready))?;
        out.family(&f::REGISTERED, |series| {
            plugin.resources.iter().try_for_each(|resource| {
                let live = resource.registration() == Registration::Live;
                series.gauge(&[&resource.name], u64::from(live))
            })
        })?;
        out.family(&f::REGISTRATIONS, |series| {
            let mut resources = plugin.resources.iter();
            resources.try_for_each(|one| series.counter(&[&one.name], one.registrations))
        })?;
        for (call, timed) in &self.calls {
            let family = match call {
                Call::Allocate => &f::ALLOCATE,
                Call::PreStart => &f::PRE_START,
            };
            out.family(family, |series| {
                timed.iter().try_for_each(|(resource, outcome, counts)| {
                    series.histogram(&[resource, outcome.name()], &counts.buckets, counts.sum)
                })
            })?;
        }
        self.write_allocations(out)?;
        out.gauge(&f::WARNINGS, self.survey.status.warnings.len() as u64)?;
        if let Some(findings) = &self.findings {
            out.family(&f::FINDINGS, |series| {
                findings.iter().try_for_each(|(kind, count)| series.counter(&[kind.name()], *count))
            })?;
        }
        if let Some((done, failed)) = self.commits {
            out.family(&f::COMMITS, |series| {
                series.counter(&["ok"], done)?;
                series.counter(&["failed"], failed)
            })?;
        }
        if let Some(events) = self.events {
            out.family(&f::EVENTS, |series| {
                events.iter().try_for_each(|(outcome, count)| series.counter(&[outcome], *count))
            })?;
        }
        if let Some(reloads) = self.reloads {
            out.family(&f::RELOADS, |series| {
                series.counter(&["ok"], reloads.taken)?;
                series.counter(&["refused"], reloads.refused)
            })?;
            out.gauge(&f::RELOAD_OK, u64::from(reloads.last_ok))?;
            out.gauge(&f::RELOAD_TIME, unix_seconds(reloads.configured_unix_ms))?;
        }
        Ok(())
    }

    fn write_allocations(&self, out: &mut Out<'_>) -> fmt::Result {
        let allocations = &self.survey.status.allocations;
        out.family(&f::ALLOCATIONS, |series| {
            let states = [
                ("allocated", AllocationState::Allocated),
                ("started", AllocationState::Started),
                ("parked", AllocationState::Parked),
            ];
            states.into_iter().try_for_each(|(name, state)| {
                let count = allocations.iter().filter(|one| one.state() == state).count();
                series.gauge(&[name], count as u64)
            })
        })?;
        let unnamed = allocations
            .iter()
            .filter(|one| one.holder.is_none() && one.state() != AllocationState::Parked);
        out.gauge(&f::UNNAMED, unnamed.count() as u64)
    }

    fn write_arbiter(&self, out: &mut Out<'_>) -> fmt::Result {
        out.gauge(&f::ARBITER_UP, u64::from(self.survey.arbiter.is_some()))?;
        let Some(view) = &self.survey.arbiter else { return Ok(()) };
        out.family(&f::ARBITER_TURNS, |series| {
            let buckets: Vec<(f64, u64)> = view.turns.buckets().collect();
            series.histogram(&[], &buckets, view.turns.sum_ns as f64 / 1e9)
        })?;
        out.counter(&f::ARBITER_COMMANDS, view.commands)
    }

    fn write_process(&self, out: &mut Out<'_>) -> fmt::Result {
        let process = self.process;
        if let Some(seconds) = process.cpu_seconds {
            out.counter(&f::PROCESS_CPU, seconds)?;
        }
        for (family, value) in [
            (&f::PROCESS_RESIDENT, process.resident_bytes),
            (&f::PROCESS_VIRTUAL, process.virtual_bytes),
            (&f::PROCESS_THREADS, process.threads),
            (&f::PROCESS_FDS, process.open_fds),
            (&f::PROCESS_MAX_FDS, process.max_fds),
        ] {
            value.map_or(Ok(()), |value| out.gauge(family, value))?;
        }
        out.gauge(&f::PROCESS_START, unix_seconds(self.started_unix_ms))
    }
}

impl Collector for Scene {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let gpus = &self.survey.status.gpus;
        let known: Gpus<'_> = gpus
            .iter()
            .map(|gpu| {
                let known =
                    Known { index: gpu.index.to_string(), memory_bytes: gpu.memory_total_bytes };
                (gpu.uuid.as_str(), known)
            })
            .collect();
        self.write_containers(&mut out, &known)?;
        write_gpus(&mut out, gpus, &known)?;
        write_replicas(&mut out, gpus, &known)?;
        write_leases(&mut out, gpus, &known, self)?;
        self.write_plugin(&mut out)?;
        self.write_arbiter(&mut out)?;
        self.write_process(&mut out)
    }
}

fn write_memory(out: &mut Out<'_>, containers: &[Container<'_>], known: &Gpus<'_>) -> fmt::Result {
    /// Bytes, or `None` where they are not known now.
    type Bytes = fn(&tessera_kubelet::admin::GpuUse, bool) -> Option<u64>;
    let families: [(&Family, Bytes); 5] = [
        (&f::CONTAINER_MEMORY_USED, |used, read| {
            read.then(|| used.memory_charged_bytes.saturating_add(used.memory_overhead_bytes))
        }),
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
    out: &mut Out<'_>,
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
    out.family(&f::CONTAINER_PROCESSES, |series| {
        let mut read = containers.iter().filter(|one| one.read);
        read.try_for_each(|one| series.gauge(&one.labels(), one.allocation.processes.len() as u64))
    })
}

/// Each container's GPUs, with its labels on each.
fn each_gpu(
    containers: &[Container<'_>],
    known: &Gpus<'_>,
    mut write: impl FnMut(&Container<'_>, &tessera_kubelet::admin::GpuUse, &[&str]) -> fmt::Result,
) -> fmt::Result {
    containers.iter().try_for_each(|container| {
        container.allocation.gpus.iter().try_for_each(|used| {
            let [namespace, pod, name] = container.name;
            let uuid = used.gpu_uuid.as_str();
            let index = known.get(uuid).map_or("", |known| known.index.as_str());
            write(container, used, &[namespace, pod, name, index, uuid])
        })
    })
}

fn write_gpus(out: &mut Out<'_>, gpus: &[Gpu], known: &Gpus<'_>) -> fmt::Result {
    let labels = |gpu: &Gpu| [known[gpu.uuid.as_str()].index.clone(), gpu.uuid.clone()];
    out.family(&f::GPU_INFO, |series| {
        gpus.iter().try_for_each(|gpu| {
            let [index, uuid] = labels(gpu);
            let numa = gpu.numa_node.map_or_else(String::new, |node| node.to_string());
            series.info(&[&index, &uuid, &gpu.name, &gpu.pci_bus_id, &numa])
        })
    })?;
    let bytes: [Figure<Gpu, u64>; 6] = [
        (&f::GPU_MEMORY_TOTAL, |gpu| gpu.memory_total_bytes),
        (&f::GPU_MEMORY_USED, |gpu| gpu.memory_used_bytes),
        (&f::GPU_MEMORY_RESERVED, |gpu| gpu.memory_reserve_bytes),
        (&f::GPU_MEMORY_SOLD, |gpu| gpu.memory_limits_bytes),
        (&f::GPU_MEMORY_CHARGED, |gpu| gpu.memory_charged_bytes.min(gpu.memory_total_bytes)),
        (&f::GPU_MEMORY_OUTSIDE, |gpu| gpu.memory_outside_bytes),
    ];
    for (family, bytes) in bytes {
        out.family(family, |series| {
            gpus.iter().try_for_each(|gpu| {
                let [index, uuid] = labels(gpu);
                series.gauge(&[&index, &uuid], bytes(gpu))
            })
        })?;
    }
    out.family(&f::GPU_CORES_SOLD, |series| {
        gpus.iter().try_for_each(|gpu| {
            let [index, uuid] = labels(gpu);
            series.gauge(&[&index, &uuid], f64::from(gpu.cores_millis) / 1000.0)
        })
    })?;
    out.family(&f::GPU_HEALTH, |series| {
        gpus.iter().try_for_each(|gpu| {
            let [index, uuid] = labels(gpu);
            let states = [
                ("healthy", GpuState::Healthy),
                ("suspect", GpuState::Suspect),
                ("unhealthy", GpuState::Unhealthy),
                ("recovering", GpuState::Recovering),
            ];
            states.into_iter().try_for_each(|(name, state)| {
                series.gauge(&[&index, &uuid, name], u64::from(gpu.state() == state))
            })
        })
    })?;
    let facts: [Figure<Gpu, bool>; 2] = [
        (&f::GPU_SOLD_HERE, |gpu| gpu.health() == Health::Healthy && gpu.cordon.is_empty()),
        (&f::GPU_CORDONED, |gpu| !gpu.cordon.is_empty()),
    ];
    for (family, fact) in facts {
        out.family(family, |series| {
            gpus.iter().try_for_each(|gpu| {
                let [index, uuid] = labels(gpu);
                series.gauge(&[&index, &uuid], u64::from(fact(gpu)))
            })
        })?;
    }
    Ok(())
}

fn write_replicas(out: &mut Out<'_>, gpus: &[Gpu], known: &Gpus<'_>) -> fmt::Result {
    let state = |replica: &Replica| match (replica.allocation_id.is_empty(), replica.health()) {
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
                    let labels =
                        [&known[gpu.uuid.as_str()].index, gpu.uuid.as_str(), resource, name];
                    series.gauge(&labels, of_it.count() as u64)
                })
            })
        })
    })
}

/// Of GPUs that some container has; of the others the arbiter knows nothing.
fn write_leases(out: &mut Out<'_>, gpus: &[Gpu], known: &Gpus<'_>, scene: &Scene) -> fmt::Result {
    let arbiter = scene.survey.arbiter.as_ref();
    let arbitrated = arbiter.map(|view| view.gpus.as_slice()).unwrap_or_default();
    let shared = || gpus.iter().filter(|gpu| arbitrated.iter().any(|share| share.uuid == gpu.uuid));
    let figures: [Figure<Gpu, f64>; 3] = [
        (&f::GPU_LEASE_HELD, |gpu| f64::from(u8::from(!gpu.lease_holder.is_empty()))),
        (&f::GPU_LEASE_WAITING, |gpu| f64::from(gpu.lease_waiting)),
        (&f::GPU_LEASE_QUANTUM, |gpu| gpu.lease_quantum_us as f64 / 1e6),
    ];
    for (family, figure) in figures {
        out.family(family, |series| {
            shared().try_for_each(|gpu| {
                series.gauge(&[&known[gpu.uuid.as_str()].index, &gpu.uuid], figure(gpu))
            })
        })?;
    }
    Ok(())
}

fn unix_seconds(unix_ms: i64) -> f64 {
    unix_ms as f64 / 1000.0
}

/// Where families are written.
struct Out<'e>(DescriptorEncoder<'e>);

impl Out<'_> {
    fn family(
        &mut self,
        family: &Family,
        fill: impl FnOnce(&mut Series<'_, '_>) -> fmt::Result,
    ) -> fmt::Result {
        let (unit, kind) = (family.unit(), family.metric_type());
        let encoder = self.0.encode_descriptor(family.base, family.help, unit.as_ref(), kind)?;
        fill(&mut Series { encoder, names: family.labels })
    }

    fn gauge(&mut self, family: &Family, value: impl EncodeGaugeValue) -> fmt::Result {
        self.family(family, |series| series.encoder.encode_gauge(&value))
    }

    fn counter(&mut self, family: &Family, value: impl EncodeCounterValue) -> fmt::Result {
        self.family(family, |series| series.encoder.encode_counter(&value, NO_EXEMPLAR))
    }
}

const NO_EXEMPLAR: Option<&Exemplar<NoLabelSet, f64>> = None;

/// Where the series of one family are written; their labels' values come in the family's order.
struct Series<'e, 'n> {
    encoder: MetricEncoder<'e>,
    names: &'n [&'static str],
}

impl Series<'_, '_> {
    fn labels<'v>(&self, values: &[&'v str]) -> Vec<(&'static str, &'v str)> {
        debug_assert_eq!(self.names.len(), values.len(), "a value for each label");
        self.names.iter().copied().zip(values.iter().copied()).collect()
    }

    fn gauge(&mut self, values: &[&str], value: impl EncodeGaugeValue) -> fmt::Result {
        let labels = self.labels(values);
        self.encoder.encode_family(&labels)?.encode_gauge(&value)
    }

    fn counter(&mut self, values: &[&str], value: impl EncodeCounterValue) -> fmt::Result {
        let labels = self.labels(values);
        self.encoder.encode_family(&labels)?.encode_counter(&value, NO_EXEMPLAR)
    }

    fn info(&mut self, values: &[&str]) -> fmt::Result {
        let labels = self.labels(values);
        self.encoder.encode_info(&labels)
    }

    fn histogram(&mut self, values: &[&str], buckets: &[(f64, u64)], sum: f64) -> fmt::Result {
        let count = buckets.iter().map(|(_, count)| count).sum();
        let labels = self.labels(values);
        let mut encoder = self.encoder.encode_family(&labels)?;
        encoder.encode_histogram::<NoLabelSet>(sum, count, buckets, None)
    }
}
