//! The memory quota over every way to obtain memory.

mod arrays;
mod calls;
mod graph_memory;
mod green;
mod ipc;
mod limits;
mod mig;
mod overhead;
mod pools;
mod vmm;
