//! `status` as the view that the command line, the JSON API, metrics and the page share.
//!
//! - [`node`]: pure, from what `status` says
//! - [`NodeSource`]: answers the JSON API's questions about this node

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tessera_arbiter::policy::{GpuIndex, TenantId};
use tessera_arbiter::trace::{Kind, Recording, Tracing};
use tessera_model::clock::unix_ms;
use tessera_rules::shares::FrontEnd;
use tessera_tenant::regions::Region;
use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::explain::Explanations;
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::node::{Node, Plugin};
use tessera_view::status::{self, Allocation, Health, Holder, Status};
use tessera_view::tenant::Tenant;
use tessera_view::trace::{Args, Event, Trace, name};
use tessera_view::{API_VERSION, SourceError, gpu as view, history, workload};
use tessera_web::source::{Answer, Source};

use crate::admin::{StatusView, Turns};
use crate::explain;
use crate::history::Recorder;

/// The node, as `status` has it. `amiss` is what keeps it from offering everything, a sentence each.
pub fn node(name: &str, status: &Status, amiss: Vec<String>) -> Node {
    Node {
        api_version: API_VERSION.to_owned(),
        node: name.to_owned(),
        at_unix_ms: status.at_unix_ms,
        plugin: plugin(status, amiss),
        gpus: status.gpus.iter().map(gpu).collect(),
        tenants: status.allocations.iter().map(tenant).collect(),
        others: Vec::new(),
        hidden_tenants: 0,
        warnings: status.warning_details.clone(),
    }
}

fn plugin(status: &Status, amiss: Vec<String>) -> Plugin {
    let plugin = &status.plugin;
    let errors = plugin.configuration.as_ref().map(|one| one.errors.join("; "));
    Plugin {
        version: plugin.version.clone(),
        started_unix_ms: plugin.started_unix_ms,
        registration: plugin.registration.into_str().to_owned(),
        ready: amiss.is_empty(),
        amiss,
        resources: plugin.resources.iter().map(|resource| resource.name.clone()).collect(),
        dra_driver: plugin.dra.as_ref().map(|dra| dra.driver.clone()).unwrap_or_default(),
        config_error: errors.unwrap_or_default(),
    }
}

fn tenant(allocation: &Allocation) -> Tenant {
    let holder = allocation.holder.clone().unwrap_or_default();
    let claim = allocation.claim.as_ref();
    Tenant {
        state: allocation.state.into_str().to_owned(),
        namespace: allocation.namespace().to_owned(),
        workload: workload::of(&holder.pod).to_owned(),
        pod: holder.pod,
        container: holder.container,
        other_holders: allocation.other_holders.iter().map(written).collect(),
        claim: claim.map(|one| format!("{}/{}", one.namespace, one.name)).unwrap_or_default(),
        request: claim.map(|one| one.request.clone()).unwrap_or_default(),
        processes: u32::try_from(allocation.processes.len()).unwrap_or(u32::MAX),
        ..allocation.seen()
    }
}

fn written(holder: &Holder) -> String {
    format!("{}/{}/{}", holder.namespace, holder.pod, holder.container)
}

/// A GPU, and what still fits on it.
pub(crate) fn gpu(gpu: &status::Gpu) -> view::Gpu {
    let is_withheld = gpu.health == Health::Unhealthy && gpu.cordon.is_empty();
    let withheld = if is_withheld { gpu.health_reason.clone() } else { String::new() };
    view::Gpu {
        state: gpu.state.into_str().to_owned(),
        withheld,
        lease: lease(gpu),
        replicas: gpu.by_resource(),
        fits: fits(gpu),
        ..gpu.seen()
    }
}

/// There is a quantum where the arbiter divides its time.
fn lease(gpu: &status::Gpu) -> Option<view::Lease> {
    (gpu.lease_quantum_us > 0).then(|| view::Lease {
        holder: gpu.lease_holder.clone(),
        waiting: gpu.lease_waiting,
        quantum_us: gpu.lease_quantum_us,
    })
}

/// What can be handed out now: free replicas, or for claims what is left.
fn fits(gpu: &status::Gpu) -> Vec<view::Fit> {
    if gpu.front_end == FrontEnd::Dra.into_str() {
        return left(gpu).into_iter().collect();
    }
    let fit = |of: view::Replicas| view::Fit {
        resource_name: of.resource_name,
        count: of.free,
        memory_bytes: of.memory_limit_bytes,
        cores_millis: of.cores_millis,
    };
    let free = gpu.by_resource().into_iter().filter(|of| of.free > 0);
    let mut fits: Vec<view::Fit> = free.map(fit).collect();
    fits.sort_by_key(|fit| Reverse((fit.memory_bytes, fit.cores_millis)));
    fits
}

