//! What an allocation and its free cost while sixteen processes of a tenant do nothing else.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::Context;

use crate::clock;
use crate::stats::{Pair, Sample};
use crate::world::World;

/// Processes at the same time.
pub const PROCESSES: usize = 16;
/// Rounds of each kind, alternating.
const ROUNDS: usize = 11;
/// How long they allocate and free in one round.
const WINDOW_MS: u64 = 250;
/// Time for all to be asleep before the window begins.
const MUSTER: Duration = Duration::from_millis(30);
/// A limit that nothing here meets.
const AMPLE: u64 = 8 << 30;

/// What a pair costs.
#[derive(Clone, Debug)]
pub struct Contended {
    /// CPU time of all processes, by all their pairs: what the machine spends on one. Nanoseconds.
    pub cpu: Pair,
    /// The window by the pairs of one process: what that process waits for one, with its turn
    /// on the CPU. Nanoseconds.
    pub wall: Pair,
}

/// Alternates rounds with and without the shim.
///
/// # Errors
/// A child's.
pub fn run(world: &World) -> anyhow::Result<Contended> {
    let pages = world.pages(AMPLE)?;
    let task = ["contended", &WINDOW_MS.to_string()];
    let mut cpu = [Vec::new(), Vec::new()];
    let mut wall = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        let order = if round % 2 == 0 { [false, true] } else { [true, false] };
        for with_shim in order {
            let command = || {
                if with_shim { world.hooked(&task, &pages) } else { world.bare(&task) }
            };
            let figures = one(command)?;
            cpu[usize::from(with_shim)].push(figures.cpu_ns);
            wall[usize::from(with_shim)].push(figures.wall_ns);
        }
    }
    let pair = |[bare, hooked]: [Vec<f64>; 2]| Pair::new(bare, hooked);
    Ok(Contended { cpu: pair(cpu), wall: pair(wall) })
}

struct Figures {
    cpu_ns: f64,
    wall_ns: f64,
}

/// One round: `PROCESSES` children that all begin at one moment.
fn one(command: impl Fn() -> anyhow::Result<Command>) -> anyhow::Result<Figures> {
    let mut children =
        (0..PROCESSES).map(|_| Member::start(command()?)).collect::<Result<Vec<_>, _>>()?;
    for child in &mut children {
        child.expect("ready")?;
    }
    let at = clock::now_ns() + u64::try_from(MUSTER.as_nanos())?;
    for child in &mut children {
        writeln!(child.child.stdin.as_mut().context("piped")?, "{at}")?;
    }
    let (mut cpu_ns, mut pairs, mut wall) = (0.0, 0.0, Vec::new());
    for child in &mut children {
        let line = child.line()?;
        let (took, done) = line.split_once(' ').context("two numbers")?;
        let (took, done): (f64, f64) = (took.parse()?, done.parse()?);
        cpu_ns += took;
        pairs += done;
        // On a machine that is busy otherwise some process may have no turn in the window.
        if done > 0.0 {
            #[allow(clippy::cast_precision_loss, reason = "milliseconds far below 2^53")]
            wall.push(WINDOW_MS as f64 * 1e6 / done);
        }
    }
    anyhow::ensure!(pairs > 0.0, "no process had a turn within {WINDOW_MS} ms");
    for mut child in children {
        let status = child.child.wait()?;
        anyhow::ensure!(status.success(), "a contending process ended: {status}");
    }
    Ok(Figures { cpu_ns: cpu_ns / pairs, wall_ns: Sample::new(wall).median() })
}

/// A child that is killed if the round ends early.
struct Member {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Member {
    fn start(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let says = BufReader::new(child.stdout.take().context("piped")?);
        Ok(Self { child, says })
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.says.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn expect(&mut self, word: &str) -> anyhow::Result<()> {
        let line = self.line()?;
        anyhow::ensure!(line == word, "a contending process said {line:?}, not {word:?}");
        Ok(())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
