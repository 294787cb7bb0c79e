//! What `tessera config check` takes for a bad file, beside a good one: time on the clock and peak memory.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use tempfile::NamedTempFile;

use crate::stats::Sample;
use crate::world::World;

/// Keys in the bad file that nobody knows; they leave it below the most that is read (1 MiB).
pub const BAD_KEYS: usize = 85_000;
/// Each file is checked so often, in turn with the other.
const ROUNDS: usize = 21;
/// `EX_USAGE`: the file was read and is bad.
const BAD: i32 = 64;

/// What the checks of one file came to.
#[derive(Debug)]
pub struct Figures {
    /// From spawn to the end, milliseconds.
    pub ms: Sample,
    /// The most that was resident at once, MiB.
    pub rss_mib: Sample,
    /// The file's length.
    pub bytes: usize,
}

/// The good file, which is all defaults, and the bad one.
///
/// # Errors
/// A check ends with another status than its file deserves.
pub fn run(world: &World) -> anyhow::Result<(Figures, Figures)> {
    let tessera = world.artefacts.path("tessera");
    let defaults = Command::new(&tessera).args(["config", "default"]).output()?.stdout;
    let bad: String = (0..BAD_KEYS).map(|n| format!("k{n:05}=1\n")).collect();
    let texts = [(defaults, 0), (bad.into_bytes(), BAD)];
    let mut files = Vec::new();
    for (text, _) in &texts {
        let mut file = NamedTempFile::new()?;
        file.write_all(text)?;
        files.push(file);
    }
    let mut all: [(Vec<f64>, Vec<f64>); 2] = Default::default();
    for _ in 0..ROUNDS {
        for ((file, (_, status)), (ms, mib)) in files.iter().zip(&texts).zip(&mut all) {
            let mut check = Command::new(&tessera);
            check.arg("config").arg("check").arg(file.path()).envs(world.envs());
            let (took, peak) = measured(check, *status).context(describe(file.path()))?;
            ms.push(took);
            mib.push(peak);
        }
    }
    let [good, bad] = all;
    let figures = |(ms, mib): (Vec<f64>, Vec<f64>), bytes| Figures {
        ms: Sample::new(ms),
        rss_mib: Sample::new(mib),
        bytes,
    };
    Ok((figures(good, texts[0].0.len()), figures(bad, texts[1].0.len())))
}

fn describe(file: &Path) -> String {
    format!("tessera config check {}", file.display())
}

/// Milliseconds and peak MiB of a command that ends with `status`.
#[allow(clippy::cast_precision_loss, reason = "KiB far below 2^53")]
fn measured(mut command: Command, status: i32) -> anyhow::Result<(f64, f64)> {
    let begin = Instant::now();
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let pid = libc::pid_t::try_from(child.id())?;
    let mut ended = 0;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: our own child, which nobody else waits for, and valid places for both answers. All zeros is a
    // valid `rusage`.
    let (waited, usage) = unsafe {
        let waited = libc::wait4(pid, &raw mut ended, 0, usage.as_mut_ptr());
        (waited, usage.assume_init())
    };
    let took = begin.elapsed().as_secs_f64() * 1e3;
    ensure!(waited == pid, "cannot wait: {}", std::io::Error::last_os_error());
    let code = libc::WIFEXITED(ended).then(|| libc::WEXITSTATUS(ended));
    ensure!(code == Some(status), "it ended with {code:?}, not {status}");
    // KiB on Linux (getrusage(2)).
    Ok((took, usage.ru_maxrss as f64 / 1024.0))
}
