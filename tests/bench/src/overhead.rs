//! What the shim adds to single calls, to the first call, and to a program that never uses CUDA.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::Context;

use crate::stats::Pair;
use crate::world::World;

/// Rounds of each, alternating.
const ROUNDS: usize = 31;
/// Processes of each for the first call.
const FIRST_CALLS: usize = 100;
/// Processes of each for `/bin/true`.
const TRUES: usize = 2000;
/// A limit that nothing here meets.
const AMPLE: u64 = 8 << 30;

/// Nanoseconds of one call, with and without the shim.
///
/// # Errors
/// A child's.
pub fn call(world: &World, task: &str) -> anyhow::Result<Pair> {
    alternate(world, task, ROUNDS)
}

/// Microseconds until a process has its first context.
///
/// # Errors
/// A child's.
pub fn first_call(world: &World) -> anyhow::Result<Pair> {
    alternate(world, "first-call", FIRST_CALLS)
}

fn alternate(world: &World, task: &str, rounds: usize) -> anyhow::Result<Pair> {
    let pages = world.pages(AMPLE)?;
    let (mut bare, mut hooked) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        // The first of the two changes, so that neither always finds the machine warmer.
        let order = if round % 2 == 0 { [false, true] } else { [true, false] };
        for with_shim in order {
            if with_shim {
                hooked.push(one(world.hooked(&[task], &pages)?)?);
            } else {
                bare.push(one(world.bare(&[task])?)?);
            }
        }
    }
    Ok(Pair::new(bare, hooked))
}

fn one(mut command: Command) -> anyhow::Result<f64> {
    let output = command.stderr(Stdio::inherit()).output()?;
    anyhow::ensure!(output.status.success(), "{command:?} failed: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("{command:?} printed {text:?}"))
}

/// Microseconds that `/bin/true` takes from start to end.
///
/// # Errors
/// No `/bin/true`.
pub fn true_program(world: &World) -> anyhow::Result<Pair> {
    let shim = world.artefacts.path("libtessera.so");
    let (mut bare, mut hooked) = (Vec::new(), Vec::new());
    for round in 0..TRUES {
        let order = if round % 2 == 0 { [false, true] } else { [true, false] };
        for with_shim in order {
            let mut command = Command::new("/bin/true");
            if with_shim {
                command.env("LD_PRELOAD", &shim);
            }
            let start = Instant::now();
            let status = command.status().context("cannot run /bin/true")?;
            let elapsed = start.elapsed().as_secs_f64() * 1e6;
            anyhow::ensure!(status.success(), "/bin/true failed under the shim: {status}");
            if with_shim { hooked.push(elapsed) } else { bare.push(elapsed) }
        }
    }
    Ok(Pair::new(bare, hooked))
}
