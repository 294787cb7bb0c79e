//! `tessera`: see [`tessera_plugin::cli`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    tessera_plugin::cli::main(std::env::args_os())
}
