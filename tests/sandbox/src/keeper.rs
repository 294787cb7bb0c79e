//! What remains when the sandbox is killed: a process that does nothing until then, ends what was started, and
//! removes a temporary directory.
//!
//! The kernel ends children with their parent (PR_SET_PDEATHSIG), but not what those have started, and no file. So
//! every process of a sandbox carries the sandbox's directory in its environment, and the keeper, which reads from
//! a pipe that nobody writes to, ends those when the pipe closes.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// In the environment of every process of a sandbox: its directory.
pub const MARK: &str = "TESSERA_SANDBOX";
/// How long processes may take to be gone after SIGKILL.
const PATIENCE: Duration = Duration::from_secs(5);

/// The keeper of a directory. Dropping it ends what still runs there.
#[derive(Debug)]
pub struct Keeper {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Keeper {
    /// Starts it; it removes `dir` at its end if that is `temporary`.
    pub fn start(dir: &Path, temporary: bool) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["in-sandbox", "keep"]).arg(dir);
        if temporary {
            command.arg("--temporary");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Not the terminal's Ctrl-C: it outlives the sandbox.
        let mut child = command.process_group(0).spawn().context("cannot start the keeper")?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.child.wait();
    }
}

/// Waits for the sandbox's end and cleans up after it.
pub fn main(dir: &Path, temporary: bool) {
    let others = blank();
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    end_all(dir, &others);
    if temporary {
        let _ = fs::remove_dir_all(dir);
    }
}

/// Kills every process of the sandbox in `dir`, and waits until they are gone. `others` had no environment before there was
/// a sandbox; any other such process is in the middle of execve(2), and may be one of the sandbox's.
fn end_all(dir: &Path, others: &BTreeSet<Pid>) {
    let end = Instant::now() + PATIENCE;
    loop {
        let marked = marked(dir);
        if (marked.is_empty() && blank().is_subset(others)) || Instant::now() > end {
            return;
        }
        for pid in marked {
            let _ = kill(pid, Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Processes of the sandbox in `dir`, but for this one.
fn marked(dir: &Path) -> Vec<Pid> {
    let mark = [MARK.as_bytes(), b"=", dir.as_os_str().as_bytes()].concat();
    let is_one = |all: &[u8]| all.split(|byte| *byte == 0).any(|one| one == mark);
    let found = environments().filter(|(pid, all)| *pid != Pid::this() && is_one(all));
    found.map(|(pid, _)| pid).collect()
}

/// Processes that run a program and have no environment.
fn blank() -> BTreeSet<Pid> {
    let runs = |pid: &Pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok();
    environments().filter(|(pid, all)| all.is_empty() && runs(pid)).map(|(pid, _)| pid).collect()
}

/// Every process with its environment, but those of other users. That of one that is dead and not waited for is empty.
fn environments() -> impl Iterator<Item = (Pid, Vec<u8>)> {
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| {
        Some((Pid::from_raw(pid), fs::read(format!("/proc/{pid}/environ")).ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_of_this_directory_are_ended() {
        let sleeper = |dir: &str| {
            let mut command = Command::new("sleep");
            command.arg("1000").env(MARK, dir).stdin(Stdio::null()).spawn().unwrap()
        };
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("one").display().to_string();
        let other = dir.path().join("one-more").display().to_string();
        let (mut a, mut b) = (sleeper(&own), sleeper(&other));
        // exec(2) has put the environment in place by the time that spawn returns.
        end_all(Path::new(&own), &blank());
        assert!(!a.wait().unwrap().success());
        assert!(b.try_wait().unwrap().is_none(), "a neighbour's process was ended");
        end_all(Path::new(&other), &blank());
        assert!(!b.wait().unwrap().success());
    }

    #[test]
    fn one_that_has_no_environment_yet_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let mut bare = Command::new("sleep");
        let mut bare = bare.arg("1000").env_clear().stdin(Stdio::null()).spawn().unwrap();
        let own = Pid::from_raw(bare.id().cast_signed());
        let before: BTreeSet<Pid> = blank().into_iter().filter(|pid| *pid != own).collect();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| end_all(dir.path(), &before));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waits.is_finished() || begun.elapsed() > PATIENCE);
            bare.kill().unwrap();
            bare.wait().unwrap();
        });
        end_all(dir.path(), &blank());
    }
}
