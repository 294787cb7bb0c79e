//! What is launched: kernels of known durations, one by one or as a graph.

use std::cell::Cell;

use super::Options;
use crate::cuda::{Cuda, Graph, Kernel, Stream};
use crate::exit::{CudaError, Exit};

/// A unit of work and where it goes.
pub(super) struct Work {
    cuda: Cuda,
    kernel: Kernel,
    graph: Option<Graph>,
    durations: Vec<u64>,
    stream: Stream,
    next: Cell<usize>,
}

impl Work {
    /// Loads the kernel, makes the stream, and captures the graph if there is to be one.
    pub fn prepare(cuda: Cuda, options: &Options) -> Result<Self, Exit> {
        let kernel = cuda.kernel()?;
        let stream = cuda.stream()?;
        let graph = match options.graph {
            true => Some(cuda.capture(&kernel, &options.kernels, stream)?),
            false => None,
        };
        let durations = options.kernels.clone();
        Ok(Self { cuda, kernel, graph, durations, stream, next: Cell::new(0) })
    }

    /// GPU time of one unit, nanoseconds.
    pub fn unit_ns(&self) -> u64 {
        self.durations.iter().sum()
    }

    /// Launches one call's worth: the graph, or the next kernel of the list.
    pub fn launch(&self) -> Result<(), CudaError> {
        let at = self.next.get();
        self.next.set(at.wrapping_add(1));
        match &self.graph {
            Some(graph) => self.cuda.launch_graph(graph, self.stream),
            None => {
                let duration = self.durations[at % self.durations.len()];
                self.cuda.launch(&self.kernel, duration, self.stream)
            }
        }
    }

    /// Launches one unit: the whole list.
    pub fn launch_unit(&self) -> Result<(), CudaError> {
        let calls = if self.graph.is_some() { 1 } else { self.durations.len() };
        (0..calls).try_for_each(|_| self.launch())
    }

    /// A host function in the stream.
    pub fn sleep_on_host(&self, ms: usize) -> Result<(), CudaError> {
        self.cuda.sleep_on_host(ms, self.stream)
    }

    /// The stream goes no further.
    pub fn wait_for_ever(&self) -> Result<(), CudaError> {
        self.cuda.wait_for_ever(self.stream)
    }

    /// Room on the device, to copy `bytes` into it.
    pub fn room(&self, bytes: usize) -> Result<u64, CudaError> {
        self.cuda.bytes(bytes)
    }

    /// Copies to the device.
    pub fn copy_in(&self, to: u64, from: &[u8]) -> Result<(), CudaError> {
        self.cuda.copy_in(to, from)
    }

    /// Waits for everything launched.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.cuda.wait(&self.kernel, self.stream)
    }
}
