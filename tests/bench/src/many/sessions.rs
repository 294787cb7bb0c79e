//! The processes with sessions, from the side of who measures.

use std::path::Path;
use std::process::Stdio;

use anyhow::Context;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// The process whose forks they are; they end with it. See `child/sessions.rs`.
#[derive(Debug)]
pub struct Sessions {
    _parent: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Sessions {
    /// None yet.
    ///
    /// # Errors
    /// This program cannot be run again.
    pub fn new() -> anyhow::Result<Self> {
        let mut parent = Command::new(std::env::current_exe()?)
            .args(["child", "sessions"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let orders = parent.stdin.take().context("piped")?;
        let answers = BufReader::new(parent.stdout.take().context("piped")?).lines();
        Ok(Self { _parent: parent, orders, answers })
    }

    /// One more, in the pages at `dir`; done when the plugin has welcomed it.
    ///
    /// # Errors
    /// It got no slot or no session.
    pub async fn add(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.orders.write_all(format!("{}\n", dir.display()).as_bytes()).await?;
        let answer = self.answers.next_line().await?;
        answer.context("no session").map(drop)
    }
}
