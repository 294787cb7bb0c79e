//! Child processes with the shim preloaded, each with a deadline, each gone at the end of its test.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::{Deref, DerefMut};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, geteuid};
use tempfile::TempDir;

use crate::{PATIENCE, Pages, SimGpu, artefacts, compile_c, workspace};

/// A child process that ends with this, also where its test fails.
#[derive(Debug)]
pub struct Owned(pub Child);

impl Deref for Owned {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Owned {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.kill();
        let _ = self.wait();
    }
}

/// A program to run with the shim preloaded, in an environment that holds nothing else.
///
/// The environment starts empty but for `PATH` and `HOME`: what the shim sees is what the test says.
#[derive(Debug)]
pub struct Preloaded {
    program: PathBuf,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    shim: Option<PathBuf>,
    timeout: Duration,
    dir: Option<PathBuf>,
    container: Option<PathBuf>,
}

impl Preloaded {
    /// `program` under the shim of [`artefacts`].
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self { shim: Some(artefacts().shim()), ..Self::bare(program) }
    }

    /// The same program without the shim: what it does on the bare driver.
    pub fn bare(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            envs: Vec::new(),
            shim: None,
            timeout: PATIENCE,
            dir: None,
            container: None,
        }
    }

    /// On this simulated machine.
    pub fn sim(mut self, sim: &SimGpu) -> Self {
        self.envs.extend(sim.envs().into_iter().map(|(k, v)| (k.into(), v.into())));
        self
    }

    /// Under the quota of these pages.
    pub fn pages(self, pages: &Pages) -> Self {
        self.env(tessera_region::layout::PAGES_DIR_ENV, &pages.dir)
    }

    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    pub fn args(self, args: impl IntoIterator<Item: AsRef<OsStr>>) -> Self {
        args.into_iter().fold(self, Self::arg)
    }

    /// One more environment variable; the later of two with one name counts.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.envs.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// The directory that the program starts in.
    pub fn current_dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.dir = Some(dir.as_ref().to_owned());
        self
    }

    /// In a mount namespace where `pages` is mounted at its place in a container and the shim, if
    /// there is one, comes by `/etc/ld.so.preload` instead of `LD_PRELOAD`. See [`can_contain`].
    pub fn in_container(mut self, pages: impl AsRef<Path>) -> Self {
        self.container = Some(pages.as_ref().to_owned());
        self
    }

    /// Kills the program, and what it started, after `timeout` (180 s unless said).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Starts the program with pipes on all three standard streams.
    pub fn spawn(self) -> Running {
        let scratch =
            self.container.as_ref().map(|_| tempfile::tempdir().expect("a writable /tmp"));
        let mut command = match (&self.container, &scratch) {
            (Some(pages), Some(scratch)) => {
                let mut command = Command::new("unshare");
                command.args(unshare_flags());
                command.arg(workspace().join("tests/programs/in-container.sh"));
                command.arg(scratch.path()).arg(pages);
                command.arg(self.shim.as_deref().unwrap_or(Path::new("-"))).arg(&self.program);
                command
            }
            _ => Command::new(&self.program),
        };
        command.args(&self.args).env_clear();
        for name in ["PATH", "HOME"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if let (Some(shim), None) = (&self.shim, &self.container) {
            command.env("LD_PRELOAD", shim);
        }
        command.envs(self.envs);
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A group of its own, so that the deadline also ends what the program forked.
        command.process_group(0);
        let mut child = command
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start {}: {e}", self.program.display()));
        let stderr = collect(child.stderr.take().expect("piped"));
        let watchdog = Watchdog::start(child.id(), self.timeout);
        Running {
            child,
            stderr: Some(stderr),
            watchdog,
            program: self.program,
            reaped: false,
            _scratch: scratch,
        }
    }

    /// Runs the program to its end with nothing on standard input.
    pub fn run(self) -> Output {
        let mut running = self.spawn();
        drop(running.child.stdin.take());
        running.wait()
    }
}

/// A started program. Dropping it kills it, and what it forked, and waits for it.
#[derive(Debug)]
pub struct Running {
    child: Child,
    stderr: Option<JoinHandle<Vec<u8>>>,
    watchdog: Watchdog,
    program: PathBuf,
    reaped: bool,
    _scratch: Option<TempDir>,
}

impl Running {
    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The program's standard input; `None` once taken.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// The program's standard output; `None` once taken.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// SIGKILL, as the kernel's out-of-memory killer or kubelet would send it, and the end awaited.
    pub fn kill(&mut self) {
        self.child.kill().expect("a child of ours");
        await_end(self.child.id());
    }

