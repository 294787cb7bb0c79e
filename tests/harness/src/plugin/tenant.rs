//! A process that holds memory of an allocation, without any driver: this test program, started again.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, send, socket};
use tessera_region::account::Account;
use tessera_region::layout::Kind;
use tessera_region::quota::QuotaReader;
use tessera_region::usage::UsageMap;

use crate::{Owned, again};

/// A process that holds memory of an allocation, as the shim does, without any driver.
pub struct Tenant {
    child: Owned,
}

/// Set for the child that is a tenant: the pages and the bytes to hold.
const TENANT_DIR: &str = "TESSERA_TEST_TENANT_DIR";
const TENANT_BYTES: &str = "TESSERA_TEST_TENANT_BYTES";
/// How many requests are refused first.
const TENANT_REFUSALS: &str = "TESSERA_TEST_TENANT_REFUSALS";

impl Tenant {
    /// Starts one and waits until it holds `bytes` on the first GPU and has said hello.
    pub fn hold(pages: &Path, bytes: u64) -> Self {
        Self::start(pages, bytes, &[])
    }

    /// As [`Tenant::hold`], one that was refused so many requests before.
    pub fn refused(pages: &Path, bytes: u64, times: u32) -> Self {
        Self::start(pages, bytes, &[(TENANT_REFUSALS, &times.to_string())])
    }

    fn start(pages: &Path, bytes: u64, envs: &[(&str, &str)]) -> Self {
        let mut child = again(&[], "tenant_process")
            .envs(envs.iter().copied())
            .env(TENANT_DIR, pages)
            .env(TENANT_BYTES, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.any(|line| line.unwrap().ends_with("tenant holds"));
        assert!(ready, "the tenant ended early");
        Self { child: Owned(child) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The body of the test `tenant_process`, which every test binary that uses [`Tenant`] has: nothing
/// in an ordinary run, a tenant in the child.
pub fn tenant_process() {
    let Some(dir) = std::env::var_os(TENANT_DIR).map(PathBuf::from) else { return };
    let bytes: u64 = std::env::var(TENANT_BYTES).unwrap().parse().unwrap();
    let quota = QuotaReader::attach(&dir).unwrap();
    let generation = quota.generation();
    let usage = UsageMap::attach(&dir).unwrap();
    let slot = usage.claim().unwrap();
    let account = Account::new(quota, usage, slot);
    let refusals = std::env::var(TENANT_REFUSALS).map_or(0, |times| times.parse().unwrap());
    for _ in 0..refusals {
        assert!(account.reserve(0, 1 << 50).is_err(), "over every quota");
    }
    let reservation = account.reserve(0, bytes).expect("within the quota");
    reservation.commit(bytes, Kind::Plain).unwrap();
    let session = connect(&dir);
    let slot = u32::try_from(account.slot_index()).unwrap();
    let hello =
        tessera_region::session::Message::Hello { slot, pid: std::process::id(), generation };
    send(session.as_raw_fd(), &hello.encode(), MsgFlags::empty()).unwrap();
    println!("tenant holds");
    std::io::stdout().flush().unwrap();
    // Until it is killed, or the test that started it is gone.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// A session socket, connected.
pub fn connect(dir: &Path) -> std::os::fd::OwnedFd {
    let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
    let socket = socket(AddressFamily::Unix, kind, flags, None).unwrap();
    let address = UnixAddr::new(&dir.join("session.sock")).unwrap();
    nix::sys::socket::connect(socket.as_raw_fd(), &address).unwrap();
    socket
}

/// Takes pages away in one step, because the plugin may mend them at any moment. Instead of them come a directory and
/// these in it; nothing where there are none.
pub fn lose(pages: &Path, left: &[&str]) {
    let aside = tempfile::tempdir_in(pages.ancestors().nth(2).unwrap()).unwrap();
    let new = aside.path().join("new");
    left.iter().for_each(|name| std::fs::create_dir_all(new.join(name)).unwrap());
    let both = if left.is_empty() { RenameFlags::empty() } else { RenameFlags::RENAME_EXCHANGE };
    renameat2(AT_FDCWD, pages, AT_FDCWD, &new, both).unwrap();
}

/// The limit of the first GPU as a tenant reads it.
pub fn limit(pages: &Path) -> u64 {
    QuotaReader::attach(pages).unwrap().memory_limit(0)
}

/// The generation as a tenant reads it.
pub fn generation(pages: &Path) -> u64 {
    QuotaReader::attach(pages).unwrap().generation()
}
