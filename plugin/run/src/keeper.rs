//! Which of a user's runs divides GPU time among all of them.
//!
//! Every run waits for one lock; the run that has it hosts the arbiter, for every run's directory. When it ends, or
//! is killed, the kernel gives the lock to another, which adopts all that run: exactly as after a restart
//! of the plugin. A command whose run was killed goes on to be served.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tessera_region::quota::QuotaReader;

use super::pages::is_in_use;
use super::root::Root;
use tessera_arbiter::Arbiter;
use tessera_config::Leases;
use tessera_system::locks::lock;

/// How long a run waits at its start for the arbiter. A machine where there can be none is no reason
/// not to run.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often new directories, and those of runs that were killed, are looked for.
const LOOK: Duration = Duration::from_millis(20);

/// What the thread that waits for the lock, or leads, shares with the run.
#[derive(Debug, Default)]
struct State {
    ended: bool,
    /// While it leads.
    arbiter: Option<Arbiter>,
    lock: Option<File>,
}

/// One run's part in it.
#[derive(Debug)]
pub(super) struct Keeper {
    root: Root,
    state: Arc<Mutex<State>>,
}

impl Keeper {
    /// Waits for the lock from now on, in a thread.
    pub fn start(root: Root, leases: &Leases) -> Self {
        let state: Arc<Mutex<State>> = Arc::default();
        let (waiting, directory, leases) = (Arc::clone(&state), root.clone(), leases.clone());
        let thread = std::thread::Builder::new().name("keeper".into()).stack_size(256 << 10);
        // Without it others arbitrate, or nobody.
        let _ = thread.spawn(move || {
            if let Some(lock) = wait_for_lock(&directory) {
                lead(&directory, lock, &waiting, &leases);
            }
        });
        Keeper { root, state }
    }

    /// Waits until the pages in `dir` are served, or cannot be soon.
    pub fn wait_for(&self, dir: &Path) {
        let begin = Instant::now();
        let Ok(page) = QuotaReader::attach(dir) else { return };
        while page.arbiter_ns() <= 1 && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The run is over and its pages are gone: another may lead.
    pub fn end(self) {
        let mut state = lock(&self.state);
        state.ended = true;
        let (arbiter, held) = (state.arbiter.take(), state.lock.take());
        drop(state);
        if let Some(arbiter) = arbiter {
            // The next holder of the lock closes the gates: no process need ration itself until then.
            arbiter.abandon();
        }
        let held = held.or_else(|| {
            let lock = self.root.lock_file().ok()?;
            lock.try_lock().is_ok().then_some(lock)
        });
        if let Some(held) = held.filter(|held| self.root.is_lock(held)) {
            self.root.remove_if_empty();
            drop(held);
        }
    }
}

/// The lock, once it is this run's. `None` if there can be none.
fn wait_for_lock(root: &Root) -> Option<File> {
    loop {
        let file = root.lock_file().ok()?;
        file.lock().ok()?;
        // The last run before may have removed it together with the directory.
        if root.is_lock(&file) {
            return Some(file);
        }
    }
}

/// Arbitrates all runs until the own one is over.
fn lead(root: &Root, held: File, state: &Mutex<State>, leases: &Leases) {
    {
        let mut state = lock(state);
        if state.ended {
            return;
        }
        let Ok(arbiter) = Arbiter::start_for_few(leases) else { return };
        state.arbiter = Some(arbiter);
        state.lock = Some(held);
    }
    // The directories that are served, with their allocations.
    let mut served: BTreeMap<PathBuf, String> = BTreeMap::new();
    loop {
        {
            let state = lock(state);
            let Some(arbiter) = &state.arbiter else { return };
            look(root, arbiter, &mut served);
        }
        std::thread::sleep(LOOK);
    }
}

/// Takes on those that came, and lets go of those that are gone.
fn look(root: &Root, arbiter: &Arbiter, served: &mut BTreeMap<PathBuf, String>) {
    let runs = root.runs();
    served.retain(|dir, allocation| {
        let stays = runs.contains(dir) && is_in_use(dir);
        if !stays {
            arbiter.release(allocation);
        }
        stays
    });
    for dir in runs {
        if served.contains_key(&dir) || !is_in_use(&dir) {
            continue;
        }
        let allocation =
            QuotaReader::attach(&dir).ok().and_then(|p| p.allocation().map(str::to_owned));
        // What cannot be served now may be at the next look.
        if let Some(allocation) = allocation
            && arbiter.admit(&dir).is_ok()
        {
            served.insert(dir, allocation);
        }
    }
}
