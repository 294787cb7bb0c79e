//! A driver that hangs, and admin clients that ask about it: the threads that kubelet's calls need are not
//! all taken.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::Value;
use tessera_harness::plugin::{TestNode, admin, bounded, replica};
use tessera_view::status::{LIVE, STATUS, Status};

/// As many as `tessera serve` has.
const THREADS: usize = 8;

#[test]
fn status_of_a_driver_that_hangs_leaves_threads_for_allocate() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(THREADS)
        .build()
        .unwrap();
    runtime.block_on(async {
        let node = TestNode::start().await;
        let gpus = Arc::clone(&node.gpus);
        gpus.hangs.store(true, Ordering::Relaxed);
        let mut calls = tokio::task::JoinSet::new();
        for n in 0..40 {
            let admin = admin(node.dir.path());
            calls.spawn(async move {
                // Some give up, which frees no thread.
                let patience = Duration::from_millis(if n % 2 == 0 { 50 } else { 3_600_000 });
                let _ = tokio::time::timeout(patience, admin.get::<Status>(STATUS)).await;
                let _ = admin.get::<Value>("/api/v1/explain?subject=a").await;
            });
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        for n in 0..4 {
            bounded(node.allocate(&[replica(0, n)])).await.unwrap();
        }
        let admin = admin(node.dir.path());
        bounded(admin.get::<Value>(LIVE)).await.unwrap();
        gpus.hangs.store(false, Ordering::Relaxed);
        bounded(async { while calls.join_next().await.is_some() {} }).await;
        bounded(admin.get::<Status>(STATUS)).await.unwrap();
    });
}
