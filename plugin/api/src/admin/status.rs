//! Builds the answer to `status`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tessera_agent::Agent;
use tessera_agent::advertised::NodeSnapshot;
use tessera_agent::inventory::Standing;
use tessera_agent::observe::{PidView, pid_view};
use tessera_agent::reload::Reloader;
use tessera_agent::status_board::StatusBoard;
use tessera_arbiter::{Arbiter, TenantShare, View};
use tessera_config::{Config, Current};
use tessera_gpu::{Discovery, SilentGpu};
use tessera_kubelet::{Device, Phase, Report, Reports};
use tessera_model::audit::{Event, What};
use tessera_model::clock::unix_ms;
use tessera_model::record::Record;
use tessera_rules::allocate::Catalogue;
use tessera_rules::capacity::{Capacity, Left};
use tessera_rules::shares::FrontEnd;
use tessera_system::locks::lock;
use tessera_tenant::regions::{Region, Use};
use tessera_view::API_VERSION;
use tessera_view::status::{
    Allocation, AllocationState, Dra, Gpu, GpuState, Health, Plugin, Process, Registration,
    Replica, Resource, Status,
};
use tessera_view::tenant::{self, Limits};
use tessera_view::warning::{Ages, Found, GRAVE, PAST};

/// Everything that `status` looks at. What comes later in the start is set once, then: the service answers while the
/// plugin still waits for GPUs.
pub struct StatusView {
    config: Current,
    discovery: Arc<dyn Discovery>,
    pub(crate) started_unix_ms: i64,
    pids: PidView,
    pub agent: OnceLock<Arc<Agent>>,
    pub reloader: OnceLock<Arc<Reloader>>,
    pub registration: OnceLock<Reports>,
    pub board: Arc<StatusBoard>,
    /// Where metrics are served.
    pub metrics: OnceLock<SocketAddr>,
    /// What the JSON API was asked.
    pub api: OnceLock<Arc<tessera_web::Counts>>,
    /// Another plugin serves the node, and this one takes over when it ends.
    stands_by: AtomicBool,
    /// When what is warned of was first and last seen.
    ages: Mutex<Ages>,
}

/// What a look at everything found.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    /// As `status` has it.
    pub status: Status,
    /// Allocations whose usage page could not be read, by id.
    pub unread: HashSet<String>,
    /// How the arbiter stands; `None` if it does not answer.
    pub arbiter: Option<View>,
    /// What `status` was made of, once the node is there.
    pub books: Option<NodeSnapshot>,
}

/// A way to look at what an allocation uses; `None` if it is unknown for now.
pub(crate) type Look = dyn Fn(&Region) -> Option<Use>;

impl std::fmt::Debug for StatusView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StatusView").finish_non_exhaustive()
    }
}

impl StatusView {
    /// With nothing but the configuration so far.
    pub fn new(config: Current, discovery: Arc<dyn Discovery>, board: Arc<StatusBoard>) -> Self {
        StatusView {
            stands_by: AtomicBool::new(false),
            config,
            discovery,
            started_unix_ms: unix_ms(),
            pids: pid_view(),
            agent: OnceLock::new(),
            reloader: OnceLock::new(),
            registration: OnceLock::new(),
            board,
            metrics: OnceLock::new(),
            api: OnceLock::new(),
            ages: Mutex::default(),
        }
    }

    /// From now on it counts as ready: another plugin serves the node, and this one waits for its end.
    pub fn stand_by(&self) {
        self.stands_by.store(true, Ordering::Relaxed);
    }

