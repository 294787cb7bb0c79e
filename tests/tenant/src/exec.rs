//! `exec`: use the GPU, then become another program, as launchers and shells do.

use std::os::unix::process::CommandExt;
use std::process::Command;

use serde_json::json;

use crate::Target;
use crate::args::Args;
use crate::cuda::{Cuda, Stream};
use crate::exit::Exit;
use crate::memory::Api;
use crate::report;
use crate::stop;

/// What to become.
#[derive(Debug)]
pub struct Options {
    clear_env: bool,
    bytes: Option<u64>,
    command: Vec<String>,
}

impl Options {
    /// From the command line.
    pub fn parse(mut args: Args) -> Result<Self, Exit> {
        let clear_env = args.flag("--clear-env");
        let bytes = args.bytes("--bytes")?;
        let command = args.command();
        args.finish()?;
        if command.is_empty() {
            return Err(Exit::usage("exec needs a command after --"));
        }
        Ok(Self { clear_env, bytes, command })
    }
}

/// Returns only where the command cannot be started.
pub fn run(target: Target, options: &Options) -> Result<(), Exit> {
    if let Some(bytes) = options.bytes {
        let cuda = Cuda::open(target)?;
        let block = cuda.allocate(Api::Plain, bytes, Stream::LEGACY)?;
        report::line("ready", json!({ "held": block.bytes }));
    }
    stop::unblock_signals();
    let mut command = Command::new(&options.command[0]);
    command.args(&options.command[1..]);
    if options.clear_env {
        command.env_clear();
    }
    let error = command.exec();
    Err(Exit::new(127, format!("cannot run {}: {error}", options.command[0])))
}
