//! Builds the answer to `status`.

mod parts;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

pub(crate) use self::parts::allocation;
use self::parts::{add_lease, dra, replicas, resource, silent, standing, warnings_of};
use tessera_agent::Agent;
use tessera_agent::advertised::NodeSnapshot;
use tessera_agent::inventory::Standing;
use tessera_agent::observe::{PidView, pid_view};
use tessera_agent::reload::Reloader;
use tessera_agent::status_board::StatusBoard;
use tessera_arbiter::{Arbiter, View};
use tessera_config::{Config, Current};
use tessera_gpu::Discovery;
use tessera_kubelet::{Phase, RegistrationStatus};
use tessera_model::clock::unix_ms;
use tessera_model::record::Record;
use tessera_rules::capacity::Capacity;
use tessera_rules::front_end::FrontEnd;
use tessera_rules::room::Left;
use tessera_system::locks::lock;
use tessera_tenant::regions::{Region, Use};
use tessera_view::API_VERSION;
use tessera_view::status::{
    Allocation, AllocationState, Gpu, Health, Plugin, Registration, Resource, Status,
};
use tessera_view::tenant;
use tessera_view::warning::{Ages, Found};

/// Everything that `status` looks at. What comes later in the start is filled in later: the service
/// answers while the plugin still waits for GPUs.
pub struct StatusView {
    config: Current,
    discovery: Arc<dyn Discovery>,
    started_unix_ms: i64,
    pids: PidView,
    agent: OnceLock<Arc<Agent>>,
    reloader: OnceLock<Arc<Reloader>>,
    registration: OnceLock<RegistrationStatus>,
    board: Arc<StatusBoard>,
    metrics: OnceLock<SocketAddr>,
    /// What the JSON API was asked.
    api: OnceLock<Arc<tessera_web::Counts>>,
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

    pub fn set_agent(&self, agent: Arc<Agent>) {
        // Set once by the start.
        let _ = self.agent.set(agent);
    }

    pub fn set_reloader(&self, reloader: Arc<Reloader>) {
        let _ = self.reloader.set(reloader);
    }

    pub fn reloader(&self) -> Option<&Arc<Reloader>> {
        self.reloader.get()
    }

    pub fn set_registration(&self, registration: RegistrationStatus) {
        let _ = self.registration.set(registration);
    }

    pub fn set_api(&self, counts: Arc<tessera_web::Counts>) {
        let _ = self.api.set(counts);
    }

    /// What the JSON API was asked, where there is one.
    pub fn api(&self) -> Option<&Arc<tessera_web::Counts>> {
        self.api.get()
    }

    pub fn board(&self) -> &Arc<StatusBoard> {
        &self.board
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
                let reports = registration.reports();
                let sold = agent.inventory().catalogue().resources.clone();
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

    pub(crate) fn started_unix_ms(&self) -> i64 {
        self.started_unix_ms
    }

    pub(crate) fn set_metrics_address(&self, address: SocketAddr) {
        // Set once by the server.
        let _ = self.metrics.set(address);
    }

    /// Where metrics are served, if they are.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.get().copied()
    }

    pub fn agent(&self) -> Option<&Arc<Agent>> {
        self.agent.get()
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
        let books = self.agent.get().map(|agent| agent.advertised().books());
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
        let others = agent.inventory().others_warnings().into_iter().chain(agent.trust_warnings());
        let records = books.allocations.iter().map(|(record, _)| record);
        let kept = tessera_agent::kept_by_other(&books.catalogue, records);
        let mut found: Vec<Found> = others.chain(kept).map(standing).collect();
        let arbiter = agent.allocations().arbiter().and_then(Arbiter::view);
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
                let compute = share.map(parts::compute);
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
        status.plugin.shim_path = agent.allocations().delivery().shim.display().to_string();
        status.gpus = self.gpus(agent, &books, &status.allocations, at);
        status.gpus.iter_mut().for_each(|gpu| add_lease(gpu, compute));
        Survey { status, unread, arbiter, books: Some(books) }
    }

    fn plugin(&self, books: Option<&NodeSnapshot>) -> Plugin {
        let config = self.config.get();
        let reports = self.registration.get().map(RegistrationStatus::reports).unwrap_or_default();
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
                let default = &sold.default_share.limit;
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
                        .trust()
                        .outside(&sold.gpu.uuid)
                        .map_or(0, |outside| outside.bytes),
                    context_overhead_bytes: sold.context_overhead_bytes,
                    context_overhead_source: sold.context_source.as_str().to_owned(),
                    state: view.state,
                    state_reason: view.reason,
                    state_since_unix_ms: view.since.map_or(0, |since| {
                        let ago = at.0.saturating_duration_since(since).as_millis();
                        at.1.saturating_sub(i64::try_from(ago).unwrap_or(i64::MAX))
                    }),
                    state_waits_for: view.waits_for,
                    cordoned_with_node: cordon.is_some() && !has_own_cordon,
                    cordon: cordon.unwrap_or_default(),
                    front_end: sold.seller.as_str().to_owned(),
                    moving: books.moving.contains(&sold.gpu.uuid),
                    left_memory_bytes: claimed.map_or(0, |left| left.memory_bytes),
                    left_cores_millis: claimed.map_or(0, |left| left.cores_millis),
                    no_room: lack.map(|lack| lack.to_string()).unwrap_or_default(),
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
