//! Pages, children, and memory shared with them.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tessera_region::account::Account;
use tessera_region::quota::{self, GpuQuota, Policy, QuotaReader, QuotaSpec};
use tessera_region::usage::{self, UsageMap};

/// An allocation of one GPU in a directory of its own.
pub struct Pages {
    pub dir: TempDir,
}

impl Pages {
    pub fn new(limit: u64) -> Self {
        // As in production, a tmpfs where there is one.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let gpu = GpuQuota {
            uuid: "GPU-00000000-0000-0000-0000-000000000000".into(),
            memory_limit_bytes: limit,
            context_overhead_bytes: 0,
            cores_millis: 1000,
            policy: Policy::None,
        };
        let spec = QuotaSpec { allocation: "a".into(), generation: 1, gpus: vec![gpu] };
        // There is no driver that could hold anything for longer than its process lives.
        let quota = quota::create(dir.path(), &spec).unwrap();
        quota.set_departure(Duration::from_micros(1));
        usage::create(dir.path(), 1).unwrap();
        Self { dir }
    }

    pub fn usage(&self) -> usage::UsageFile {
        usage::UsageFile::open(self.dir.path()).unwrap()
    }

    pub fn spawn(&self, role: &str, index: usize) -> Tenant {
        spawn_in(self.dir.path(), role, index)
    }
}

/// Runs this program as a tenant's process with this role.
pub fn spawn_in(dir: &Path, role: &str, index: usize) -> Tenant {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg(format!("child:{role}"))
        .arg(dir)
        .arg(index.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    Tenant { child, out }
}

/// Attaches and claims, as a tenant's process does at its first driver call.
pub fn account(dir: &Path) -> Account {
    let usage = UsageMap::attach(dir).unwrap();
    let slot = usage.claim().unwrap();
    Account::new(QuotaReader::attach(dir).unwrap(), usage, slot)
}

/// A child, killed with SIGKILL when dropped.
pub struct Tenant {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Tenant {
    /// Sends SIGKILL and waits until the process is gone.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The next line that the child prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub fn succeeded(&mut self) -> bool {
        self.child.wait().unwrap().success()
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends with the parent, and by itself should the parent wait for ever.
pub fn die_with_parent() {
    // SAFETY: SIGALRM's default action ends this process; nothing here handles it.
    unsafe { libc::alarm(600) };
    // SAFETY: changes only what happens to this process when its parent dies.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Waits until `condition`, at most two minutes, and in many looks: a machine that stood still meanwhile
/// says nothing about those who are waited for.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    const LOOKS: u32 = 20_000;
    let (start, mut looks) = (Instant::now(), 0);
    while !condition() {
        let is_over = looks > LOOKS && start.elapsed() > Duration::from_secs(120);
        assert!(!is_over, "waited in vain until {what}");
        looks += 1;
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// `T`, made of atomics and zero at first, shared by all processes that name the same file.
pub fn shared<T>(dir: &Path) -> &'static T {
    let path = dir.join("control");
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.unwrap();
    file.set_len(u64::try_from(size_of::<T>()).unwrap()).unwrap();
    // SAFETY: a new mapping of a file that is long enough and never gets shorter; scenarios use
    // structures of atomics, for which every byte is valid; it is never unmapped.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            size_of::<T>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        &*at.cast::<T>()
    }
}

/// xorshift64*, seeded differently per process and thread.
pub struct Random(u64);

impl Random {
    pub fn new(seed: usize) -> Self {
        Self((u64::try_from(seed).unwrap() + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) % bound
    }
}
