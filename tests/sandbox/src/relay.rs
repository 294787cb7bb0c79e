//! Commands of `tessera` that a sandbox's plugin is asked by: `tessera sandbox top` is `tessera top` of the node that it is
//! about, in the terminal where it was typed.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context;
use tessera_system::terminal;

use super::control;
use super::node::Asked;

/// Asks the sandbox whom, and becomes the command; of several nodes, one after the other.
///
/// # Errors
/// This program cannot be started.
pub fn run(dir: Option<&Path>, command: &super::Command) -> anyhow::Result<ExitCode> {
    let reply = match control::ask(dir, command) {
        Ok(reply) => reply,
        Err(error) => return Ok(super::no_sandbox(&error)),
    };
    if reply.code != 0 {
        eprintln!("{}", reply.text);
        return Ok(ExitCode::from(reply.code));
    }
    let (asked, words): (Vec<Asked>, Vec<String>) = serde_json::from_str(&reply.text)
        .context("the sandbox is of another version of tessera")?;
    let mut code = 0;
    for one in &asked {
        let mut command = Command::new(std::env::current_exe()?);
        one.give(&mut command, &words);
        if asked.len() == 1 {
            return Err(command.exec().into());
        }
        terminal::print(&format!("{}:\n", one.node))?;
        code = code.max(command.status()?.code().map_or(1, |code| u8::try_from(code).unwrap_or(1)));
    }
    Ok(ExitCode::from(code))
}
