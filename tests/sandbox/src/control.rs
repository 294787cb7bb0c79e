//! The sandbox's own socket: commands from another terminal, a JSON line each way.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream as Stream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use super::command::Command;
use super::sandbox::Reply;
use super::scratch::PREFIX;

/// The socket's file name.
pub const SOCKET: &str = "control.sock";
/// Longest request, bytes.
const LONGEST: u64 = 64 << 10;

/// How long a shell that completes a word waits for names.
const PATIENCE: Duration = Duration::from_millis(500);

/// A command, and where the reply goes.
pub type Request = (Command, oneshot::Sender<Reply>);

/// Serves in `dir`, which only this user can enter; commands come out of the channel one by one.
///
/// # Errors
/// The socket cannot be made.
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
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    tokio::io::BufReader::new(read.take(LONGEST)).read_line(&mut line).await?;
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
    write.write_all(format!("{}\n", serde_json::to_string(&reply)?).as_bytes()).await?;
    Ok(())
}

/// Asks the sandbox in `dir`, or the only one that runs.
///
/// # Errors
/// None runs, several do, or it does not answer.
pub fn ask(dir: Option<&Path>, command: &Command) -> anyhow::Result<Reply> {
    let stream = match dir {
        Some(dir) => Stream::connect(dir.join(SOCKET)).with_context(|| {
            format!("no sandbox answers in {}; `tessera sandbox` starts one", dir.display())
        })?,
        None => only()?,
    };
    exchange(stream, command)
}

/// Names of the pods of the only sandbox that runs, for a shell that completes a word. Nothing where there is none, or
/// where it is busy: a key was pressed.
#[must_use]
pub fn pods() -> Vec<String> {
    let asked = only().and_then(|stream| {
        stream.set_read_timeout(Some(PATIENCE))?;
        exchange(stream, &Command::Names)
    });
    asked.map(|reply| reply.text.lines().map(str::to_owned).collect()).unwrap_or_default()
}

fn exchange(mut stream: Stream, command: &Command) -> anyhow::Result<Reply> {
    stream.write_all(format!("{}\n", serde_json::to_string(command)?).as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    serde_json::from_str(&line).context("the sandbox ended before it answered")
}

fn only() -> anyhow::Result<Stream> {
    let tmp = std::env::temp_dir();
    let dirs: Vec<PathBuf> = std::fs::read_dir(&tmp)
        .with_context(|| format!("cannot look for sandboxes in {}", tmp.display()))?
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
        .map(|entry| entry.path())
        .collect();
    let mut running: Vec<(PathBuf, Stream)> = dirs
        .into_iter()
        .filter_map(|dir| Some((dir.clone(), Stream::connect(dir.join(SOCKET)).ok()?)))
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
