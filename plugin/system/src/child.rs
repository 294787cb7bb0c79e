//! A command that is run for its output, and leaves nothing behind: it has a limit of time and of output, and its whole
//! process group is ended and reaped before [`run`] returns. A descendant that left the group lives on, and is not waited
//! for.

use std::fs::File;
use std::io::{self, IsTerminal, Read, stdin};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossterm::terminal::is_raw_mode_enabled;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

const MOST: usize = 1 << 20;

#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub out: Vec<u8>,
    /// Its standard error; empty where that is the terminal.
    pub said: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    #[error("cannot run: {0}")]
    Start(io::Error),
    #[error("did not end within {0:?}, and was ended")]
    Late(Duration),
    #[error("printed more than {} bytes, and was ended", MOST)]
    Much,
    /// The system refuses what is needed to follow it.
    #[error("cannot be followed: {0}")]
    Lost(#[from] io::Error),
}

/// Whether a command could ask a person: not while a live view reads the keys.
pub fn has_terminal() -> bool {
    stdin().is_terminal() && !is_raw_mode_enabled().unwrap_or(false)
}

/// Runs a command in a process group of its own. With `terminal` it has our standard input and error, and the
/// terminal's foreground as long as it runs.
pub fn run(mut command: Command, terminal: bool, limit: Duration) -> Result<Ended, ChildError> {
    let until = Instant::now() + limit;
    command.process_group(0).stdout(Stdio::piped());
    match terminal {
        true => command.stdin(Stdio::inherit()).stderr(Stdio::inherit()),
        false => command.stdin(Stdio::null()).stderr(Stdio::piped()),
    };
    let group = Group::of(command.spawn().map_err(ChildError::Start)?)?;
    let _foreground = terminal.then(|| Foreground::of(group.id)).flatten();
    group.follow(until).map_err(|error| match error {
        ChildError::Late(_) => ChildError::Late(limit),
        error => error,
    })
}

/// A child and its descendants. Ends them when it is dropped.
struct Group {
    child: Child,
    id: Pid,
    /// Reads as ended as soon as the child has ended.
    ended: UnixStream,
}

impl Group {
    fn of(child: Child) -> io::Result<Self> {
        let id = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        let (ended, ends) = UnixStream::pair()?;
        let group = Group { child, id, ended };
        thread::Builder::new().name("child".to_owned()).spawn(move || {
            // Nothing is reaped here: as long as the child is a zombie, no other group has its number.
            while waitid(Id::Pid(id), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
                == Err(Errno::EINTR)
            {}
            drop(ends);
        })?;
        Ok(group)
    }

    fn follow(mut self, until: Instant) -> Result<Ended, ChildError> {
        let mut out = Pipe::of(self.child.stdout.take())?;
        let mut said = Pipe::of(self.child.stderr.take())?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ChildError::Late(left));
            }
            let files = [&out.file, &said.file].into_iter().flatten().map(AsFd::as_fd);
            let files = files.chain([self.ended.as_fd()]);
            let mut polled: Vec<_> =
                files.map(|file| PollFd::new(file, PollFlags::POLLIN)).collect();
            // Rounded up: what is left is more than nothing.
            let wait = PollTimeout::try_from(left + Duration::from_millis(1));
            match poll(&mut polled, wait.unwrap_or(PollTimeout::MAX)) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(ChildError::Lost(error.into())),
            }
            let ended = polled.last().is_some_and(|last| last.any().unwrap_or(false));
            if ended {
                // What it printed is in the pipes; a descendant may hold them open, and print more.
                while out.take()? | said.take()? {}
                break;
            }
            out.take()?;
            said.take()?;
        }
        self.end();
        let status = self.child.wait()?;
        Ok(Ended {
            status,
            out: std::mem::take(&mut out.kept),
            said: std::mem::take(&mut said.kept),
        })
    }

    fn end(&self) {
        // Nobody is left of a group that has ended.
        let _ = killpg(self.id, Signal::SIGKILL);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // After a wait the number may be another's.
        if let Ok(None) = self.child.try_wait() {
            self.end();
            let _ = self.child.wait();
        }
    }
}

/// An output of which what is there is read without waiting.
struct Pipe {
    file: Option<File>,
    kept: Vec<u8>,
}

