//! The arbiter: which tenant may use a GPU now. `docs/compute.md` is the contract with the shim.
//!
//! One thread receives from all tenants of the node and writes all gates: it must not
//! wait behind anything else that the plugin does, so it shares no lock, opens no file and runs on no
//! runtime. [`policy`] decides and is pure; [`bound`] knows which processes a drain waits for.
//! The rest of the plugin talks to it by messages.
#![forbid(unsafe_code)]

mod bound;
mod cycle;
mod lane;
mod latency;
pub mod policy;
mod reactor;
mod seat;
mod thread;
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

pub use lane::Misdeeds;
pub use view::{GpuShare, TenantShare, View};

use policy::Settings;
use reactor::Reactor;
use seat::{Opened, Served};
use tessera_config::Leases;
use tessera_peers::socket;
use tessera_peers::tenant::most;
use tessera_system::locks::lock;
use thread::{Order, Thread};

/// The name of its thread, by which its CPU time can be found in `/proc/<pid>/task`.
pub const THREAD_NAME: &str = "arbiter";

/// How long whoever asks how it stands waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Above everything else that this machine does: it takes microseconds, and tenants wait for it.
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

/// A running arbiter. Dropped, it ends and says so to its tenants.
#[derive(Debug)]
pub struct Arbiter {
    orders: Mutex<Sender<Order>>,
    served: Mutex<Served>,
    waker: Arc<EventFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Arbiter {
    /// Starts the thread, with nobody to arbitrate.
    ///
    /// # Errors
    /// No descriptors, or no thread.
    pub fn start(leases: &Leases) -> io::Result<Self> {
        Self::spawn(leases, most())
    }

    /// As [`Arbiter::start`], where tenants are few and trust each other: each may have all the processes
    /// that fit into its pages, however few files may be open.
    ///
    /// # Errors
    /// No descriptors, or no thread.
    pub fn start_for_few(leases: &Leases) -> io::Result<Self> {
        Self::spawn(leases, 2 * SLOTS)
    }

    fn spawn(leases: &Leases, most: usize) -> io::Result<Self> {
        let reactor = Reactor::new()?;
        let waker = reactor.waker();
        let (orders, receiver) = channel();
        let thread = Thread::new(reactor, receiver, leases.clone(), most);
        let builder = std::thread::Builder::new().name(THREAD_NAME.into()).stack_size(256 << 10);
        let thread = builder.spawn(move || {
            // Of this thread alone, as Linux has it. Without the right to it others may come first.
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

    /// Arbitrates the tenant whose pages are in `dir`, by the share and policy in its quota page; looks
    /// at them again if it does already. Opens files, so call it where that may be done.
    ///
    /// # Errors
    /// The page or the socket; then the tenant is not arbitrated, or as before.
    pub fn admit(&self, dir: &Path) -> Result<(), ArbiterError> {
        let mut served = lock(&self.served);
        let opened = Opened::open(dir, &served)?;
        match opened.share {
            Some(_) => served.insert(opened.id.clone(), opened.file),
            // Who is not arbitrated has no socket that could be kept.
            None => served.remove(&opened.id),
        };
        drop(served);
        self.order(Order::Admit(Box::new(opened)));
        Ok(())
    }

    /// The allocation is no more; what still runs of it is not arbitrated.
    pub fn release(&self, allocation: &str) {
        lock(&self.served).remove(allocation);
        self.order(Order::Release(allocation.to_owned()));
    }

    /// Goes on with other settings, for tenants that are there as well.
    pub fn configure(&self, leases: &Leases) {
        self.order(Order::Configure(leases.clone()));
    }

    /// How it stands; `None` if it does not answer.
    #[must_use]
    pub fn view(&self) -> Option<View> {
        let (answer, view) = sync_channel(1);
        self.order(Order::View(answer));
        view.recv_timeout(PATIENCE).ok()
    }

    /// Ends, and tells the tenants, who ration themselves from now on.
    pub fn stop(&self) {
        self.end(Order::Stop);
    }

    /// Ends without a word, because another arbiter takes its place at once.
    pub fn abandon(&self) {
        self.end(Order::Abandon);
    }

    fn end(&self, order: Order) {
        self.order(order);
        if let Some(thread) = lock(&self.thread).take() {
            // If it panicked that was told; tenants will notice its silence.
            let _ = thread.join();
        }
    }

    fn order(&self, order: Order) {
        // Fails if it has ended.
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
