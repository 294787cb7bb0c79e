//! Child processes that cannot outlive their time.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// What a finished process left.
#[derive(Clone, Debug)]
pub struct Output {
    /// Exit status; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
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
    let mut child = command
        .stdin(if stdin.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    let feeder = child.stdin.take().zip(stdin.map(str::to_owned)).map(|(mut pipe, text)| {
        // A child that ends early closes the pipe; its exit status tells the rest.
        thread::spawn(move || drop(pipe.write_all(text.as_bytes())))
    });
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let end = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            bail!("{command:?} did not end within {limit:?}");
        }
        thread::sleep(Duration::from_millis(10));
    };
    if let Some(feeder) = feeder {
        feeder.join().expect("the feeder does not panic");
    }
    let text = |reader: thread::JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&reader.join().expect("the reader does not panic")).into_owned()
    };
    Ok(Output { code: status.code(), stdout: text(stdout), stderr: text(stderr) })
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read before an error is still the output.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}
