//! A sandbox that stands: what runs in it, and commands from other terminals over its own socket, a JSON line each way,
//! until its end.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream as Stream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use std::{io, process};

use anyhow::{Context, bail};
use tessera_system::files::{Dir, check_peer};
use tessera_system::terminal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::timeout;

use super::command::Command;
use super::node::Asked;
use super::pod::exit_code;
use super::print;
use super::sandbox::{Reply, Sandbox};
use super::scratch::MARK;
use super::scratch::PREFIX;

/// The socket's file name.
pub const SOCKET: &str = "control.sock";
/// Longest request, and longest reply, bytes.
const LONGEST: u64 = 64 << 10;
const LONGEST_REPLY: u64 = 16 << 20;

/// How long the other end may take to write a request, or to read a reply.
const TALK: Duration = Duration::from_secs(5);
/// How long a command may take, but for one that says how long it waits.
const WORK: Duration = Duration::from_secs(180);

pub type Request = (Command, oneshot::Sender<Reply>);

/// Serves in `dir`, which only this user can enter; commands come out of the channel one by one.
pub fn serve(dir: &Path) -> anyhow::Result<mpsc::Receiver<Request>> {
    let path = dir.join(SOCKET);
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)
        .with_context(|| format!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    let (send, requests) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let send = send.clone();
            tokio::spawn(async move {
                // A client that goes away is its own affair.
                let _ = answer(stream, &send).await;
            });
        }
    });
    Ok(requests)
}

async fn answer(stream: UnixStream, send: &mpsc::Sender<Request>) -> anyhow::Result<()> {
    check_peer(&stream)?;
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut read = tokio::io::BufReader::new(read.take(LONGEST));
    timeout(TALK, read.read_line(&mut line)).await??;
    let reply = match serde_json::from_str(&line) {
        Ok(command) => {
            let (sender, receiver) = oneshot::channel();
            send.send((command, sender)).await?;
            receiver.await.unwrap_or_else(|_| Reply::failed("the sandbox has ended"))
        }
        Err(error) => Reply::failed(format!(
            "this sandbox is of another version of tessera and does not understand ({error})"
        )),
    };
    let reply = format!("{}\n", serde_json::to_string(&reply)?);
    timeout(TALK, write.write_all(reply.as_bytes())).await??;
    Ok(())
}

/// Asks the sandbox in `dir`; without, that in which this process runs, or the only one.
pub fn ask(dir: Option<&Path>, command: &Command) -> anyhow::Result<Reply> {
    let stream = find(dir)?;
    let waits = match command {
        Command::Wait { limit, .. } => *limit,
        _ => Duration::ZERO,
    };
    exchange(stream, command, WORK + waits)
}

fn find(dir: Option<&Path>) -> anyhow::Result<Stream> {
    let here = std::env::var_os(HERE).map(PathBuf::from);
    match dir.or(here.as_deref()) {
        // Links on the way to it are the caller's choice.
        Some(dir) => dir.canonicalize().and_then(|dir| connect(&dir)).with_context(|| {
            format!("no sandbox answers in {}; `tessera sandbox` starts one", dir.display())
        }),
        None => only(),
    }
}

/// Where this user's sandbox listens: what another user has put there is not talked to.
fn connect(dir: &Path) -> io::Result<Stream> {
    let stream = Stream::connect(Dir::own(dir)?.path().join(SOCKET))?;
    check_peer(&stream)?;
    stream.set_write_timeout(Some(TALK))?;
    Ok(stream)
}

/// The reply, with nothing in it that acts on a terminal.
fn exchange(mut stream: Stream, command: &Command, limit: Duration) -> anyhow::Result<Reply> {
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(format!("{}\n", serde_json::to_string(command)?).as_bytes())?;
    let mut line = String::new();
    let read = BufReader::new(stream.take(LONGEST_REPLY)).read_line(&mut line);
    if read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
        bail!("the sandbox does not answer within {limit:?}");
    }
    read?;
    let reply: Reply =
        serde_json::from_str(&line).context("the sandbox ended before it answered")?;
    Ok(reply.printable())
}

