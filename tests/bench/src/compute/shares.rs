//! Tenants that never have enough: shares, throughput, hand-overs, the arbiter's cost; how much of the time the GPU works for two, beside
//! what it does without Tessera; and how long a server waits beside one of them.

use std::time::Duration;

use serde_json::{Map, Value, json};
use tessera_harness::Spinners;

use super::scenario::{self, Seen, Stage};
use super::{Gate, Report, Spec, Timeouts, backlog, graphs};
use crate::stats::Sample;

/// How long the judge looks on.
const LENGTH: Duration = Duration::from_millis(10_100);
/// And without Tessera, where there is less to see.
const BARE: Duration = Duration::from_millis(2_100);
/// And at pairs that easily lose the GPU's time.
const BUSY: Duration = Duration::from_secs(4);
/// One stretch of serving, alone or not; rounds, in which alone and beside alternate, and of whose percentiles the
/// medians count.
const SERVED: Duration = Duration::from_millis(1500);
const ROUNDS: usize = 3;
const SECOND: Duration = Duration::from_secs(1);
const TEN: Duration = Duration::from_secs(10);

struct Set {
    name: &'static str,
    weights: &'static [f64],
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

pub fn run(report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    let (mut second, mut ten) = (0.0f64, 0.0f64);
    let mut detail = serde_json::Map::new();
    for set in &SETS {
        crate::note(&format!("shares: {}", set.name));
        let due = set.due();
        let seen = scenario::watch(&set.tenants(), Gate::Tessera, LENGTH)?;
        timeouts.0 += seen.timeouts;
        let off = worst(&seen.account.share_errors(&due, SECOND));
        // Where operations are longer, a second cannot be divided so finely.
        if set.longest_us <= 1000.0 {
            second = second.max(off);
        }
        ten = ten.max(worst(&seen.account.share_errors(&due, TEN)));
        detail.insert(set.name.into(), value(&seen, &due));
        if set.name == "two_equal" {
            throughput(report, &seen)?;
            handover(report, &seen, ["handoff_us", "handoff_p99_us"], [60.0, 100.0]);
        }
        if set.name == "eight_equal" {
            let percent = seen.arbiter_percent;
            report.figure("arbiter_cpu_pct", "arbiter's CPU, 8 tenants", "%", percent, 3.0);
        }
    }
    report.figure("share_error_1s_pp", "share error over 1 s", "pp", second, 1.0);
    report.figure("share_error_10s_pp", "share error over 10 s", "pp", ten, 0.5);
    report.put("share_detail", Value::Object(detail));
    conservation(report, timeouts)?;
    // Before everything else on the machine, what is beside it says nothing.
    if crate::machine::goes_first() {
        return Ok(());
    }
    loaded(report, timeouts)
}

fn worst(errors: &[f64]) -> f64 {
    errors.iter().copied().fold(0.0, f64::max)
}

fn value(seen: &Seen, due: &[f64]) -> Value {
    let errors = |window| {
        let errors = seen.account.share_errors(due, window);
        match errors.is_empty() {
            true => Value::Null,
            false => json!({ "worst": worst(&errors), "median": Sample::new(errors).median() }),
        }
    };
    json!({
        "due": due,
        "got": seen.account.shares(),
        "error_1s_pp": errors(SECOND),
        "error_10s_pp": errors(TEN),
        "busy": seen.account.rates().iter().sum::<f64>(),
        "gate_timeouts": seen.timeouts,
    })
}

/// Median and 99th percentile of hand-overs, microseconds, under these keys, with what they must not exceed.
fn handover(report: &mut Report, seen: &Seen, keys: [&str; 2], most: [f64; 2]) {
    let Some(idle) = seen.account.handover_us() else { return };
    report.figure(keys[0], "hand-over, GPU idle, p50", "µs", idle.median(), most[0]);
    report.figure(keys[1], "· p99", "µs", idle.quantile(0.99), most[1]);
    report.detail(&format!("{}_detail", keys[0]), &idle);
}

/// All work done under contention to what one does alone, in the same time.
fn throughput(report: &mut Report, seen: &Seen) -> anyhow::Result<()> {
    crate::note("throughput");
    let alone = scenario::watch(&SETS[0].tenants()[..1], Gate::Bare, BARE)?;
    let rate = |seen: &Seen| seen.account.rates().iter().sum::<f64>();
    let ratio = rate(seen) / rate(&alone);
    report.at_least("aggregate_throughput", "two backlogged, to one alone", "", ratio, 0.98);
    Ok(())
}

/// A quarter of the GPU, and a neighbour that is there and wants nothing.
fn conservation(report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    crate::note("work conservation");
    let length = Duration::from_secs(3);
    let idle = Spec::new(75.0, &["--kernel-us=10", "--rate=0.001"]);
    let tenants = [backlog(25.0, "20,200,1000"), idle];
    let mut ratios = Vec::new();
    for _ in 0..3 {
        let bare = scenario::watch(&tenants[..1], Gate::Bare, length)?;
        let seen = scenario::watch(&tenants, Gate::Tessera, length)?;
        timeouts.0 += seen.timeouts;
        ratios.push(seen.account.rates()[0] / bare.account.rates()[0]);
    }
    let ratios = Sample::new(ratios);
    let median = ratios.median();
    report.at_least("work_conservation", "beside an idle one, to alone", "", median, 0.995);
    report.detail("work_conservation_detail", &ratios);
    Ok(())
}

/// The same beside a load of two a CPU: hand-overs, shares, a strict cap, and how long a server waits.
fn loaded(report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    crate::note("on busy CPUs");
    let spinners = Spinners::start(2 * std::thread::available_parallelism().map_or(1, usize::from));
    let seen = scenario::watch(&SETS[0].tenants(), Gate::Tessera, LENGTH)?;
    let strict = [backlog(25.0, "200").strict()];
    let cap = scenario::watch(&strict, Gate::Tessera, BUSY)?;
    let more = interference(1)?;
    drop(spinners);
    timeouts.0 += seen.timeouts + cap.timeouts;
    let keys = ["handoff_loaded_us", "handoff_loaded_p99_us"];
    handover(report, &seen, keys, [150.0, 600.0]);
    let error = worst(&seen.account.share_errors(&SETS[0].due(), SECOND));
    report.figure("share_error_1s_loaded_pp", "share error over 1 s, busy CPUs", "pp", error, 2.0);
    let error = (cap.account.rates()[0] / 0.25 - 1.0).abs() * 100.0;
    report.figure("cap_error_loaded_pct", "strict 25 % alone, busy CPUs", "%", error, 3.0);
    let what = "a server's p99 beside a backlog, 80/20, busy CPUs";
    report.figure("interference_p99_80_loaded_pct", what, "% more", more.0, 25.0);
    report.put("interference_loaded_detail", more.1);
    Ok(())
}

/// Two or more of which the GPU's time is easily lost.
struct Pattern {
    key: &'static str,
    what: &'static str,
    /// The GPU is busy for so much of what it is without Tessera; or of the time.
    least: f64,
    of_bare: bool,
    tenants: Vec<Spec>,
}

/// The table of GPU time's design.
fn patterns() -> Vec<Pattern> {
    let bursts = |cores, us: u32, kernels: u32, pause: u32| {
        let [us, kernels, pause] = [("kernel-us", us), ("kernels", kernels), ("pause-ms", pause)]
            .map(|(name, number)| format!("--{name}={number}"));
        Spec::new(cores, &["--closed", &us, &kernels, &pause])
    };
    let copies = || Spec::new(50.0, &["--kernel-us=1000", "--sync-every=10", "--copy-mib=16"]);
    let copy = Spec::new(50.0, &["--kernel-us=200", "--sync-every=1", "--copy-mib=16"]);
    let periodic = |cores| Spec::new(cores, &["--rate=333", "--kernel-us=200"]);
    let many = Spec { processes: 16, ..backlog(50.0, "200") };
    let limited = |cpus| vec![backlog(50.0, "200").limited(cpus), backlog(50.0, "200")];
    let bare = |key, what, least, tenants| Pattern { key, what, least, of_bare: true, tenants };
    let wall =
        |key, what, least, tenants| Pattern { of_bare: false, ..bare(key, what, least, tenants) };
    vec![
        bare(
            "decoders_busy_ratio",
            "busy, to bare: twice 8 ms of work, 1 ms pause",
            0.98,
            vec![bursts(50.0, 200, 40, 1); 2],
        ),
        wall(
            "pauses_8_4_busy",
            "busy: twice 8 ms of work, 4 ms pause",
            0.95,
            vec![bursts(50.0, 200, 40, 4); 2],
        ),
        wall(
            "pauses_2_2_busy",
            "busy: twice 2 ms of work, 2 ms pause",
            0.95,
            vec![bursts(50.0, 200, 10, 2); 2],
        ),
        wall(
            "pauses_2_2_four_busy",
            "busy: four times 2 ms of work, 2 ms pause",
            0.95,
            vec![bursts(25.0, 200, 10, 2); 4],
        ),
        bare(
            "periodic_busy_ratio",
            "busy, to bare: 200 µs each 3 ms and a backlog, 50/50",
            0.97,
            vec![periodic(50.0), backlog(50.0, "200")],
        ),
        bare(
            "periodic_20_busy_ratio",
            "busy, to bare: the same, 20/80",
            0.97,
            vec![periodic(20.0), backlog(80.0, "200")],
        ),
        bare(
            "half_busy_ratio",
            "busy, to bare: 1 ms of work, 1 ms pause and a backlog, 80/20",
            0.95,
            vec![bursts(80.0, 200, 5, 1), backlog(20.0, "200")],
        ),
        bare("copy_busy_ratio", "busy, to bare: two that copy", 0.95, vec![copies(), copies()]),
        bare(
            "copy_beside_busy_ratio",
            "busy, to bare: 16 MiB of copy each 200 µs and a backlog",
            0.95,
            vec![copy, backlog(50.0, "200")],
        ),
        bare(
            "bursts_busy_ratio",
            "busy, to bare: twice 40 ms on, 60 ms off",
            0.98,
            vec![bursts(50.0, 1000, 40, 60); 2],
        ),
        bare(
            "processes_busy_ratio",
            "busy, to bare: 16 processes and one",
            0.95,
            vec![many, backlog(50.0, "200")],
        ),
        bare(
            "limited_half_busy_ratio",
            "busy, to bare: a backlog with half a CPU and one",
            0.97,
            limited(0.5),
        ),
        bare(
            "limited_one_busy_ratio",
            "busy, to bare: a backlog with one CPU and one",
            0.97,
            limited(1.0),
        ),
        bare(
            "limited_more_busy_ratio",
            "busy, to bare: a backlog with 1.5 CPUs and one",
            0.97,
            limited(1.5),
        ),
    ]
}

/// Measures how much of the time the GPU works for them, beside what it does without Tessera.
pub fn busy(report: &mut Report) -> anyhow::Result<()> {
    let mut detail = Map::new();
    for Pattern { key, what, least, of_bare, tenants } in patterns() {
        crate::note(what);
        let mut ratios = Vec::new();
        let mut rows = Vec::new();
        for _ in 0..3 {
            let bare = scenario::watch(&tenants, Gate::Bare, BUSY / 2)?.account;
            let seen = scenario::watch(&tenants, Gate::Tessera, BUSY)?.account;
            let busy = |rates: &[f64]| rates.iter().sum::<f64>();
            ratios.push(busy(&seen.rates()) / if of_bare { busy(&bare.rates()) } else { 1.0 });
            rows.push(json!({ "rates": seen.rates(), "bare_rates": bare.rates() }));
        }
        report.at_least(key, what, "", Sample::new(ratios).median(), least);
        detail.insert(key.into(), Value::Array(rows));
    }
    report.put("busy_detail", Value::Object(detail));
    Ok(())
}

/// The 99th percentile of a server's requests, half of a request's kernels each, 40 Poisson requests of 2 ms in a
/// second: 8 % of the GPU.
pub fn interfere(report: &mut Report) -> anyhow::Result<()> {
    let rows = [
        (1, "interference_p99_80_pct", "a server's p99 beside a backlog, 80/20", 10.0),
        (3, "interference_p99_80_three_pct", "the same beside one of three processes", 20.0),
    ];
    for (processes, key, what, goal) in rows {
        crate::note(what);
        let (more, detail) = interference(processes)?;
        report.figure(key, what, "% more", more, goal);
        report.put(&format!("{key}_detail"), detail);
    }
    Ok(())
}

/// By how many percent it grows beside a backlog of so many processes, and the medians of both.
fn interference(processes: u32) -> anyhow::Result<(f64, Value)> {
    let server = Spec::new(80.0, &["--kernel-us=500,500,500,500", "--rate=40", "--poisson"]);
    let tenants = [server, Spec { processes, ..backlog(20.0, "200") }];
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(serve(&tenants[..1])?);
        beside.push(serve(&tenants)?);
    }
    let (alone, beside) = (Sample::new(alone).median(), Sample::new(beside).median());
    let detail = json!({ "alone_us": alone, "beside_us": beside });
    Ok(((beside / alone - 1.0) * 100.0, detail))
}

/// The 99th percentile that the first of `tenants` says of its requests, microseconds.
fn serve(tenants: &[Spec]) -> anyhow::Result<f64> {
    let mut stage = Stage::set(tenants, Gate::Tessera)?;
    let server = &mut stage.tenants[0];
    // What was served while others started is not looked at.
    server.signal(libc::SIGUSR1);
    server.hear("phase", 1)?;
    server.forget();
    std::thread::sleep(SERVED);
    server.signal(libc::SIGUSR1);
    let phase = server.hear("phase", 1)?.remove(0);
    let field = |name: &str| phase[name].as_f64().unwrap_or(f64::NAN);
    anyhow::ensure!(field("requests") > 0.0, "no request was served");
    Ok(field("p99_us"))
}
