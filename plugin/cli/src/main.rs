//! `tessera`: see [`tessera_cli`].
#![deny(unsafe_code)]

mod memory;

use std::process::ExitCode;

fn main() -> ExitCode {
    memory::keep_one_heap();
    tessera_cli::main(std::env::args_os())
}
