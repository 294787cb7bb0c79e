//! Waiting on conditions, bounded, ended by an interrupt.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigSet, Signal};

/// A look is a kubectl, and a kubectl is 60 ms of processor time that the cluster needs too.
const BETWEEN_LOOKS: Duration = Duration::from_millis(300);

/// How long anything may take that ends sooner on any machine that is not stuck: a wait costs only what
/// it waits for, and a machine may be busy.
pub const LIMIT: Duration = Duration::from_secs(180);

#[derive(Debug)]
pub enum Look<T> {
    Done(T),
    /// Not yet, and what was seen instead.
    NotYet(String),
}

impl Look<()> {
    /// [`Look::Done`] if `holds`.
    pub fn when(holds: bool, seen: impl Into<String>) -> Self {
        if holds { Look::Done(()) } else { Look::NotYet(seen.into()) }
    }
}

impl<T> Look<T> {
    /// [`Look::Done`] with what was found.
    pub fn found(found: Option<T>, seen: impl Into<String>) -> Self {
        found.map_or_else(|| Look::NotYet(seen.into()), Look::Done)
    }

    /// [`Look::Done`] where it worked: it is tried again where it did not.
    pub fn worked(result: Result<T>) -> Self {
        result.map_or_else(|error| Look::NotYet(format!("{error:#}")), Look::Done)
    }
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT and SIGTERM end the current wait, so that the cluster is left as it was found.
pub fn catch_interrupts() -> Result<()> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block().context("cannot block signals")?;
    thread::spawn(move || {
        while set.wait().is_ok() {
            INTERRUPTED.store(true, Ordering::Relaxed);
        }
    });
    Ok(())
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Forgets the interrupt: cleaning up has to wait too.
pub fn resume() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}

pub fn until<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Result<Look<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let seen = match look().with_context(|| format!("while waiting until {what}"))? {
            Look::Done(value) => return Ok(value),
            Look::NotYet(seen) => seen,
        };
        if interrupted() {
            bail!("interrupted while waiting until {what}");
        }
        if start.elapsed() > limit {
            bail!("{what}: not within {limit:?}; last seen: {seen}");
        }
        thread::sleep(BETWEEN_LOOKS);
    }
}
