//! `tessera`: see [`tessera_cli`].
#![deny(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    keep_one_heap();
    tessera_cli::main(std::env::args_os())
}

/// What the process asks of its allocator, so that a node agent stays small. Of the binary, not of the library: a test's
/// process is not the plugin's.
///
/// glibc gives nearly each thread a heap of its own, each of which keeps what its thread once needed: on
/// a node of a thousand sessions most of the plugin's memory. Its threads seldom meet in the allocator.
/// And what is large, such as an answer about a thousand pods, goes back to the kernel at once
/// (mallopt(3)).
#[allow(unsafe_code)]
fn keep_one_heap() {
    #[cfg(target_env = "gnu")]
    {
        use nix::libc::{M_ARENA_MAX, M_MMAP_THRESHOLD, mallopt};
        // SAFETY: sets two numbers, before there is another thread. A libc that refuses keeps its own.
        unsafe {
            mallopt(M_ARENA_MAX, 1);
            mallopt(M_MMAP_THRESHOLD, 64 << 10);
        }
    }
}
