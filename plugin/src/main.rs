//! `tessera`: see [`tessera_plugin::cli`].
#![deny(unsafe_code)]

mod memory;

use std::process::ExitCode;

fn main() -> ExitCode {
    memory::keep_one_heap();
    tessera_plugin::cli::main(std::env::args_os(), memory::give_back)
}
