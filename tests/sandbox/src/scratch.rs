//! The one directory in which everything lives, and its end; and what remains when the sandbox is killed.
//!
//! The kernel ends children with their parent (PR_SET_PDEATHSIG), but not what those have started, and no file. So
//! every process of a sandbox carries the sandbox's directory in its environment, and the keeper, which reads from
//! a pipe that nobody writes to, ends those when the pipe closes.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tessera_system::files::Dir;

/// In the directory; locked while a sandbox lives there.
const LOCK: &str = "lock";
/// What temporary directories' names begin with.
pub const PREFIX: &str = "tessera-";
/// Longest path of a directory in which sockets of plugins have room: a socket's path has at most 107 bytes
/// (unix(7)), of which `/n0/k/device-plugins/` and the name of a resource's socket take the others.
const LONGEST: usize = 31;

/// A directory of our own. A temporary one goes with this value, whatever becomes of this process.
#[derive(Debug)]
pub struct Scratch {
    pub path: PathBuf,
    keep: bool,
    keeper: Option<Keeper>,
    /// Held as long as the directory is in use.
    _lock: Option<Flock<fs::File>>,
}

impl Scratch {
    /// A fresh directory among the temporary files, whose name begins with `prefix`.
    pub fn temporary(prefix: &str) -> anyhow::Result<Self> {
        let template = std::env::temp_dir().join(format!("{prefix}XXXXXX"));
        let path = nix::unistd::mkdtemp(&template)
            .with_context(|| format!("cannot make {}", template.display()))?;
        Ok(Self { path, keep: false, keeper: None, _lock: None })
    }

    /// The directory that the user named, made where there is none. It stays at the end.
    pub fn named(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        if !path.exists() {
            fs::create_dir_all(path).with_context(|| format!("cannot make {shown}"))?;
        }
        // Links on the way to it are the caller's choice.
        let path = path.canonicalize().with_context(|| format!("cannot use {shown}"))?;
        let dir = Dir::own(&path).with_context(|| format!("{shown} must be your own"))?;
        anyhow::ensure!(
            dir.stat(LOCK).is_ok() || dir.names()?.is_empty(),
            "{shown} has other files in it; name an empty directory, or one of an earlier sandbox"
        );
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700))
            .with_context(|| format!("cannot use {shown}"))?;
        Ok(Self { path, keep: true, keeper: None, _lock: None })
    }

    /// Leaves the directory where it is at the end.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Takes the directory for this process: nobody else may use it, and what was started in it ends with this
    /// process, however that ends.
    pub fn occupy(&mut self) -> anyhow::Result<()> {
        let shown = self.path.display();
        let length = self.path.as_os_str().len();
        anyhow::ensure!(
            length <= LONGEST,
            "{shown} has {length} characters, and sockets in it could have no name; set TMPDIR, or give \
             --dir, so that it has at most {LONGEST}"
        );
        let file = Dir::own(&self.path).and_then(|dir| dir.open_or_make(LOCK, 0o600));
        let file = file.with_context(|| format!("cannot write in {shown}"))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| {
            match errno {
                Errno::EAGAIN => anyhow::anyhow!(
                    "another sandbox lives in {shown}; name another directory, or talk to that one: \
                     `tessera sandbox list --dir {shown}`"
                ),
                errno => anyhow::anyhow!("cannot lock {shown}: {errno}"),
            }
        })?;
        self._lock = Some(lock);
        self.keeper = Some(Keeper::start(&self.path, !self.keep)?);
        Ok(())
    }

    /// Whether it stays at the end.
    pub fn is_kept(&self) -> bool {
        self.keep
    }

    /// A directory in it, made where there is none.
    pub fn dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
        }
        // It ends whatever still runs here, and then itself.
        drop(self.keeper.take());
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

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
pub fn keep(dir: &Path, temporary: bool) {
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
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn a_temporary_directory_goes_unless_it_is_to_be_kept() {
        let scratch = Scratch::temporary(PREFIX).unwrap();
        let dir = scratch.dir("a/b").unwrap();
        assert!(dir.is_dir());
        drop(scratch);
        assert!(!dir.exists());
    }

    #[test]
    fn a_directory_with_other_files_is_left_alone() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("thesis.tex"), "").unwrap();
        let error = Scratch::named(tmp.path()).unwrap_err().to_string();
        assert!(error.contains("has other files in it"), "{error}");
        assert!(tmp.path().join("thesis.tex").exists());
    }

    #[test]
    fn a_lock_that_is_a_link_is_not_followed() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("precious"), "text").unwrap();
        let dir = tmp.path().join("s");
        fs::create_dir(&dir).unwrap();
        symlink("../precious", dir.join(LOCK)).unwrap();
        let mut scratch = Scratch::named(&dir).unwrap();
        scratch.occupy().unwrap_err();
        assert_eq!(fs::read_to_string(tmp.path().join("precious")).unwrap(), "text");
    }

    #[test]
    fn a_directory_of_another_user_is_left_alone() {
        let tmp = tempfile::tempdir().unwrap();
        if chown(tmp.path(), Some(65534), None).is_err() {
            eprintln!("not checked, for only root gives a directory away");
            return;
        }
        let error = format!("{:#}", Scratch::named(tmp.path()).unwrap_err());
        assert!(error.contains("must be your own: it is uid 65534's"), "{error}");
    }

    #[test]
    fn a_path_without_room_for_sockets_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::named(&tmp.path().join("x".repeat(60))).unwrap();
        let error = scratch.occupy().unwrap_err().to_string();
        assert!(error.contains("set TMPDIR"), "{error}");
    }

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
