//! Talking to `tests/programs/calls.c`: one driver call per line, one reply per line.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout};

use crate::{Output, Pages, Preloaded, Running, SimGpu, compile_c};

/// A running `calls` program, driven call by call.
#[derive(Debug)]
pub struct Conversation {
    running: Running,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

/// What one driver call returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The command that was sent, for messages.
    pub command: String,
    /// The `CUresult` (or `nvmlReturn_t`).
    pub result: i64,
    /// What it filled in: addresses, sizes, counts.
    pub values: Vec<u64>,
}

impl Reply {
    /// The only or first value of a call that must have succeeded.
    pub fn ok(&self) -> u64 {
        assert_eq!(self.result, 0, "{self}");
        self.values.first().copied().unwrap_or(0)
    }
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` answered {} {:?}", self.command, self.result, self.values)
    }
}

impl Conversation {
    /// Starts the program; its first reply comes from the first [`Conversation::ask`].
    pub fn start(program: Preloaded) -> Self {
        let mut running = program.spawn();
        let stdin = running.take_stdin();
        let stdout = BufReader::new(running.take_stdout().expect("not taken before"));
        Self { running, stdin, stdout }
    }

    /// `tests/programs/<name>.c` as a tenant of `pages`, with device 0's primary context retained.
    pub fn with_context(name: &str, sim: &SimGpu, pages: &Pages) -> Self {
        let mut tenant = Self::start(Preloaded::new(compile_c(name)).sim(sim).pages(pages));
        tenant.must("init");
        tenant.must("retain 0");
        tenant
    }

    /// Sends one command and reads its reply. The commands are listed at the top of `calls.c`.
    pub fn ask(&mut self, command: &str) -> Reply {
        self.send(command);
        self.reply(command)
    }

    /// [`Conversation::ask`], and the call must succeed.
    pub fn must(&mut self, command: &str) -> u64 {
        self.ask(command).ok()
    }

    /// Sends a command without reading the reply, so that several processes act at once.
    pub fn send(&mut self, command: &str) {
        let stdin = self.stdin.as_mut().expect("not closed before");
        let sent = writeln!(stdin, "{command}").and_then(|()| stdin.flush());
        assert!(sent.is_ok(), "process {} is gone before `{command}`", self.running.pid());
    }

    /// Reads the reply to a command sent before.
    pub fn reply(&mut self, command: &str) -> Reply {
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line);
        assert!(
            matches!(read, Ok(1..)),
            "process {} ended instead of answering `{command}` ({read:?})",
            self.running.pid()
        );
        let mut numbers = line.split_whitespace();
        let result = numbers.next().and_then(|word| word.parse().ok());
        let values: Option<Vec<u64>> = numbers.map(|word| word.parse().ok()).collect();
        let (Some(result), Some(values)) = (result, values) else {
            panic!("`{command}` answered `{}`", line.trim_end());
        };
        Reply { command: command.to_owned(), result, values }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.running.pid()
    }

    /// SIGKILL, and the end awaited.
    pub fn kill(&mut self) {
        self.running.kill();
    }

    /// Ends the program by closing its standard input, and collects what it said on standard error.
    pub fn finish(mut self) -> Output {
        drop(self.stdin.take());
        self.running.wait()
    }
}
