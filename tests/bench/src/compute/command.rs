//! `tessera-bench compute SCENARIO …` runs one scenario and prints what the judge saw; see [`USAGE`].

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use tessera_tenant_program::args::Args;
use tessera_tenant_program::exit::Exit;

use tessera_config::Leases;

use super::machine::Costs;
use super::scenario::{self, Place, Seen, Stage};
use super::suite::{busy, interfere, late, many, reclaim, tied};
use super::sweep;
use super::tenant::{Gate, Spec};
use super::view;
use crate::report::Report;
use crate::stats::Sample;
use crate::world::Artefacts;

const USAGE: &str = "\
tessera-bench compute SCENARIO [OPTIONS]

Scenarios
  share       backlogged tenants: shares, errors over 1 s windows, hand-overs, throughput
              [--tenants N] [--weights A,B,…] [--policy burst|strict] [--sync-every N]
  interfere   a server of requests beside a backlogged neighbour
              [--rate R] [--weights SERVER,NEIGHBOUR] [--request-us LIST] [--processes N]
  reclaim     a tenant that comes and goes beside a backlogged neighbour
              [--burst-ms B] [--pause-ms P] [--weights BURSTY,NEIGHBOUR]
  sweep       share at 75/25 on machines whose events and switches cost more and more, as a table
  late        a strict share beside late neighbours [--case TEXT]
  newcomer    80 % beside one that was alone with 10 s of work queued
  busy        pairs of which the GPU's time is easily lost [--case TEXT]
  tied        collectives and host functions under a lease, beside bare [--case TEXT]
  many        128 tenants in pure simulation of the policy, without options

Options
  --seconds N         how long the judge looks (5)
  --kernel-us LIST    the backlogged tenants' kernels; tenants are separated by / (200)
  --kernels N         that many of each (1)
  --graph             all of a tenant's as one graph
  --shallow-ms N      that long each begins with one launch in flight (300); 0: the first to come has
                      the queue full before another is there
  --processes N       processes of each backlogged tenant (1)
  --gate bare|tessera|run|both                (both: bare, then tessera)
  --quantum-ms, --window, --window-us N       how the arbiter is configured
  --slice-us, --switch-us, --event-ns, --marker-ns, --launch-ns N
  --realtime          before everything else on a machine that is busy with other things (root)
  --json              one JSON object for each run instead of text
  --artefacts DIR     built files";

/// What a scenario's command line says.
struct Options {
    place: Place,
    gates: Vec<Gate>,
    length: Duration,
    json: bool,
    kernel_us: Vec<String>,
    kernels: u32,
    graph: bool,
    processes: u32,
    weights: Vec<f64>,
    policy: &'static str,
    sync_every: u64,
    shallow_ms: u64,
    rate: f64,
    request_us: String,
    burst_ms: u64,
    pause_ms: u64,
    case: String,
}

