//! Tessera on a real Kubernetes: the plugin as users deploy it, real kubelet, scheduler and
//! containers; only the GPUs are simulated. See README.md beside this crate.

mod cases;
mod cluster;
mod deploy;
mod dra;
mod host;
mod images;
mod invariants;
mod kubectl;
mod person;
mod pods;
mod process;
mod suite;
mod wait;

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::Parser;
use tessera_harness::Rng;

use crate::cases::{CASES, Case};
use crate::cluster::Cluster;
use crate::deploy::Plugin;
use crate::dra::mode;
use crate::suite::Suite;

const ENVIRONMENT: &str = "\
KUBECONFIG          the cluster; unset: one is started with ../shared/cluster
TESSERA_ARTEFACTS   the programs under test [target/shipped, by `make plugin`]
TESSERA_E2E_SEED    the order of --shuffle, again";

#[derive(clap::Parser)]
#[command(name = "run", after_help = ENVIRONMENT)]
struct Options {
    /// Run only cases whose name contains one of these
    #[arg(value_name = "NAME", value_parser = part_of_a_name)]
    names: Vec<String>,
    /// Name the cases and run none
    #[arg(long)]
    list: bool,
    /// Leave plugin, tenants and cluster as they are at the end
    #[arg(long)]
    keep: bool,
    /// Run the cases in another order each time
    #[arg(long)]
    shuffle: bool,
}

fn part_of_a_name(text: &str) -> Result<String, &'static str> {
    let found = CASES.iter().any(|case| case.name.contains(text));
    found.then(|| text.to_owned()).ok_or("no case is named like it")
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    if options.list {
        CASES.iter().for_each(|case| println!("{}", case.name));
        return Ok(ExitCode::SUCCESS);
    }
    Ok(if run(&options)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether every case passed.
fn run(options: &Options) -> Result<bool> {
    let repo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let artefacts = env::var_os("TESSERA_ARTEFACTS").context("start tests/e2e/run")?;
    let artefacts =
        PathBuf::from(artefacts).canonicalize().context("TESSERA_ARTEFACTS: run `make e2e`")?;
    wait::catch_interrupts()?;
    let cluster = Cluster::find_or_start(&repo)?;
    let outcome = on(&cluster, &repo, &artefacts, options);
    if options.keep {
        return outcome;
    }
    let left = cluster.leave();
    let passed = outcome?;
    left?;
    Ok(passed)
}

fn on(cluster: &Cluster, repo: &Path, artefacts: &Path, options: &Options) -> Result<bool> {
    let kubectl = &cluster.kubectl;
    Plugin::check_absent(kubectl)?;
    let node = pick_node(cluster)?;
    let started = Instant::now();
    images::load(cluster, repo, artefacts)?;
    if kubectl.find(&["namespace", deploy::PLUGIN_NAMESPACE])?.is_some() {
        println!("removing what an earlier run left");
        deploy::remove(kubectl, repo, &node)?;
    }
    println!("images on {node} after {:.1?}", started.elapsed());
    let outcome = Plugin::deploy(cluster, repo, &node).and_then(|plugin| {
        println!("plugin ready after {:.1?}", started.elapsed());
        let suite = Suite::new(cluster, repo, artefacts, node.clone(), plugin)?;
        cases(&suite, options, started)
    });
    if options.keep {
        return outcome;
    }
    wait::resume();
    let removed = deploy::remove(kubectl, repo, &node);
    let passed = outcome?;
    removed.context("cleaning up")?;
    Ok(passed)
}

/// The cases that are asked for, in their order. Those of one front end stay together: a change is two roll-outs.
fn chosen(options: &Options) -> Result<Vec<&'static Case>> {
    let is_asked = |case: &&Case| {
        options.names.is_empty() || options.names.iter().any(|name| case.name.contains(name))
    };
    let mut chosen: Vec<&Case> = CASES.iter().filter(is_asked).collect();
    if options.shuffle {
        let seed = seed()?;
        println!("shuffled: TESSERA_E2E_SEED={seed}");
        Rng::with_seed(seed).shuffle(&mut chosen);
        let first = chosen.first().map(|case| case.takes_claims);
        chosen.sort_by_key(|case| Some(case.takes_claims) != first);
    }
    Ok(chosen)
}

fn seed() -> Result<u64> {
    number_of("TESSERA_E2E_SEED", SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

fn number_of(name: &str, default: u64) -> Result<u64> {
    env::var(name).map_or(Ok(default), |text| Ok(text.parse()?))
}

/// Whether every case passed.
fn cases(suite: &Suite<'_>, options: &Options, started: Instant) -> Result<bool> {
    let has_claims = mode::claims_share_devices(suite.kubectl)?;
    let (mut passed, mut failed, mut ignored) = (0, Vec::new(), 0);
    for case in chosen(options)? {
        if wait::interrupted() {
            failed.push(case.name);
            continue;
        }
        if case.takes_claims && !has_claims {
            println!("test {} ... ignored (needs Kubernetes 1.36)", case.name);
            ignored += 1;
            continue;
        }
        let begun = Instant::now();
        let change = if case.takes_claims { mode::enter } else { mode::leave };
        let result = change(suite).and_then(|()| (case.run)(suite));
        let seconds = begun.elapsed().as_secs_f64();
        match result {
            Ok(()) => {
                println!("test {} ... ok ({seconds:.1} s)", case.name);
                passed += 1;
            }
            Err(error) => {
                println!("test {} ... FAILED ({seconds:.1} s)\n     {error:#}", case.name);
                suite.explain();
                failed.push(case.name);
            }
        }
        if let Err(error) = suite.clear() {
            println!("clearing up after {}: {error:#}", case.name);
            suite.explain();
        }
    }
    for name in &failed {
        println!("failed: {name}");
    }
    let result = if failed.is_empty() { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {result}. {passed} passed; {} failed; {ignored} ignored; finished in {:.0?}",
        failed.len(),
        Duration::from_secs(started.elapsed().as_secs()),
    );
    Ok(failed.is_empty())
}

/// A ready node that takes ordinary pods.
fn pick_node(cluster: &Cluster) -> Result<String> {
    let nodes = cluster.kubectl.items(&["nodes"])?;
    let usable = |node: &&serde_json::Value| {
        let taints = node["spec"]["taints"].as_array();
        let tainted =
            taints.into_iter().flatten().any(|taint| taint["effect"] != "PreferNoSchedule");
        pods::is_ready(&node["status"]) && !tainted && node["spec"]["unschedulable"] != true
    };
    let node = nodes.iter().find(usable).context("no node is ready and untainted")?;
    Ok(node["metadata"]["name"].as_str().unwrap_or_default().to_owned())
}
