//! Whether the machine was calm enough for its latencies to mean anything. A thread that sleeps for a millisecond
//! wakes up late where CPUs are busy, and so does everything that waits for the GPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tessera_system::locks::lock;

const SLEEP: Duration = Duration::from_millis(1);
/// The 99th percentile of lateness up to which a machine is calm, microseconds: a quarter of a step of 4 ms.
pub(super) const CALM_US: u64 = 1000;

/// Sleeps and wakes on a thread of its own until dropped.
pub(super) struct Calm {
    late_us: Arc<Mutex<Vec<u64>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Calm {
    /// Starts.
    pub fn watch() -> Self {
        let late_us = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, end) = (Arc::clone(&late_us), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                let begin = Instant::now();
                std::thread::sleep(SLEEP);
                let late = begin.elapsed().saturating_sub(SLEEP);
                lock(&seen).push(u64::try_from(late.as_micros()).unwrap_or(u64::MAX));
            }
        });
        Self { late_us, stop, thread: Some(thread) }
    }

    /// The 99th percentile of how late it woke up since the last call, microseconds.
    pub fn take(&self) -> u64 {
        p99(&mut std::mem::take(&mut *lock(&self.late_us)))
    }
}

impl Drop for Calm {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn p99(all: &mut [u64]) -> u64 {
    all.sort_unstable();
    // The smallest that 99 of 100 do not exceed.
    let rank = (all.len() * 99).div_ceil(100);
    rank.checked_sub(1).and_then(|at| all.get(at)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_hundred_may_be_later() {
        let mut all: Vec<u64> = (1..=100).collect();
        assert_eq!(p99(&mut all), 99);
        assert_eq!(p99(&mut [7]), 7);
        assert_eq!(p99(&mut []), 0);
    }
}
