//! Strict shares: how much of the cap is used by who wants more, alone, beside neighbours that do not drain in time,
//! and with several processes; and a newcomer beside who was alone and has a long queue.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::judge::Look;
use super::scenario::{self, Stage};
use super::{Gate, Report, Spec, Timeouts, backlog, graphs};

/// Caps that together leave room, so that each tenant is held by its own alone; and how long they are looked at.
const GROUPS: [&[f64]; 2] = [&[10.0, 25.0, 50.0], &[75.0]];
const TOGETHER: Duration = Duration::from_secs(10);

pub fn run(report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    let mut detail = Map::new();
    let kernels: fn(f64) -> Spec = |cores| backlog(cores, "200");
    for (key, what, most, load) in [
        ("cap_error_pct", "strict caps, kernels", 1.0, kernels),
        ("cap_error_graph_pct", "strict caps, 8 ms graphs", 2.0, graphs as fn(f64) -> Spec),
    ] {
        crate::note(what);
        let mut worst = 0.0f64;
        let mut caps = Map::new();
        // What one could use without a cap.
        let bare = scenario::watch(&[load(100.0)], Gate::Bare, Duration::from_secs(2))?;
        let solo = bare.account.rates()[0];
        for group in GROUPS {
            let tenants: Vec<Spec> = group.iter().map(|&cores| load(cores).strict()).collect();
            let seen = scenario::watch(&tenants, Gate::Tessera, TOGETHER)?;
            timeouts.0 += seen.timeouts;
            for (cap, got) in group.iter().zip(seen.account.rates()) {
                let got = got / solo * 100.0;
                let off = (got - cap) / cap * 100.0;
                worst = worst.max(off.abs());
                caps.insert(format!("{cap}"), json!({ "got": got, "error_percent": off }));
            }
        }
        report.figure(key, what, "%", worst, most);
        detail.insert(key.into(), Value::Object(caps));
    }
    report.put("cap_detail", Value::Object(detail));
    Ok(())
}

/// How long each case of late neighbours is looked at.
const LENGTH: Duration = Duration::from_secs(6);
/// Their capped neighbour's cap, percent.
const CAP: f64 = 25.0;

/// One case: its name, who is there, and how many of the last are stopped.
struct Case {
    name: &'static str,
    tenants: Vec<Spec>,
    stopped: usize,
}

fn with(mut spec: Spec, words: &[&str]) -> Spec {
    spec.load.extend(words.iter().map(|&word| word.to_owned()));
    spec
}

/// All cases; the capped tenant is the first.
fn cases() -> Vec<Case> {
    let capped = || backlog(CAP, "200").strict();
    let beside = |name, others: Vec<Spec>, stopped| {
        let tenants = std::iter::once(capped()).chain(others).collect();
        Case { name, tenants, stopped }
    };
    let short = || backlog(CAP, "200");
    let many = vec![Spec { processes: 8, ..capped() }];
    vec![
        beside("1 stopped", vec![short()], 1),
        beside("2 stopped", vec![short(), short()], 2),
        beside("3 stopped", vec![short(), short(), short()], 3),
        beside("host functions", vec![with(short(), &["--host-ms=400"])], 0),
        beside("never drains", vec![with(short(), &["--stuck-after-ms=200"])], 0),
        Case { name: "8 processes", tenants: many, stopped: 0 },
    ]
}

/// How far the first tenant is off its cap, percent of it; and what it got, percent.
fn off(case: &Case, timeouts: &mut Timeouts) -> anyhow::Result<(f64, f64)> {
    let stage = Stage::set(&case.tenants, Gate::Tessera)?;
    for tenant in stage.tenants.iter().rev().take(case.stopped) {
        tenant.stop();
    }
    if case.stopped > 0 {
        std::thread::sleep(Duration::from_millis(300));
    }
    let seen = stage.look(LENGTH)?;
    timeouts.0 += seen.timeouts;
    let got = seen.account.rates()[0] * 100.0;
    Ok(((got - CAP) / CAP * 100.0, got))
}

pub fn late(report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    let (mut worst, mut detail) = (0.0f64, Map::new());
    for case in cases() {
        crate::note(case.name);
        let (error, got) = off(&case, timeouts)?;
        worst = worst.max(error.abs());
        detail.insert(case.name.into(), json!({ "got": got, "error_percent": error }));
    }
    let what = "strict cap beside late ones, the worst";
    report.figure("late_cap_error_pct", what, "%", worst, 1.0);
    report.put("late_cap_detail", Value::Object(detail));
    let seconds = newcomer()?;
    report.figure("newcomer_share_s", "a newcomer has its share after", "s", seconds, 0.5);
    Ok(())
}

/// How long after it was there a newcomer with 80 % had that of each half second that followed, beside a
/// tenant that was alone with 10 s of work queued. Infinite where it never had.
fn newcomer() -> anyhow::Result<f64> {
    crate::note("newcomer");
    let alone = Spec::new(20.0, &["--kernel-us=10000"]);
    let mut stage = Stage::set(&[alone], Gate::Tessera)?;
    std::thread::sleep(Duration::from_millis(700));
    stage.join(&Spec::new(80.0, &["--kernel-us=200"]))?;
    let seen = stage.look(Duration::from_secs(5))?.account;
    let begun = seen.looks[0].at_ns;
    let half = |from: &Look| {
        let to = seen.looks.iter().find(|look| look.at_ns >= from.at_ns + 500_000_000)?;
        #[allow(clippy::cast_precision_loss, reason = "below 2^53")]
        let part = (to.work_ns[1] - from.work_ns[1]) as f64 / (to.at_ns - from.at_ns) as f64;
        Some((from.at_ns - begun, part))
    };
    let parts: Vec<(u64, f64)> = seen.looks.iter().map_while(half).collect();
    let late = parts.iter().rposition(|(_, part)| *part < 0.72);
    let from = late.map_or(Some(0), |at| parts.get(at + 1).map(|(at, _)| *at));
    Ok(from.map_or(f64::INFINITY, |ns| Duration::from_nanos(ns).as_secs_f64()))
}