/// Runs one scenario by name.
///
/// # Errors
/// A wrong command line, or a tenant that does not start.
pub fn run(words: &[String]) -> anyhow::Result<ExitCode> {
    let mut args = Args::new(words.to_vec());
    if args.flag("--help") || args.flag("-h") {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    }
    let usage = |exit: Exit| anyhow::anyhow!("{}\n\n{USAGE}", exit.message);
    let options = Options::parse(&mut args).map_err(usage)??;
    if args.flag("--realtime") {
        crate::machine::go_first().context("--realtime takes root")?;
    }
    let scenario = args.subcommand().unwrap_or_default();
    args.finish().map_err(usage)?;
    if scenario == "many" {
        let mut report = Report::default();
        many::run(&mut report);
        println!("{}", if options.json { report.summary().to_string() } else { report.table() });
        return Ok(ExitCode::SUCCESS);
    }
    if scenario == "sweep" {
        let kernel_us = options.kernel_us.first().map_or("200", String::as_str);
        let (value, text) = sweep::run(&options.place, kernel_us, options.length)?;
        println!("{}", if options.json { value.to_string() } else { text });
        return Ok(ExitCode::SUCCESS);
    }
    if scenario == "tied" {
        return options.tied();
    }
    for &gate in &options.gates {
        let (value, text) = match scenario.as_str() {
            "share" => options.share(gate)?,
            "interfere" => options.interfere(gate)?,
            "reclaim" => options.reclaim(gate)?,
            "late" => options.late(gate)?,
            "newcomer" => {
                let seconds = late::newcomer(&options.place, gate)?;
                (json!({ "seconds": seconds }), format!("has its share after {seconds:.2} s"))
            }
            "busy" => options.busy(gate)?,
            other => anyhow::bail!("no scenario {other:?}\n\n{USAGE}"),
        };
        if options.json {
            println!("{value}");
        } else {
            println!("{}: {text}", gate.name());
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Options {
    fn parse(args: &mut Args) -> Result<anyhow::Result<Self>, Exit> {
        let defaults = Costs::default();
        let costs = Costs {
            slice_us: args.number("--slice-us", defaults.slice_us)?,
            switch_us: args.number("--switch-us", defaults.switch_us)?,
            event_ns: args.number("--event-ns", defaults.event_ns)?,
            marker_ns: args.number("--marker-ns", defaults.marker_ns)?,
            launch_ns: args.number("--launch-ns", defaults.launch_ns)?,
        };
        let gates = match args.value("--gate")?.as_deref() {
            None | Some("both") => vec![Gate::Bare, Gate::Tessera],
            Some("bare") => vec![Gate::Bare],
            Some("tessera") => vec![Gate::Tessera],
            Some("run") => vec![Gate::Run],
            Some(other) => return Err(Exit::usage(format!("--gate: it cannot be {other:?}"))),
        };
        let list = args.value("--weights")?;
        let tenants: usize = args.number("--tenants", 2)?;
        let weights = match list {
            #[allow(clippy::cast_precision_loss, reason = "a number of tenants")]
            None => vec![100.0 / tenants.max(1) as f64; tenants],
            Some(list) => list
                .split(',')
                .map(|w| w.parse().ok().filter(|w| *w > 0.0))
                .collect::<Option<Vec<f64>>>()
                .ok_or_else(|| Exit::usage(format!("--weights: {list:?} is not percentages")))?,
        };
        let policy = match args.value("--policy")?.as_deref() {
            None | Some("burst") => "burst",
            Some("strict") => "strict",
            Some("none") => "none",
            Some(other) => return Err(Exit::usage(format!("--policy: it cannot be {other:?}"))),
        };
        let kernel_us = args.value("--kernel-us")?.unwrap_or_else(|| "200".into());
        let artefacts = match Artefacts::find(args.value("--artefacts")?.as_deref()) {
            Ok(artefacts) => artefacts,
            Err(error) => return Ok(Err(error)),
        };
        let mut leases = Leases::default();
        if let Some(ms) = Some(args.number::<u64>("--quantum-ms", 0)?).filter(|&ms| ms > 0) {
            leases.quantum = Duration::from_millis(ms);
            leases.quantum_min = leases.quantum_min.min(leases.quantum);
            leases.quantum_max = leases.quantum_max.max(leases.quantum);
        }
        leases.window = args.number("--window", leases.window)?;
        let window_us = u64::try_from(leases.window_time.as_micros()).unwrap_or(u64::MAX);
        leases.window_time = Duration::from_micros(args.number("--window-us", window_us)?);
        let options = Self {
            place: Place { artefacts, costs, leases },
            gates,
            length: Duration::from_millis(args.number::<u64>("--seconds", 5)? * 1000),
            json: args.flag("--json"),
            kernel_us: kernel_us.split('/').map(str::to_owned).collect(),
            kernels: args.number("--kernels", 1)?,
            graph: args.flag("--graph"),
            processes: args.number("--processes", 1)?,
            weights,
            policy,
            sync_every: args.number("--sync-every", 0)?,
            shallow_ms: args.number("--shallow-ms", scenario::SHALLOW_MS)?,
            rate: args.number("--rate", 50.0)?,
            request_us: args.value("--request-us")?.unwrap_or_else(|| "1000".into()),
            burst_ms: args.number("--burst-ms", 20)?,
            pause_ms: args.number("--pause-ms", 60)?,
            case: args.value("--case")?.unwrap_or_default(),
        };
        Ok(Ok(options))
    }

    fn late(&self, gate: Gate) -> anyhow::Result<(Value, String)> {
        let (mut rows, mut text) = (serde_json::Map::new(), String::new());
        for case in late::cases().iter().filter(|case| case.name.contains(&self.case)) {
            let (error, got) = late::off(&self.place, case, gate, &mut 0)?;
            rows.insert(case.name.into(), json!({ "got": got, "error_percent": error }));
            text += &format!("\n  {}: {got:.2} %, {error:+.2} % of the cap", case.name);
        }
        Ok((Value::Object(rows), text))
    }

    fn tied(&self) -> anyhow::Result<ExitCode> {
        let place = tied::Place::new(&self.place.artefacts)?;
        for shape in tied::SHAPES.iter().filter(|shape| shape.contains(&self.case)) {
            let seen = place.speeds(shape)?;
            match self.json {
                true => println!("{}", json!({ *shape: seen.to_json() })),
                false => println!(
                    "{shape}: {:.0} steps a second bare; of its share {:.3} with a cap, {:.3} beside a \
                     backlog, which does {:.3} of its own",
                    seen.bare, seen.capped, seen.beside, seen.backlog
                ),
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    fn busy(&self, gate: Gate) -> anyhow::Result<(Value, String)> {
        let (mut rows, mut text) = (serde_json::Map::new(), String::new());
        for (key, _, _, tenants) in busy::cases().iter().filter(|case| case.0.contains(&self.case))
        {
            let seen = scenario::watch(&self.place, tenants, gate, self.length)?;
            let rates = seen.account.rates();
            let busy: f64 = rates.iter().sum();
            text += &format!("\n  {key}: {rates:.3?}, {:.1} % busy", busy * 100.0);
            rows.insert((*key).into(), json!(rates));
        }
        Ok((Value::Object(rows), text))
    }

    /// The backlogged tenant number `index`.
    fn backlog(&self, index: usize, cores: f64) -> Spec {
        let mut load: Vec<String> = vec![
            format!("--kernel-us={}", self.kernel_us[index % self.kernel_us.len()]),
            format!("--kernels={}", self.kernels),
            format!("--sync-every={}", self.sync_every),
            format!("--shallow-ms={}", self.shallow_ms),
        ];
        if self.graph {
            load.push("--graph".into());
        }
        Spec { cores, policy: self.policy, load, processes: self.processes }
    }

    fn share(&self, gate: Gate) -> anyhow::Result<(Value, String)> {
        let tenants: Vec<Spec> =
            self.weights.iter().enumerate().map(|(i, &w)| self.backlog(i, w)).collect();
        let stage = Stage::set(&self.place, &tenants, gate)?;
        let seen = stage.look(self.length)?;
        if let Some(view) = stage.view() {
            eprint!("{}", view::text(&view));
        }
        let all: f64 = self.weights.iter().sum();
        let due: Vec<f64> = self.weights.iter().map(|w| w / all).collect();
        Ok(judged(gate, &seen, &due))
    }

    fn interfere(&self, gate: Gate) -> anyhow::Result<(Value, String)> {
        let cores = |index: usize| self.weights.get(index).copied().unwrap_or(50.0);
        let server = interfere::server(cores(0), &self.request_us, self.rate);
        let round =
            interfere::round(&self.place, &server, &self.backlog(0, cores(1)), gate, self.length)?;
        let (alone, beside) = (&round.alone, &round.beside);
        let text = format!(
            "alone p50 {:.0} p99 {:.0} µs; beside a backlog p50 {:.0} p99 {:.0} µs: p99 {:+.1} %",
            alone.p50_us,
            alone.p99_us,
            beside.p50_us,
            beside.p99_us,
            round.more_percent(),
        );
        Ok((json!({ "gate": gate.name(), "interference": round.value() }), text))
    }

    fn reclaim(&self, gate: Gate) -> anyhow::Result<(Value, String)> {
        let cores = |index: usize| self.weights.get(index).copied().unwrap_or(50.0);
        let bursty = reclaim::bursty(cores(0), &self.request_us, self.burst_ms, self.pause_ms);
        let done =
            reclaim::round(&self.place, &bursty, &self.backlog(0, cores(1)), gate, self.length)?;
        let text = format!(
            "first operation later than alone by p50 {} p90 {} p99 {} max {} µs ({} times)",
            done["p50_us"], done["p90_us"], done["p99_us"], done["max_us"], done["reclaims"]
        );
        Ok((json!({ "gate": gate.name(), "reclaim": done }), text))
    }
}

/// What the judge saw of backlogged tenants, for machines and for people.
fn judged(gate: Gate, all: &Seen, due: &[f64]) -> (Value, String) {
    let seen = &all.account;
    let second = Duration::from_secs(1);
    let errors = seen.share_errors(due, second);
    let worst = |values: &[f64]| values.iter().copied().fold(f64::NAN, f64::max);
    let least = |values: &[f64]| values.iter().copied().fold(f64::NAN, f64::min);
    let whole =
        seen.shares().iter().zip(due).map(|(got, due)| (got - due).abs()).fold(0.0, f64::max);
    let percent = |values: &[f64]| -> Vec<f64> {
        values.iter().map(|v| (v * 100_000.0).round() / 1000.0).collect()
    };
    let handover = seen.handover_us();
    let (p50, p99) = handover.as_ref().map_or((0.0, 0.0), |h| (h.median(), h.quantile(0.99)));
    let median = if errors.is_empty() { 0.0 } else { Sample::new(errors.clone()).median() };
    let value = json!({
        "gate": gate.name(),
        "due_percent": percent(due),
        "share_percent": percent(&seen.shares()),
        "rate_percent": percent(&seen.rates()),
        "busy_percent": seen.rates().iter().sum::<f64>() * 100.0,
        "marks_percent": seen.marks() * 100.0,
        "error_pp": whole * 100.0,
        "error_1s_pp": { "worst": worst(&errors), "median": median },
        "jain_1s": least(&seen.jain(due, second)),
        "kernels": seen.kernels(),
        "switches_per_second": seen.switches_per_second(),
        "handover_us": { "p50": p50, "p99": p99, "count": seen.handovers.len() },
        "gate_timeouts": all.counted.timeouts,
        "gate_waits": all.counted.waits,
        "window_waits": all.counted.window_waits,
        "arbiter_cpu_percent": all.arbiter_percent,
        "seconds": seen.seconds(),
    });
    let text = format!(
        "due {:?} %, got {:?} % of the work; {:.1} % of the time busy\n  \
         off by {:.2} pp over {:.1} s, over 1 s by {median:.2} (median) and {:.2} (worst); Jain ≥ {:.4}\n  \
         idle between tenants p50 {p50:.1} p99 {p99:.1} µs; {:.0} switches/s; markers {:.3} % of the time\n  \
         waited {} times at the gate, {} at the window, {} time-outs; arbiter {:.2} % of a core",
        percent(due),
        percent(&seen.shares()),
        seen.rates().iter().sum::<f64>() * 100.0,
        whole * 100.0,
        seen.seconds(),
        worst(&errors),
        least(&seen.jain(due, second)),
        seen.switches_per_second(),
        seen.marks() * 100.0,
        all.counted.waits,
        all.counted.window_waits,
        all.counted.timeouts,
        all.arbiter_percent,
    );
    (value, text)
}
