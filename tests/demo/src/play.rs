//! What happens, in order.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};

use tessera_config::Config;
use tessera_model::gpu::Gpu;
use tessera_model::quantity::format_bytes;
use tessera_run::{Artefact, find_artefact};
use tessera_sandbox::container::Means;
use tessera_sandbox::scratch::Scratch;
use tessera_system::terminal;

use super::Args;
use super::account::{Account, Watch};
use super::calm::Calm;
use super::clock::Clock;
use super::division::{self, Division};
use super::latency::{self, Latencies, P99};
use super::report;
use super::stage::Stage;
use super::table::{count, millis};
use super::tenant::{GREEDY_PROCESSES, Part, Tenant};
use super::verdict::{self, Facts, Recovery};
use super::view::{GpuLine, Scene, Screen, TenantLine, TimeLine};

/// How often the play looks whether to go on.
const STEP: Duration = Duration::from_millis(10);
/// How often the view is drawn.
const FRAME: Duration = Duration::from_millis(200);
/// How long a tenant may take to be ready or to end.
const PATIENCE: Duration = Duration::from_secs(15);
/// `128 + SIGINT`.
const INTERRUPTED: u8 = 130;

/// Plays the demo to its end, cleans up, reports and judges.
pub(super) async fn run(
    args: &Args,
    config: &Config,
    scratch: Scratch,
) -> anyhow::Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let program = find_artefact(Artefact::Tenant, None)?;
    let stage = Stage::set(args.real, scratch, config).await?;
    let (means, account) = match prepare(&stage) {
        Ok(prepared) => prepared,
        Err(error) => {
            stage.strike().await;
            return Err(error);
        }
    };
    let mut play = Play::new(args, stage, program, means, account);
    let played = tokio::select! {
        played = play.perform() => Some(played),
        _ = interrupt.recv() => None,
        _ = terminate.recv() => None,
    };
    let Some(played) = played else {
        play.strike().await;
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let latencies = play.latencies();
    let facts = std::mem::take(&mut play.judged);
    let (recovery, division) = (play.recovery, std::mem::take(&mut play.division));
    let name = |gpu: &Gpu| format!("{}, {}", gpu.name, format_bytes(gpu.memory_bytes));
    let gpus = play.stage.gpus.iter().map(name).collect::<Vec<_>>();
    let placed = std::mem::take(&mut play.placed);
    let (means, real) = (play.means, play.real);
    let failure = play.watch.seen().failure.clone();
    play.strike().await;
    played?;
    if let Some(failure) = failure {
        anyhow::bail!("nothing can be judged here: {failure}");
    }
    let mut failures = verdict::failures(&facts, recovery);
    failures.extend(division::failures(&division, real));
    let judgement = latency::judge(&latencies, real);
    if let latency::Judgement::Broken(broken) = &judgement {
        failures.extend(broken.iter().cloned());
    }
    let report = report::Report {
        facts: &facts,
        placed: &placed,
        recovery,
        gpus: &gpus,
        means,
        real,
        division: &division,
        judgement: &judgement,
    };
    for line in report.lines(&failures, Screen::width()) {
        terminal::print(&format!("{line}\n"))?;
    }
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the tenants' surroundings and the judge need of this machine.
fn prepare(stage: &Stage) -> anyhow::Result<(Means, Account)> {
    let means = Means::probe(&stage.scratch.dir("probe")?);
    let uuids = stage.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    Ok((means, Account::open(stage.nvml.as_deref(), uuids)?))
}

pub(super) struct Play {
    pub(super) tenants: Vec<Tenant>,
    pub(super) watch: Watch,
    screen: Screen,
    pub(super) stage: Stage,
    pub(super) program: PathBuf,
    pub(super) means: Means,
    real: bool,
    /// How long the first part takes.
    pub(super) first: Duration,
    clock: Clock,
    pub(super) calm: Calm,
    /// How late the CPUs were while `chat` served alone, and beside others, microseconds.
    late_us: [u64; 2],
    start: Instant,
    drawn: Option<Instant>,
    events: Vec<(f64, String)>,
    recovery: Recovery,
    /// What is known of the tenants of the first part.
    judged: Vec<Facts>,
    placed: Vec<(Part, usize)>,
    pub(super) division: Vec<Division>,
}

impl Play {
    fn new(args: &Args, stage: Stage, program: PathBuf, means: Means, account: Account) -> Self {
        let first = Duration::from_secs(args.seconds.into());
        // With one replica of each GPU there is no time to divide.
        let divides = stage.replicas_per_gpu > 1;
        let division = divides.then(|| division::planned(first)).into_iter().flatten();
        Self {
            tenants: Vec::new(),
            watch: Watch::start(account),
            screen: Screen::open(args.plain),
            stage,
            program,
            means,
            real: args.real,
            first,
            clock: Clock::of(std::iter::once(first).chain(division)),
            calm: Calm::watch(),
            late_us: [0; 2],
            start: Instant::now(),
            drawn: None,
            events: Vec::new(),
            recovery: Recovery::default(),
            judged: Vec::new(),
            placed: Vec::new(),
            division: Vec::new(),
        }
    }

    async fn perform(&mut self) -> anyhow::Result<()> {
        let (replicas, gpus) = (self.stage.replicas_per_gpu, self.stage.gpus.len());
        self.tell(format!(
            "the plugin registered {} with kubelet: {replicas} replicas of each of {gpus} GPUs",
            self.stage.resource
        ));
        let chat = self.place(Part::Serve).await?;
        self.ready(chat, 1).await?;
        self.tenants[chat].state = "serves alone: this is what it feels without neighbours".into();
        self.calm.take();
        self.pass(self.at(0.35)).await;
        self.late_us[0] = self.calm.take();

        self.tenants[chat].signal(Signal::SIGUSR1);
        self.wait("chat did not close its first phase", |play| {
            !play.tenants[chat].progress().phases.is_empty()
        })
        .await?;
        self.tenants[chat].state = "serves beside the others".into();
        let greedy = self.place(Part::Exceed).await?;
        self.tenants[greedy].state =
            format!("asks for more from {GREEDY_PROCESSES} processes by 4 APIs, again and again");
        let crash = self.place(Part::Die).await?;
        let large = self.place(Part::ServeLarge).await?;
        self.tenants[large].state = "serves with weights that need both replicas".into();
        self.ready(crash, 1).await?;
        self.tenants[crash].state = "holds most of its share".into();
        self.ready(large, 1).await?;
        self.ready(greedy, usize::try_from(GREEDY_PROCESSES)?).await?;
        self.pass(self.at(0.6)).await;

        self.kill_and_return(crash).await?;
        self.pass(self.at(1.0)).await;
        self.late_us[1] = self.calm.take();
        self.end().await?;
        self.part_is_over();
        self.clear();
        self.divide().await?;
        // The last picture is of the end.
        self.draw();
        Ok(())
    }

    /// A part of what the clock counts has ended.
    pub(super) fn part_is_over(&mut self) {
        self.clock.part_is_over(self.start.elapsed());
    }

    /// The 99th percentiles that the report prints.
    fn latencies(&self) -> Latencies {
        let chat = self.placed.iter().position(|(part, _)| *part == Part::Serve);
        let phases = chat.and_then(|at| self.judged.get(at)).map(|facts| &facts.progress.phases);
        let neighbour = phases.filter(|phases| phases.len() > 1).map(|phases| {
            [0, 1].map(|at| P99 {
                us: phases[at].p99_us,
                at_least_us: phases[at].p99_at_least_us,
                late_us: self.late_us[at],
            })
        });
        Latencies { neighbour, steps: division::steps(&self.division) }
    }

    /// The moment at `fraction` of the time.
    fn at(&self, fraction: f64) -> Instant {
        self.start + self.first.mul_f64(fraction)
    }

    /// The tenants of the first part go, and what is known of them stays.
    fn clear(&mut self) {
        self.judged = self.facts();
        self.placed = self.tenants.iter().map(|t| (t.part, t.gpu)).collect();
        for tenant in self.tenants.drain(..) {
            tenant.remove(&self.stage);
        }
        self.watch.seen().forget();
    }

    pub(super) async fn place(&mut self, part: Part) -> anyhow::Result<usize> {
        let mut tenant = Tenant::place(&self.stage, part).await?;
        let group = tenant.start(self.means, &self.program, &self.stage)?;
        let index = self.tenants.len();
        self.watch.seen().enrol(group, index);
        self.tell(format!(
            "{}: asked {}, was given GPU {}, quota {}",
            part.name(),
            replicas(part.replicas(self.stage.replicas_per_gpu)),
            tenant.gpu,
            format_bytes(tenant.quota)
        ));
        self.tenants.push(tenant);
        Ok(index)
    }

    /// Waits until `processes` of a tenant are at their load.
    pub(super) async fn ready(&mut self, tenant: usize, processes: usize) -> anyhow::Result<()> {
        let name = self.tenants[tenant].part.name();
        self.wait(&format!("{name} did not start"), |play| {
            play.tenants[tenant].progress().ready >= processes
        })
        .await
    }

    /// SIGKILL, the driver's release, PreStart, and the same bytes held again.
    async fn kill_and_return(&mut self, crash: usize) -> anyhow::Result<()> {
        let tenant = &self.tenants[crash];
        let held = tenant.part.held(tenant.quota, self.stage.context_overhead);
        let gpu = tenant.gpu;
        let before = self.watch.seen().used.get(gpu).copied().unwrap_or(0);
        let killed = Instant::now();
        self.tenants[crash].kill().await;
        self.tell(format!("crash: SIGKILL while it held {}", format_bytes(held)));
        // Neighbours come and go by some MiB; what the killed one held is far more.
        let below = before.saturating_sub(held / 10 * 9);
        while killed.elapsed() < PATIENCE {
            let seen = self.watch.seen().used.get(gpu).copied().unwrap_or(u64::MAX);
            if seen <= below {
                self.recovery.driver_us = Some(micros(killed.elapsed()));
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let restarted = Instant::now();
        self.tenants[crash].restart_container(&self.stage).await?;
        let group = self.tenants[crash].start(self.means, &self.program, &self.stage)?;
        self.watch.seen().enrol(group, crash);
        self.ready(crash, 1).await?;
        self.recovery.again_us = Some(micros(restarted.elapsed()));
        self.tenants[crash].state = "was killed, came back and holds as much again".into();
        let freed = self
            .recovery
            .driver_us
            .map_or_else(|| "not".into(), |us| format!("{} later", millis(us)));
        self.tell(format!(
            "crash: the driver had its bytes back {freed}; restarted, it holds {} again",
            format_bytes(held)
        ));
        Ok(())
    }

    /// Asks everyone to stop and waits; what each says at its end is in its progress then.
    async fn end(&mut self) -> anyhow::Result<()> {
        self.draw();
        // The serving ones first, so that their last phase is not one of tearing down.
        for serving in [true, false] {
            for tenant in &mut self.tenants {
                let serves = matches!(tenant.part, Part::Serve | Part::ServeLarge);
                if serves == serving {
                    tenant.signal(Signal::SIGTERM);
                    tenant.finish(PATIENCE).await;
                }
            }
        }
        Ok(())
    }

    /// Goes on until `condition` holds.
    ///
    /// # Errors
    /// A tenant that ended meanwhile, or `what` after [`PATIENCE`].
    pub(super) async fn wait(
        &mut self,
        what: &str,
        condition: impl Fn(&Self) -> bool,
    ) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        while !condition(self) {
            for tenant in &mut self.tenants {
                if tenant.has_ended() {
                    let log = tenant.said(&self.stage);
                    anyhow::bail!(
                        "{} ended with exit code {}: {log}",
                        tenant.part.name(),
                        tenant.exit.unwrap_or(-1)
                    );
                }
            }
            anyhow::ensure!(Instant::now() < end, "{what} within {PATIENCE:?}");
            self.step().await;
        }
        Ok(())
    }

    /// Goes on until `end`.
    pub(super) async fn pass(&mut self, end: Instant) {
        while Instant::now() < end {
            self.step().await;
        }
    }

    async fn step(&mut self) {
        if self.drawn.is_none_or(|drawn| drawn.elapsed() >= FRAME) {
            self.draw();
            self.drawn = Some(Instant::now());
        }
        tokio::time::sleep(STEP).await;
    }

    pub(super) fn tell(&mut self, event: String) {
        self.events.push((self.start.elapsed().as_secs_f64(), event));
        self.draw();
    }

    fn draw(&mut self) {
        let scene = self.scene();
        self.screen.show(&scene);
    }

    fn scene(&self) -> Scene {
        let elapsed = self.start.elapsed();
        let seen = self.watch.seen();
        let dividing = self.tenants.first().is_some_and(|t| t.part == Part::Answer);
        let kind = if self.real { "this machine's GPU" } else { "a simulated GPU" };
        Scene {
            title: format!("Tessera: tenants with quotas on {kind}"),
            subtitle: format!(
                "plugin: tessera serve, pid {}; kubelet: a stand-in; tenants: {}",
                self.stage.node.plugin_pid().map_or_else(|| "gone".into(), |pid| pid.to_string()),
                self.means.describe()
            ),
            elapsed: elapsed.as_secs_f64(),
            total: self.clock.total(elapsed).as_secs_f64(),
            gpus: self
                .stage
                .gpus
                .iter()
                .enumerate()
                .map(|(index, gpu)| GpuLine {
                    name: format!("GPU {index} {}", gpu.name),
                    used: seen.used.get(index).copied().unwrap_or(0),
                    memory: gpu.memory_bytes,
                    taken: self
                        .tenants
                        .iter()
                        .filter(|t| t.gpu == index)
                        .map(|t| t.device_ids.len())
                        .sum(),
                    replicas: self.stage.replicas_per_gpu,
                })
                .collect(),
            tenants: self
                .tenants
                .iter()
                .enumerate()
                .map(|(index, tenant)| {
                    let progress = tenant.progress();
                    let now = &progress.now;
                    TenantLine {
                        name: tenant.part.name().into(),
                        gpu: Some(tenant.gpu),
                        quota: tenant.quota,
                        used: seen.now.get(index).copied().unwrap_or(0),
                        refused: progress.tries().refused + progress.total().out_of_memory,
                        latency: (now.requests > 0).then_some((
                            now.requests,
                            now.p50_us,
                            now.p99_us,
                        )),
                        state: tenant.state.clone(),
                        time: dividing.then(|| TimeLine {
                            asked: tenant.asked_percent(),
                            got: seen.busy.get(index).copied().unwrap_or(0),
                            holds: tenant.holds(),
                        }),
                    }
                })
                .collect(),
            events: self.events.clone(),
        }
    }

    fn facts(&self) -> Vec<Facts> {
        let seen = self.watch.seen();
        let one = self.tenants.first().map(|chat| chat.quota);
        self.tenants
            .iter()
            .enumerate()
            .map(|(index, tenant)| Facts {
                name: tenant.part.name(),
                replicas: tenant.device_ids.len(),
                quota: tenant.quota,
                peak: seen.peaks.get(index).copied().unwrap_or(0),
                expects_refusals: tenant.part == Part::Exceed,
                one_replica: one.filter(|_| tenant.part == Part::ServeLarge),
                progress: tenant.progress().clone(),
                exit: tenant.exit,
            })
            .collect()
    }

    /// Ends everything, in the order that leaves nothing behind.
    async fn strike(self) {
        let Self { tenants, watch, screen, stage, .. } = self;
        drop(screen);
        for mut tenant in tenants {
            tenant.remove(&stage);
            tenant.kill().await;
        }
        drop(watch);
        stage.strike().await;
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// `1 replica`, `2 replicas`.
pub(super) fn replicas(number: usize) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} replica{plural}", count(u64::try_from(number).unwrap_or(u64::MAX)))
}