    /// What keeps the node from offering every resource that is sold; nothing if it offers them all. Cheap:
    /// reads no page.
    pub fn amiss(&self) -> Vec<String> {
        if self.stands_by.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut amiss = Vec::new();
        match (self.agent.get(), self.registration.get()) {
            (Some(agent), Some(registration)) => {
                let reports = registration.borrow().clone();
                let sold = agent.inventory.catalogue().resources.clone();
                let dra = self.board.facts().dra;
                if sold.is_empty() && dra.is_none() {
                    amiss.push("nothing is sold".to_owned());
                }
                if let Some(dra) = dra.filter(|dra| !dra.registered) {
                    let why = dra.registration_error;
                    let why = if why.is_empty() { why } else { format!(": {why}") };
                    amiss.push(format!("DRA driver {}: not registered{why}", dra.driver));
                }
                for name in sold.keys() {
                    let report = reports.get(name);
                    let text = match report.map(|report| report.phase) {
                        Some(Phase::Live) => continue,
                        Some(Phase::Accepted) => "registered, but kubelet does not watch it",
                        Some(Phase::Waiting) => "not registered",
                        Some(Phase::Stopped) | None => "not served",
                    };
                    let error = report.and_then(|report| report.last_error.as_deref());
                    let error = error.map_or_else(String::new, |error| format!(": {error}"));
                    amiss.push(format!("{name}: {text}{error}"));
                }
            }
            _ => amiss.push("starting".to_owned()),
        }
        amiss.extend(self.board.removed());
        if !amiss.is_empty() {
            amiss.extend(self.board.conditions());
        }
        amiss
    }

    pub(crate) fn config(&self) -> Arc<Config> {
        self.config.get()
    }

    /// The answer. Reads every usage page and asks the driver for memory in use.
    pub fn status(&self) -> Status {
        self.survey(&|region| Some(region.recover_and_snapshot())).status
    }

    /// As [`StatusView::status`], looking at pages in another way.
    pub(crate) fn survey(&self, look: &Look) -> Survey {
        let mut unread = HashSet::new();
        let books = self.agent.get().map(|agent| agent.advertised.books());
        let mut status = Status {
            api_version: API_VERSION.to_owned(),
            plugin: self.plugin(books.as_ref()),
            at_unix_ms: unix_ms(),
            ..Status::default()
        };
        let at = (Instant::now(), status.at_unix_ms);
        let mut warnings = self.board.warnings(status.at_unix_ms);
        status.refusals = self.board.refused(status.at_unix_ms);
        let (Some(agent), Some(books)) = (self.agent.get(), books) else {
            status.gpus = self.silent();
            status.set_warnings(warnings);
            return Survey { status, ..Survey::default() };
        };
        let others = agent.inventory.others_warnings().into_iter().chain(agent.trust_warnings());
        let records = books.allocations.iter().map(|(record, _)| record);
        let kept = tessera_agent::kept_by_other(&books.catalogue, records);
        let mut found: Vec<Found> = others.chain(kept).map(standing).collect();
        let arbiter = agent.allocations.arbiter().and_then(Arbiter::view);
        let no_view = View::default();
        let compute = arbiter.as_ref().unwrap_or(&no_view);
        let (mut hidden, mut seen) = (false, false);
        for (record, region) in &books.allocations {
            let used = region.as_ref().and_then(|region| look(region));
            if used.is_none() {
                unread.insert(record.id.to_string());
            }
            let used = used.unwrap_or_default();
            if let Some(region) = region {
                hidden |= region.tenant().has_hidden_pids();
                seen |= region.tenant().peers().iter().any(|peer| peer.host_pid.is_some());
            }
            let parked_and_idle = !record.is_live() && used.snapshot.slots.is_empty();
            let name = record.name();
            let share = compute.tenants.iter().find(|share| share.id == record.id.as_str());
            let id = record.id.as_str();
            found.extend(warnings_of(id, &name, region.as_deref(), share));
            if !parked_and_idle {
                let compute = share.map(compute_of);
                let allocation = allocation(record, region.as_deref(), &used);
                status.allocations.push(Allocation { compute, ..allocation });
            }
        }
        // A tenant's own word goes before what was guessed at the start.
        hidden |= !seen && self.pids == PidView::Own;
        if hidden {
            found.push(standing(
                "pids of tenants are unknown: the plugin's pod needs hostPID: true; until then a \
                 process's death is noticed when its socket closes, and what it holds beyond its \
                 charges is neither observed nor audited"
                    .to_owned(),
            ));
        }
        warnings.extend(lock(&self.ages).update(found, status.at_unix_ms));
        status.set_warnings(warnings);
        status.plugin.sees_host_pids = !hidden;
        status.plugin.shim_path = agent.allocations.delivery.shim.display().to_string();
        status.gpus = self.gpus(agent, &books, &status.allocations, at);
        status.gpus.iter_mut().for_each(|gpu| add_lease(gpu, compute));
        Survey { status, unread, arbiter, books: Some(books) }
    }

