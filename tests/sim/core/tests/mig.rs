//! MIG instances in the shared state: memory of their own, time of their own.

use simgpu::Session;
use simgpu::engine::Op;
use simgpu::memory::Use;

const MS: u64 = 1_000_000;
/// Units 0 and 1: instances of GPU 0; 2 and 3: two compute instances in one GPU instance; 4: GPU 1.
const CONFIG: &str = r#"
[costs]
launch_ns = 0
[[gpu]]
mig = ["1g.2gb", "2g.4gb", { profile = "2g.4gb", compute = ["1c", "1c"] }]
[[gpu]]
"#;

fn machine(dir: &tempfile::TempDir) -> Session {
    let session = Session::open_at(&dir.path().join("state"), Some(CONFIG)).unwrap();
    assert!(session.claim());
    session
}

#[test]
fn an_instances_memory_is_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let s = machine(&dir);
    assert_eq!([s.capacity(0), s.capacity(1)], [2 << 30, 4 << 30]);
    assert!(s.charge(0, Use::Allocation, 2 << 30));
    assert!(!s.charge(0, Use::Allocation, 1), "full");
    assert!(s.charge(1, Use::Allocation, 4 << 30), "and its neighbour is empty");
    assert_eq!([s.used(0), s.used(1), s.used(4)], [2 << 30, 4 << 30, 0]);
}

#[test]
fn compute_instances_share_their_gpu_instances_memory() {
    let dir = tempfile::tempdir().unwrap();
    let s = machine(&dir);
    assert!(s.charge(2, Use::Allocation, 3 << 30));
    assert_eq!([s.used(2), s.used(3)], [3 << 30, 3 << 30]);
    assert!(!s.charge(3, Use::Allocation, (1 << 30) + 1));
    assert!(s.charge(3, Use::Allocation, 1 << 30));
    assert_eq!(s.processes(2)[0].used_bytes, 3 << 30, "each has its own processes");
    assert_eq!(s.processes(3)[0].used_bytes, 1 << 30);
}

#[test]
fn instances_do_not_take_each_others_time() {
    let dir = tempfile::tempdir().unwrap();
    let s = machine(&dir);
    // Of one process, which would be one queue on one GPU.
    let channels = [0, 1, 2, 3].map(|unit| s.open_channel(unit).unwrap());
    let last = channels.map(|channel| s.submit(channel, 0, Op::Compute(50 * MS)));
    for (channel, last) in channels.into_iter().zip(last) {
        s.wait(channel, last);
    }
    // Submitted within less than one takes, all are done when one is done, by the model's clock.
    let done = [0, 1, 2, 3].map(|at| s.finish_ns(channels[at], last[at]).unwrap());
    let (first, end) = (done.iter().min().unwrap(), done.iter().max().unwrap());
    assert!(end - first < 50 * MS, "one after the other: {done:?}");
    assert_eq!([0, 1, 2, 3].map(|unit| s.gpu_busy(unit).0), [50 * MS; 4]);
}

#[test]
fn a_fault_is_attributed_to_a_gpu_instance() {
    let dir = tempfile::tempdir().unwrap();
    let s = machine(&dir);
    s.inject_xid_in(0, Some(2), 63);
    s.inject_xid(0, 79);
    let found = [0, 1].map(|n| s.xid(n).map(|e| (e.gpu, e.code, e.gpu_instance)));
    assert_eq!(found, [Some((0, 63, Some(2))), Some((0, 79, None))]);
}
