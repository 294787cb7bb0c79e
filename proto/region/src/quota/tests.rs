use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::Ordering;

use tempfile::TempDir;

use super::*;
use crate::layout::{
    GATE_CLOSED, GATE_SOLO, HEARTBEAT_STALE_NS, MAX_BYTES, QUOTA_FILE, gate_epoch, gate_state,
    gate_word,
};
use crate::{PageFault, prepare_dir, remove_pages};

fn gpu(index: u64) -> GpuQuota {
    GpuQuota {
        uuid: format!("GPU-00000000-0000-0000-0000-{index:012}"),
        memory_limit_bytes: 1000 + index,
        context_overhead_bytes: 10 + index,
        cores_millis: 250,
        policy: Policy::Strict,
    }
}

fn spec(gpus: u64) -> QuotaSpec {
    QuotaSpec {
        allocation: "0123456789abcdef".into(),
        generation: 7,
        gpus: (0..gpus).map(gpu).collect(),
    }
}

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn file(dir: &TempDir) -> std::path::PathBuf {
    dir.path().join(QUOTA_FILE)
}

/// The fault of creating one GPU's page where `make` has put something else.
fn fault_after(make: impl FnOnce(&Path)) -> PageFault {
    let dir = dir();
    make(&file(&dir));
    let error = create(dir.path(), &spec(1)).unwrap_err();
    assert_eq!(error.path, file(&dir));
    assert!(!error.to_string().is_empty());
    error.fault
}

/// Why one cannot attach to what `make` has made.
fn attach_fault_after(make: impl FnOnce(&Path)) -> String {
    let dir = dir();
    make(&file(&dir));
    let error = QuotaReader::attach(dir.path()).unwrap_err().to_string();
    let (path, why) = error.split_once(": ").unwrap();
    assert!(path.ends_with("/quota"), "{error}");
    why.to_owned()
}

/// A sound page with some of its bytes replaced.
fn page_with(at: usize, bytes: &'static [u8]) -> impl FnOnce(&Path) {
    move |path| {
        create(path.parent().unwrap(), &spec(2)).unwrap();
        let mut page = fs::read(path).unwrap();
        page[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(path, page).unwrap();
    }
}

#[test]
fn both_sides_read_what_was_created() {
    let dir = dir();
    let writer = create(dir.path(), &spec(16)).unwrap();
    assert_eq!(writer.spec(), spec(16));
    assert_eq!(QuotaWriter::open(dir.path()).unwrap().spec(), spec(16));
    let reader = QuotaReader::attach(dir.path()).unwrap();
    assert_eq!((reader.gpu_count(), reader.generation()), (16, 7));
    assert_eq!(reader.allocation(), Some("0123456789abcdef"));
    for (index, gpu) in spec(16).gpus.iter().enumerate() {
        assert_eq!(reader.uuid(index), gpu.uuid);
        assert_eq!(reader.memory_limit(index), gpu.memory_limit_bytes);
        assert_eq!(reader.context_overhead(index), gpu.context_overhead_bytes);
        assert_eq!((reader.cores_millis(index), reader.policy(index)), (250, Policy::Strict));
    }
    let meta = fs::metadata(file(&dir)).unwrap();
    assert_eq!((meta.len(), meta.mode() & 0o777), (4096, 0o644));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "a temporary file is left");
}