    fn plugin(&self, books: Option<&NodeSnapshot>) -> Plugin {
        let config = self.config.get();
        let reports = self.registration.get().map(|all| all.borrow().clone()).unwrap_or_default();
        let devices = |name: &str| books.and_then(|books| books.advertised.get(name));
        let is_sold =
            |name: &str| books.is_some_and(|books| books.catalogue.resources.contains_key(name));
        let resources: Vec<Resource> = reports
            .iter()
            .map(|(name, report)| {
                let devices = devices(name).map(Vec::as_slice).unwrap_or_default();
                resource(name, !is_sold(name), report, devices)
            })
            .collect();
        let names: Vec<&str> = match resources.as_slice() {
            [] => vec![&config.resource.name],
            some => some.iter().map(|resource| resource.name.as_str()).collect(),
        };
        let farthest = resources.iter().map(|resource| resource.registration).min();
        let errors: Vec<String> = resources
            .iter()
            .filter(|resource| !resource.registration_error.is_empty())
            .map(|Resource { name, registration_error: error, .. }| match names.len() {
                1 => error.clone(),
                _ => format!("{name}: {error}"),
            })
            .collect();
        let facts = self.board.facts();
        let config_path = config.source.file.as_ref().map(|file| file.display().to_string());
        Plugin {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_unix_ms: self.started_unix_ms,
            resource_name: names.join(", "),
            // A node may sell by claims alone, or stand by.
            registration: farthest.unwrap_or_else(|| match self.amiss().is_empty() {
                true => Registration::Live,
                false => Registration::Waiting,
            }),
            registered_unix_ms: resources.iter().map(|r| r.registered_unix_ms).max().unwrap_or(0),
            registrations: resources.iter().map(|resource| resource.registrations).sum(),
            registration_error: errors.join("; "),
            sees_host_pids: true,
            config_path: config_path.unwrap_or_default(),
            shim_path: String::new(),
            configuration: self.reloader.get().map(|one| one.state()),
            others_seen_by: facts.others_seen_by.to_owned(),
            dra: facts.dra.map(|status| dra(status, books)),
            resources,
        }
    }

    /// GPUs that are left out because they do not answer.
    fn silent(&self) -> Vec<Gpu> {
        self.board.facts().silent.iter().map(|(gpu, since)| silent(gpu, *since)).collect()
    }

