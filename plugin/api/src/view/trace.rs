//! What the arbiter recorded, as a trace that can be drawn.

use std::collections::BTreeMap;

use tessera_arbiter::policy::{GateState, GpuIndex, ShareKind, TenantId, Why};
use tessera_arbiter::trace::{Kind, Recording};
use tessera_view::node::Node;
use tessera_view::trace::{Args, Event, Trace, name};

/// Of a GPU that the node does not name.
const UNKNOWN: u32 = 500;

/// A recording of a node that was `before` when it began, at `begun_unix_ms`, and is `after` now.
pub(super) fn trace(
    recording: &Recording,
    before: &Node,
    after: &Node,
    begun_unix_ms: i64,
) -> Trace {
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
    u32::try_from(tenant.0).unwrap_or(u32::MAX).saturating_add(1)
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
        Kind::Idle(cause) => format!("idle: {}", cause.name()),
    }
}

fn args(kind: Kind) -> Option<Args> {
    match kind {
        Kind::Lease(gate, why) => Some(Args {
            gate: gate.map_or("", GateState::name).to_owned(),
            closed: why.map_or("", reason).to_owned(),
            ..Args::default()
        }),
        Kind::Share(share) => {
            let kind = match share.kind {
                ShareKind::Burst => "burst",
                ShareKind::Strict => "strict",
            };
            Some(Args { share: format!("{} {kind}", share.millis), ..Args::default() })
        }
        _ => None,
    }
}

fn reason(why: Why) -> &'static str {
    match why {
        Why::Idle => "idle",
        Why::Quantum => "quantum",
        Why::Owed => "owed",
        Why::Cap => "cap",
        Why::Newcomer => "newcomer",
        Why::Found => "found",
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
