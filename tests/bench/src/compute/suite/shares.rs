//! Tenants that never have enough: shares, fairness, throughput, hand-overs, the arbiter's cost.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Gate, Place, Report, Spec, Timeouts, backlog, graphs};
use crate::compute::scenario::{self, Seen};
use crate::stats::Sample;

/// How long the judge looks on.
const LENGTH: Duration = Duration::from_millis(10_100);
/// And without Tessera, where there is less to see.
const BARE: Duration = Duration::from_millis(2_100);
const SECOND: Duration = Duration::from_secs(1);
const TEN: Duration = Duration::from_secs(10);

/// Tenants with weights.
struct Set {
    name: &'static str,
    weights: &'static [f64],
    /// What each runs.
    kernels: &'static [&'static str],
    /// Longest operation, microseconds.
    longest_us: f64,
}

/// A graph instead of kernels.
const GRAPH: &str = "graph";

const SETS: [Set; 5] = [
    Set { name: "two_equal", weights: &[50.0, 50.0], kernels: &["200"], longest_us: 200.0 },
    Set { name: "two_75_25", weights: &[75.0, 25.0], kernels: &["20", "1000"], longest_us: 1000.0 },
    Set { name: "two_90_10_graphs", weights: &[10.0, 90.0], kernels: &[GRAPH], longest_us: 8000.0 },
    Set {
        name: "four",
        weights: &[40.0, 30.0, 20.0, 10.0],
        kernels: &["5000", "20,200,1000", GRAPH, "200"],
        longest_us: 8000.0,
    },
    Set {
        name: "eight_equal",
        weights: &[12.5; 8],
        kernels: &["20", "200", "1000", "50,500"],
        longest_us: 1000.0,
    },
];

impl Set {
    fn tenants(&self) -> Vec<Spec> {
        let kernels = self.kernels.iter().cycle();
        let one = |(&cores, kernels): (&f64, &&str)| match *kernels {
            GRAPH => graphs(cores),
            list => backlog(cores, list),
        };
        self.weights.iter().zip(kernels).map(one).collect()
    }

    fn due(&self) -> Vec<f64> {
        let all: f64 = self.weights.iter().sum();
        self.weights.iter().map(|w| w / all).collect()
    }
}

/// Measures all of it.
///
/// # Errors
/// A tenant that does not start.
pub fn run(place: &Place, report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    let (mut second, mut ten) = (0.0f64, 0.0f64);
    let mut detail = serde_json::Map::new();
    for set in &SETS {
        crate::note(&format!("shares: {}", set.name));
        let due = set.due();
        let bare = scenario::watch(place, &set.tenants(), Gate::Bare, BARE)?;
        let seen = scenario::watch(place, &set.tenants(), Gate::Tessera, LENGTH)?;
        timeouts.0 += seen.counted.timeouts;
        let off = worst(&seen.account.share_errors(&due, SECOND));
        // Where operations are longer, a second cannot be divided so finely.
        if set.longest_us <= 1000.0 {
            second = second.max(off);
        }
        ten = ten.max(worst(&seen.account.share_errors(&due, TEN)));
        detail.insert(set.name.into(), value(set, &seen, &bare, &due));
        if set.name == "two_equal" {
            throughput(place, report, &seen, &bare)?;
            handover(report, &seen);
        }
        if set.name == "eight_equal" {
            let least = seen.account.jain(&due, SECOND).into_iter().fold(1.0, f64::min);
            report.at_least("jain_8", "Jain's index of 8 tenants, 1 s", "", least, Some(0.999));
            let percent = seen.arbiter_percent;
            report.figure("arbiter_cpu_pct", "arbiter's CPU, 8 tenants", "%", percent, Some(3.0));
        }
    }
    report.figure("share_error_1s_pp", "share error over 1 s", "pp", second, Some(1.0));
    report.figure("share_error_10s_pp", "share error over 10 s", "pp", ten, Some(0.5));
    report.put("share_detail", Value::Object(detail));
    conservation(place, report, timeouts)?;
    // Before everything else on the machine, what is beside it says nothing.
    if crate::machine::goes_first() {
        return Ok(());
    }
    loaded(place, report, timeouts)
}

fn worst(errors: &[f64]) -> f64 {
    errors.iter().copied().fold(0.0, f64::max)
}

