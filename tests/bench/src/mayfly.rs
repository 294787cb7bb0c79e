//! Processes that die with all that is shown free, and successors that ask for it at once, with a driver
//! that takes its time: what the driver holds at the most, and how many requests of what is shown free are
//! refused. Under `tessera run` and under the plugin.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::Context;
use serde_json::json;
use tessera_harness::artefacts;
use tessera_region::layout::PAGES_DIR_ENV;

use crate::node::{self, Node, Setup};
use crate::report::Report;
use crate::world::World;

const MIB: u64 = 1 << 20;
/// What each tenant may hold, its contexts in it.
const QUOTA: u64 = 1024 * MIB;
/// Tenants; the GPU has room for all, and no more.
const TENANTS: usize = 4;
/// How long the driver takes to give a dead process's memory back, milliseconds.
const TEARDOWNS: [u64; 3] = [0, 10, 500];
/// How the next process follows: killed and started again, by an exec, ended and started again.
const MODES: [(&str, &str); 3] = [("k", "kills"), ("e", "execs"), ("r", "restarts")];

/// What a case runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Run,
    Serve,
}

#[allow(clippy::cast_precision_loss, reason = "counts and bytes far below 2^53")]
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let program = world.path("mayfly");
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../programs/mayfly.c");
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.arg("-O1").arg("-o").arg(&program).arg(&source).arg("-ldl");
    anyhow::ensure!(cc.status()?.success(), "{} does not compile", source.display());
    // Of the worst case.
    let (mut overshoot, mut refusals, mut detail) = (0, 0, Vec::new());
    for teardown in TEARDOWNS {
        for how in [How::Run, How::Serve] {
            for (mode, name) in MODES {
                let case = Case { world, program: &program, teardown, how, mode };
                let (most, refused, granted) = case
                    .measure()
                    .with_context(|| format!("{name} under {how:?}, teardown {teardown} ms"))?;
                overshoot = overshoot.max(most.saturating_sub(QUOTA * TENANTS as u64));
                refusals = refusals.max(refused);
                detail.push(json!({
                    "under": format!("{how:?}").to_lowercase(),
                    "by": name,
                    "teardown_ms": teardown,
                    "most_mib": most / MIB,
                    "granted": granted,
                    "refused": refused,
                }));
            }
        }
    }
    let what = "held beyond all quotas in storms, by the driver";
    report.figure("storm_overshoot_bytes", what, "bytes", overshoot as f64, 0.0);
    let what = "refusals there of what is shown free";
    report.figure("storm_false_refusals", what, "", refusals as f64, 0.0);
    let case = Case { world, program: &program, teardown: 0, how: How::Run, mode: "decay" };
    let decay = case.decay().context("overhead")?;
    report.figure("overhead_decay_ms", "overhead shown after it is gone", "ms", decay, 1e3);
    report.put("storms_detail", detail.into());
    Ok(())
}

struct Case<'a> {
    world: &'a World,
    program: &'a Path,
    teardown: u64,
    how: How,
    mode: &'static str,
}

