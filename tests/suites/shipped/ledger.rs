//! Ledgers that a disk has damaged: redb's reader panics on some, and `tessera` must be built so that it can go on.

#[path = "../../../fuzz/src/lib.rs"]
#[allow(unused, reason = "the other readers are for fuzzing and its replay")]
mod readers;

use tessera_harness::plugin::{GPU, Simulated, bounded};
use tessera_harness::{artefacts, corpus};
use tessera_store::{Ledger, Opened};

/// Whether redb panics when it reads this file.
fn panics(file: &[u8]) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.redb");
    std::fs::write(&path, file).unwrap();
    let (_, opened) = Ledger::open(&path, false).unwrap();
    matches!(opened, Opened::Rebuilt { reason, .. } if reason.contains("its reader panicked"))
}

/// The plugin as it is shipped: another profile could abort where this test's own unwinds. Which damage redb
/// panics on depends on the profile, too.
#[tokio::test]
async fn the_built_plugin_starts_on_ledgers_whose_reader_panics() {
    let mut node = Simulated::new("replicas = 4").await;
    node.program = artefacts().tessera();
    let ledger = node.dir.path().join("ledger.redb");
    let mut panicked = 0;
    for (input, damage) in corpus::inputs("ledger") {
        let file = readers::damaged_ledger(&damage);
        if !panics(&file) {
            continue;
        }
        std::fs::write(&ledger, &file).unwrap();
        node.serve().await;
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        let warning = node.json()["warnings"].to_string();
        assert!(warning.contains("the ledger was unreadable"), "{input}: {warning}");
        panicked += u32::from(warning.contains("its reader panicked"));
        assert_eq!(node.terminate().await, Some(0));
    }
    assert!(panicked > 0, "redb panics on none of the corpus");
}
