//! Whether the thread that serves kubelet makes progress.

use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::Mutex;

/// For how long an answer of that thread counts: however many ask, it is asked so often. Much longer than a turn
/// takes on a busy node, else those who ask would wait for most of the time.
const FRESH: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Liveness {
    main: Handle,
    checked: Mutex<Option<Instant>>,
}

impl Liveness {
    /// Of the runtime that serves kubelet.
    pub fn new(main: Handle) -> Self {
        Liveness { main, checked: Mutex::default() }
    }

    /// Done when that thread has had a turn; false if it has none any more.
    pub async fn check(&self) -> bool {
        let mut checked = self.checked.lock().await;
        if checked.is_some_and(|at| at.elapsed() < FRESH) {
            return true;
        }
        let turns = self.main.spawn(async {}).await.is_ok();
        *checked = turns.then(Instant::now);
        turns
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_thread_that_hangs_is_not_live_until_it_goes_on() {
        let main = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let liveness = Liveness::new(main.handle().clone());
        let (hang, hanging) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            main.block_on(async move {
                let _ = hanging.recv();
                tokio::time::sleep(Duration::from_millis(200)).await;
            });
        });
        let own = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        own.block_on(async {
            let early = tokio::time::timeout(Duration::from_millis(100), liveness.check()).await;
            assert!(early.is_err(), "nobody can have answered");
            drop(hang);
            assert!(liveness.check().await);
        });
        thread.join().unwrap();
        // Its runtime is gone.
        own.block_on(async {
            tokio::time::sleep(FRESH).await;
            assert!(!liveness.check().await);
        });
    }
}