impl Case<'_> {
    /// Milliseconds for which overhead is shown that is gone, under `tessera run`.
    fn decay(&self) -> anyhow::Result<f64> {
        let (envs, _) = self.machine()?;
        let out = self.run(&envs).arg("decay").stdin(Stdio::null()).output()?;
        let text = String::from_utf8(out.stdout)?;
        let field = |name: &str| text.split_whitespace().find_map(|word| word.strip_prefix(name));
        let hidden: u64 = field("hidden=").context("no figure")?.parse()?;
        // Half of it is what was asked for, the rest what nobody asked for.
        anyhow::ensure!(hidden > 300 * MIB, "no overhead was seen: {text}");
        Ok(field("decay=").context("no figure")?.parse()?)
    }

    fn run(&self, envs: &[(&'static str, PathBuf); 2]) -> Command {
        let mut run = Command::new(artefacts().tessera());
        run.args(["run", "--sim", "-m", "1GiB", "--context-overhead", "32MiB", "--"]);
        run.arg(self.program).envs(envs.clone());
        run
    }

    /// The machine's configuration and state, and where requests are reported.
    fn machine(&self) -> anyhow::Result<([(&'static str, PathBuf); 2], PathBuf)> {
        let name = format!("mayfly-{:?}-{}-{}", self.how, self.mode, self.teardown);
        let config = self.world.path(&format!("{name}.toml"));
        let memory = QUOTA * TENANTS as u64 / MIB;
        std::fs::write(
            &config,
            format!(
                "[memory]\nreserved = \"0\"\ncontext_overhead = \"32MiB\"\nteardown_ms = {}.0\n\
                 [[gpu]]\nuuid = \"GPU-7e55e7a0-0000-4000-8000-000000000000\"\nmemory = \"{memory}MiB\"\n",
                self.teardown
            ),
        )?;
        let state = self.world.path(&format!("{name}.state"));
        let envs = [("SIMGPU_CONFIG", config), ("SIMGPU_STATE", state)];
        Ok((envs, self.world.path(&format!("{name}.report"))))
    }

    /// The most that the driver held, requests refused or failed, and requests granted.
    fn measure(&self) -> anyhow::Result<(u64, u64, u64)> {
        let (envs, report) = self.machine()?;
        let mut watch = self.command(&envs);
        watch.arg("watch").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut watch = watch.spawn()?;
        match self.how {
            How::Run => self.storm(&report, |_| Ok(self.run(&envs)))?,
            How::Serve => self.serve(&envs, &report)?,
        }
        drop(watch.stdin.take());
        let out = watch.wait_with_output()?;
        let most = String::from_utf8(out.stdout)?;
        let most = most.trim().strip_prefix("most=").context("no figure")?.parse()?;
        let text = std::fs::read_to_string(&report)?;
        let count = |what: &[char]| text.matches(what).count() as u64;
        Ok((most, count(&['R', 'X']), count(&['G'])))
    }

    fn command(&self, envs: &[(&'static str, PathBuf); 2]) -> Command {
        let mut command = Command::new(self.program);
        command.env("LD_LIBRARY_PATH", artefacts().sim_dir()).envs(envs.clone());
        command
    }

    /// The same with pods' pages.
    fn serve(&self, envs: &[(&'static str, PathBuf); 2], report: &Path) -> anyhow::Result<()> {
        let setup = Setup::new(self.world, "mayfly", 1, TENANTS)?;
        let mut setup = Setup { envs: envs.to_vec(), reserve: 0, ..setup };
        setup.envs.push(("LD_LIBRARY_PATH", artefacts().sim_dir()));
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build()?;
        runtime.block_on(async {
            let node = Node::start(&setup).await?;
            let mut pages = Vec::new();
            for tenant in 0..TENANTS {
                pages.push(node::run(&node, &format!("mayfly-{tenant}")).await?);
            }
            let outcome = tokio::task::block_in_place(|| {
                self.storm(report, |tenant| {
                    let mut command = self.command(envs);
                    command.env("LD_PRELOAD", artefacts().shim());
                    command.env(PAGES_DIR_ENV, &pages[tenant]);
                    Ok(command)
                })
            });
            node.end().await;
            outcome
        })
    }

    /// All tenants at once, each by the command that `start` makes for it: those that stay, and one whose
    /// processes follow each other.
    fn storm(
        &self,
        report: &Path,
        start: impl Fn(usize) -> anyhow::Result<Command>,
    ) -> anyhow::Result<()> {
        let rounds = if self.teardown < 100 { "8" } else { "3" };
        let mut children: Vec<Child> = Vec::new();
        for tenant in 0..TENANTS {
            let mut command = start(tenant)?;
            match (tenant, self.mode) {
                (0, "e") => command.args(["live"]).arg(report).args(["e", "5", rounds]),
                (0, mode) => command.args(["loop"]).arg(report).args([mode, rounds, "5"]),
                _ => command.args(["stay"]).arg(report).arg("1500"),
            };
            children.push(command.stdin(Stdio::null()).stderr(self.world.log()?).spawn()?);
        }
        for child in &mut children {
            child.wait()?;
        }
        Ok(())
    }
}