#[test]
fn what_the_plugin_changes_the_tenant_sees() {
    let dir = dir();
    let writer = create(dir.path(), &spec(2)).unwrap();
    let reader = QuotaReader::attach(dir.path()).unwrap();
    writer.set_memory_limit(1, 5);
    assert_eq!((reader.memory_limit(0), reader.memory_limit(1)), (1000, 5));
    writer.set_memory_limit(1, u64::MAX);
    assert_eq!(reader.memory_limit(1), MAX_BYTES);
    writer.set_observed_overhead(0, 33);
    assert_eq!((reader.observed_overhead(0), reader.context_overhead(0)), (33, 10));
    assert_eq!((reader.effective_limit(0), reader.effective_limit(1)), (967, MAX_BYTES));
    writer.set_observed_overhead(0, 1001);
    assert_eq!((reader.effective_limit(0), reader.memory_limit(0)), (0, 1000));
    writer.set_observed_overhead(0, u64::MAX);
    assert_eq!((writer.observed_overhead(0), reader.observed_overhead(0)), (MAX_BYTES, MAX_BYTES));
    writer.set_observed_overhead(0, 0);
    writer.set_heartbeat(7);
    let stale = 8 + HEARTBEAT_STALE_NS;
    assert_eq!(reader.departing(0, 8), None);
    for any in [true, false] {
        writer.set_departing(0, any);
        assert_eq!((reader.departing(0, 8), reader.departing(0, stale)), (Some(any), None));
    }
    writer.set_heartbeat(99);
    writer.set_window(0, 4, 500);
    writer.set_cores(0, 500, Policy::Burst);
    assert_eq!((reader.heartbeat_ns(), reader.window(0), reader.window_us(0)), (99, 4, 500));
    assert_eq!(reader.idle_ns(0), 100_000, "of an arbiter that does not say");
    writer.set_idle(0, 450);
    assert_eq!(reader.idle_ns(0), 450_000);
    assert_eq!(reader.arbiter_ns(), 0, "no arbiter yet");
    writer.set_arbiter(7);
    writer.set_phase(0, 250);
    assert_eq!((reader.arbiter_ns(), reader.phase_millis(0)), (7, 250));
    assert_eq!((reader.cores_millis(0), reader.policy(0)), (500, Policy::Burst));
    // SAFETY: the pointer stays valid for the life of the process.
    let gate = unsafe { &*reader.gate_word(0) };
    assert_eq!(gate.load(Ordering::Relaxed), gate_word(0, GATE_SOLO));
    assert_eq!(writer.set_gate(0, GATE_CLOSED), 1);
    assert_eq!(gate.load(Ordering::Relaxed), gate_word(1, GATE_CLOSED));
    assert_eq!(writer.set_gate(0, GATE_CLOSED), 2, "a closing of its own");
    assert_eq!((gate_state(writer.gate(0)), gate_epoch(writer.gate(0))), (GATE_CLOSED, 2));
}

#[test]
fn creating_again_updates_the_file_that_containers_have_mapped() {
    let dir = dir();
    drop(create(dir.path(), &spec(1)).unwrap());
    let reader = QuotaReader::attach(dir.path()).unwrap();
    let inode = fs::metadata(file(&dir)).unwrap().ino();
    let mut next = spec(1);
    next.generation = 8;
    next.gpus[0].memory_limit_bytes = 77;
    next.gpus[0].policy = Policy::None;
    assert_eq!(create(dir.path(), &next).unwrap().spec(), next);
    assert_eq!(fs::metadata(file(&dir)).unwrap().ino(), inode);
    assert_eq!((reader.memory_limit(0), reader.generation()), (77, 8));
    assert_eq!(reader.policy(0), Policy::None);
}

#[test]
fn a_page_of_another_allocation_or_other_gpus_is_left_alone() {
    for other in [
        QuotaSpec { allocation: "fedcba".into(), ..spec(1) },
        QuotaSpec { gpus: vec![gpu(5)], ..spec(1) },
        spec(2),
    ] {
        let dir = dir();
        create(dir.path(), &spec(1)).unwrap();
        let error = create(dir.path(), &other).unwrap_err();
        let found = "0123456789abcdef".to_owned();
        assert!(matches!(&error.fault, PageFault::Foreign { found: f } if *f == found), "{error}");
        assert_eq!(QuotaWriter::open(dir.path()).unwrap().spec(), spec(1));
    }
}

#[test]
fn whatever_else_is_there_is_distinguished() {
    let io = |path: &Path, text: &str| fs::write(path, text).unwrap();
    assert!(matches!(fault_after(|at| fs::create_dir(at).unwrap()), PageFault::IsDirectory));
    assert!(matches!(fault_after(|at| symlink("/etc/passwd", at).unwrap()), PageFault::NotRegular));
    assert!(matches!(fault_after(fifo), PageFault::NotRegular));
    assert!(matches!(fault_after(|at| io(at, "")), PageFault::WrongSize(0)));
    assert!(matches!(fault_after(|at| io(at, &"x".repeat(4097))), PageFault::WrongSize(4097)));
    assert!(matches!(fault_after(|at| io(at, &"x".repeat(4096))), PageFault::BadMagic));
    assert!(matches!(fault_after(page_with(8, &[9])), PageFault::Abi { found: 9 }));
    assert!(matches!(fault_after(page_with(12, &[17])), PageFault::BadMagic));
    for of_another in [page_with(32, &[0]), page_with(256, &[0])] {
        assert!(matches!(fault_after(of_another), PageFault::Foreign { .. }));
    }
    let absent = QuotaWriter::open(dir().path()).unwrap_err().fault;
    assert!(matches!(absent, PageFault::Io { call: "open", .. }));
    let no_dir = create(Path::new("/nonexistent"), &spec(1)).unwrap_err().fault;
    assert!(matches!(no_dir, PageFault::Io { call: "create", .. }));
}

