//! `tessera-bench`: what Tessera costs and whether its quota holds under load, measured on the
//! simulated driver, printed beside its goals and written to `target/bench/summary.json`. Every figure
//! has a goal. The first lines of each module say how its figures are got.

mod api;
mod child;
mod compute;
mod dra;
mod gate_flood;
mod machine;
mod many;
mod mayfly;
mod node;
mod overhead;
mod plugin;
mod race;
mod recovery;
mod report;
mod soak;
mod stats;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use clap::Parser;
use serde_json::json;

use crate::report::Report;
use crate::world::World;

type Part = fn(&World, &mut Report) -> anyhow::Result<()>;

/// What is measured, in this order, by name; then [`compute`].
const PARTS: [(&str, Part); 10] = [
    ("overhead", overhead::run),
    ("race", race::run),
    ("mayfly", mayfly::run),
    ("recovery", recovery::run),
    ("plugin", plugin::run),
    ("dra", dra::run),
    ("soak", soak::run),
    ("gate-flood", |_, report| gate_flood::run(report)),
    ("api", api::run),
    ("many", many::run),
];

/// What Tessera costs, measured on the simulated driver
#[derive(Parser)]
struct Options {
    /// Where the summary goes
    #[arg(long, default_value = "target/bench/summary.json")]
    out: PathBuf,
    /// Parts, `compute`, or scenarios of it, such as `shares`
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Before everything else on a machine that is busy with other things; root
    #[arg(long)]
    realtime: bool,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((first, task)) if first == "child" => child::main(task).map(|()| ExitCode::SUCCESS),
        _ => bench(),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("tessera-bench: {error:#}");
        ExitCode::FAILURE
    })
}

fn bench() -> anyhow::Result<ExitCode> {
    let Options { out, only, realtime } = Options::parse();
    if realtime {
        machine::go_first().context("--realtime takes root")?;
    }
    let wanted = |part: &str| only.is_empty() || only.iter().any(|name| name == part);
    let world = match World::enter()? {
        Ok(world) => world,
        Err(status) => {
            return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    };

    let start = Instant::now();
    let mut report = Report::default();
    let mut failed = Vec::new();
    let mut measure = |name, part: &dyn Fn(&mut Report) -> anyhow::Result<()>| {
        if let Err(error) = part(&mut report) {
            eprintln!("tessera-bench: {name}: {error:#}\n{}", world.complaints());
            failed.push(name);
        }
    };
    for (name, part) in PARTS.into_iter().filter(|(name, _)| wanted(name)) {
        note(name);
        measure(name, &|report| part(&world, report));
    }
    let scenario = |name: &str| wanted("compute") || wanted(name);
    if compute::SCENARIOS.into_iter().any(scenario) {
        measure("compute", &|report| compute::run(&world, report, &scenario));
    }
    report.put("metadata", machine::metadata());
    report.put("seconds", json!(start.elapsed().as_secs()));

    println!(
        "\nMeasured on: {}. Overheads are hooked minus bare, medians of alternating rounds;",
        machine::describe()
    );
    println!("± is half the distance between the quartiles of the rounds' differences.");
    if let Some(parent) = out.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(&out, format!("{:#}\n", report.summary()))
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!("Summary: {}", out.display());
    anyhow::ensure!(failed.is_empty(), "not measured, see above: {}", failed.join(", "));
    Ok(ExitCode::SUCCESS)
}

fn note(what: &str) {
    eprintln!("measuring {what} …");
}