fn left(gpu: &status::Gpu) -> Option<view::Fit> {
    let is_sold = gpu.health == Health::Healthy && gpu.cordon.is_empty() && !gpu.moving;
    (is_sold && gpu.no_room.is_empty()).then(|| view::Fit {
        count: 1,
        memory_bytes: gpu.left_memory_bytes,
        cores_millis: gpu.left_cores_millis,
        ..Default::default()
    })
}

/// Questions that are worked on at a time, each on a thread that may block: the others are left to kubelet's calls
/// and to metrics.
const AT_WORK: usize = 2;

const STARTS: &str = "the plugin has not found its GPUs yet; try again";
const NO_ARBITER: &str =
    "nobody divides GPU time on this node: its arbiter could not start; `tessera status` says why";

/// The node, to the JSON API. A clone is the same source.
#[derive(Clone)]
pub struct NodeSource {
    shared: Arc<Shared>,
}

struct Shared {
    view: Arc<StatusView>,
    name: String,
    past: OnceLock<Arc<Recorder>>,
    turns: Turns,
}

impl fmt::Debug for NodeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeSource").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

impl NodeSource {
    /// Of a node of this name. Call it within the runtime whose threads may block.
    pub fn new(name: String, view: Arc<StatusView>) -> Self {
        let (past, turns) = (OnceLock::new(), Turns::new(AT_WORK));
        NodeSource { shared: Arc::new(Shared { view, name, past, turns }) }
    }

    /// From now on, this answers what was.
    pub fn set_past(&self, past: Arc<Recorder>) {
        // Set once by the start.
        let _ = self.shared.past.set(past);
    }

    /// Does it on a thread that may block.
    async fn at_work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Result<T, SourceError> + Send + 'static,
    ) -> Result<T, SourceError> {
        let shared = Arc::clone(&self.shared);
        self.shared.turns.block(move || work(&shared)).await
    }

    fn check(&self, node: &str) -> Result<(), SourceError> {
        let name = &self.shared.name;
        match node.is_empty() || node == name {
            true => Ok(()),
            false => Err(SourceError::NotFound(format!("this is node {name} and no other"))),
        }
    }
}

impl Shared {
    /// Changes nothing, and waits for no tenant.
    fn node(&self) -> Node {
        let status = self.view.survey(&Region::try_snapshot).status;
        node(&self.name, &status, self.view.amiss())
    }

    fn tracing(&self) -> Result<Tracing, SourceError> {
        let unavailable = |text: String| SourceError::Unavailable(text);
        let agent = self.view.agent.get().ok_or_else(|| unavailable(STARTS.to_owned()))?;
        let arbiter = agent.allocations.arbiter();
        let arbiter = arbiter.ok_or_else(|| unavailable(NO_ARBITER.to_owned()))?;
        arbiter.trace().map_err(|error| unavailable(error.to_string()))
    }

    fn asked<T>(
        &self,
        ask: impl FnOnce(&Recorder, &Node) -> Result<T, SourceError>,
    ) -> Result<T, SourceError> {
        let starts = || SourceError::Unavailable(STARTS.to_owned());
        ask(self.past.get().ok_or_else(starts)?, &self.node())
    }
}

