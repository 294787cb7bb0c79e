//! `tessera demo`: a script in a sandbox of one node, and a judge.
//!
//! Four tenants share memory: one serves, first alone; one asks for more than its quota by every API; one is killed and
//! comes back; one needs two replicas. Then two share the time of one GPU, and the same load runs without Tessera. What
//! each held and computed is judged by NVML's own account ([`super::account`]), never by the shim's.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::Value;
use tessera_api::print::table;
use tessera_model::quantity::format_bytes;
use tessera_system::terminal;
use tokio::process::{Child, Command};
use toml::Table;

use super::command;
use super::container::{Means, Surroundings};
use super::control::{Ends, INTERRUPTED};
use super::judge::{self, Facts, Phase, Said, Tenant, Way, millis};
use super::judge::{Account, Group, micros};
use super::machine::Machine;
use super::pod::Load;
use super::pod::{Pod, State};
use super::sandbox::{Sandbox, overhead};
use super::scratch::MARK;
use super::scratch::{PREFIX, Scratch};
use super::start::{self, Plan};

/// How long a process may take to do what it was asked.
const PATIENCE: Duration = Duration::from_secs(15);
const STEP: Duration = Duration::from_millis(10);
/// Before GPU time is counted: programs start.
const WARM_UP: Duration = Duration::from_millis(300);
/// The least time in which GPU time is counted: the driver's account is an average over a second.
const LEAST: Duration = Duration::from_millis(1800);
/// Somebody waits for each step of `answer`: short leases, and little in flight when one ends.
const LEASES: &str =
    "quantum = '2ms'\nquantum_min = '1ms'\nquantum_max = '4ms'\ncredit = '1ms'\nwindow = 4";

/// Arguments of `tessera demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Use this machine's GPUs instead of simulated ones
    #[arg(long)]
    real: bool,
    /// How long the tenants run, at least 6
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(6..))]
    seconds: u32,
    /// Leave the temporary directory, with the plugin's log and configuration, and say where it is
    #[arg(long)]
    keep: bool,
}

/// Plays, reports and judges. Fails if a quota was exceeded or a neighbour was harmed.
pub fn main(args: &Args, file: Option<&Path>) -> anyhow::Result<ExitCode> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let ends = Ends::listen()?;
        let mut demo = tokio::select! {
            demo = Demo::start(args, file) => demo?,
            () = ends.wait() => return Ok(ExitCode::from(INTERRUPTED)),
        };
        let played = tokio::select! {
            played = demo.play() => Some(played),
            () = ends.wait() => None,
        };
        let Demo { sandbox, account, facts, .. } = demo;
        drop(account);
        sandbox.strike().await;
        match played {
            None => return Ok(ExitCode::from(INTERRUPTED)),
            Some(played) => played?,
        }
        let verdict = judge::judge(&facts, args.real);
        say(&format!("{}\n{}", report(&facts), verdict.text()))?;
        Ok(if verdict.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    })
}

struct Demo {
    sandbox: Sandbox,
    account: Account,
    /// UUIDs, in NVML's order.
    gpus: Vec<String>,
    replicas_per_gpu: usize,
    /// How long the first part takes.
    first: Duration,
    facts: Facts,
}

impl Demo {
    async fn start(args: &Args, file: Option<&Path>) -> anyhow::Result<Self> {
        let mut user = file.map(start::read).transpose()?.unwrap_or_default();
        let compute = user.entry("compute").or_insert_with(|| Table::new().into());
        if let Some(compute) = compute.as_table_mut() {
            compute.extend(LEASES.parse::<Table>()?);
        }
        let mut scratch = Scratch::temporary(PREFIX)?;
        if args.keep {
            scratch.keep();
            eprintln!("tessera: everything is kept in {}", scratch.path.display());
        }
        let machine = (!args.real).then(Machine::default);
        // A port of the machine is not the demo's to take.
        let plan = Plan { nodes: 1, machine, user, file: file.map(Path::to_owned), listens: false };
        let sandbox = start::stand(plan, scratch).await?;
        let node = &sandbox.nodes[0];
        let status = node.command(&["status", "-o", "json"])?.output()?;
        let status: Value = serde_json::from_slice(&status.stdout).context("no status")?;
        let all = status["gpus"].as_array().into_iter().flatten();
        let gpus: Vec<String> =
            all.filter_map(|gpu| Some(gpu["uuid"].as_str()?.to_owned())).collect();
        let library = node.config.paths.nvml.clone();
        let library = library.unwrap_or_else(|| "libnvidia-ml.so.1".into());
        let account = Account::of(node, &library, &gpus)?;
        let replicas = node.kubelet.devices(&node.config.resource.name).len();
        let replicas_per_gpu = replicas / gpus.len().max(1);
        let first = Duration::from_secs(args.seconds.into());
        let facts = Facts::default();
        Ok(Self { sandbox, account, gpus, replicas_per_gpu, first, facts })
    }

