//! The simulated driver against NVIDIA's documentation, each scenario in a process of its own.

mod exports {
    pub use simcuda::exports::*;
    pub use simnvml::exports::*;
}
mod harness;

mod arrays;
mod calls;
mod cancel;
mod capture;
mod capture_rules;
mod copies;
mod graphs;
mod green;
mod ipc;
mod ipc_events;
mod locks;
mod nvml;
mod pools;
mod queues;
mod stream_memory;
mod vmm;
mod widths;
