//! The pages: what the plugin reads of a tenant's, and what a tenant's process attaches to.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use tempfile::TempDir;
use tessera_region::account::Account;
use tessera_region::layout::{
    Kind, MAX_BYTES, MAX_GPUS, QUOTA_FILE, SLOTS, USAGE_BYTES, USAGE_FILE,
};
use tessera_region::quota::{self, GpuQuota, Policy, QuotaReader, QuotaSpec, QuotaWriter};
use tessera_region::usage::{self, Snapshot, UsageFile, UsageMap};

use super::patch::scribble;

/// In memory where that is possible: thousands are made each second.
pub fn directory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory")
}

fn spec() -> QuotaSpec {
    let gpu = |n: u32| GpuQuota {
        uuid: format!("GPU-{n}"),
        memory_limit_bytes: 1 << 30,
        context_overhead_bytes: 0,
        cores_millis: 500,
        policy: Policy::Burst,
    };
    QuotaSpec { allocation: "a".into(), generation: 3, gpus: vec![gpu(0), gpu(1)] }
}

fn account(dir: &Path) -> Account {
    let usage = UsageMap::attach(dir).expect("a sound page");
    let slot = usage.claim().expect("a free slot");
    Account::new(QuotaReader::attach(dir).expect("a sound page"), usage, slot)
}

/// Quota and usage page as two processes leave them that hold something.
fn sound() -> &'static (Vec<u8>, Vec<u8>) {
    static SOUND: OnceLock<(Vec<u8>, Vec<u8>)> = OnceLock::new();
    SOUND.get_or_init(|| {
        let dir = directory();
        quota::create(dir.path(), &spec()).expect("room for pages");
        usage::create(dir.path(), 3).expect("room for pages");
        let (one, two) = (account(dir.path()), account(dir.path()));
        one.reserve(0, 4096).expect("it fits").commit(4096, Kind::Plain).expect("it fits");
        two.reserve(1, 8192).expect("it fits").commit(8192, Kind::Pitched).expect("it fits");
        let read = |name| std::fs::read(dir.path().join(name)).expect("just made");
        (read(QUOTA_FILE), read(USAGE_FILE))
    })
}

fn believable(snapshot: &Snapshot) {
    assert!(snapshot.slots.len() <= SLOTS);
    assert!(snapshot.slots.windows(2).all(|pair| pair[0].index < pair[1].index));
    for slot in &snapshot.slots {
        assert!(slot.index < SLOTS);
        for gpu in 0..MAX_GPUS {
            assert!(slot.granted[gpu] <= slot.charged[gpu] && slot.charged[gpu] <= MAX_BYTES);
        }
    }
    for gpu in 0..MAX_GPUS {
        assert!(snapshot.granted(gpu) <= snapshot.charged(gpu));
    }
}

/// The pure parser of a usage page: sound and scribbled ones, and bytes that are none.
pub fn usage_page(data: &[u8]) {
    assert!(usage::parse(data).is_err() || data.len() == USAGE_BYTES);
    let mut page = sound().1.clone();
    scribble(&mut page, data);
    match usage::parse(&page) {
        Ok(snapshot) => believable(&snapshot),
        Err(tampered) => assert!(!tampered.to_string().is_empty()),
    }
}

/// The plugin's handling of a scribbled, cut or grown usage file, and what the next process finds.
pub fn usage_file(data: &[u8]) {
    let dir = directory();
    let path = dir.path().join(USAGE_FILE);
    quota::create(dir.path(), &spec()).expect("room for pages");
    let mut page = sound().1.clone();
    let (&cut, data) = data.split_first().unwrap_or((&0, &[]));
    scribble(&mut page, data);
    std::fs::write(&path, &page).expect("room for pages");
    let file = std::fs::File::options().write(true).open(&path).expect("just made");
    match cut & 3 {
        1 => file.set_len(u64::from(cut) * 521).expect("a size"),
        2 => file.write_all_at(data, USAGE_BYTES as u64).expect("room for pages"),
        _ => {}
    }

    let usage = UsageFile::open(dir.path()).expect("a regular file");
    if let Ok(snapshot) = usage.snapshot() {
        believable(&snapshot);
    }
    usage.recover_dead().expect("whatever is in it");
    usage.restore(3).expect("room for pages");
    assert!(!usage.any_slot_locked());

    usage::create(dir.path(), 7).expect("it is put right");
    let snapshot = usage.snapshot().expect("as Tessera leaves it");
    assert_eq!((snapshot.generation, snapshot.slots.len()), (7, 0));
    let account = account(dir.path());
    account.reserve(0, 1 << 30).expect("all of it").commit(1 << 30, Kind::Plain).expect("fits");
    assert_eq!(usage.snapshot().expect("a sound owner").charged(0), 1 << 30);
}

/// A tenant's process and the plugin at a quota page that something damaged.
pub fn quota_page(data: &[u8]) {
    let dir = directory();
    let mut page = sound().0.clone();
    let (&cut, data) = data.split_first().unwrap_or((&0, &[]));
    scribble(&mut page, data);
    if cut & 1 != 0 {
        page.truncate(usize::from(cut) * 16);
    }
    std::fs::write(dir.path().join(QUOTA_FILE), &page).expect("room for pages");
    match QuotaReader::attach(dir.path()) {
        Ok(quota) => {
            assert!((1..=MAX_GPUS).contains(&quota.gpu_count()));
            for gpu in 0..quota.gpu_count() {
                assert!(!quota.uuid(gpu).is_empty());
                assert!(quota.memory_limit(gpu) <= MAX_BYTES);
                assert!(quota.context_overhead(gpu) <= MAX_BYTES);
                let _ = (quota.cores_millis(gpu), quota.policy(gpu), quota.window(gpu));
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Ok(writer) = QuotaWriter::open(dir.path()) {
        let found = writer.spec();
        assert!(!found.gpus.is_empty());
    }
    // A side that finds no sound page of its own replaces it.
    if quota::create(dir.path(), &spec()).is_err() {
        std::fs::remove_file(dir.path().join(QUOTA_FILE)).expect("just made");
        quota::create(dir.path(), &spec()).expect("room for pages");
    }
    let quota = QuotaWriter::open(dir.path()).expect("put right").spec();
    assert_eq!(quota, spec());
}
