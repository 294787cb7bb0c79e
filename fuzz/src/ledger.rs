//! The ledger's file, damaged.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::What;
use tessera_model::record::{Grant, Record};
use tessera_model::sharing::Compute;
use tessera_store::{Change, Ledger};

use super::patch::scribble;

/// Whatever the disk gives back, the ledger opens: as it was, or as a new one with the old file kept aside.
/// What it then says is sound, and it can be written.
pub fn ledger(data: &[u8]) {
    // libFuzzer ends at every panic, also at those of redb that `Ledger::open` catches; one that is
    // not caught still ends it here.
    #[cfg(fuzzing)]
    std::panic::set_hook(Box::new(|_| {}));
    let bytes = damaged(data);
    let dir = super::pages::directory();
    let path = dir.path().join("ledger.redb");
    std::fs::write(&path, bytes).expect("room for a ledger");
    let (mut ledger, _) = Ledger::open(&path, false).expect("opened or made");
    let (records, generation, _) = ledger.load().expect("what was checked can be read");
    for found in &records {
        assert!(found.generation <= generation || generation == 0, "{found:?}");
    }
    let _ = ledger.lines().expect("what was checked can be read");
    let mut change = Change::default();
    change.put(record(9), What::Allocated, 1);
    ledger.commit(&change).expect("it can be written");
}

/// A sound ledger's file with this damage.
pub fn damaged(data: &[u8]) -> Vec<u8> {
    let mut bytes = sound().to_vec();
    // The first byte may cut the file.
    if let Some((&cut, data)) = data.split_first() {
        scribble(&mut bytes, data);
        if cut & 0x80 != 0 {
            bytes.truncate(bytes.len() * usize::from(cut & 0x7f) / 0x80);
        }
    }
    bytes
}

fn record(n: u64) -> Record {
    let replica = format!("GPU-0::{n}");
    let grant = Grant {
        uuid: "GPU-0".into(),
        memory_limit_bytes: 1 << 30,
        context_overhead_bytes: 0,
        cores_millis: 100,
        compute: Compute::Burst,
    };
    let id = AllocationId::of("tessera.dev/gpu", [replica.as_str()]);
    Record {
        resource: "tessera.dev/gpu".into(),
        replicas: vec![replica],
        allocated_unix_ms: 1,
        ..Record::new(id, n, vec![grant])
    }
}

fn sound() -> &'static [u8] {
    static SOUND: OnceLock<Vec<u8>> = OnceLock::new();
    SOUND.get_or_init(|| {
        let dir = super::pages::directory();
        let path: PathBuf = Path::new(dir.path()).join("ledger.redb");
        let (mut ledger, _) = Ledger::open(&path, false).expect("a new ledger");
        for n in 1..9 {
            let mut change = Change::default();
            change.put(record(n), What::Allocated, 1);
            ledger.commit(&change).expect("room for a ledger");
        }
        drop(ledger);
        std::fs::read(path).expect("just written")
    })
}