impl Pipe {
    fn of(output: Option<impl Into<OwnedFd>>) -> io::Result<Self> {
        let file = output.map(|output| File::from(output.into()));
        if let Some(file) = &file {
            fcntl(file, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(Pipe { file, kept: Vec::new() })
    }

    /// Reads a piece; whether there was one.
    fn take(&mut self) -> Result<bool, ChildError> {
        let Some(file) = &mut self.file else { return Ok(false) };
        let mut piece = [0; 8 << 10];
        match file.read(&mut piece) {
            Ok(0) => self.file = None,
            Ok(read) if self.kept.len() + read > MOST => return Err(ChildError::Much),
            Ok(read) => {
                self.kept.extend_from_slice(&piece[..read]);
                return Ok(true);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(error.into()),
        }
        Ok(false)
    }
}

/// Another group has the terminal's foreground, until this is dropped.
struct Foreground;

impl Foreground {
    /// `None` where we have it not ourselves.
    fn of(group: Pid) -> Option<Self> {
        if tcgetpgrp(stdin()) != Ok(getpgrp()) {
            return None;
        }
        tcsetpgrp(stdin(), group).ok()?;
        // It may have asked before, and been stopped for that.
        let _ = killpg(group, Signal::SIGCONT);
        Some(Foreground)
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        // Who takes the foreground from the background is stopped, unless this signal is blocked.
        let mut signal = SigSet::empty();
        signal.add(Signal::SIGTTOU);
        let before = signal.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK);
        let _ = tcsetpgrp(stdin(), getpgrp());
        if let Ok(before) = before {
            let _ = before.thread_set_mask();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use nix::sys::signal::kill;

    use super::*;

    /// More than any test takes.
    const LONG: Duration = Duration::from_secs(3600);

    fn sh(script: &str, dir: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(dir);
        command
    }

    /// Waits until the process whose number is in this file has ended: a killed one does so a little later.
    fn until_gone(file: &Path) {
        let id = std::fs::read_to_string(file).unwrap();
        let stat = format!("/proc/{}/stat", id.trim());
        // Another process reaps an orphan, some time later.
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_command_that_does_not_end_is_ended_with_all_that_it_began() {
        let dir = tempfile::tempdir().unwrap();
        let script = "echo $$ >shell; sleep 4000 & echo $! >sleep; trap '' TERM; wait";
        let error = run(sh(script, dir.path()), false, Duration::from_secs(1)).unwrap_err();
        assert!(matches!(error, ChildError::Late(_)), "{error}");
        assert_eq!(error.to_string(), "did not end within 1s, and was ended");
        for name in ["shell", "sleep"] {
            until_gone(&dir.path().join(name));
        }
    }

    #[test]
    fn a_descendant_that_holds_the_output_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let script = "sleep 4000 & echo $! >sleep; echo word; echo why >&2; exit 3";
        let ended = run(sh(script, dir.path()), false, LONG).unwrap();
        assert_eq!((ended.out.as_slice(), ended.said.as_slice()), (&b"word\n"[..], &b"why\n"[..]));
        assert_eq!(ended.status.code(), Some(3));
        until_gone(&dir.path().join("sleep"));
        // One that left the group.
        let script = "setsid sleep 4000 & echo $! >sleep; echo word";
        let ended = run(sh(script, dir.path()), false, LONG).unwrap();
        assert_eq!(ended.out, b"word\n");
        let id = std::fs::read_to_string(dir.path().join("sleep")).unwrap();
        let _ = kill(Pid::from_raw(id.trim().parse().unwrap()), Signal::SIGKILL);
    }

    #[test]
    fn output_without_end_ends_the_command() {
        let dir = tempfile::tempdir().unwrap();
        for to in ["", " >&2"] {
            let script = format!("echo $$ >shell; exec yes{to}");
            let error = run(sh(&script, dir.path()), false, LONG).unwrap_err();
            assert!(matches!(error, ChildError::Much), "{error}");
            until_gone(&dir.path().join("shell"));
        }
        let most = run(sh("head -c 1048576 /dev/zero", dir.path()), false, LONG).unwrap();
        assert_eq!(most.out.len(), MOST);
    }

    #[test]
    fn what_is_not_there_cannot_run() {
        let error = run(Command::new("/nowhere/login"), false, LONG).unwrap_err();
        assert!(matches!(error, ChildError::Start(_)), "{error}");
    }

    /// The child of the test below, whose terminal is of its own.
    #[test]
    fn at_a_terminal() {
        if std::env::var_os("TESSERA_TEST_TERMINAL").is_none() {
            return;
        }
        assert!(has_terminal());
        for word in ["one", "two"] {
            let command = sh("read line && echo \"$line\"", Path::new("/"));
            let ended = run(command, true, LONG).unwrap();
            assert_eq!(String::from_utf8_lossy(&ended.out).trim(), word);
            // It is ours again: who has it not may not read.
            assert_eq!(tcgetpgrp(stdin()), Ok(getpgrp()));
        }
    }

    #[test]
    fn a_command_may_ask_at_the_terminal_which_is_ours_again_afterwards() {
        let script = "import os, pty, sys\n\
                      pid, terminal = pty.fork()\n\
                      if pid == 0: os.execv(sys.argv[1], sys.argv[1:])\n\
                      os.write(terminal, b'one\\ntwo\\n')\n\
                      try:\n    while os.read(terminal, 4096): pass\n\
                      except OSError: pass\n\
                      sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n";
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(std::env::current_exe().unwrap());
        python.args(["--exact", "child::tests::at_a_terminal", "--nocapture"]);
        let ended = python.env("TESSERA_TEST_TERMINAL", "1").output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
    }
}
