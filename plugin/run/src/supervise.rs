//! Starts the command, passes signals on, and waits.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// The command was found but could not be started.
const CANNOT_RUN: u8 = 126;
/// The command was not found.
const NOT_FOUND: u8 = 127;

/// Runs `command` to its end and returns its exit code; `look` is called again and again, and says how
/// soon.
///
/// # Errors
/// Signals or processes cannot be handled at all; a command that cannot be started is reported on
/// standard error and has a code of its own.
pub(super) fn run(command: Command, look: impl FnMut() -> Duration) -> anyhow::Result<u8> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot watch signals")?
        .block_on(supervise(command, look))
}

async fn supervise(command: Command, mut look: impl FnMut() -> Duration) -> anyhow::Result<u8> {
    // Before the start, so that no signal ends this process and leaves the pages behind.
    let mut signals = Signals::new().context("cannot watch signals")?;
    let name = command.get_program().to_owned();
    let mut child = match tokio::process::Command::from(command).spawn() {
        Ok(child) => child,
        Err(error) => {
            let name = name.to_string_lossy();
            eprintln!("tessera: cannot run {}: {error}", tessera_model::printable::line(&name));
            let missing = error.kind() == io::ErrorKind::NotFound;
            return Ok(if missing { NOT_FOUND } else { CANNOT_RUN });
        }
    };
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
    let mut next = tokio::time::Instant::now();
    loop {
        tokio::select! {
            status = child.wait() => return Ok(code(status.context("cannot wait for the command")?)),
            received = signals.next() => {
                // Not yet waited for, so the pid is still the child's.
                if let Some(pid) = pid.filter(|_| !from_terminal(received)) {
                    let _ = kill(pid, received);
                }
            }
            () = tokio::time::sleep_until(next) => {
                next = tokio::time::Instant::now() + look();
            }
        }
    }
}

/// The command's own exit code, or 128 + the signal that ended it, as shells say it.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

/// Whether the terminal sent `signal` to the whole foreground group, the command included.
fn from_terminal(signal: Signal) -> bool {
    matches!(signal, Signal::SIGINT | Signal::SIGQUIT | Signal::SIGWINCH)
        && nix::unistd::tcgetpgrp(io::stdin()).is_ok_and(|group| group == nix::unistd::getpgrp())
}

/// What is passed on: all that would end this process, whose command would go on without it, and what tells a
/// command of its terminal or that it goes on. SIGTSTP and its like stop both by themselves.
const PASSED_ON: [Signal; 15] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGVTALRM,
    Signal::SIGPROF,
    Signal::SIGIO,
    Signal::SIGPWR,
    Signal::SIGSTKFLT,
    Signal::SIGXCPU,
    Signal::SIGWINCH,
    Signal::SIGCONT,
];

struct Signals {
    streams: Vec<(Signal, Stream)>,
}

impl Signals {
    fn new() -> io::Result<Self> {
        let open = |s: Signal| Ok::<_, io::Error>((s, signal(SignalKind::from_raw(s as i32))?));
        let ignored = ignored();
        // One that is ignored (`nohup`) stays so, and the command inherits that.
        let heard = PASSED_ON.into_iter().filter(|s| ignored & (1 << (*s as i32 - 1)) == 0);
        Ok(Self { streams: heard.map(open).collect::<io::Result<_>>()? })
    }

    async fn next(&mut self) -> Signal {
        std::future::poll_fn(|context| {
            for (signal, stream) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return std::task::Poll::Ready(*signal);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}

/// Which signals this process ignores, a bit each (`SigIgn`, proc(5)).
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