    async fn play(&mut self) -> anyhow::Result<()> {
        say(&format!(
            "{}; the plugin and a stand-in for kubelet over gRPC; Allocate's answer reaches tenants by {}",
            self.sandbox.described, self.sandbox.means
        ))?;
        let begun = Instant::now();
        let at = |part: f64| begun + self.first.mul_f64(part);
        let [alone, all, end] = [at(0.35), at(0.6), at(1.0)];
        self.must("run chat --load serve").await?;
        self.account.seen()?.late_us();
        self.pass(alone).await?;
        self.facts.late_us[0] = self.account.seen()?.late_us();
        let chat = self.pod("chat")?;
        let (quota, log) = (chat.placement.memory(), chat.log.clone());
        self.close_phase(chat.group(), &log).await?;
        self.must("run greedy --load greedy").await?;
        let held = quota.saturating_sub(overhead(&self.sandbox.nodes[0])) / 5 * 4;
        self.must(&format!("run crash --load idle --memory {}Mi", held >> 20)).await?;
        // More than one replica has.
        let weights = quota / 2 * 3;
        self.must(&format!("run large --gpu 2 --load serve --memory {}Mi", weights >> 20)).await?;
        self.pass(all).await?;
        self.kill_and_return(held).await?;
        self.pass(end).await?;
        self.facts.late_us[1] = self.account.seen()?.late_us();
        self.must("list").await?;
        self.must("status").await?;
        self.must("explain greedy").await?;
        // The serving ones first, so that their last phase is not one of tearing down.
        for name in ["chat", "large", "greedy", "crash"] {
            self.end(name, quota).await?;
        }
        // With one replica of each GPU there is no time to divide.
        if self.replicas_per_gpu > 1 { self.divide().await } else { Ok(()) }
    }

    /// Does a line of the script, which must succeed.
    async fn must(&mut self, line: &str) -> anyhow::Result<()> {
        say(&format!("\n$ tessera sandbox {line}"))?;
        let words: Vec<&str> = line.split(' ').collect();
        let command = match command::parse(&words)? {
            command::Command::Tessera(_) => {
                let output = self.sandbox.nodes[0].command(&words)?.output()?;
                let said = String::from_utf8_lossy(&output.stdout);
                ensure!(output.status.success(), "{line}: {}", output.status);
                return say(said.trim_end());
            }
            command => command,
        };
        let reply = self.sandbox.obey(command).await;
        self.sandbox.settle();
        ensure!(reply.code == 0, "{line}: {}", reply.text);
        say(&reply.text)
    }

    fn pod(&self, name: &str) -> anyhow::Result<&Pod> {
        self.sandbox.pods.iter().find(|pod| pod.name == name).context("no such pod")
    }

    /// Goes on until then; nobody may end meanwhile.
    async fn pass(&mut self, until: Instant) -> anyhow::Result<()> {
        while Instant::now() < until {
            let news = self.sandbox.news();
            ensure!(news.is_empty(), "{}", news.join("; "));
            tokio::time::sleep(STEP).await;
        }
        Ok(())
    }

    /// Ends a phase of a serving process; which it was.
    async fn close_phase(&self, group: Option<Pid>, log: &Path) -> anyhow::Result<usize> {
        let before = Said::of(log, 0).phases.len();
        kill(group.context("it does not serve any more")?, Signal::SIGUSR1)?;
        until("a phase did not end", || Said::of(log, 0).phases.len() > before).await?;
        Ok(before)
    }