impl Source for NodeSource {
    fn fleet(&self) -> Answer<'_, Fleet> {
        Box::pin(self.at_work(|shared| {
            let view = shared.node();
            let entry = Entry {
                node: shared.name.clone(),
                answers: true,
                answered_unix_ms: view.at_unix_ms,
                error: String::new(),
                view: Some(view),
            };
            Ok(Fleet {
                api_version: API_VERSION.to_owned(),
                name: String::new(),
                at_unix_ms: unix_ms(),
                nodes: vec![entry],
            })
        }))
    }

    fn history<'a>(&'a self, node: &'a str, query: history::Query) -> Answer<'a, history::Answer> {
        Box::pin(async move {
            self.check(node)?;
            self.at_work(move |shared| shared.asked(|past, now| past.history(now, &query))).await
        })
    }

    fn explain<'a>(&'a self, node: &'a str, subject: &'a str) -> Answer<'a, Explanations> {
        Box::pin(async move {
            self.check(node)?;
            let subject = subject.to_owned();
            self.at_work(move |shared| {
                let explanation = explain::explanation(&shared.view, &subject)?;
                Ok(Explanations::of(vec![(shared.name.clone(), explanation)]))
            })
            .await
        })
    }

    fn recommend(&self, scope: Scope) -> Answer<'_, Recommendations> {
        Box::pin(self.at_work(move |shared| shared.asked(|past, now| past.recommend(now, &scope))))
    }

    fn waste(&self, scope: Scope) -> Answer<'_, Waste> {
        Box::pin(self.at_work(move |shared| shared.asked(|past, now| past.waste(now, &scope))))
    }

    fn trace<'a>(&'a self, node: &'a str, seconds: u32) -> Answer<'a, Trace> {
        Box::pin(async move {
            self.check(node)?;
            let begun = self.at_work(|shared| Ok((shared.node(), shared.tracing()?, unix_ms())));
            let (before, tracing, begun_unix_ms) = begun.await?;
            // Whoever asked may be gone before: then `tracing` is dropped here, and no turn is taken.
            tokio::time::sleep(Duration::from_secs(seconds.into())).await;
            self.at_work(move |shared| {
                let recording = tracing.end();
                let recording = recording.map_err(|e| SourceError::Unavailable(e.to_string()))?;
                Ok(trace(&recording, &before, &shared.node(), begun_unix_ms))
            })
            .await
        })
    }
}

/// Of a GPU that the node does not name.
const UNKNOWN: u32 = 500;

/// A recording of a node that was `before` when it began, at `begun_unix_ms`, and is `after` now.
fn trace(recording: &Recording, before: &Node, after: &Node, begun_unix_ms: i64) -> Trace {
    let mut trace = Trace::begun(begun_unix_ms);
    trace.about.lost_events = recording.lost;
    trace.about.duration_us = us(recording.ns);
    let mut names = BTreeMap::new();
    for (gpu, uuid) in &recording.gpus {
        let pid = pid(recording, after, *gpu);
        let called = match after.gpus.iter().find(|known| known.uuid == *uuid) {
            Some(known) => format!("GPU {}: {} ({uuid})", known.index, known.name),
            None => uuid.clone(),
        };
        let args = Args { name: called, ..Args::default() };
        names.insert((pid, 0), name("process_name", pid, 0, args));
        let args = Args { name: "the GPU".to_owned(), ..Args::default() };
        trace.events.push(name("thread_name", pid, 0, args));
    }
    for item in &recording.items {
        let pid = pid(recording, after, item.gpu);
        let tid = item.tenant.map_or(0, tid);
        if let Some(id) = item.tenant.and_then(|tenant| recording.tenants.get(&tenant)) {
            names
                .entry((pid, tid))
                .or_insert_with(|| name("thread_name", pid, tid, called(id, before, after)));
        }
        trace.events.push(Event {
            ph: if item.ns.is_some() { "X" } else { "i" }.to_owned(),
            name: kind(item.kind),
            ts: us(item.from),
            dur: item.ns.map(us),
            pid,
            tid,
            args: args(item.kind).map(Box::new),
        });
    }
    trace.events.extend(health(recording, after, begun_unix_ms));
    trace.events.splice(0..0, names.into_values());
    trace
}

#[allow(clippy::cast_precision_loss, reason = "half a minute")]
fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn tid(tenant: TenantId) -> u32 {
    tenant.0.saturating_add(1)
}

fn pid(recording: &Recording, node: &Node, gpu: GpuIndex) -> u32 {
    let uuid = recording.gpus.get(&gpu);
    let known = node.gpus.iter().find(|known| Some(&known.uuid) == uuid);
    known.map_or(UNKNOWN + u32::from(gpu), |known| known.index.saturating_add(1))
}

/// The pod and container that hold an allocation, or its id.
fn called(id: &str, before: &Node, after: &Node) -> Args {
    let mut tenants = after.tenants.iter().chain(&before.tenants);
    let tenant = tenants.find(|tenant| tenant.id == id).filter(|tenant| !tenant.pod.is_empty());
    let (namespace, name) = match tenant {
        Some(one) => {
            (one.namespace.clone(), format!("{}/{}, {}", one.namespace, one.pod, one.container))
        }
        None => (String::new(), id.to_owned()),
    };
    Args { name, namespace, allocation: id.to_owned(), ..Args::default() }
}

