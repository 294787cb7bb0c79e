//! What `libtessera.so` does inside a stranger's process, as a library without exports: an exported
//! `dlsym` in an rlib would capture every program that links it.
//!
//! # A tour
//!
//! *Finding the driver.* [`real`] holds one typed pointer per driver symbol and binds them from the
//! library's own handle. [`resolve`] decides what `dlsym` and `cuGetProcAddress` answer.
//!
//! *Where a process stands.* `state` is the life cycle: not a tenant, a tenant, or closed because
//! its pages are broken (`attach`); and what a fork does to all of it. A thread's own state
//! (`thread`, `own`) is plain words.
//!
//! *Memory.* `memory` holds the allocating and freeing hooks, `contexts` those that make
//! and end contexts, `pools` those of stream-ordered memory, `graphs` those of graphs that
//! allocate, `arrays` those of arrays, `vmm` those of virtual memory management, `shares` what
//! processes share. They ask `place` where the calling thread's allocations go, remember them in
//! `allocations` and `contexts`, and settle with the account through `quota`.
//! `info` and `nvml` show the tenant its quota.
//!
//! *Compute.* [`launch`] passes every launch through [`gate`], with a busy flag per thread
//! (`records`).
//!
//! *The plugin* hears of refusals through `session`; nothing waits for it.
//!
//! # Hooks
//!
//! A hook of the table gets the driver's function with the caller's own arguments as a call, and these arguments
//! ([`hooks`]): a stream as what NULL means to the export. Those of class `query` choose the arguments of the call
//! themselves. A hook is `unsafe`, because its arguments are what the driver's function demands.
//!
//! # Rules of a guest
//!
//! No constructor, signal handler, umask, exit or change of the environment; no NEEDED entry for a
//! driver library; nothing unwinds into the host (`extern "C"` aborts, and no hook panics). Hooks
//! allocate nothing on hot paths and keep their tables on memory of their own. Silent unless
//! something is refused ([`log`]).

#![cfg_attr(not(test), no_std)]

extern crate alloc;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("CUDA exists on 64-bit Linux only; device pointers and sizes are taken as 64 bits");

mod allocations;
mod arrays;
mod attach;
mod contexts;
pub mod gate;
mod graphs;
mod info;
pub mod launch;
mod libdl;
mod limits;
pub mod log;
mod memory;
mod nvml;
mod own;
mod pages;
mod place;
mod pools;
mod quota;
pub mod real;
mod records;
pub mod resolve;
mod session;
mod shares;
mod state;
mod thread;
mod vmm;
pub mod work;

use tessera_region::spin;

/// The bodies of the table's hooks, by the table's body names. Launches go through [`launch`] instead.
pub mod hooks {
    pub use crate::arrays::*;
    pub use crate::contexts::*;
    pub use crate::gate::capture::hooks::*;
    pub use crate::graphs::hooks::*;
    pub use crate::info::*;
    pub use crate::limits::*;
    pub use crate::memory::*;
    pub use crate::nvml::*;
    pub use crate::pools::hooks::*;
    pub use crate::resolve::lookup;
    pub use crate::shares::*;
    pub use crate::thread::{answer, result};
    pub use crate::vmm::*;
    pub use crate::work::*;
}
