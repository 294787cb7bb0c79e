//! The arbiter decides which tenant may use a GPU now. `docs/internals/compute.md` is the contract with the shim.
//!
//! One thread receives from all tenants of the node and writes all gates. It must not wait for any other
//! work of the plugin, so it shares no lock, opens no file and runs on no runtime. [`policy`] decides and is
//! pure; `drain_tracker` knows which processes a drain waits for. The rest of the plugin sends it orders. It
//! may use `peers`, `config` and lower crates, and must know nothing of records, pages' life or kubelet.
#![forbid(unsafe_code)]

mod arbitrated_tenant;
mod drain_tracker;
mod fallback_schedule;
mod flights;
mod gate_connections;
mod latency;
mod linked_shares;
pub mod policy;
mod reactor;
mod thread;
pub mod trace;
mod view;

use nix::sys::eventfd::EventFd;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use tessera_region::PageError;
use tessera_region::layout::SLOTS;
use tracing::debug;

pub use gate_connections::ProtocolViolations;
pub use view::{GpuShare, TenantShare, View};

use arbitrated_tenant::{OpenedPages, Served};
use policy::Settings;
use reactor::Reactor;
use tessera_config::Leases;
use tessera_peers::socket;
use tessera_peers::tenant::max_processes;
use tessera_system::locks::lock;
use thread::{Order, Thread};
use trace::{TraceError, Tracing};

/// The name of its thread, by which its CPU time can be found in `/proc/<pid>/task`.
pub const THREAD_NAME: &str = "arbiter";

/// How long [`Arbiter::view`] waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Priority of the thread: its turns take microseconds, and tenants wait for them.
const NICENESS: i32 = -15;

/// Why a tenant is not arbitrated.
#[derive(Debug, thiserror::Error)]
pub enum ArbiterError {
    /// Its quota page.
    #[error(transparent)]
    Page(#[from] PageError),
    /// Its socket.
    #[error("{path}: gate.sock: {error}")]
    Socket {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// A running arbiter. Dropping it ends it and informs its tenants.
#[derive(Debug)]
pub struct Arbiter {
    orders: Mutex<Sender<Order>>,
    served: Mutex<Served>,
    waker: Arc<EventFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Arbiter {
    /// Starts the thread, without tenants.
    ///
    /// # Errors
    /// No descriptors, or no thread.
    pub fn start(leases: &Leases) -> io::Result<Self> {
        Self::spawn(leases, max_processes())
    }

    /// As [`Arbiter::start`], where tenants are few and trust each other: each may have as many processes as
    /// fit into its pages, even where few files may be open.
    ///
    /// # Errors
    /// No descriptors, or no thread.
    pub fn start_for_few(leases: &Leases) -> io::Result<Self> {
        Self::spawn(leases, 2 * SLOTS)
    }

    fn spawn(leases: &Leases, max_processes: usize) -> io::Result<Self> {
        let reactor = Reactor::new()?;
        let waker = reactor.waker();
        let (orders, receiver) = channel();
        let thread = Thread::new(reactor, receiver, leases.clone(), max_processes);
        let builder = std::thread::Builder::new().name(THREAD_NAME.into()).stack_size(256 << 10);
        let thread = builder.spawn(move || {
            // Linux sets this for one thread. Without the right to it, other threads may come first.
            if let Err(error) = socket::set_thread_niceness(NICENESS) {
                debug!(%error, "the arbiter has no priority");
            }
            thread.run();
        })?;
        Ok(Arbiter {
            orders: Mutex::new(orders),
            served: Mutex::default(),
            waker,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Arbitrates the tenant whose pages are in `dir`, by the share and policy in its quota page. For a
    /// known tenant it reads the page again. It opens files, so the caller must be allowed to block.
    ///
    /// # Errors
    /// The page or the socket failed; the tenant is not arbitrated, or as before.
    pub fn admit(&self, dir: &Path) -> Result<(), ArbiterError> {
        let mut served = lock(&self.served);
        let opened = OpenedPages::open(dir, &served)?;
        match opened.share {
            Some(_) => served.insert(opened.id.clone(), opened.file),
            // A tenant that is not arbitrated has no socket to keep.
            None => served.remove(&opened.id),
        };
        drop(served);
        self.order(Order::Admit(Box::new(opened)));
        Ok(())
    }

    /// The allocation has ended; surviving processes of it are not arbitrated.
    pub fn release(&self, allocation: &str) {
        lock(&self.served).remove(allocation);
        self.order(Order::Release(allocation.to_owned()));
    }

    /// Changes the settings, also for present tenants.
    pub fn configure(&self, leases: &Leases) {
        self.order(Order::Configure(leases.clone()));
    }

    /// Somebody has measured how long the allocation's work ran since the last call, nanoseconds; `None` where nobody
    /// can. Without such calls the time in which it is alone stays unmeasured.
    pub fn measured(&self, allocation: &str, busy_ns: Option<u64>) {
        self.order(Order::Measured(allocation.to_owned(), busy_ns));
    }

    /// A view of all tenants and GPUs; `None` if the thread does not answer.
    #[must_use]
    pub fn view(&self) -> Option<View> {
        let (answer, view) = sync_channel(1);
        self.order(Order::View(answer));
        view.recv_timeout(PATIENCE).ok()
    }

    /// Begins to trace what it does; see [`Tracing`]. It waits for the thread, for a second at most.
    ///
    /// # Errors
    /// See [`TraceError`].
    pub fn trace(&self) -> Result<Tracing, TraceError> {
        let orders = lock(&self.orders).clone();
        Tracing::begin(orders, Arc::clone(&self.waker))
    }

    /// Ends, and informs the tenants, which ration themselves from then on.
    pub fn stop(&self) {
        self.end(true);
    }

    /// Ends without informing the tenants, because another arbiter takes over at once.
    pub fn abandon(&self) {
        self.end(false);
    }

    fn end(&self, informs: bool) {
        self.order(Order::End(informs));
        if let Some(thread) = lock(&self.thread).take() {
            // A panic has been reported; tenants notice the silence.
            let _ = thread.join();
        }
    }

    fn order(&self, order: Order) {
        // Fails if the thread has ended.
        if lock(&self.orders).send(order).is_ok() {
            reactor::wake(&self.waker);
        }
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The policy's constants, as configured.
fn settings(leases: &Leases) -> Settings {
    let ns = |length: Duration| u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    Settings {
        quantum: ns(leases.quantum),
        quantum_least: ns(leases.quantum_min),
        quantum_most: ns(leases.quantum_max),
        credit: ns(leases.credit),
        drain_least: ns(leases.drain_min),
        drain_most: ns(leases.drain_max),
        ..Settings::default()
    }
}