    /// Awaits the end. Standard output is collected unless it was taken.
    pub fn wait(mut self) -> Output {
        drop(self.child.stdin.take());
        let stdout = self.child.stdout.take().map(collect);
        await_end(self.child.id());
        let timed_out = self.watchdog.stop();
        // What it left running holds the pipes open, and is not wanted beyond the test.
        kill_group(self.child.id());
        let status = self.child.wait().expect("a child of ours");
        self.reaped = true;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let stdout = stdout.map(|h| h.join().expect("reads only")).unwrap_or_default();
        let stderr = self.stderr.take().expect("taken only here").join().expect("reads only");
        let program = self.program.display().to_string();
        Output { program, status, timed_out, stdout: text(stdout), stderr: text(stderr) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.watchdog.stop();
        if !self.reaped {
            kill_group(self.child.id());
            let _ = self.child.wait();
        }
    }
}

/// What a program said and how it ended.
#[derive(Clone, Debug)]
pub struct Output {
    program: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Whether the deadline ended it.
    pub timed_out: bool,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
}

impl Output {
    /// Whether it exited with 0 by itself.
    pub fn success(&self) -> bool {
        self.status.success() && !self.timed_out
    }

    /// The rest of the first line of standard output that starts with `key` and a blank.
    pub fn value(&self, key: &str) -> &str {
        self.stdout
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))
            .unwrap_or_else(|| panic!("no line `{key} …` in {self}"))
    }

    /// [`Output::value`] as a number.
    pub fn number(&self, key: &str) -> i64 {
        let value = self.value(key);
        value.trim().parse().unwrap_or_else(|_| panic!("`{key} {value}` is no number in {self}"))
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = match (self.timed_out, self.status.code(), self.status.signal()) {
            (true, ..) => "did not end in time".to_owned(),
            (_, Some(code), _) => format!("exited with {code}"),
            (_, _, signal) => format!("was killed by signal {}", signal.unwrap_or_default()),
        };
        writeln!(f, "{} {end}", self.program)?;
        writeln!(
            f,
            "--- stdout\n{}\n--- stderr\n{}",
            self.stdout.trim_end(),
            self.stderr.trim_end()
        )
    }
}

/// Whether this machine lets tests make mount namespaces; the error says what is missing.
pub fn can_contain() -> Result<(), String> {
    let probe = Command::new("unshare").args(unshare_flags()).arg("true").output();
    match probe {
        Err(e) => Err(format!("unshare (util-linux): {e}")),
        Ok(out) if out.status.success() => Ok(()),
        Ok(out) => Err(format!(
            "no mount namespaces here: {}",
            String::from_utf8_lossy(&out.stderr).trim()
        )),
    }
}

/// Root needs no user namespace, and has none in some containers.
fn unshare_flags() -> &'static [&'static str] {
    if geteuid().is_root() { &["--mount"] } else { &["--user", "--map-root-user", "--mount"] }
}

/// Kills a process group when its time is up.
#[derive(Debug)]
struct Watchdog {
    cancel: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    fired: Arc<AtomicBool>,
}

impl Watchdog {
    fn start(pid: u32, timeout: Duration) -> Self {
        let (cancel, cancelled) = mpsc::channel();
        let fired = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let fired = Arc::clone(&fired);
            move || {
                if cancelled.recv_timeout(timeout) == Err(mpsc::RecvTimeoutError::Timeout) {
                    fired.store(true, Ordering::SeqCst);
                    kill_group(pid);
                }
            }
        });
        Self { cancel: Some(cancel), thread: Some(thread), fired }
    }

    /// Ends the watch; says whether it had struck.
    fn stop(&mut self) -> bool {
        drop(self.cancel.take());
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only waits");
        }
        self.fired.load(Ordering::SeqCst)
    }
}

/// Kills every process of the group that `leader`, not yet reaped, leads.
fn kill_group(leader: u32) {
    // The group is one that `process_group(0)` made for a child of ours. It may have ended by itself.
    let _ = killpg(Pid::from_raw(leader.cast_signed()), Signal::SIGKILL);
}

/// Awaits a child's end without reaping it, so that its number stays its own.
fn await_end(pid: u32) {
    let pid = Pid::from_raw(pid.cast_signed());
    while let Err(error) = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
        assert_eq!(error, Errno::EINTR, "waitid({pid})");
    }
}

/// Reads a pipe to its end on a thread, so that a full one never stops the child.
fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

/// Sends SIGSTOP to a child of this test's, and waits until its last thread has stopped: kill(2) returns before, and on
/// another CPU a thread goes on for a moment.
pub fn stop(pid: u32) {
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP).expect("it is not reaped");
    let is_stopped = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The state follows the name, which is in parentheses.
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
    };
    let tasks = || fs::read_dir(format!("/proc/{pid}/task")).expect("it is not reaped");
    let begun = Instant::now();
    while !tasks().flatten().all(is_stopped) {
        assert!(begun.elapsed() < PATIENCE, "process {pid} runs on");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// Talking to `tests/programs/calls.c`: one driver call per line, one reply per line.

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

    /// `tests/programs/<name>.c` as a tenant of `pages`.
    pub fn tenant(name: &str, sim: &SimGpu, pages: &Pages) -> Self {
        Self::start(Preloaded::new(compile_c(name)).sim(sim).pages(pages))
    }

    /// The same, with device 0's primary context retained.
    pub fn with_context(name: &str, sim: &SimGpu, pages: &Pages) -> Self {
        let mut tenant = Self::tenant(name, sim, pages);
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
