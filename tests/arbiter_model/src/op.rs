//! Work of a simulated tenant in flight.

use std::collections::VecDeque;

use crate::Load;

/// A host function in the middle of a stream: the GPU does nothing for it, and what follows waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFunctions {
    /// One after so many operations.
    pub every: u64,
    /// Shortest and longest, nanoseconds.
    pub ns: (u64, u64),
}

/// One operation, or one host function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    /// Remaining nanoseconds.
    pub(crate) left: f64,
    /// Runs on the host.
    pub(crate) on_host: bool,
    /// Index of the tenant's process.
    pub(crate) process: u32,
}

/// How long the hardware serves a process while another has work, nanoseconds.
const SLICE: f64 = 2e6;

/// The order in which the GPU serves a tenant's processes: one after the other, each for a slice or until
/// its queue is empty.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    process: u32,
    /// Nanoseconds that it has been served.
    served: f64,
}

impl Turn {
    /// How much the served process has had.
    pub(crate) fn serve(&mut self, ns: f64) {
        self.served += ns;
    }

    /// Moves the operation that is served next to the front. True if it is another process's.
    pub(crate) fn pass(&mut self, flight: &mut VecDeque<Op>) -> bool {
        let place = |process| flight.iter().position(|op| op.process == process);
        let own = place(self.process);
        let after = flight.iter().map(|op| op.process).filter(|&other| other != self.process);
        let next = after.min_by_key(|&other| (other < self.process, other));
        let (at, other) = match (own, next.and_then(place)) {
            (Some(own), Some(_)) if self.served < SLICE => (own, false),
            (_, Some(other)) => (other, true),
            (Some(own), None) => (own, false),
            (None, None) => return false,
        };
        if let Some(op) = flight.remove(at) {
            if other {
                *self = Self { process: op.process, served: 0.0 };
            }
            flight.push_front(op);
        }
        other
    }
}

impl Load {
    /// Processes, at least one: each has a slice of the hardware's time.
    pub(crate) fn slices(&self) -> u32 {
        self.processes.max(1)
    }
}
