//! What remains when the sandbox is killed: a process that does nothing until then, ends what was started, and
//! removes a temporary directory.
//!
//! The kernel ends children with their parent (PR_SET_PDEATHSIG), but not what those have started, and no file. So
//! every process of a sandbox carries the sandbox's directory in its environment, and the keeper, which reads from
//! a pipe that nobody writes to, ends those when the pipe closes.

use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
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
    ///
    /// # Errors
    /// This program cannot be started.
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
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    end_all(dir);
    if temporary {
        let _ = fs::remove_dir_all(dir);
    }
}

/// Kills every process of the sandbox in `dir`, and waits until they are gone.
pub fn end_all(dir: &Path) {
    let end = Instant::now() + PATIENCE;
    loop {
        let marked = marked(dir);
        if marked.is_empty() || Instant::now() > end {
            return;
        }
        for pid in marked {
            let _ = kill(pid, Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Processes of the sandbox in `dir`, but for this one. Those of other users cannot be looked at.
pub fn marked(dir: &Path) -> Vec<Pid> {
    let mark = [MARK.as_bytes(), b"=", dir.as_os_str().as_bytes()].concat();
    let own = Pid::this();
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_one = |pid: &Pid| {
        let environment = fs::read(PathBuf::from(format!("/proc/{pid}/environ")));
        // Empty for one that is dead and not waited for.
        environment.is_ok_and(|all| all.split(|byte| *byte == 0).any(|one| one == mark))
    };
    pids.map(Pid::from_raw).filter(|pid| *pid != own).filter(is_one).collect()
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
        end_all(Path::new(&own));
        assert!(!a.wait().unwrap().success());
        assert!(b.try_wait().unwrap().is_none(), "a neighbour's process was ended");
        end_all(Path::new(&other));
        assert!(!b.wait().unwrap().success());
    }
}
