//! The shared state between real processes: creation, sharing, death.
//!
//! Each test forks children that open the state for themselves; a child ends with `_exit` or is
//! killed, so that nothing of the parent's runs in it.

use simgpu::Session;
use simgpu::engine::Op;
use simgpu::layout::{MAX_SLOTS, Shared};
use simgpu::memory::ObjectId;
use simgpu::memory::Use;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;
const CONFIG: &str = "[memory]\nteardown_ms = 30\n[costs]\nlaunch_ns = 0\n";
/// A generous bound for things that take milliseconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// A child process that is killed when dropped.
struct Child(libc::pid_t);

impl Child {
    /// Runs `act` in a child, which then exits with its answer, or waits to be killed.
    fn run(act: impl FnOnce() -> i32) -> Child {
        // SAFETY: the child uses memory and system calls only, and leaves with _exit; glibc keeps
        // its allocator usable in a forked child.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork failed");
        if pid == 0 {
            let code = act();
            // SAFETY: ends this process.
            unsafe { libc::_exit(code) };
        }
        Child(pid)
    }

    fn wait(mut self) -> i32 {
        let status = reap(self.0);
        self.0 = 0;
        assert!(libc::WIFEXITED(status), "child died: {status:#x}");
        libc::WEXITSTATUS(status)
    }

    fn kill(self) {
        drop(self);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.0 > 0 {
            // SAFETY: our own child, not yet reaped.
            unsafe { libc::kill(self.0, libc::SIGKILL) };
            reap(self.0);
        }
    }
}

fn reap(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is valid, `pid` is our own child.
    while unsafe { libc::waitpid(pid, &raw mut status, 0) } < 0 {}
    status
}