fn value(set: &Set, seen: &Seen, bare: &Seen, due: &[f64]) -> Value {
    let errors = |seen: &Seen, window| {
        let errors = seen.account.share_errors(due, window);
        match errors.is_empty() {
            true => Value::Null,
            false => json!({ "worst": worst(&errors), "median": Sample::new(errors).median() }),
        }
    };
    json!({
        "due": due,
        "kernel_us": set.kernels,
        "got": seen.account.shares(),
        "error_1s_pp": errors(seen, SECOND),
        "error_10s_pp": errors(seen, TEN),
        "jain_1s": seen.account.jain(due, SECOND).into_iter().fold(1.0, f64::min),
        "busy": seen.account.rates().iter().sum::<f64>(),
        "markers": seen.account.marks(),
        "switches_per_second": seen.account.switches_per_second(),
        "handover_us": handover_value(seen),
        "arbiter_percent": seen.arbiter_percent,
        "gate_timeouts": seen.counted.timeouts,
        "bare": {
            "got": bare.account.shares(),
            "error_1s_pp": errors(bare, SECOND),
            "busy": bare.account.rates().iter().sum::<f64>(),
        },
    })
}

fn handover_value(seen: &Seen) -> Value {
    seen.account.handover_us().map_or(Value::Null, |idle| {
        json!({
            "p50": idle.median(), "p90": idle.quantile(0.9), "p99": idle.quantile(0.99),
            "max": idle.max(), "count": idle.len(),
        })
    })
}

fn handover(report: &mut Report, seen: &Seen) {
    let Some(idle) = seen.account.handover_us() else { return };
    let (p50, p99) = (idle.median(), idle.quantile(0.99));
    report.figure("handoff_us", "hand-over, GPU idle, p50", "µs", p50, None);
    report.figure("handoff_p99_us", "· p99", "µs", p99, Some(100.0));
    report.put("handoff_detail_us", handover_value(seen));
}

/// All work done under contention to what one does alone, in the same time.
fn throughput(place: &Place, report: &mut Report, seen: &Seen, bare: &Seen) -> anyhow::Result<()> {
    crate::note("throughput");
    let alone = scenario::watch(place, &SETS[0].tenants()[..1], Gate::Bare, BARE)?;
    let rate = |seen: &Seen| seen.account.rates().iter().sum::<f64>();
    let ratio = rate(seen) / rate(&alone);
    let most = Some(0.98);
    report.at_least("aggregate_throughput", "two backlogged, to one alone", "", ratio, most);
    report.put("aggregate_throughput_bare", json!(rate(bare) / rate(&alone)));
    Ok(())
}

/// A quarter of the GPU, and a neighbour that is there and wants nothing.
fn conservation(place: &Place, report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    crate::note("work conservation");
    let length = Duration::from_secs(3);
    let idle = Spec::new(75.0, &["--kernel-us=10", "--rate=0.001"]);
    let tenants = [backlog(25.0, "20,200,1000"), idle];
    let mut ratios = Vec::new();
    for _ in 0..3 {
        let bare = scenario::watch(place, &tenants[..1], Gate::Bare, length)?;
        let seen = scenario::watch(place, &tenants, Gate::Tessera, length)?;
        timeouts.0 += seen.counted.timeouts;
        ratios.push(seen.account.rates()[0] / bare.account.rates()[0]);
    }
    let ratios = Sample::new(ratios);
    let median = ratios.median();
    report.at_least("work_conservation", "beside an idle one, to alone", "", median, Some(0.995));
    report.detail("work_conservation_detail", &ratios);
    Ok(())
}

/// Hand-overs while every CPU has something else to do.
fn loaded(place: &Place, report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    crate::note("hand-over on busy CPUs");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let seen = std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let length = Duration::from_secs(4);
        let seen = scenario::watch(place, &SETS[0].tenants(), Gate::Tessera, length);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        seen
    })?;
    timeouts.0 += seen.counted.timeouts;
    if let Some(idle) = seen.account.handover_us() {
        report.figure("handoff_loaded_us", "· busy CPUs, p50", "µs", idle.median(), None);
        let p99 = idle.quantile(0.99);
        report.figure("handoff_loaded_p99_us", "· busy CPUs, p99", "µs", p99, None);
    }
    report.put("handoff_loaded_detail_us", handover_value(&seen));
    Ok(())
}
