//! The simulated driver against NVIDIA's documentation, each scenario in a process of its own.

mod exports {
    pub use simcuda::exports::*;
    pub use simnvml::exports::*;
}
mod harness;

mod calls;
mod capture;
mod copies;
mod graphs;
mod green;
mod ipc;
mod locks;
mod nvml;
mod pools;
mod queues;
mod stream_memory;
mod vmm;
