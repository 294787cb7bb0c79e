//! `tessera-bench`: what Tessera costs and whether its quota holds under load, measured on the
//! simulated driver, printed beside their goals and written to
//! `target/bench/summary.json`. `docs/benchmarks.md` says how each figure is got.
//! `tessera-bench compute` runs one scenario of divided GPU time; `--help` there.
//!
//! Options: `--out FILE`, `--artefacts DIR`, `--only PART,…` (overhead, contended, race, recovery,
//! plugin, dra, configuration, console, soak, storm, flood, gate-flood, api, many, history, compute, shim), `--apis NAME,…` (of races
//! and recovery; all), `--rest SECONDS` (for how long the DRA driver's requests at rest are counted, beside everything
//! else; 600),
//! `--realtime` (before everything else on a machine that is busy with other things; root).

mod api;
mod child;
mod clock;
mod compute;
mod configuration;
mod console;
mod contended;
mod dra;
mod flood;
mod gate_flood;
mod history;
mod logged;
mod machine;
mod many;
mod mayfly;
mod node;
mod overhead;
mod plugin;
mod process;
mod race;
mod recovery;
mod report;
mod shim_file;
mod silent;
mod soak;
mod stats;
mod storm;
mod tenants;
mod world;

use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::json;
use tessera_tenant_program::args::Args;
use tessera_tenant_program::memory::Api;
use tessera_web::Route;

use crate::api::Answers;
use crate::dra::Resting;
use crate::report::Report;
use crate::stats::Sample;
use crate::world::{Artefacts, World};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((first, words)) if first == "compute" => compute::command(words),
        Some((first, task)) if first == "child" => child::main(task).map(|()| ExitCode::SUCCESS),
        _ => bench(),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("tessera-bench: {error:#}");
        ExitCode::FAILURE
    })
}

