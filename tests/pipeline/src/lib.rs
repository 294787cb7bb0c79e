//! A gRPC inference pipeline whose stages are processes of their own, sharing one GPU: what
//! `deploy/examples/pipeline.yaml` deploys.
//!
//! A *stage* takes a tensor, works on it by way of the GPU, and hands the result to the next. The model's
//! weights stay in device memory and are read from there for every request, so that a neighbour who
//! damaged them would show in the client's results. The arithmetic itself is done by the host: the
//! simulated GPU takes a kernel's time and computes nothing.

pub mod client;
pub mod gpu;
pub mod math;
pub mod server;

/// The messages and the service.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    include!("gen/pipeline.rs");
}