    /// SIGKILL, the driver's release, PreStartContainer, and the same bytes held again.
    async fn kill_and_return(&mut self, held: u64) -> anyhow::Result<()> {
        let uuid = self.pod("crash")?.placement.uuids().into_iter().next();
        let gpu = self.gpus.iter().position(|gpu| Some(gpu) == uuid.as_ref());
        let gpu = gpu.context("crash has no GPU")?;
        self.facts.before = self.pod("crash")?.group().map(|group| self.peak(group)).transpose()?;
        let used = |account: &mut Account| Ok::<_, anyhow::Error>(account.seen()?.used[gpu]);
        // Neighbours come and go by some MiB; what the killed one held is far more.
        let below = used(&mut self.account)?.saturating_sub(held / 10 * 9);
        let killed = Instant::now();
        self.must("kill crash").await?;
        while used(&mut self.account)? > below {
            ensure!(killed.elapsed() < PATIENCE, "the killed tenant's bytes did not come back");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.facts.freed_us = micros(killed.elapsed());
        let started = Instant::now();
        self.must("start crash").await?;
        self.facts.again_us = micros(started.elapsed());
        Ok(())
    }

    fn peak(&mut self, group: Pid) -> anyhow::Result<u64> {
        Ok(self.account.seen()?.peak(group.as_raw()))
    }

    /// Ends a tenant of the first part, and notes what is known of it.
    async fn end(&mut self, name: &'static str, one: u64) -> anyhow::Result<()> {
        let at = self.sandbox.pods.iter().position(|pod| pod.name == name);
        let pod = &mut self.sandbox.pods[at.context("no such pod")?];
        let group = pod.group();
        pod.signal(Signal::SIGTERM);
        let exit = match pod.wait_for(PATIENCE).await {
            State::Ended(code) => Some(code),
            State::Running => None,
        };
        let (asked, quota) = (pod.placement.device_ids.len(), pod.placement.memory());
        let said = Said::of(&pod.log, 0);
        let peak = group.map(|group| self.peak(group)).transpose()?.unwrap_or(0);
        let peak = peak.max(self.facts.before.filter(|_| name == "crash").unwrap_or(0));
        self.facts.tenants.push(Tenant { name, asked, quota, one, peak, exit, said });
        self.must(&format!("rm {name}")).await
    }

    /// The time of one GPU three ways.
    async fn divide(&mut self) -> anyhow::Result<()> {
        self.must(&format!("run answer --load steps --gpu {}", self.replicas_per_gpu - 1)).await?;
        let of = |pod: &Pod| {
            let group = pod.group().context("it has ended")?;
            anyhow::Ok((group, pod.placement.quota.cores_millis(0) / 10))
        };
        let (answer, share) = of(self.pod("answer")?)?;
        let log = self.pod("answer")?.log.clone();
        let uuid = self.pod("answer")?.placement.uuids().remove(0);
        self.measure("answer alone", [Some(share), None], [Some(answer), None], &log).await?;
        self.must("run batch --load flood").await?;
        let (batch, left) = of(self.pod("batch")?)?;
        let asked = [Some(share), Some(left)];
        self.measure("with Tessera", asked, [Some(answer), Some(batch)], &log).await?;
        self.must("rm answer").await?;
        self.must("rm batch").await?;
        say("\nthe same two programs, without Tessera")?;
        let (mut answer, log) = self.bare(Load::Steps, &uuid).await?;
        let (mut batch, _) = self.bare(Load::Flood, &uuid).await?;
        let groups = [&answer, &batch].map(group_of);
        let measured = self.measure("without Tessera", [None; 2], groups, &log).await;
        for child in [&mut answer, &mut batch] {
            if let Some(group) = group_of(child) {
                let _ = killpg(group, Signal::SIGKILL);
            }
            let _ = child.wait().await;
        }
        measured
    }

    /// Lets both run for a while, and notes what the answer says of its steps and the driver of both.
    async fn measure(
        &mut self,
        name: &'static str,
        asked: [Option<u32>; 2],
        groups: [Option<Pid>; 2],
        log: &Path,
    ) -> anyhow::Result<()> {
        self.pass(Instant::now() + WARM_UP).await?;
        let phase = self.close_phase(groups[0], log).await?;
        self.account.seen()?.late_us();
        self.pass(Instant::now() + (self.first / 5).max(LEAST)).await?;
        let (got, late_us) = {
            let mut seen = self.account.seen()?;
            let busy = |group: Option<Pid>| {
                group.and_then(|group| seen.busy.get(&group.as_raw()).copied()).unwrap_or(0)
            };
            (groups.map(busy), seen.late_us())
        };
        self.close_phase(groups[0], log).await?;
        let steps: Phase = Said::of(log, 0).phases.get(phase + 1).cloned().unwrap_or_default();
        self.facts.ways.push(Way { name, asked, got, steps, late_us });
        Ok(())
    }

    /// A program beside Tessera: no pod, no shim, no pages; at work.
    async fn bare(&self, load: Load, uuid: &str) -> anyhow::Result<(Child, PathBuf)> {
        let Sandbox { nodes, program, scratch, .. } = &self.sandbox;
        let arguments = load.arguments(0, 0, uuid, None);
        let mut command =
            Means::Environment.command(&Surroundings::default(), program, &arguments)?;
        if let Some(simulation) = &nodes[0].spec.simulation {
            command.envs(simulation.envs()).env("LD_LIBRARY_PATH", &simulation.libraries);
        }
        let log = scratch.dir("logs")?.join(format!("bare.{load:?}"));
        command.env(MARK, &scratch.path).stdin(Stdio::null()).stderr(Stdio::null());
        command.stdout(std::fs::File::create(&log)?);
        let child = Command::from(command).kill_on_drop(true).spawn()?;
        until("a program did not start", || Said::of(&log, 0).ready >= load.processes()).await?;
        Ok((child, log))
    }
}

fn group_of(child: &Child) -> Option<Pid> {
    child.id().and_then(|pid| Group::try_from(pid).ok()).map(Pid::from_raw)
}

async fn until(what: &str, holds: impl Fn() -> bool) -> anyhow::Result<()> {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        if Instant::now() > end {
            bail!("{what} within {PATIENCE:?}");
        }
        tokio::time::sleep(STEP).await;
    }
    Ok(())
}

