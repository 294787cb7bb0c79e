//! Processes of one container that die at random moments, by every way out and over every API, for as
//! long as one likes: a few seconds in `make test`, hours with
//!
//!     SOAK_MINUTES=120 cargo test -p tessera-suite-shim --test shim_alone deaths -- --ignored --nocapture
//!
//! After each round all are dead. Then no byte is charged and the driver holds none (nothing leaked), and
//! the whole limit is granted to one request (none that fits is refused). In the midst, the driver never
//! holds more than the limit for longer than a death takes (none is granted twice).

use std::process::Command;
use std::time::{Duration, Instant};

use tessera_harness::{
    Conversation, MIB, Pages, Preloaded, Rng, Running, SimGpu, alone, artefacts, compile_c, until,
};

const LIMIT: u64 = 512 * MIB;
const CONTEXT: u64 = 16 * MIB;
const PROCESSES: usize = 6;
const OUT_OF_MEMORY: i64 = 2;

const MACHINE: &str = r#"
[memory]
reserved = "0MiB"
context_overhead = "16MiB"
teardown_ms = 3.0
[[gpu]]
uuid = "GPU-7e55e7a0-0000-4000-8000-000000000000"
memory = "4GiB"
"#;

/// What the driver holds on the GPU, MiB.
fn driver_holds(sim: &SimGpu) -> u64 {
    let out = Command::new(artefacts().simgpu_ctl()).arg("status").envs(sim.envs()).output();
    let text = String::from_utf8(out.expect("it starts").stdout).expect("ASCII");
    let line =
        text.lines().find(|line| line.starts_with("GPU 0")).unwrap_or_else(|| panic!("{text}"));
    let before = line.split(" of ").next().expect("a part");
    before.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

fn signal(process: &Running, signal: i32) {
    let pid = libc::pid_t::try_from(process.pid()).expect("a pid");
    // SAFETY: kill takes no memory; the child is not reaped before it is dropped, so its number is its
    // own, and it leads a group.
    unsafe { libc::kill(-pid, signal) };
}

#[derive(Debug, Default)]
struct Figures {
    rounds: u64,
    deaths: u64,
    stopped: u64,
    /// Highest the driver was seen to hold, MiB.
    most: u64,
    samples: u64,
}

struct World {
    sim: SimGpu,
    pages: Pages,
    random: Rng,
    figures: Figures,
}

impl World {
    fn new(seed: u64) -> Self {
        let sim = SimGpu::start(MACHINE);
        let pages = Pages::with_overhead(&[(sim.uuid(0), LIMIT)], CONTEXT);
        World { sim, pages, random: Rng::with_seed(seed), figures: Figures::default() }
    }

    /// A process of the container: the tenant, which draws from every API that the shim accounts for and
    /// checks what it stored, or the program that knows every way out.
    fn process(&mut self) -> Running {
        let seed = self.random.u64(..1 << 31).to_string();
        let program = match self.random.u64(..2) {
            0 => Preloaded::new(artefacts().tenant())
                .arg("churn")
                .arg("--threads=3")
                .arg("--max=64Mi")
                .arg(format!("--seed={seed}")),
            _ => Preloaded::new(compile_c("deaths")).arg(seed),
        };
        program.sim(&self.sim).pages(&self.pages).timeout(Duration::from_secs(60)).spawn()
    }

    fn round(&mut self) {
        let mut living: Vec<Running> = (0..PROCESSES).map(|_| self.process()).collect();
        for _ in 0..4 + self.random.u64(..8) {
            std::thread::sleep(Duration::from_micros(self.random.u64(..20_000)));
            let victim = self.random.usize(..living.len());
            match self.random.u64(..5) {
                0 => {
                    signal(&living[victim], libc::SIGSTOP);
                    self.figures.stopped += 1;
                }
                1 => signal(&living[victim], libc::SIGCONT),
                // Dropping kills it and all that it forked.
                _ => {
                    living[victim] = self.process();
                    self.figures.deaths += 1;
                }
            }
        }
        self.sample(&living);
        self.figures.deaths += living.len() as u64;
        drop(living);
        self.nothing_is_left();
        self.figures.rounds += 1;
    }

    /// What the driver holds while nobody dies on purpose. Those that die by themselves may be in both
    /// accounts for a moment, so what lasts is looked for.
    fn sample(&mut self, living: &[Running]) {
        living.iter().for_each(|process| signal(process, libc::SIGCONT));
        let limit = LIMIT / MIB;
        let mut least = u64::MAX;
        for _ in 0..20 {
            let holds = driver_holds(&self.sim);
            least = least.min(holds);
            self.figures.samples += 1;
            if holds <= limit {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(least <= limit, "the driver holds {least} MiB of {limit}");
        self.figures.most = self.figures.most.max(least);
    }

    fn nothing_is_left(&mut self) {
        until("no byte is charged", || self.pages.charged(0) == 0);
        until("the driver holds none", || driver_holds(&self.sim) == 0);
        let program = Preloaded::new(compile_c("calls")).sim(&self.sim).pages(&self.pages);
        let mut last = Conversation::start(program);
        last.must("init");
        last.must("retain 0");
        assert_eq!(last.ask(&format!("alloc {}", LIMIT - CONTEXT + 1)).result, OUT_OF_MEMORY);
        last.must(&format!("alloc {}", LIMIT - CONTEXT));
        assert_eq!(driver_holds(&self.sim), LIMIT / MIB);
        drop(last);
        until("the last one's bytes are back", || {
            self.pages.charged(0) == 0 && driver_holds(&self.sim) == 0
        });
    }
}

fn run_for(time: Duration, seed: u64) -> Figures {
    let mut world = World::new(seed);
    let start = Instant::now();
    let mut reported = start;
    while start.elapsed() < time || world.figures.rounds == 0 {
        world.round();
        if reported.elapsed() > Duration::from_secs(60) {
            reported = Instant::now();
            println!("{:.0?}: {:?}", start.elapsed(), world.figures);
        }
    }
    println!("{:.0?}: {:?}", start.elapsed(), world.figures);
    world.figures
}

#[test]
fn whoever_dies_however_leaves_nothing_and_takes_nothing() {
    let _alone = alone();
    let figures = run_for(Duration::from_secs(4), 20_261_121);
    assert!(figures.deaths > 0, "{figures:?}");
}

#[test]
#[ignore = "runs for SOAK_MINUTES"]
fn soak() {
    let _alone = alone();
    let minutes = std::env::var("SOAK_MINUTES").ok().and_then(|m| m.parse().ok()).unwrap_or(10);
    let seed = u64::from(std::process::id()) << 20;
    println!("seed {seed}");
    run_for(Duration::from_secs(60 * minutes), seed);
}
