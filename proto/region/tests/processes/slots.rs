//! The life of a slot: death, fork, closed descriptors, exec; leases; descriptor exhaustion.

use std::ffi::{CStr, CString};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::ptr;
use std::time::{Duration, Instant};

use tessera_region::PageFault;
use tessera_region::account::Reason;
use tessera_region::layout::{Kind, USAGE_FILE};
use tessera_region::usage::{self, UsageFile, UsageMap};

use crate::support::{Pages, account, spawn_in, wait_until};

const LIMIT: u64 = 1000;
/// Of which a tenant's process holds this and has the rest reserved.
const GRANTED: u64 = 600;

/// A tenant's process with one of the roles below.
pub fn child(role: &str, dir: &Path) {
    match role {
        "full" => return fill(dir),
        "lease" => return hold_lease(dir),
        "starved" => return starve(dir),
        _ => {}
    }
    let account = account(dir);
    account.reserve(0, 900).unwrap().commit(GRANTED, Kind::Plain).unwrap();
    // Dies in the middle of a driver call.
    let _pending = account.reserve(0, LIMIT - GRANTED).unwrap();
    match role {
        "hold" => ready(""),
        "fork" => {
            // SAFETY: no other thread exists; the child only sleeps.
            let forked = unsafe { libc::fork() };
            if forked == 0 {
                // SAFETY: only async-signal-safe calls; ends by itself if the test does not end it.
                unsafe {
                    libc::alarm(20);
                    libc::pause();
                    libc::_exit(0);
                }
            }
            ready(&forked.to_string());
        }
        "close" => {
            ready("");
            // SAFETY: nothing in this process uses a descriptor above 2 any more.
            unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32) };
            ready("");
        }
        "exec" => {
            let error = std::process::Command::new("sleep").arg("20").exec();
            panic!("sleep: {error}");
        }
        _ => panic!("no role {role}"),
    }
    loop {
        std::thread::park();
    }
}

fn ready(what: &str) {
    println!("{what}");
    std::io::stdout().flush().unwrap();
}

pub fn killed() -> String {
    const TIMES: usize = 40;
    let pages = Pages::new(LIMIT);
    let survivor = pages.account();
    let mut reserve = Vec::new();
    let mut since_kill = Vec::new();
    for _ in 0..TIMES {
        let mut tenant = pages.spawn("hold", 0);
        tenant.line();
        let refused = survivor.reserve(0, LIMIT - GRANTED + 1).unwrap_err();
        assert_eq!(refused.reason, Reason::OverQuota);
        let kill = Instant::now();
        tenant.kill();
        let dead = Instant::now();
        survivor.reserve(0, LIMIT).unwrap().commit(LIMIT, Kind::Plain).unwrap();
        reserve.push(dead.elapsed());
        since_kill.push(kill.elapsed());
        survivor.release(0, LIMIT, Kind::Plain);
    }
    let worst = |times: Vec<Duration>| times.into_iter().max().unwrap();
    let (reserve, since_kill) = (worst(reserve), worst(since_kill));
    assert!(reserve < Duration::from_secs(1), "{reserve:?}");
    format!("worst of {TIMES}: {reserve:.0?} after death, {since_kill:.0?} after kill(2)")
}

pub fn forked() -> String {
    let pages = Pages::new(LIMIT);
    let usage = pages.usage();
    let mut tenant = pages.spawn("fork", 0);
    let forked: i32 = tenant.line().parse().unwrap();
    tenant.kill();
    assert!(usage.slot_locked(0));
    assert!(usage.any_slot_locked());
    assert_eq!(usage.recover_dead().unwrap().slots, 0);
    let refused = pages.account().reserve(0, LIMIT - GRANTED + 1).unwrap_err();
    assert_eq!(refused.reason, Reason::OverQuota);

    // SAFETY: the process that `fork` made; it is nobody's child, so its pid was not reused.
    unsafe { libc::kill(forked, libc::SIGKILL) };
    wait_until("the last sharer is gone", || !usage.slot_locked(0));
    let recovered = usage.recover_dead().unwrap();
    assert_eq!((recovered.bytes[0], usage.snapshot().unwrap().charged(0)), (LIMIT, 0));
    String::new()
}

pub fn closed() -> String {
    let pages = Pages::new(LIMIT);
    let usage = pages.usage();
    let mut tenant = pages.spawn("close", 0);
    tenant.line();
    tenant.line();
    assert!(usage.slot_locked(0));
    assert_eq!(usage.recover_dead().unwrap().slots, 0);
    tenant.kill();
    assert!(!usage.any_slot_locked());
    assert_eq!(usage.recover_dead().unwrap().bytes[0], LIMIT);
    String::new()
}

pub fn executed() -> String {
    let pages = Pages::new(LIMIT);
    let usage = pages.usage();
    let _tenant = pages.spawn("exec", 0);
    let mut recovered = 0;
    wait_until("exec has dropped the mapping", || {
        recovered += usage.recover_dead().unwrap().bytes[0];
        recovered == LIMIT
    });
    String::new()
}