fn only() -> anyhow::Result<Stream> {
    let tmp = std::env::temp_dir();
    let mut running: Vec<(PathBuf, Stream)> = std::fs::read_dir(&tmp)
        .with_context(|| format!("cannot look for sandboxes in {}", tmp.display()))?
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
        .filter_map(|entry| Some((entry.path(), connect(&entry.path()).ok()?)))
        .collect();
    if running.len() > 1 {
        let dirs: Vec<String> = running.iter().map(|(dir, _)| dir.display().to_string()).collect();
        bail!("several sandboxes run; say which with --dir: {}", dirs.join(", "));
    }
    match running.pop() {
        Some((_, stream)) => Ok(stream),
        None => bail!(
            "no sandbox runs; `tessera sandbox` starts one, and --dir names one that is not in {}",
            tmp.display()
        ),
    }
}

/// `tessera sandbox top` is `tessera top` of the node that it is about, in the terminal where it was typed.
/// The sandbox has said of whom; this becomes the command; of several nodes, one after the other.
pub fn relay(said: &str) -> anyhow::Result<ExitCode> {
    let (asked, words): (Vec<Asked>, Vec<String>) =
        serde_json::from_str(said).context("the sandbox is of another version of tessera")?;
    let mut code = 0;
    for one in &asked {
        let mut command = process::Command::new(std::env::current_exe()?);
        one.give(&mut command, &words);
        if asked.len() == 1 {
            return Err(command.exec().into());
        }
        terminal::print(&format!("{}:\n", one.node))?;
        code = code.max(command.status()?.code().map_or(1, |code| u8::try_from(code).unwrap_or(1)));
    }
    Ok(ExitCode::from(code))
}

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
    let started = serve(&sandbox.scratch.path).and_then(|requests| {
        if command.is_empty() {
            say(&print::greeting(&sandbox, shell.is_some()));
        }
        let run = shell.as_deref().unwrap_or(command);
        let child = run.split_first().map(|(program, arguments)| {
            let mut inner = inside(program, &sandbox.scratch.path);
            if shell.is_none() {
                // What it leaves ends with the sandbox.
                inner.env(MARK, &sandbox.scratch.path);
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
fn inside(program: &std::ffi::OsStr, dir: &Path) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(program);
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
    let Some(child) = child else { return std::future::pending().await };
    let Ok(status) = child.wait().await else { return 1 };
    u8::try_from(exit_code(status)).unwrap_or(1)
}

fn say(text: &str) {
    // A full disk must not end the sandbox before it has cleaned up.
    let _ = terminal::print(&format!("{text}\n"));
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// What becomes of a question to somebody who answers so.
    fn asked(answer: Vec<u8>, limit: Duration) -> anyhow::Result<Reply> {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(SOCKET)).unwrap();
        std::thread::scope(|scope| {
            let stream = connect(dir.path()).unwrap();
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                // Until the other end has enough of it.
                let _ = stream.write_all(&answer);
                let _ = stream.read_to_end(&mut Vec::new());
            });
            exchange(stream, &Command::List, limit)
        })
    }

    #[test]
    fn an_answer_is_bounded_and_moves_no_cursor() {
        let long = Duration::from_secs(60);
        let reply = Reply::done("a\n\u{1b}[2Jb");
        let line = serde_json::to_vec(&reply).unwrap();
        assert_eq!(asked([&line[..], b"\n"].concat(), long).unwrap().text, "a\n\\u001b[2Jb");
        let error = asked(Vec::new(), Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("does not answer within 50ms"), "{error}");
        let most = usize::try_from(LONGEST_REPLY).unwrap();
        let error = asked(vec![b'"'; most + 1], long).unwrap_err();
        assert!(error.to_string().contains("before it answered"), "{error}");
    }

    #[test]
    fn what_is_in_a_directory_of_another_user_is_not_asked() {
        let dir = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(dir.path().join(SOCKET)).unwrap();
        if chown(dir.path(), Some(65534), None).is_err() {
            eprintln!("not checked, for only root gives a directory away");
            return;
        }
        let error = format!("{:#}", ask(Some(dir.path()), &Command::List).unwrap_err());
        assert!(error.contains("uid 65534's"), "{error}");
    }
}
