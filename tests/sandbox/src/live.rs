//! A sandbox that stands: what runs in it, and commands from other terminals, until its end.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use tessera_system::terminal;
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Mutex;

use super::control;
use super::greeting;
use super::keeper::MARK;
use super::sandbox::Sandbox;

/// `128 + SIGINT`.
pub const INTERRUPTED: u8 = 130;
/// How often it is looked for what ended by itself.
const LOOK: Duration = Duration::from_millis(500);
/// In the environment of what runs in a sandbox: the directory, for `tessera sandbox`.
pub const HERE: &str = "TESSERA_SANDBOX_DIR";

/// Signals that end a sandbox in order.
#[derive(Debug)]
pub struct Ends(Mutex<[Signal; 3]>);

impl Ends {
    pub fn listen() -> io::Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [a, b, c] = kinds.map(signal);
        Ok(Self(Mutex::new([a?, b?, c?])))
    }

    pub async fn wait(&self) {
        let mut all = self.0.lock().await;
        let [a, b, c] = &mut *all;
        tokio::select! { _ = a.recv() => {}, _ = b.recv() => {}, _ = c.recv() => {} }
    }
}

/// Runs `command` in it, or at a terminal the user's shell, and ends with it; without either, at Ctrl-C.
pub async fn live(
    mut sandbox: Sandbox,
    command: &[OsString],
    ends: &Ends,
) -> anyhow::Result<ExitCode> {
    let at_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let shell = std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
    let shell = (command.is_empty() && at_terminal).then_some(vec![shell]);
    let started = control::serve(sandbox.scratch.path()).and_then(|requests| {
        if command.is_empty() {
            say(&greeting::text(&sandbox, shell.is_some()));
        }
        let run = shell.as_deref().unwrap_or(command);
        let child = run.split_first().map(|(program, arguments)| {
            let mut inner = inside(program, sandbox.scratch.path());
            if shell.is_none() {
                // What it leaves ends with the sandbox.
                inner.env(MARK, sandbox.scratch.path());
            }
            let child = inner.args(arguments).spawn();
            child.with_context(|| format!("cannot run {}", Path::new(program).display()))
        });
        Ok((requests, child.transpose()?))
    });
    let (mut requests, mut child) = match started {
        Ok(started) => started,
        Err(error) => {
            sandbox.strike().await;
            return Err(error);
        }
    };
    let mut look = tokio::time::interval(LOOK);
    let code = loop {
        let (asked, tell) = tokio::select! {
            () = ends.wait() => break if command.is_empty() { 0 } else { INTERRUPTED },
            code = ended(&mut child) => break if command.is_empty() { 0 } else { code },
            Some(request) = requests.recv() => request,
            _ = look.tick() => {
                let news = sandbox.news();
                if !news.is_empty() {
                    say(&format!("{}{}", if at_terminal { "\n" } else { "" }, news.join("\n")));
                }
                continue;
            }
        };
        let reply = tokio::select! {
            reply = sandbox.obey(asked) => reply,
            () = ends.wait() => break INTERRUPTED,
        };
        sandbox.settle();
        let ends_now = reply.ends;
        let _ = tell.send(reply);
        if ends_now {
            // What was just answered is still on its way.
            tokio::time::sleep(Duration::from_millis(50)).await;
            break 0;
        }
    };
    drop(child);
    sandbox.strike().await;
    Ok(ExitCode::from(code))
}

/// A program that knows in which sandbox it is, and finds `tessera`.
fn inside(program: &std::ffi::OsStr, dir: &Path) -> Command {
    let mut command = Command::new(program);
    command.env(HERE, dir).kill_on_drop(true);
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(own.into_iter().chain(std::env::split_paths(&path)));
    if let Ok(path) = path {
        command.env("PATH", path);
    }
    command
}

/// Its exit status, or 128 and the signal; without a child, never.
async fn ended(child: &mut Option<Child>) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let Some(child) = child else { return std::future::pending().await };
    let Ok(status) = child.wait().await else { return 1 };
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

fn say(text: &str) {
    // A full disk must not end the sandbox before it has cleaned up.
    let _ = terminal::print(&format!("{text}\n"));
}