    /// `at`: when the answer was begun, by both clocks. No state is younger than that.
    fn gpus(
        &self,
        agent: &Agent,
        books: &NodeSnapshot,
        allocations: &[Allocation],
        at: (Instant, i64),
    ) -> Vec<Gpu> {
        let NodeSnapshot { catalogue, standings, advertised, .. } = books;
        let standing = |uuid: &str| standings.get(uuid).cloned().unwrap_or_default();
        let withheld = |uuid: &str| {
            let Standing { cordon, withheld, .. } = standing(uuid);
            cordon.or(withheld)
        };
        let lives = |record: &&Record| record.is_live();
        let live_records = || books.allocations.iter().map(|(record, _)| &**record).filter(lives);
        let mut replicas = replicas(catalogue, advertised, allocations, &withheld);
        let live = || allocations.iter().filter(|a| a.state != AllocationState::Parked);
        let mut gpus: Vec<Gpu> = catalogue
            .gpus
            .values()
            .map(|sold| {
                // A cordon is no illness: it stands for itself.
                let Standing { cordon, has_own_cordon, withheld, health: view } =
                    standing(&sold.gpu.uuid);
                let uses = || live().flat_map(|a| &a.gpus).filter(|u| u.gpu_uuid == sold.gpu.uuid);
                let claimed = (sold.seller == FrontEnd::Dra).then(|| {
                    let capacity = Capacity::within(&sold.gpu, catalogue.reserve_bytes);
                    Left::beside(capacity, &sold.gpu.uuid, live_records())
                });
                let lack = claimed.and_then(|left| left.lack_of_any(sold.context_overhead_bytes));
                let default = &sold.default_share;
                let sum =
                    |bytes: fn(&tenant::Use) -> u64| uses().map(bytes).fold(0, u64::saturating_add);
                Gpu {
                    uuid: sold.gpu.uuid.clone(),
                    index: sold.gpu.index,
                    name: sold.gpu.name.clone(),
                    pci_bus_id: sold.gpu.pci_bus_id.clone(),
                    numa_node: sold.gpu.numa_node.map(i64::from),
                    health: Health::of(sold.sick.is_none() && withheld.is_none()),
                    health_reason: sold
                        .sick
                        .clone()
                        .or_else(|| withheld.clone())
                        .unwrap_or_default(),
                    memory_total_bytes: sold.gpu.memory_bytes,
                    memory_used_bytes: self.discovery.memory_used(&sold.gpu.uuid).unwrap_or(0),
                    memory_reserve_bytes: sold.gpu.reserve(catalogue.reserve_bytes),
                    memory_limits_bytes: sum(|u| u.memory_limit_bytes),
                    memory_charged_bytes: sum(|u| u.memory_charged_bytes),
                    cores_millis: uses().map(|u| u.cores_millis).fold(0, u32::saturating_add),
                    replicas: replicas.remove(&sold.gpu.uuid).unwrap_or_default(),
                    memory_outside_bytes: agent
                        .trust
                        .outside(&sold.gpu.uuid)
                        .map_or(0, |outside| outside.bytes),
                    context_overhead_bytes: sold.context_overhead_bytes,
                    context_overhead_source: sold.context_source.into_str().to_owned(),
                    state: view.state,
                    state_reason: view.reason,
                    state_since_unix_ms: view.since.map_or(0, |since| {
                        let ago = at.0.saturating_duration_since(since).as_millis();
                        at.1.saturating_sub(i64::try_from(ago).unwrap_or(i64::MAX))
                    }),
                    state_waits_for: view.waits_for,
                    cordoned_with_node: cordon.is_some() && !has_own_cordon,
                    cordon: cordon.unwrap_or_default(),
                    front_end: sold.seller.into_str().to_owned(),
                    moving: books.moving.contains(&sold.gpu.uuid),
                    left_memory_bytes: claimed.map_or(0, |left| left.memory_bytes),
                    left_cores_millis: claimed.map_or(0, |left| left.cores_millis),
                    no_room: lack.unwrap_or_default().to_owned(),
                    default_memory_bytes: claimed.map_or(0, |_| default.memory_bytes),
                    default_cores_millis: claimed.map_or(0, |_| default.cores_millis),
                    ..Gpu::default()
                }
            })
            .collect();
        gpus.extend(self.silent());
        gpus.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        gpus
    }
}

/// How the DRA driver stands, with the claims that are prepared.
fn dra(status: Dra, books: Option<&NodeSnapshot>) -> Dra {
    let claims = books.map_or(0, |books| {
        let claimed = books.allocations.iter().filter_map(|(record, _)| record.origin.claim());
        claimed.map(|claim| &claim.uid).collect::<std::collections::BTreeSet<_>>().len()
    });
    Dra { claims: u32::try_from(claims).unwrap_or(u32::MAX), ..status }
}

/// How one resource stands with kubelet.
fn resource(name: &str, retired: bool, report: &Report, devices: &[Device]) -> Resource {
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
fn silent(silent: &SilentGpu, since_unix_ms: i64) -> Gpu {
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
fn replicas(
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
                memory_limit_bytes: share.map_or(0, |share| share.memory_bytes),
                cores_millis: share.map_or(0, |share| share.cores_millis),
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
fn compute_of(share: &TenantShare) -> tenant::Compute {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    tenant::Compute {
        gate: share.state.into_str().to_owned(),
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
fn add_lease(gpu: &mut Gpu, view: &View) {
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
        holder: record.holder.clone(),
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
        other_holders: record.others.clone(),
    }
}

/// Something that stands, and is about what its text begins with: the rest may change from look to look.
fn standing(text: String) -> Found {
    let key = text.split_once(": ").map_or(text.as_str(), |(subject, _)| subject).to_owned();
    Found { key, text, times: 0, shown: 0 }
}

/// What is wrong with a tenant, by its pages, its sessions and its gate.
fn warnings_of(
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
