//! Processes without descriptors, and a file system without room.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::ptr;
use std::time::Duration;

use tessera_region::PageFault;
use tessera_region::account::Reason;
use tessera_region::layout::{Kind, USAGE_FILE};
use tessera_region::usage::{self, UsageFile, UsageMap};

use crate::support::{Pages, account, spawn_in};

const LIMIT: u64 = 1000;

pub fn starve(dir: &Path) {
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
pub fn fill(dir: &Path) {
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
        return println!("no mount namespaces here");
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
    println!("done");
}

pub fn full() -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut tenant = spawn_in(dir.path(), "full", 0);
    let said = tenant.line();
    assert!(tenant.succeeded());
    said
}
