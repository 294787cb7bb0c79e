//! The gate: where a launch asks whether its tenant may use the GPU now.
//!
//! The plugin writes a gate word per GPU into the quota page. [`admit`] is the one place that reads
//! it, between raising the thread's busy flag and the driver's launch, so that the protocol of a
//! lease (close the gate, wait until no flag is up, drain) has its ordering here and nowhere else:
//!
//! - the launching thread: `busy.swap(1, SeqCst)`, then load the gate;
//! - who closes: store CLOSED, `fence(SeqCst)`, then read the busy flags. One of the two sees the
//!   other.
//!
//! **State of enforcement.** Compute is not limited yet: the plugin writes SOLO only, and a word
//! other than SOLO is admitted at once (see [`other_than_solo`]). What is final is the hot path and
//! its cost.

use crate::records::Record;
use crate::state::{self, Process, Standing};
use crate::thread::THREAD;
use core::sync::atomic::{AtomicU32, Ordering};
use tessera_cuda::types::{CUDA_ERROR_SYSTEM_NOT_READY, CUresult};
use tessera_region::layout::GATE_SOLO;

/// The right to hand one operation to the driver; given back on drop.
#[derive(Debug)]
pub enum Pass {
    /// This thread's busy flag is up.
    Flag(&'static AtomicU32),
    /// More threads than there are records: they share a counter.
    Crowd(&'static AtomicU32),
    /// Nothing to give back: pass-through, or inside another launch of this thread.
    Free,
}

impl Drop for Pass {
    #[inline(always)]
    fn drop(&mut self) {
        match self {
            // Release: the launch is the driver's before the flag is seen down.
            Self::Flag(busy) => busy.store(0, Ordering::Release),
            Self::Crowd(count) => {
                count.fetch_sub(1, Ordering::Release);
            }
            Self::Free => {}
        }
    }
}

/// Waits until this thread may launch, and counts the launch.
///
/// # Errors
/// `CUDA_ERROR_SYSTEM_NOT_READY` where the quota cannot be read (absence closes).
#[inline(always)]
pub fn admit() -> Result<Pass, CUresult> {
    let record = THREAD.with(|thread| thread.record.get());
    if record.is_null() {
        return admit_without_record();
    }
    // SAFETY: records are never unmapped; in a forked child they read as zero.
    let record = unsafe { &*record };
    if record.busy.swap(1, Ordering::SeqCst) != 0 {
        // The driver called its own export: the outer launch holds the flag.
        return Ok(Pass::Free);
    }
    let pass = Pass::Flag(&record.busy);
    let process = record.process.load(Ordering::Relaxed);
    if process.is_null() {
        drop(pass);
        return admit_without_record();
    }
    // SAFETY: the state of a process is never freed.
    check(unsafe { &*process });
    count(record);
    Ok(pass)
}

/// The gates of all the tenant's GPUs: a container with several is granted all or none.
#[inline(always)]
fn check(process: &'static Process) {
    for gate in process.gates() {
        if gate.load(Ordering::Acquire) != GATE_SOLO {
            other_than_solo();
        }
    }
}

/// OPEN, CLOSED or a word from a later plugin. Without a lease protocol there is nothing to wait
/// for, so the launch passes.
#[cold]
fn other_than_solo() {}

#[inline(always)]
fn count(record: &Record) {
    let launches = record.launches.load(Ordering::Relaxed);
    // SAFETY: set together with `process`, which is not null: a word of this process's slot, which
    // stays mapped.
    let launches = unsafe { &*launches };
    if record.exclusive.load(Ordering::Relaxed) != 0 {
        launches.store(launches.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    } else {
        launches.fetch_add(1, Ordering::Relaxed);
    }
}

/// A thread's first launch, its first one after a fork, and every launch in pass-through.
#[inline(never)]
fn admit_without_record() -> Result<Pass, CUresult> {
    let process = match state::standing() {
        Standing::Pass => return Ok(Pass::Free),
        Standing::Closed => return Err(CUDA_ERROR_SYSTEM_NOT_READY),
        Standing::Armed(process) => process,
    };
    match process.records.claim(process, process.launch_shards()) {
        Some(record) => {
            THREAD.with(|thread| thread.record.set(record));
            record.busy.swap(1, Ordering::SeqCst);
            check(process);
            count(record);
            Ok(Pass::Flag(&record.busy))
        }
        None => {
            process.crowd.fetch_add(1, Ordering::SeqCst);
            check(process);
            if let Some(shared) = process.launch_shards().last() {
                shared.fetch_add(1, Ordering::Relaxed);
            }
            Ok(Pass::Crowd(&process.crowd))
        }
    }
}
