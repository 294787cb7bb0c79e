//! Neighbours of a tenant that floods its gate socket, for every kind of message that the protocol has.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use tessera_harness::Background;
use tessera_harness::gate_tenants::{Peer, Tenant, arbiter};
use tessera_region::layout::{GATE_CLOSED, gate_epoch, gate_state};
use tessera_region::quota::QuotaWriter;
use tessera_region::session::{Kind, Message};

use crate::report::Report;
use crate::stats::Sample;

/// Rounds, and how long each of their two parts is measured.
const ROUNDS: usize = 5;
const PART: Duration = Duration::from_millis(600);
/// How long a part has lasted when it is measured.
const LEAD: Duration = Duration::from_millis(150);
/// From one look of a process at its gate to the next.
const LOOK: Duration = Duration::from_micros(50);

/// Measures by how much less of the time the neighbours' gates were open beside a flood than before it, for the worst
/// kind of its messages.
pub fn run(report: &mut Report) -> anyhow::Result<()> {
    let arbiter = arbiter();
    let admit = |id: &str, millis| Tenant::new(id, millis).at(&arbiter);
    let (neighbours, flooder) = ([admit("a", 500), admit("b", 250)], admit("flooder", 250));
    let open_ns = Arc::new(AtomicU64::new(0));
    let _work = neighbours
        .iter()
        .map(|tenant| worker(tenant.path(), &open_ns, true))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (mut worst, mut detail) = (f64::NEG_INFINITY, Map::new());
    for &kind in Kind::ALL {
        let mut losses = Vec::new();
        for _ in 0..ROUNDS {
            // Who wants takes leases, and these flooders drain none: that alone costs the others, without any flood.
            let quiet = match kind {
                Kind::Want => worker(flooder.path(), &Arc::default(), false)?,
                _ => flood(flooder.path(), None),
            };
            let before = measure(&open_ns);
            drop(quiet);
            let flood = flood(flooder.path(), Some(kind));
            let beside = measure(&open_ns);
            drop(flood);
            losses.push(100.0 * (1.0 - beside / before.max(1e-9)));
        }
        let lost = Sample::new(losses).median();
        worst = worst.max(lost);
        detail.insert(format!("{kind:?}").to_lowercase(), lost.into());
    }
    let what = "neighbours' time at an open gate, lost to a flood of the worst kind";
    report.figure("flood_neighbour_loss_pct", what, "%", worst, 2.0);
    report.put("flood_detail", Value::Object(detail));
    Ok(())
}

/// The part of the time for which the neighbours' gates are open.
#[allow(clippy::cast_precision_loss, reason = "nanoseconds of a second")]
fn measure(open_ns: &AtomicU64) -> f64 {
    std::thread::sleep(LEAD);
    let (before, began) = (open_ns.load(Ordering::Relaxed), Instant::now());
    std::thread::sleep(PART);
    let open = open_ns.load(Ordering::Relaxed) - before;
    open as f64 / began.elapsed().as_nanos() as f64
}

/// A process with work without end: it wants at every closing, after it has drained if it `drains`, and adds up for
/// how long it may work.
fn worker(dir: &Path, open_ns: &Arc<AtomicU64>, drains: bool) -> anyhow::Result<Background> {
    let (page, open_ns) = (QuotaWriter::open(dir)?, Arc::clone(open_ns));
    let peer = Peer::connect(dir).hello();
    Ok(Background::new(move |stop| {
        let (mut seen, mut opened) = (None, Instant::now());
        while !stop.load(Ordering::Relaxed) {
            let word = page.gate(0);
            if seen.replace(word) != Some(word) && gate_state(word) == GATE_CLOSED {
                let used_ns = u64::try_from(opened.elapsed().as_nanos()).unwrap_or(u64::MAX);
                let drained = Message::Drained { gpu: 0, epoch: gate_epoch(word), used_ns };
                let _ = drains.then(|| peer.say(drained));
                peer.want();
            }
            let looked = Instant::now();
            std::thread::sleep(LOOK);
            if gate_state(word) == GATE_CLOSED {
                opened = Instant::now();
            } else {
                let passed = u64::try_from(looked.elapsed().as_nanos()).unwrap_or(0);
                open_ns.fetch_add(passed, Ordering::Relaxed);
            }
        }
    }))
}

/// A process that says something new of this kind without end, as fast as it is heard, and connects again when it is
/// dropped; or, without a kind, is there.
fn flood(dir: &Path, kind: Option<Kind>) -> Background {
    let (dir, mut peer) = (dir.to_owned(), Peer::connect(dir).hello());
    Background::new(move |stop| {
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            let Some(kind) = kind else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            number += 1;
            if !peer.say(Message::specimen(kind, number)) {
                match Peer::try_connect(&dir) {
                    Ok(new) => peer = new.hello(),
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        }
    })
}