fn kind(kind: Kind) -> String {
    match kind {
        Kind::Wait => "wait".to_owned(),
        Kind::Lease(..) => "lease".to_owned(),
        Kind::Drain => "drain".to_owned(),
        Kind::Late => "late".to_owned(),
        Kind::LateDrained => "late drained".to_owned(),
        Kind::Share(_) => "share".to_owned(),
        Kind::Idle(cause) => format!("idle: {}", cause.into_str()),
    }
}

fn args(kind: Kind) -> Option<Args> {
    match kind {
        Kind::Lease(gate, why) => Some(Args {
            gate: gate.map_or("", Into::into).to_owned(),
            closed: why.map_or("", Into::into).to_owned(),
            ..Args::default()
        }),
        Kind::Share(share) => {
            let kind = share.kind.into_str();
            Some(Args { share: format!("{} {kind}", share.millis), ..Args::default() })
        }
        _ => None,
    }
}

/// The last change of each GPU's health, if it was meanwhile.
fn health(recording: &Recording, node: &Node, begun_unix_ms: i64) -> Vec<Event> {
    let mut events = Vec::new();
    for (gpu, uuid) in &recording.gpus {
        let Some(known) = node.gpus.iter().find(|known| known.uuid == *uuid) else { continue };
        let Ok(ms) = u64::try_from(known.state_since_unix_ms.saturating_sub(begun_unix_ms)) else {
            continue;
        };
        if known.state_since_unix_ms == 0 {
            continue;
        }
        let health = format!("{}: {}", known.state, known.state_reason);
        events.push(Event {
            ph: "i".to_owned(),
            name: "health".to_owned(),
            ts: us(ms.saturating_mul(1_000_000).min(recording.ns)),
            pid: pid(recording, node, *gpu),
            args: Some(Box::new(Args { health, ..Args::default() })),
            ..Event::default()
        });
    }
    events
}

#[cfg(test)]
mod tests {
    use tessera_view::status::{Gpu, Replica};

    use super::*;

    fn replica(resource: &str, gib: u64, holder: &str, health: Health) -> Replica {
        Replica {
            resource_name: resource.into(),
            memory_limit_bytes: gib << 30,
            allocation_id: holder.into(),
            health,
            ..Replica::default()
        }
    }

    #[test]
    fn what_fits_is_what_is_free_and_healthy_the_largest_first() {
        let gpu = Gpu {
            replicas: vec![
                replica("small", 10, "", Health::Healthy),
                replica("small", 10, "", Health::Healthy),
                replica("small", 10, "held", Health::Healthy),
                replica("large", 40, "", Health::Unhealthy),
                replica("large", 40, "", Health::Healthy),
            ],
            front_end: FrontEnd::DevicePlugin.into_str().to_owned(),
            ..Gpu::default()
        };
        let seen = super::gpu(&gpu);
        let fits: Vec<_> =
            seen.fits.iter().map(|f| (&*f.resource_name, f.count, f.memory_bytes >> 30)).collect();
        assert_eq!(fits, [("large", 1, 40), ("small", 2, 10)]);
        let cut: Vec<_> =
            seen.replicas.iter().map(|r| (&*r.resource_name, r.count, r.held, r.free)).collect();
        assert_eq!(cut, [("small", 3, 1, 2), ("large", 2, 0, 1)]);
        assert_eq!(seen.lease, None);
    }

    #[test]
    fn of_a_gpu_for_claims_fits_what_is_left_while_it_is_sold() {
        let gpu = Gpu {
            front_end: FrontEnd::Dra.into_str().to_owned(),
            health: Health::Healthy,
            left_memory_bytes: 59 << 30,
            left_cores_millis: 750,
            ..Gpu::default()
        };
        let fit =
            view::Fit { count: 1, memory_bytes: 59 << 30, cores_millis: 750, ..Default::default() };
        assert_eq!(super::gpu(&gpu).fits, [fit]);
        let cordoned = Gpu { cordon: "c".into(), ..gpu.clone() };
        assert!(super::gpu(&cordoned).fits.is_empty() && super::gpu(&cordoned).withheld.is_empty());
        assert!(super::gpu(&Gpu { moving: true, ..gpu.clone() }).fits.is_empty());
        assert!(super::gpu(&Gpu { no_room: "GPU time".into(), ..gpu }).fits.is_empty());
    }
}
