//! Kubernetes Events on pods, where the API server is reachable and lets us. Nothing depends on them: what
//! happens is in the audit trail, and every path here ends in a counter.
//!
//! Lines of the audit trail go into a bounded queue ([`EventSender`]), without waiting. A task of its own makes
//! events of them ([`words`], pure), adds up what repeats ([`series`], pure), and sends them over one
//! connection that lives no longer than there is something to send ([`tessera_cluster::events`]). A server that
//! is away, slow or hanging costs a timeout and then a pause that doubles; one that forbids it, five minutes.
//! Whether there is such a task is as the configuration in force says ([`Keeper`]).

mod keeper;
pub mod series;
mod task;
pub mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;

pub use keeper::Keeper;
pub use task::{Timing, node_name};

pub use tessera_cluster::Server;
use tessera_model::audit::Event;

/// Lines that wait to be made events of.
const QUEUE: usize = 128;

#[derive(Debug, Default)]
pub struct Counts {
    pub sent: AtomicU64,
    /// Requests that it refused or did not answer.
    pub failed: AtomicU64,
    /// Events that were given up.
    pub dropped: AtomicU64,
}

impl Counts {
    /// Sent, failed and dropped.
    pub fn all(&self) -> [(&'static str, u64); 3] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("sent", read(&self.sent)),
            ("failed", read(&self.failed)),
            ("dropped", read(&self.dropped)),
        ]
    }
}

/// Takes lines of the audit trail; never waits.
#[derive(Clone, Debug)]
pub struct EventSender {
    queue: mpsc::Sender<Event>,
    counts: Arc<Counts>,
}

impl EventSender {
    /// A teller, and the end where its lines come out.
    pub fn new(counts: Arc<Counts>) -> (Self, mpsc::Receiver<Event>) {
        let (queue, lines) = mpsc::channel(QUEUE);
        (EventSender { queue, counts }, lines)
    }

    /// Takes a line, if pods are to hear of such.
    pub fn tell(&self, line: &Event) {
        if words::concerns_pods(&line.what) && self.queue.try_send(line.clone()).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}
