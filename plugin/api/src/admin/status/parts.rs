//! The parts of the answer to `status`, each made of what one of the plugin's own books says.

use std::collections::{BTreeMap, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

use tessera_agent::advertised::NodeSnapshot;
use tessera_arbiter::{TenantShare, View};
use tessera_gpu::SilentGpu;
use tessera_kubelet::{Device, Phase, Report};
use tessera_model::audit::{Event, What};
use tessera_model::record::Record;
use tessera_rules::allocate::Catalogue;
use tessera_tenant::regions::{Region, Use};
use tessera_view::status::{
    Allocation, AllocationState, Dra, Gpu, GpuState, Health, Process, Registration, Replica,
    Resource,
};
use tessera_view::tenant::{self, Limits};
use tessera_view::warning::{Found, GRAVE, PAST};

/// How the DRA driver stands, with the claims that are prepared.
pub(super) fn dra(status: Dra, books: Option<&NodeSnapshot>) -> Dra {
    let claims = books.map_or(0, |books| {
        let claimed = books.allocations.iter().filter_map(|(record, _)| record.origin.claim());
        claimed.map(|claim| &claim.uid).collect::<std::collections::BTreeSet<_>>().len()
    });
    Dra { claims: u32::try_from(claims).unwrap_or(u32::MAX), ..status }
}

/// How one resource stands with kubelet.
pub(super) fn resource(name: &str, retired: bool, report: &Report, devices: &[Device]) -> Resource {
    let registration = match report.phase {
        Phase::Live => Registration::Live,
        Phase::Accepted => Registration::Accepted,
        Phase::Waiting | Phase::Stopped => Registration::Waiting,
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Resource {
        name: name.to_owned(),
        retired,
        registration,
        registered_unix_ms: report.registered_at.map_or(0, to_unix_ms),
        registrations: report.registrations,
        registration_error: report.last_error.clone().unwrap_or_default(),
        replicas: count(devices.len()),
        healthy: count(devices.iter().filter(|device| device.healthy).count()),
    }
}

/// A GPU that is left out because it does not answer: what NVML did not tell is empty or 0.
pub(super) fn silent(silent: &SilentGpu, since_unix_ms: i64) -> Gpu {
    Gpu {
        uuid: silent.gpu.uuid.clone(),
        index: silent.gpu.index,
        name: silent.gpu.name.clone(),
        pci_bus_id: silent.gpu.pci_bus_id.clone(),
        health: Health::Unhealthy,
        health_reason: silent.reason(),
        state: GpuState::Unhealthy,
        state_reason: silent.reason(),
        state_since_unix_ms: since_unix_ms,
        state_waits_for: "NVML to answer for the GPU".to_owned(),
        ..Gpu::default()
    }
}

/// What each GPU is cut into, as advertised: in the configuration's order, retired ones last.
pub(super) fn replicas(
    catalogue: &Catalogue,
    advertised: &BTreeMap<String, Vec<Device>>,
    allocations: &[Allocation],
    withheld: &dyn Fn(&str) -> Option<String>,
) -> HashMap<String, Vec<Replica>> {
    let mut holders: HashMap<(&str, &str), &str> = HashMap::new();
    for allocation in allocations.iter().filter(|a| a.state != AllocationState::Parked) {
        for id in &allocation.replica_ids {
            holders.insert((&allocation.resource_name, id), &allocation.id);
        }
    }
    let mut gpus: HashMap<String, Vec<(usize, Replica)>> = HashMap::new();
    for (resource, devices) in advertised {
        for device in devices {
            let Some((uuid, index)) = tessera_model::replica::Replica::split(&device.id) else {
                continue;
            };
            let Some(sold) = catalogue.gpus.get(uuid) else { continue };
            let place = sold.shares.iter().position(|share| share.resource == *resource);
            let share = place.map(|place| &sold.shares[place]);
            let share = share.filter(|share| index < share.count);
            let amiss = || sold.sick.clone().or_else(|| withheld(uuid));
            let reason = match (device.healthy, share) {
                (true, _) => String::new(),
                (false, None) => amiss().unwrap_or_else(|| "retired".to_owned()),
                (false, Some(_)) => {
                    amiss().unwrap_or_else(|| "no room beside the live limits".to_owned())
                }
            };
            let replica = Replica {
                id: device.id.clone(),
                index,
                health: Health::of(device.healthy),
                health_reason: reason,
                memory_limit_bytes: share.map_or(0, |share| share.limit.memory_bytes),
                cores_millis: share.map_or(0, |share| share.limit.cores_millis),
                allocation_id: holders
                    .get(&(resource.as_str(), device.id.as_str()))
                    .map(|id| (*id).to_owned())
                    .unwrap_or_default(),
                resource_name: resource.clone(),
            };
            let place = place.unwrap_or(usize::MAX);
            gpus.entry(uuid.to_owned()).or_default().push((place, replica));
        }
    }
    gpus.into_iter()
        .map(|(uuid, mut replicas)| {
            replicas.sort_by_key(|(place, replica)| (*place, replica.index));
            (uuid, replicas.into_iter().map(|(_, replica)| replica).collect())
        })
        .collect()
}

fn to_unix_ms(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The limits at Allocate, where others are in force by now.
pub(crate) fn allocated(record: &Record, gpu: usize) -> Option<Limits> {
    let before = record.overridden.as_ref()?.allocated.get(gpu)?;
    let is_changed = record.grants.get(gpu) != Some(before);
    is_changed.then(|| before.into())
}

/// What an allocation got.
pub(super) fn compute(share: &TenantShare) -> tenant::Compute {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    tenant::Compute {
        gate: share.state.name().to_owned(),
        got_1s_millis: share.got_1s_millis,
        got_10s_millis: share.got_10s_millis,
        leased_us: share.totals.leased_ns / 1000,
        waited_us: share.totals.waited_ns / 1000,
        waiting_us: share.waiting_ns.map(|ns| ns / 1000),
        leases: share.totals.leases,
        overlaps: share.totals.overlaps,
        processes: count(share.processes),
        undrained: count(share.owing),
        used_us: share.totals.used_ns / 1000,
        measured_us: share.totals.measured_ns / 1000,
        used_10s_millis: share.used_10s_millis,
    }
}

/// The holder of a GPU.
pub(super) fn add_lease(gpu: &mut Gpu, view: &View) {
    let Some(lease) = view.gpus.iter().find(|lease| lease.uuid == gpu.uuid) else { return };
    gpu.lease_holder = lease.holder.clone().unwrap_or_default();
    gpu.lease_late.clone_from(&lease.late);
    gpu.lease_waiting = u32::try_from(lease.waiting).unwrap_or(u32::MAX);
    gpu.lease_quantum_us = lease.quantum_ns / 1000;
}

pub(crate) fn allocation(record: &Record, region: Option<&Region>, used: &Use) -> Allocation {
    let snapshot = &used.snapshot;
    let overhead = |gpu| region.map_or(0, |region| region.overhead(gpu));
    let gpus = record.grants.iter().enumerate().map(|(gpu, grant)| tenant::Use {
        gpu_uuid: grant.uuid.clone(),
        // Not as its page has it, which follows: see `NodeSnapshot`.
        memory_limit_bytes: grant.memory_limit_bytes,
        memory_used_bytes: snapshot.charged(gpu).saturating_add(overhead(gpu)),
        memory_charged_bytes: snapshot.charged(gpu),
        memory_granted_bytes: snapshot.granted(gpu),
        memory_peak_bytes: used.tally.peak.get(gpu).copied().unwrap_or(0),
        context_overhead_bytes: grant.context_overhead_bytes,
        cores_millis: grant.cores_millis,
        policy: grant.compute,
        memory_overhead_bytes: overhead(gpu),
        memory_nvml_bytes: region.and_then(|region| region.observed().used(gpu)),
        changed: allocated(record, gpu).is_some(),
        allocated: allocated(record, gpu),
        memory_owed_bytes: record.owed_bytes(&grant.uuid),
    });
    let peers = region.map(|region| region.tenant().peers()).unwrap_or_default();
    let processes = snapshot.slots.iter().map(|slot| {
        let index = u32::try_from(slot.index).unwrap_or(u32::MAX);
        // A slot is matched to the session that named it. The name is the tenant's word; the pid is
        // the kernel's, and of one of the tenant's own processes in any case.
        let host_pid = peers
            .iter()
            .find(|peer| peer.hello.is_some_and(|(_, slot)| slot == index))
            .and_then(|peer| peer.host_pid);
        Process {
            host_pid: host_pid.unwrap_or(0),
            container_pid: slot.pid_hint,
            slot: index,
            memory_charged_bytes: slot.charged.iter().fold(0, |sum, b| sum.saturating_add(*b)),
        }
    });
    Allocation {
        id: record.id.to_string(),
        state: record.state,
        generation: record.generation,
        replica_ids: record.replicas.clone(),
        holder: record.holder.as_ref().map(Into::into),
        allocated_unix_ms: record.allocated_unix_ms,
        started_unix_ms: record.started_unix_ms,
        gpus: gpus.collect(),
        processes: processes.collect(),
        refusals: used.tally.refusals,
        driver_refusals: used.tally.driver_refusals,
        launches: used.tally.launches,
        gpu_time_us: used.tally.gpu_time_ns / 1000,
        gate_wait_us: used.tally.gate_wait_ns / 1000,
        gate_waits: used.tally.gate_waits,
        gate_timeouts: used.tally.gate_timeouts,
        window_waits: used.tally.window_waits,
        compute: None,
        tamperings: region.map_or(0, Region::tamperings),
        unaccounted: region.map_or(0, |region| region.observed().findings()),
        pages_dir: region.map(|region| region.dir().display().to_string()).unwrap_or_default(),
        resource_name: record.resource.clone(),
        claim: record.origin.claim().map(Into::into),
        other_holders: record.others.iter().map(Into::into).collect(),
    }
}

/// Something that stands, and is about what its text begins with: the rest may change from look to look.
pub(super) fn standing(text: String) -> Found {
    let key = text.split_once(": ").map_or(text.as_str(), |(subject, _)| subject).to_owned();
    Found { key, text, times: 0, shown: 0 }
}

/// What is wrong with a tenant, by its pages, its sessions and its gate.
pub(super) fn warnings_of(
    id: &str,
    name: &str,
    region: Option<&Region>,
    share: Option<&TenantShare>,
) -> Vec<Found> {
    let mut found = Vec::new();
    let mut add = |times, shown, text: &str| {
        let (key, text) = (format!("{id} {text}"), format!("{name}: {text}"));
        found.push(Found { key, text, times, shown });
    };
    let counters = region.map(|region| region.tenant().counters()).unwrap_or_default();
    if region.is_some_and(|region| region.observed().stands()) {
        add(0, 0, &(told(What::Unaccounted) + " (docs/runbook.md, TesseraBypass)"));
    }
    let tampered = told(What::Tampered { what: "usage page".to_owned() });
    let tampered = tampered + " (docs/runbook.md, TesseraTampering)";
    let (violations, overlaps) =
        share.map(|share| (share.violations, share.totals.overlaps)).unwrap_or_default();
    // It hurts itself alone.
    let owner =
        ". Ask its owner: it denies itself CUDA by that (docs/runbook.md, TesseraTampering)";
    let unlisted = format!(". {}", Event::of_node(What::Unlisted, 0).advice());
    let counted = [
        (region.map_or(0, Region::tamperings), GRAVE, tampered.as_str(), ""),
        (counters.garbage, PAST, "sends garbage to its session socket", owner),
        (counters.throttled, PAST, "floods its session socket and is slowed down", owner),
        (counters.turned_away, PAST, "opens too many sessions", owner),
        (
            counters.unknown_gpu,
            PAST,
            "sees a GPU that is not in its quota, and may not use it",
            &unlisted,
        ),
        (counters.no_slot, PAST, "has more CUDA processes than there are slots", &unlisted),
        (violations.garbage, PAST, "sends garbage to its gate socket", owner),
        (violations.nonsense, PAST, "sends its gate messages that make no sense there", owner),
        (violations.throttled, PAST, "floods its gate socket and is slowed down", owner),
        (violations.turned_away, PAST, "opens too many connections to its gate", owner),
        (overlaps, PAST, &told(What::Overlapped), ""),
    ];
    for (times, shown, text, advice) in counted {
        if times > 0 {
            add(times, shown, &format!("{text}{advice}"));
        }
    }
    found
}

/// As the audit trail has it, and what to do.
fn told(what: What) -> String {
    let event = Event::of_node(what, 0);
    format!("{}. {}", event.sentence("the GPU"), event.advice())
}