#[test]
fn a_tenants_reasons_not_to_attach_are_distinguished() {
    assert_eq!(attach_fault_after(|_| ()), "absent");
    assert_eq!(attach_fault_after(|at| fs::create_dir(at).unwrap()), "not a regular file");
    assert_eq!(attach_fault_after(|at| symlink("x", at).unwrap()), "not a regular file");
    assert_eq!(attach_fault_after(fifo), "not a regular file");
    assert_eq!(
        attach_fault_after(|at| fs::write(at, [0; 4095]).unwrap()),
        "4095 bytes long instead of 4096"
    );
    assert_eq!(
        attach_fault_after(|at| fs::write(at, [0; 4096]).unwrap()),
        "not a Tessera page (magic 0x0000000000000000)"
    );
    assert_eq!(attach_fault_after(page_with(8, &[2])), "page ABI 2, this library speaks 1");
    assert_eq!(attach_fault_after(page_with(12, &[0])), "impossible count 0");
    assert_eq!(attach_fault_after(page_with(12, &[17])), "impossible count 17");
    assert_eq!(attach_fault_after(page_with(256, b"\n")), "impossible UUID of GPU 0");
    assert_eq!(attach_fault_after(page_with(256 + 192 + 63, b"x")), "impossible UUID of GPU 1");
    let same = attach_fault_after(|path| {
        page_with(0, b"T")(path);
        let mut page = fs::read(path).unwrap();
        page.copy_within(256..256 + 64, 256 + 192);
        fs::write(path, page).unwrap();
    });
    assert_eq!(same, "impossible UUID of GPU 1");
}

#[test]
fn impossible_quotas_are_refused_before_anything_is_written() {
    let with = |change: fn(&mut QuotaSpec)| {
        let mut spec = spec(2);
        change(&mut spec);
        let dir = dir();
        let error = create(dir.path(), &spec).unwrap_err();
        assert!(matches!(error.fault, PageFault::Invalid(_)), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    };
    with(|spec| spec.gpus.clear());
    with(|spec| spec.gpus = (0..17).map(gpu).collect());
    with(|spec| spec.gpus[1].uuid = "GPU\0".into());
    with(|spec| spec.gpus[0].memory_limit_bytes = MAX_BYTES + 1);
    with(|spec| spec.gpus[0].context_overhead_bytes = MAX_BYTES + 1);
}

#[test]
fn empty_directories_in_the_pages_places_are_replaced() {
    let dir = dir();
    let pages = dir.path().join("a/b");
    assert_eq!(prepare_dir(&pages).unwrap(), Vec::<std::path::PathBuf>::new());
    fs::create_dir(pages.join("quota")).unwrap();
    fs::create_dir(pages.join("usage")).unwrap();
    fs::write(pages.join(".tessera-new.1.2"), "left by a killed plugin").unwrap();
    assert_eq!(prepare_dir(&pages).unwrap(), [pages.join("quota"), pages.join("usage")]);
    assert_eq!(fs::read_dir(&pages).unwrap().count(), 0);
    create(&pages, &spec(1)).unwrap();
    assert!(prepare_dir(&pages).unwrap().is_empty());
    // As somebody's umask may have made it.
    for mode in [0o700, 0o777, 0o750] {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&pages, std::fs::Permissions::from_mode(mode)).unwrap();
        assert!(!crate::is_open(&pages));
        prepare_dir(&pages).unwrap();
        assert!(crate::is_open(&pages), "{mode:o}");
    }

    fs::create_dir_all(pages.join("usage/something")).unwrap();
    assert!(matches!(prepare_dir(&pages).unwrap_err().fault, PageFault::IsDirectory));
    let file = pages.join("quota");
    assert!(matches!(prepare_dir(&file).unwrap_err().fault, PageFault::NotRegular));

    remove_pages(&dir.path().join("nothing")).unwrap();
    fs::remove_dir_all(pages.join("usage")).unwrap();
    remove_pages(&pages).unwrap();
    assert_eq!(fs::read_dir(&pages).unwrap().count(), 0);
}

fn fifo(path: &Path) {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}
