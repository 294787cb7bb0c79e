//! Child processes that cannot outlive their time.

use std::io::{Seek, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[derive(Clone, Debug)]
pub struct Output {
    /// Exit status; `None` when a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// Standard output, if the process succeeded.
    pub fn success(self, what: &str) -> Result<String> {
        match self.code {
            Some(0) => Ok(self.stdout),
            // Some say on their output what is amiss, and only end with a status of their own.
            code => {
                bail!("{what} ended with {code:?}: {}\n{}", self.stderr.trim(), self.stdout.trim())
            }
        }
    }
}

/// Runs `command` to its end, feeding it `stdin`.
pub fn run(command: &mut Command, stdin: Option<&str>, limit: Duration) -> Result<Output> {
    let mut input = Stdio::null();
    if let Some(text) = stdin {
        let mut file = tempfile::tempfile()?;
        file.write_all(text.as_bytes())?;
        file.rewind()?;
        input = file.into();
    }
    command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let (ends, ended) = mpsc::channel();
    thread::spawn(move || ends.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(limit) else {
        kill(pid, Signal::SIGKILL)?;
        bail!("{command:?} did not end within {limit:?}");
    };
    let output = output?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(Output {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    })
}