fn bench() -> anyhow::Result<ExitCode> {
    let mut args = Args::from_env();
    let usage = |exit: tessera_tenant_program::exit::Exit| anyhow::anyhow!(exit.message);
    let out = args.value("--out").map_err(usage)?;
    let artefacts = args.value("--artefacts").map_err(usage)?;
    let only = args.value("--only").map_err(usage)?;
    let apis = match args.value("--apis").map_err(usage)? {
        Some(list) => Api::list(&list).map_err(anyhow::Error::msg)?,
        None => Api::ALL.to_vec(),
    };
    let rest = match args.value("--rest").map_err(usage)? {
        Some(seconds) => Duration::from_secs(seconds.parse().context("--rest takes seconds")?),
        None => dra::REST,
    };
    if args.flag("--realtime") {
        machine::go_first().context("--realtime takes root")?;
    }
    args.finish().map_err(usage)?;
    let wanted = |part: &str| only.as_deref().is_none_or(|list| list.split(',').any(|p| p == part));
    let artefacts = Artefacts::find(artefacts.as_deref())?;
    let world = match World::enter(&artefacts)? {
        Ok(world) => world,
        Err(status) => {
            return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    };

    let start = Instant::now();
    let mut report = Report::default();
    let resting = match wanted("dra") {
        true => Some(Resting::begin(&world, rest).context("a node at rest")?),
        false => None,
    };
    type Part<'a> = &'a dyn Fn(&mut Report) -> anyhow::Result<()>;
    let parts: [(&str, Part<'_>); 18] = [
        ("overhead", &|report| overheads(&world, report)),
        ("contended", &|report| contention(&world, report)),
        ("race", &|report| races(&world, &apis, report).with_context(|| world.complaints())),
        ("mayfly", &|report| mayflies(&world, report).with_context(|| world.complaints())),
        ("recovery", &|report| {
            recoveries(&world, &apis, report).with_context(|| world.complaints())
        }),
        ("plugin", &|report| plugins(&world, report)),
        ("dra", &|report| claims(&world, report)),
        ("configuration", &|report| configurations(&world, report)),
        ("console", &|report| consoles(&world, report)),
        ("soak", &|report| soaked(&world, report)),
        ("storm", &|report| stormed(&world, report)),
        ("flood", &|report| flooded(&world, report)),
        ("gate-flood", &gate_flooded),
        ("api", &|report| answers(&world, report)),
        ("many", &|report| manifold(&world, report)),
        ("history", &|report| historical(&world, report)),
        ("compute", &|report| compute::run(&world, report)),
        ("shim", &|report| shim(&world, report)),
    ];
    let mut failed = Vec::new();
    for (name, part) in parts {
        if wanted(name) {
            let _within = Limit::of(name);
            if let Err(error) = part(&mut report) {
                eprintln!("tessera-bench: {name}: {error:#}");
                failed.push(name);
            }
        }
    }
    if let Some(resting) = resting {
        rested(resting, &mut report)?;
    }
    report.put("metadata", machine::metadata());
    report.put("seconds", json!(start.elapsed().as_secs()));

    println!("\n{}", report.table());
    println!(
        "Measured on: {}. Overheads are hooked minus bare, medians of alternating rounds;",
        machine::describe()
    );
    println!("± is half the distance between the quartiles of the rounds' differences.");
    let out = out.unwrap_or_else(|| "target/bench/summary.json".into());
    let out = Path::new(&out);
    if let Some(parent) = out.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(out, format!("{:#}\n", report.summary()))
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!("Summary: {}", out.display());
    anyhow::ensure!(failed.is_empty(), "not measured, see above: {}", failed.join(", "));
    Ok(ExitCode::SUCCESS)
}

/// The longest that one part may take. The longest one needs some six minutes.
const PART_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Ends the bench with the name of a part that takes longer than [`PART_LIMIT`].
struct Limit(#[expect(dead_code, reason = "its drop ends the watch")] mpsc::Sender<()>);

impl Limit {
    fn of(part: &str) -> Self {
        let (running, over) = mpsc::channel();
        let part = part.to_owned();
        std::thread::spawn(move || {
            if over.recv_timeout(PART_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!(
                    "tessera-bench: {part} took more than {PART_LIMIT:?}; see it alone: --only {part}"
                );
                std::process::exit(1);
            }
        });
        Self(running)
    }
}

fn note(what: &str) {
    eprintln!("measuring {what} …");
}

/// Task of the child, key, what it is, most that it may cost. The target is for a pair of calls; the
/// cycle of virtual memory is five, of which the driver's own work takes microseconds.
const BY_API: [(&str, &str, &str, Option<f64>); 3] = [
    ("alloc-async", "alloc_async_overhead_ns", "async alloc + free, warm pool", Some(250.0)),
    ("vmm", "vmm_overhead_ns", "create, map, access, unmap, release", None),
    ("array", "array_overhead_ns", "array create + destroy", Some(250.0)),
];

fn consoles(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("the page with a large fleet");
    let Some(figures) = console::run(world)? else { return Ok(()) };
    let paint = &figures.first_paint_ms;
    let what = "200 nodes × 8 GPUs × 10 tenants: first paint";
    report.figure("console_first_paint_ms", what, "ms", paint.median(), Some(1000.0));
    let refresh = &figures.refresh_ms;
    let what = "every node changes: shown after";
    report.figure("console_refresh_ms", what, "ms", refresh.median(), Some(2000.0));
    let what = "the page answers no key for, at most";
    let longest = figures.longest_task_ms.quantile(1.0);
    report.figure("console_longest_task_ms", what, "ms", longest, None);
    let what = "the server's RSS, at most";
    report.figure("console_rss_mib", what, "MiB", figures.rss_mib, Some(150.0));
    report.put(
        "console_detail",
        json!({
            "fleet": console::FLEET,
            "first_paint_ms_max": paint.quantile(1.0).round(),
            "refresh_ms_max": refresh.quantile(1.0).round(),
            "loads": paint.len(),
            "refreshes": refresh.len(),
        }),
    );
    Ok(())
}

fn overheads(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("launches");
    let pair = overhead::call(world, "launch")?;
    report.pair("launch_overhead_ns", "hooked launch, alone", "ns", &pair, 8.0);
    note("allocations");
    let pair = overhead::call(world, "alloc-free")?;
    report.pair("alloc_free_overhead_ns", "alloc + free", "ns", &pair, 250.0);
    for (task, key, what, most) in BY_API {
        note(what);
        let pair = overhead::call(world, task)?;
        report.difference(key, what, "ns", &pair, most);
    }
    note("cuMemGetInfo");
    let pair = overhead::call(world, "mem-get-info")?;
    report.pair("mem_get_info_overhead_ns", "cuMemGetInfo", "ns", &pair, 50.0);
    note("offloading");
    let pair = overhead::call(world, "offload")?;
    report.difference("offload_batch_us", "a call with 8,192 copies", "µs", &pair, Some(100.0));
    note("first calls");
    let pair = overhead::first_call(world)?;
    report.pair("first_call_overhead_us", "to the first context", "µs", &pair, 1000.0);
    note("/bin/true");
    let pair = overhead::true_program(world)?;
    report.pair("true_overhead_us", "/bin/true", "µs", &pair, 100.0);
    Ok(())
}

fn contention(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("allocations in 16 processes at once");
    let cost = contended::run(world)?;
    report.difference("alloc_free_contended_ns", "alloc + free, 16 at once", "ns", &cost.cpu, None);
    let absolute = cost.cpu.hooked.median();
    report.figure("alloc_free_contended_cpu_ns", "of all its CPU time", "ns", absolute, None);
    report.put(
        "alloc_free_contended_wall_ns_detail",
        json!({
            "processes": contended::PROCESSES,
            "bare_median": cost.wall.bare.median().round(),
            "hooked_median": cost.wall.hooked.median().round(),
        }),
    );
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "counts and bytes far below 2^53")]
fn races(world: &World, apis: &[Api], report: &mut Report) -> anyhow::Result<()> {
    note("races for memory");
    let outcome = race::run(world, apis)?;
    let over = outcome.overshoot_bytes() as f64;
    report.figure("overshoot_bytes", "granted over the limit", "bytes", over, Some(0.0));
    let refusals = outcome.false_refusals() as f64;
    report.figure("false_refusals", "refusals of what fits", "", refusals, Some(0.0));
    report.put("race_detail", outcome.detail());
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "counts and bytes far below 2^53")]
fn mayflies(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("storms of kills, execs and restarts");
    let figures = mayfly::run(world)?;
    let over = figures.overshoot_bytes as f64;
    let what = "held beyond all quotas in storms, by the driver";
    report.figure("storm_overshoot_bytes", what, "bytes", over, Some(0.0));
    let refused = figures.false_refusals as f64;
    let what = "refusals there of what is shown free";
    report.figure("storm_false_refusals", what, "", refused, Some(0.0));
    let bare = figures.bare_refusals as f64;
    report.figure("storm_bare_refusals", "· by the bare driver", "", bare, None);
    let (decay, bare) = figures.decay_ms;
    report.figure("overhead_decay_ms", "overhead shown after it is gone", "ms", decay, Some(1e3));
    report.figure("overhead_decay_bare_ms", "· by the bare driver", "ms", bare, None);
    report.put("storms_detail", json!(figures.detail));
    Ok(())
}

fn recoveries(world: &World, apis: &[Api], report: &mut Report) -> anyhow::Result<()> {
    note("recovery");
    let mut all = Vec::new();
    let mut by_api = serde_json::Map::new();
    for &api in apis {
        let recovery = recovery::run(world, api)
            .with_context(|| format!("where {} memory was held", api.name()))?;
        by_api.insert(
            api.name().into(),
            json!({
                "kills": recovery.after_driver.len(),
                "after_driver_ms_max": recovery.after_driver.max(),
                "after_kill_ms_max": recovery.after_kill.max(),
            }),
        );
        all.push(recovery);
    }
    let after_driver = Sample::joined(all.iter().map(|recovery| &recovery.after_driver));
    let after_kill = Sample::joined(all.iter().map(|recovery| &recovery.after_kill));
    let worst = after_driver.max().max(0.0);
    report.figure("recovery_ms", "bytes back after the driver's", "ms", worst, Some(10.0));
    report.detail("recovery_after_driver_ms", &after_driver);
    report.detail("recovery_after_kill_ms", &after_kill);
    report.put("recovery_detail", by_api.into());
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
fn plugins(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("the plugin");
    let figures = plugin::run(world)?;
    let p99 = figures.allocate_ms.quantile(0.99);
    report.figure("allocate_p99_ms", "Allocate, p99, no fsync", "ms", p99, Some(2.0));
    let p99 = figures.fsync_ms.quantile(0.99);
    report.figure("fsync_p99_ms", "Allocate, p99, with fsync", "ms", p99, None);
    let p99 = figures.disk_ms.quantile(0.99);
    report.figure("disk_fsync_p99_ms", "the disk's own fsync, p99", "ms", p99, None);
    let (rss, own) = figures.rss_kib;
    report.figure(
        "plugin_rss_mib",
        "plugin's RSS after the load",
        "MiB",
        rss as f64 / 1024.0,
        Some(24.0),
    );
    report.figure("plugin_rss_anon_mib", "of it its own", "MiB", own as f64 / 1024.0, None);
    let (rss, own) = figures.rss_bare_kib;
    let what = "· without JSON API and history";
    report.figure("plugin_rss_mib_bare", what, "MiB", rss as f64 / 1024.0, None);
    let what = "· of it its own";
    report.figure("plugin_rss_anon_mib_bare", what, "MiB", own as f64 / 1024.0, None);
    let median = figures.register_ms.median();
    report.figure("register_ms", "start to registered", "ms", median, Some(20.0));
    report.detail("allocate_ms", &figures.allocate_ms);
    report.detail("allocate_fsync_ms", &figures.fsync_ms);
    report.detail("disk_fsync_ms", &figures.disk_ms);
    report.detail("register_detail_ms", &figures.register_ms);
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "KiB and counts far below 2^53")]
fn claims(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("the DRA driver");
    let figures = dra::run(world)?;
    let p99 = figures.prepare_ms.quantile(0.99);
    report.figure("dra_prepare_p99_ms", "NodePrepareResources, p99", "ms", p99, Some(10.0));
    let p99 = figures.prepare_16_ms.quantile(0.99);
    report.figure("dra_prepare_16_p99_ms", "· of 16 claims a call, p99", "ms", p99, Some(50.0));
    let p99 = figures.fsync_ms.quantile(0.99);
    report.figure("dra_prepare_fsync_p99_ms", "· of one, with fsync, p99", "ms", p99, None);
    let median = figures.publish_ms.median();
    report.figure("dra_publish_ms", "XID to the slice's taint", "ms", median, Some(500.0));
    let median = figures.rebuild_ms.median();
    let what = "start to registered, 64 claims' files gone";
    report.figure("dra_rebuild_ms", what, "ms", median, Some(500.0));
    let median = figures.repair_ms.median();
    report.figure("repair_ms", "a claim's lost CDI spec is back", "ms", median, Some(500.0));
    let (rss, own) = figures.rss_kib;
    let (rss, own) = (rss as f64 / 1024.0, own as f64 / 1024.0);
    report.figure("plugin_rss_mib_dra", "plugin's RSS, DRA and metrics on", "MiB", rss, Some(24.0));
    report.figure("plugin_rss_anon_mib_dra", "· of it its own", "MiB", own, None);
    let [(plain, _), (tainted, _)] = figures.slices;
    report.figure("dra_slices_mig", "slices of 16 GPUs with MIG", "", plain as f64, None);
    report.figure("dra_slices_mig_tainted", "· with a taint", "", tainted as f64, None);
    let all: usize = figures.requests.values().sum();
    let each = all as f64 / figures.claims as f64;
    report.figure("dra_api_calls_per_claim", "API calls per claim", "", each, Some(3.0));
    report.detail("dra_prepare_ms", &figures.prepare_ms);
    report.detail("dra_prepare_16_ms", &figures.prepare_16_ms);
    report.detail("dra_prepare_fsync_ms", &figures.fsync_ms);
    report.detail("dra_publish_detail_ms", &figures.publish_ms);
    report.detail("dra_rebuild_detail_ms", &figures.rebuild_ms);
    report.detail("repair_detail_ms", &figures.repair_ms);
    report.put(
        "dra_detail",
        json!({
            "requests": figures.requests,
            "claims": figures.claims,
            "slices_and_devices": figures.slices,
        }),
    );
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn rested(resting: Resting, report: &mut Report) -> anyhow::Result<()> {
    note("what a node at rest asks of the API server");
    let (requests, seconds) = resting.end()?;
    let hourly = requests.values().sum::<usize>() as f64 * 3600.0 / seconds;
    let what = "API calls per idle hour, 16 claims";
    report.figure("dra_api_calls_idle_hour", what, "", hourly, None);
    report.put("dra_rest_detail", json!({ "requests": requests, "seconds": seconds.round() }));
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
fn configurations(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("checks of configurations");
    let (good, bad) = configuration::run(world)?;
    let (ms, mib) = (bad.ms.median(), bad.rss_mib.median());
    report.figure("config_check_ms_bad", "config check, 85,000 unknown keys", "ms", ms, None);
    report.figure("config_check_rss_mib_bad", "· peak RSS", "MiB", mib, None);
    let (ms, mib) = (good.ms.median(), good.rss_mib.median());
    report.figure("config_check_ms_good", "· of the defaults", "ms", ms, None);
    report.figure("config_check_rss_mib_good", "· of the defaults, peak RSS", "MiB", mib, None);
    report.put("config_check_bytes", json!({ "bad": bad.bytes, "good": good.bytes }));
    report.detail("config_check_ms_bad_detail", &bad.ms);
    report.detail("config_check_ms_good_detail", &good.ms);
    report.detail("config_check_rss_mib_bad_detail", &bad.rss_mib);
    report.detail("config_check_rss_mib_good_detail", &good.rss_mib);
    note("what is sold beside a GPU that does not answer");
    let (sold, cases) = silent::run(world)?;
    let what = "replicas of the others sold beside a sick GPU";
    report.at_least("start_with_sick_gpu_sold", what, "%", sold, Some(100.0));
    report.put("start_with_sick_gpu_cases", cases.into());
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "KiB and counts far below 2^53")]
fn soaked(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("the plugin under scrapes and churn");
    let figures = soak::run(world)?;
    let idle = figures.idle_percent;
    report.figure("idle_cpu_pct", "CPU at rest, scraped every 15 s", "%", idle, Some(0.2));
    let p99 = figures.scrape_ms.quantile(0.99);
    report.figure("metrics_scrape_ms_1000", "scrape of 1,000 series, p99", "ms", p99, Some(10.0));
    let (before, after) = figures.rss_kib;
    let rss = after as f64 / 1024.0;
    report.figure("plugin_rss_mib_soak", "plugin's RSS after scrapes and churn", "MiB", rss, None);
    report.detail("metrics_scrape_ms", &figures.scrape_ms);
    report.put(
        "soak_detail",
        json!({
            "series": figures.series,
            "pods_churned": figures.churned,
            "rss_mib_after_10_scrapes": before as f64 / 1024.0,
        }),
    );
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "KiB and counts far below 2^53")]
fn stormed(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("the plugin while clock, API server and quotas misbehave");
    let figures = storm::run(world)?;
    let (before, after) = figures.anonymous_kib;
    let growth = after as f64 - before as f64;
    let what = "own memory, growth under jumps, churn and quotas";
    report.figure("plugin_growth_kib_storm", what, "KiB", growth, Some(1024.0));
    report.put(
        "storm_detail",
        json!({
            "anonymous_kib_before": before,
            "anonymous_kib_after": after,
            "pods_churned": figures.churned,
            "quotas_changed": figures.changed,
            "clock_jumps": figures.jumps,
            "events_failed": figures.events_failed,
        }),
    );
    Ok(())
}

fn gate_flooded(report: &mut Report) -> anyhow::Result<()> {
    note("neighbours of a tenant that floods its gate");
    for (at, (kind, loss)) in gate_flood::run()?.into_iter().enumerate() {
        let key = format!("{}_flood_neighbour_loss_pct", kind.name());
        let what = match at {
            0 => "neighbours' time at an open gate, lost to a flood of hellos",
            _ => "· of the message that the key names",
        };
        report.figure(&key, what, "%", loss.median(), Some(2.0));
        report.detail(&format!("{key}_detail"), &loss);
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
fn flooded(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("probes beside a flood of connections");
    let figures = flood::run(world)?;
    let (quiet, flood) = (&figures.quiet, &figures.flood);
    let p99 = flood.probe_ms.quantile(0.99);
    let what = "a probe beside 2,000 connections a second, p99";
    report.figure("probe_p99_ms_flood", what, "ms", p99, Some(1000.0));
    let missed = flood.missed as f64;
    report.figure("probes_missed_flood", "· not answered, of 500", "", missed, Some(0.0));
    let rss = flood.rss_kib as f64 / 1024.0;
    report.figure("probe_rss_mib_flood", "· plugin's RSS, most", "MiB", rss, None);
    report.figure("probe_cpu_pct_flood", "· plugin's CPU", "%", flood.cpu_percent, None);
    let p99 = quiet.probe_ms.quantile(0.99);
    report.figure("probe_p99_ms", "a probe without a flood, p99", "ms", p99, None);
    let rss = quiet.rss_kib as f64 / 1024.0;
    report.figure("probe_rss_mib", "· plugin's RSS, most", "MiB", rss, None);
    report.detail("probe_ms_flood", &flood.probe_ms);
    report.detail("probe_ms", &quiet.probe_ms);
    report.put(
        "flood_detail",
        json!({
            "connections_per_s_wanted": flood::RATE,
            "connections_per_s": figures.rate,
            "probes_missed": quiet.missed,
            "cpu_percent": quiet.cpu_percent,
        }),
    );
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "bytes far below 2^53")]
fn historical(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("the history of 64 tenants");
    let figures = history::run(world)?;
    let what = "64 tenants: CPU of the history";
    report.paired("history_cpu_pct", what, "%", &figures.cpu_percent, Some(0.1));
    let cpu = figures.stored_percent;
    report.figure("history_store_cpu_pct", "· of it folding and storing", "%", cpu, None);
    let bytes = figures.bytes as f64;
    let bound = tessera_config::History::default().size_bytes as f64;
    report.figure("history_bytes", "· its file in a month, at most", "", bytes, Some(bound));
    let hours = figures.fine_hours;
    report.figure("history_fine_hours", "· buckets of 10 s then", "h", hours, None);
    let (day, all) = figures.asked_ms;
    report.figure("history_pod_ms", "· a pod's day", "ms", day, None);
    report.figure("history_all_ms", "· six hours of everything", "ms", all, None);
    Ok(())
}

fn answers(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("answers of the JSON API");
    let all = api::run(world)?;
    let p99 = |answers: &Answers| answers.ms.quantile(0.99);
    let (still, looking): (Vec<&Answers>, Vec<&Answers>) =
        all.iter().partition(|answers| answers.route == Route::Schema);
    let worst = |some: &[&Answers]| some.iter().map(|answers| p99(answers)).fold(0.0, f64::max);
    let what = "64 tenants: an answer of the JSON API, worst p99";
    report.figure("api_p99_ms", what, "ms", worst(&looking), Some(10.0));
    let what = "· of one that looks at nothing";
    report.figure("api_schema_p99_ms", what, "ms", worst(&still), None);
    let cpu = looking.iter().map(|answers| answers.cpu_ms.median()).fold(0.0, f64::max);
    report.figure("api_cpu_ms", "· the plugin's CPU time, worst median", "ms", cpu, None);
    let detail = all.iter().map(|answers| {
        let figures = json!({
            "p50_ms": answers.ms.median(),
            "p99_ms": p99(answers),
            "max_ms": answers.ms.max(),
            "cpu_ms": answers.cpu_ms.median(),
            "bytes": answers.bytes,
            "samples": answers.ms.len(),
        });
        (answers.name.clone(), figures)
    });
    report.put("api_detail", detail.collect::<serde_json::Map<_, _>>().into());
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "KiB and counts far below 2^53")]
fn manifold(world: &World, report: &mut Report) -> anyhow::Result<()> {
    note("a node of 1,024 replicas");
    let figures = many::run(world)?;
    let (few, many) = (&figures.few, &figures.many);
    let p99 = many.allocate_ms.quantile(0.99);
    report.figure("allocate_p99_ms_1024", "1,000 sessions: Allocate, p99", "ms", p99, Some(2.0));
    let ratio = many.allocate_ms.median() / few.allocate_ms.median();
    report.figure("allocate_ratio_1024", "· its median to that of 10", "×", ratio, Some(2.0));
    let p99 = figures.fsync_ms.quantile(0.99);
    report.figure("fsync_p99_ms_1024", "· with fsync, p99", "ms", p99, None);
    let p99 = figures.pre_start_ms.quantile(0.99);
    report.figure("pre_start_p99_ms_1024", "· PreStartContainer, p99", "ms", p99, None);
    let p99 = figures.preferred_ms.quantile(0.99);
    report.figure("preferred_p99_ms_1024", "· GetPreferredAllocation, p99", "ms", p99, None);
    let median = figures.reconcile_ms.median();
    report.figure("reconcile_ms_1024", "· reconcile", "ms", median, None);
    let inspect = figures.inspect_ms.median();
    report.figure("inspect_ms_1024", "· a look at every page", "ms", inspect, None);
    let lists = figures.lists_by_allocates as f64;
    report.figure("lists_by_allocates_1024", "· device lists by Allocates", "", lists, Some(0.0));
    let lists = figures.lists_by_health;
    report.figure("lists_by_health_1024", "· device lists by a sick GPU", "", lists, Some(1.0));
    let kib = figures.list_bytes as f64 / 1024.0;
    report.figure("list_kib_1024", "· a device list", "KiB", kib, None);
    let median = figures.health_ms.median();
    report.figure("health_ms_1024", "· XID to kubelet", "ms", median, None);
    let (all, observing) = many.idle_percent;
    report.figure("idle_cpu_percent_1024", "· CPU while idle", "%", all, None);
    report.figure("observe_cpu_percent_1024", "· of it observing", "%", observing, None);
    let (rss, own) = many.rss_kib;
    report.figure("plugin_rss_mib_1024", "· plugin's RSS", "MiB", rss as f64 / 1024.0, None);
    report.figure("plugin_rss_anon_mib_1024", "· of it its own", "MiB", own as f64 / 1024.0, None);
    let descriptors = many.descriptors as f64;
    report.figure("plugin_descriptors_1024", "· open descriptors", "", descriptors, None);
    report.figure("plugin_threads_1024", "· threads", "", many.threads as f64, None);
    report.figure("register_ms_1024", "· start to registered", "ms", figures.register_ms, None);
    for (key, load) in [("sessions_10", few), ("sessions_1000", many)] {
        let (rss, own) = load.rss_kib;
        report.put(
            key,
            json!({
                "allocate_p50_ms": load.allocate_ms.median(),
                "allocate_p99_ms": load.allocate_ms.quantile(0.99),
                "allocate_cpu_ms": load.allocate_cpu_ms,
                "idle_cpu_percent": load.idle_percent.0,
                "observe_cpu_percent": load.idle_percent.1,
                "rss_kib": rss,
                "rss_anon_kib": own,
                "descriptors": load.descriptors,
                "threads": load.threads,
            }),
        );
    }
    report.detail("allocate_ms_1024", &many.allocate_ms);
    report.detail("allocate_fsync_ms_1024", &figures.fsync_ms);
    report.detail("pre_start_ms_1024", &figures.pre_start_ms);
    report.detail("preferred_ms_1024", &figures.preferred_ms);
    report.detail("reconcile_detail_ms_1024", &figures.reconcile_ms);
    report.detail("health_detail_ms_1024", &figures.health_ms);
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
fn shim(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let file = shim_file::read(&world.artefacts.path("libtessera.so"))?;
    report.figure("shim_kib", "the shim's file", "KiB", file.bytes as f64 / 1024.0, Some(500.0));
    let reached = file.max_glibc <= shim_file::Version::of(&[2, 17]);
    report.word("shim_max_glibc", "newest glibc it asks for", &file.max_glibc, "≤ 2.17", reached);
    Ok(())
}