fn sleep_forever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// A word that parent and children share, outside the state under test.
struct Flag(&'static AtomicU32);

impl Flag {
    fn new() -> Flag {
        // SAFETY: a fresh shared anonymous page, never unmapped.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: mapped, zeroed, aligned.
        Flag(unsafe { &*at.cast::<AtomicU32>() })
    }
    fn raise(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn reached(&self, n: u32) {
        eventually("a child to get there", || self.0.load(Ordering::SeqCst) >= n);
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < PATIENCE, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Where a state may be, as long as the directory is there.
fn state() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    (dir, path)
}

fn open(path: &Path) -> Session {
    Session::open_at(path, Some(CONFIG)).unwrap()
}

fn open_and_claim(path: &Path) -> Session {
    let session = open(path);
    assert!(session.claim());
    session
}

/// A child with a slot that has done `act` and waits to be killed.
fn holder(path: &Path, act: impl FnOnce(&Session)) -> Child {
    let done = Flag::new();
    let child = Child::run(|| {
        let s = open_and_claim(path);
        act(&s);
        done.raise();
        sleep_forever()
    });
    done.reached(1);
    child
}

#[test]
fn processes_that_start_together_share_one_state() {
    let (_dir, path) = state();
    let (ready, done) = (Flag::new(), Flag::new());
    let children: Vec<_> = (0..8)
        .map(|_| {
            Child::run(|| {
                let s = open_and_claim(&path);
                let ok = s.charge(0, Use::Own, 5 * MIB);
                ready.raise();
                done.reached(1);
                i32::from(!ok)
            })
        })
        .collect();
    ready.reached(8);
    assert_eq!(open(&path).used(0), 8 * 5 * MIB);
    done.raise();
    for child in children {
        assert_eq!(child.wait(), 0);
    }
}

#[test]
fn a_forked_child_keeps_its_parents_memory_in_use() {
    let (_dir, path) = state();
    let ready = Flag::new();
    let grandchild = Flag::new();
    let parent = Child::run(|| {
        let s = open_and_claim(&path);
        s.charge(0, Use::Own, 64 * MIB);
        let heir = Child::run(|| {
            ready.raise();
            grandchild.reached(1);
            0
        });
        ready.reached(1);
        // Leaves without reaping: the heir lives on.
        std::mem::forget(heir);
        0
    });
    assert_eq!(parent.wait(), 0);
    let s = open(&path);
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(s.used(0), 64 * MIB);
    grandchild.raise();
    eventually("the heir's end", || s.used(0) == 0);
}

#[test]
fn a_process_that_closes_every_descriptor_still_owns_its_slot() {
    let (_dir, path) = state();
    let other = holder(&path, |s| assert!(s.charge(0, Use::Own, 32 * MIB)));
    let closer = holder(&path, |s| {
        assert!(s.charge(0, Use::Own, 16 * MIB));
        // SAFETY: closes descriptors that nothing below uses.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
        // A foreign file takes the number: its locks must not be taken for ours.
        let _foreign = std::fs::File::open("/proc/self/exe");
        assert_eq!(s.processes(0).len(), 2);
    });
    let s = open(&path);
    assert_eq!(s.processes(0).len(), 2);
    assert_eq!(s.used(0), 48 * MIB);
    other.kill();
    closer.kill();
    eventually("both processes' memory", || s.used(0) == 0);
}

#[test]
fn killing_the_holder_of_the_lock_wedges_nobody() {
    let (_dir, path) = state();
    let child = holder(&path, |s| {
        assert!(s.charge(0, Use::Own, MIB));
        std::mem::forget(s.lock());
    });
    child.kill();
    let s = open_and_claim(&path);
    eventually("the dead holder's memory", || s.used(0) == 0);
    assert!(s.charge(0, Use::Own, MIB));
}

#[test]
fn a_storm_of_kills_leaves_a_whole_state() {
    let (_dir, path) = state();
    let keeper = open_and_claim(&path);
    let channel = keeper.open_channel(0).unwrap();
    for round in 0..40u64 {
        let started = Flag::new();
        let children: Vec<_> = (0..3)
            .map(|_| {
                Child::run(|| {
                    let s = open_and_claim(&path);
                    let channel = s.open_channel(0).unwrap();
                    started.raise();
                    loop {
                        s.charge(0, Use::Own, MIB);
                        let seq = s.submit(channel, 0, Op::Compute(20_000));
                        s.is_complete(channel, seq);
                        s.uncharge(0, Use::Own, MIB);
                    }
                })
            })
            .collect();
        started.reached(3);
        std::thread::sleep(Duration::from_micros(100 + 37 * round));
        drop(children);
        let seq = keeper.submit(channel, 0, Op::Compute(1_000));
        keeper.wait(channel, seq);
        let mut locked = keeper.lock();
        locked.advance();
        assert!(locked.is_valid());
    }
    eventually("all memory", || keeper.used(0) == 0);
    assert!(keeper.processes(0).is_empty());
}

#[test]
fn a_state_in_use_keeps_its_configuration() {
    let (_dir, path) = state();
    let user = holder(&path, |_| ());
    let other = "[[gpu]]\nmemory = \"1GiB\"\n";
    let refused = Session::open_at(&path, Some(other)).err().unwrap().to_string();
    assert!(refused.contains("another configuration"), "{refused}");
    assert_eq!(Session::open_at(&path, None).unwrap().config().gpus.len(), 2);
    user.kill();
}

#[test]
fn an_idle_state_takes_a_new_configuration() {
    let (_dir, path) = state();
    let first = Child::run(|| {
        open(&path);
        0
    });
    assert_eq!(first.wait(), 0);
    let s = Session::open_at(&path, Some("[[gpu]]\nmemory = \"1GiB\"\n")).unwrap();
    assert_eq!(s.config().gpus.len(), 1);
}

#[test]
fn a_half_made_state_is_made_again() {
    let (_dir, path) = state();
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(std::mem::size_of::<Shared>() as u64).unwrap();
    drop(file);
    assert_eq!(open(&path).config().gpus.len(), 2);
}

#[test]
fn a_file_that_is_not_ours_is_left_alone() {
    let (_dir, path) = state();
    std::fs::write(&path, "precious").unwrap();
    let refused = Session::open_at(&path, Some(CONFIG)).err().unwrap().to_string();
    assert!(refused.contains("left alone"), "{refused}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn slots_run_out_and_come_back() {
    let (_dir, path) = state();
    let ready = Flag::new();
    let claimed = |path: &Path, ready: &Flag| {
        Child::run(|| {
            let s = open(path);
            let code = if s.claim() { 1 } else { 2 };
            ready.0.fetch_add(if code == 1 { 1 } else { 1000 }, Ordering::SeqCst);
            sleep_forever()
        })
    };
    let holders: Vec<_> = (0..MAX_SLOTS).map(|_| claimed(&path, &ready)).collect();
    ready.reached(u32::try_from(MAX_SLOTS).unwrap());
    assert!(!open(&path).claim());
    drop(holders);
    let s = open(&path);
    eventually("a slot", || s.claim());
}

const FIRST: ObjectId = ObjectId { index: 0, generation: 1 };

#[test]
fn shared_memory_counts_once_and_moves_to_who_holds_it() {
    let (_dir, path) = state();
    let child = holder(&path, |s| {
        assert!(s.charge(0, Use::Own, 6 * MIB) && s.charge(0, Use::Own, MIB));
        assert_eq!(s.share(0, 6 * MIB), Some(FIRST));
    });
    let s = open_and_claim(&path);
    assert_eq!(s.hold(FIRST), Some((0, 6 * MIB)));
    assert_eq!(s.used(0), 7 * MIB);
    let bytes = |s: &Session| s.processes(0).iter().map(|p| p.used_bytes).collect::<Vec<_>>();
    assert_eq!(bytes(&s), [7 * MIB], "for its maker");
    child.kill();
    eventually("the maker's teardown", || s.used(0) == 6 * MIB);
    assert_eq!(bytes(&s), [6 * MIB], "for its holder");
    s.let_go(FIRST);
    assert_eq!((s.used(0), s.hold(FIRST)), (0, None));
}

// === MIG instances: memory of their own, time of their own ===

/// Units 0 and 1: instances of GPU 0; 2 and 3: two compute instances in one GPU instance; 4: GPU 1.
const INSTANCES: &str = r#"
[costs]
launch_ns = 0
[[gpu]]
mig = ["1g.2gb", "2g.4gb", { profile = "2g.4gb", compute = ["1c", "1c"] }]
[[gpu]]
"#;

fn machine(path: &Path) -> Session {
    let session = Session::open_at(path, Some(INSTANCES)).unwrap();
    assert!(session.claim());
    session
}

#[test]
fn an_instances_memory_is_its_own() {
    let (_dir, path) = state();
    let s = machine(&path);
    assert_eq!([s.capacity(0), s.capacity(1)], [2 << 30, 4 << 30]);
    assert!(s.charge(0, Use::Own, 2 << 30));
    assert!(!s.charge(0, Use::Own, 1), "full");
    assert!(s.charge(1, Use::Own, 4 << 30), "and its neighbour is empty");
    assert_eq!([s.used(0), s.used(1), s.used(4)], [2 << 30, 4 << 30, 0]);
}

#[test]
fn compute_instances_share_their_gpu_instances_memory() {
    let (_dir, path) = state();
    let s = machine(&path);
    assert!(s.charge(2, Use::Own, 3 << 30));
    assert_eq!([s.used(2), s.used(3)], [3 << 30, 3 << 30]);
    assert!(!s.charge(3, Use::Own, (1 << 30) + 1));
    assert!(s.charge(3, Use::Own, 1 << 30));
    assert_eq!(s.processes(2)[0].used_bytes, 3 << 30, "each has its own processes");
    assert_eq!(s.processes(3)[0].used_bytes, 1 << 30);
}

#[test]
fn instances_do_not_take_each_others_time() {
    let (_dir, path) = state();
    let s = machine(&path);
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