fn say(text: &str) -> anyhow::Result<()> {
    Ok(terminal::print(&format!("{text}\n"))?)
}

/// What each asked, got and tried, what its neighbour felt, and who had the GPU's time.
fn report(facts: &Facts) -> String {
    let mut out = String::from("\n");
    let tenants = facts.tenants.iter().map(|tenant| {
        let Tenant { name, asked, quota, peak, said, .. } = tenant;
        let (attempts, refused) = said.tries();
        let did = match *name {
            "greedy" => format!("{attempts} times more by {} APIs", said.apis.len()),
            "crash" => format!(
                "SIGKILL; bytes back in {}, held again in {}",
                millis(facts.freed_us),
                millis(facts.again_us)
            ),
            _ => format!("served {} requests", said.total().requests),
        };
        let refused = refused + said.total().out_of_memory;
        let cells = [asked.to_string(), format_bytes(*quota), format_bytes(*peak)];
        [vec![(*name).to_owned()], cells.into(), vec![refused.to_string(), did]].concat()
    });
    table(
        &mut out,
        &["TENANT", "REPLICAS", "QUOTA", "MOST HELD", "REFUSED", "DID"],
        tenants.collect(),
    );
    let phases = facts.tenants.iter().find(|tenant| tenant.name == "chat");
    let phases = phases.map(|chat| chat.said.phases.as_slice()).unwrap_or_default();
    let felt = ["alone", "beside greedy and crash"].into_iter().zip(phases).map(|(name, phase)| {
        let Phase { requests, p50_us, p99_us, verified_bytes, corrupted, .. } = phase;
        let (verified, wrong) = (format_bytes(*verified_bytes), corrupted.to_string());
        let name = name.to_owned();
        vec![name, requests.to_string(), millis(*p50_us), millis(*p99_us), verified, wrong]
    });
    out.push('\n');
    table(&mut out, &["CHAT", "REQUESTS", "p50", "p99", "VERIFIED", "WRONG"], felt.collect());
    let ways = facts.ways.iter().map(|way| {
        let percent = |part: Option<u32>| part.map_or("-".to_owned(), |part| format!("{part} %"));
        let [a, b] = way.asked.map(percent);
        let [got, other] = way.got.map(|part| percent(Some(part)));
        let steps =
            [way.steps.requests.to_string(), millis(way.steps.p50_us), millis(way.steps.p99_us)];
        [vec![way.name.to_owned(), a, got, b, other], steps.into()].concat()
    });
    out.push('\n');
    let head = ["GPU TIME", "answer ASKED", "GOT", "batch ASKED", "GOT", "STEPS", "p50", "p99"];
    table(&mut out, &head, ways.collect());
    out + "\n\"Most held\" and \"got\" are NVML's account, contexts included, asked outside the shim."
}