fn hold_lease(dir: &Path) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(dir.join(USAGE_FILE));
    let file = std::os::fd::OwnedFd::from(file.unwrap());
    // SAFETY: plain calls on an open descriptor; the signal that a lease break sends is ignored.
    let lease = unsafe {
        libc::signal(libc::SIGIO, libc::SIG_IGN);
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK)
    };
    ready(if lease == 0 { "held" } else { "refused" });
    loop {
        std::thread::park();
    }
}

pub fn leased() -> String {
    let pages = Pages::new(LIMIT);
    let mut tenant = pages.spawn("lease", 0);
    assert_eq!(tenant.line(), "held");
    let start = Instant::now();
    let open = UsageFile::open(pages.dir.path()).unwrap_err();
    assert!(matches!(open.fault, PageFault::Busy), "{open}");
    let create = usage::create(pages.dir.path(), 2).unwrap_err();
    assert!(matches!(create.fault, PageFault::Busy), "{create}");
    let waited = start.elapsed();
    assert!(waited < Duration::from_secs(1), "waited {waited:?} for the lease");
    tenant.kill();

    // A process that has it open already cannot be kept out.
    let usage = pages.usage();
    let mut tenant = pages.spawn("lease", 0);
    assert_eq!(tenant.line(), "refused");
    assert!(usage.snapshot().is_ok());
    String::new()
}

fn starve(dir: &Path) {
    let usage = UsageMap::attach(dir).unwrap();
    let account = account(dir);
    // SAFETY: lowers a limit of this process.
    unsafe {
        let none = libc::rlimit { rlim_cur: 3, rlim_max: 3 };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none), 0);
    }
    let refused = usage.claim().unwrap_err().to_string();
    assert!(refused.starts_with("no file descriptor left"), "{refused}");
    account.reserve(0, LIMIT).unwrap().commit(LIMIT, Kind::Plain).unwrap();
    assert_eq!(account.reserve(0, 1).unwrap_err().reason, Reason::OverQuota);
    account.release(0, LIMIT, Kind::Plain);

    // A collision, without a queue: two threads, one of which holds on for a while.
    let first = account.reserve(0, 600).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| account.reserve(0, 600).map(drop));
        std::thread::sleep(Duration::from_millis(20));
        drop(first);
        second.join().unwrap().unwrap();
    });
}

pub fn starved() -> String {
    let pages = Pages::new(LIMIT);
    assert!(pages.spawn("starved", 0).succeeded());
    String::new()
}

/// In a mount namespace of its own, on a file system with room for one page and no more.
fn fill(dir: &Path) {
    let target = CString::new(dir.as_os_str().as_encoded_bytes()).unwrap();
    let mount = |flags: libc::c_ulong, options: &CStr| {
        // SAFETY: NUL-terminated strings that outlive the call.
        let result = unsafe {
            let (kind, options) = (c"tmpfs".as_ptr(), options.as_ptr().cast());
            libc::mount(kind, target.as_ptr(), kind, flags, options)
        };
        assert_eq!(result, 0, "mount: {}", std::io::Error::last_os_error());
    };
    // SAFETY: this process has one thread, and shares its mounts with nobody afterwards.
    let unshared = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            || libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) == 0
    };
    if !unshared {
        return ready("no mount namespaces here");
    }
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: as `mount`; keeps what follows out of the namespace this one was copied from.
    unsafe { libc::mount(c"none".as_ptr(), c"/".as_ptr(), ptr::null(), private, ptr::null()) };
    mount(0, c"size=8k");
    let full = usage::create(dir, 1).unwrap_err();
    assert!(matches!(full.fault, PageFault::NoSpace(bytes) if bytes > 8192), "{full}");
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    mount(libc::MS_REMOUNT, c"size=1m");
    assert!(usage::create(dir, 1).unwrap().fresh);

    // A tenant punched the memory out of its page, and the file system filled up meanwhile.
    let page = std::fs::OpenOptions::new().write(true).open(dir.join(USAGE_FILE)).unwrap();
    page.set_len(0).unwrap();
    std::fs::write(dir.join("neighbour"), vec![1; 1 << 21]).unwrap_err();
    let full = UsageFile::open(dir).unwrap().restore(1).unwrap_err();
    assert!(matches!(full.fault, PageFault::NoSpace(_)), "{full}");

    // A sound page is renewed without any memory.
    std::fs::remove_file(dir.join("neighbour")).unwrap();
    UsageFile::open(dir).unwrap().restore(1).unwrap();
    let _ = std::fs::write(dir.join("neighbour"), vec![1; 1 << 21]);
    assert!(!usage::create(dir, 2).unwrap().fresh);
    ready("done");
}

pub fn full() -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut tenant = spawn_in(dir.path(), "full", 0);
    let said = tenant.line();
    assert!(tenant.succeeded());
    said
}
