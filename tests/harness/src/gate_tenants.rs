//! Tenants with pages, and peers that speak the gate's protocol.

use std::io::IoSlice;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, send, sendmsg,
    socket,
};
use tempfile::TempDir;
use tessera_arbiter::{Arbiter, TenantShare};
use tessera_config::Leases;
use tessera_region::flight::{self, FlightPage};
use tessera_region::layout::{
    GATE_CLOSED, GATE_OPEN, GATE_SOCKET, GATE_SOLO, GATE_YIELD, gate_epoch, gate_state,
};
use tessera_region::quota::{GpuQuota, Policy, QuotaReader, QuotaWriter};
use tessera_region::session::Message;

use crate::{Background, Pages, settles, until};

/// What a process says first.
pub const HELLO: Message = Message::Hello { slot: 0, pid: 1, generation: 1 };
/// States in which a gate lets work through.
pub const OPEN: [u32; 3] = [GATE_SOLO, GATE_OPEN, GATE_YIELD];

/// An arbiter with the default settings.
pub fn arbiter() -> Arbiter {
    Arbiter::start(&Leases::default()).unwrap()
}

pub struct Tenant {
    pub dir: TempDir,
    pub id: String,
    /// Its quota page, as the plugin writes it.
    pub page: QuotaWriter,
}

impl Tenant {
    /// On one GPU, and what it does not use is there for others.
    pub fn new(id: &str, millis: u32) -> Self {
        Self::with(id, &["GPU-0"], millis, Policy::Burst)
    }

    pub fn with(id: &str, gpus: &[&str], cores_millis: u32, policy: Policy) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let gpu = |uuid: &&str| GpuQuota {
            uuid: (*uuid).to_owned(),
            memory_limit_bytes: 1 << 30,
            context_overhead_bytes: 0,
            cores_millis,
            policy,
        };
        let page = Pages::of(dir.path(), id, gpus.iter().map(gpu).collect()).quota;
        Tenant { dir, id: id.to_owned(), page }
    }

    /// With an arbiter, and its gate closed by it.
    pub fn at(self, arbiter: &Arbiter) -> Self {
        arbiter.admit(self.path()).unwrap();
        until("it is taken on", || self.reader().arbiter_ns() > 1);
        self
    }

    /// The directory of its pages.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Its quota page, as a process of the tenant reads it.
    pub fn reader(&self) -> QuotaReader {
        QuotaReader::attach(self.path()).unwrap()
    }

    pub fn state(&self) -> u32 {
        gate_state(self.page.gate(0))
    }

    /// Whether its gate lets work through.
    pub fn is_open(&self) -> bool {
        OPEN.contains(&self.state())
    }

    pub fn epoch(&self) -> u32 {
        gate_epoch(self.page.gate(0))
    }

    pub fn share(&self, arbiter: &Arbiter) -> TenantShare {
        let view = arbiter.view().unwrap();
        view.tenants.into_iter().find(|tenant| tenant.id == self.id).unwrap()
    }

    /// Waits until its gate is open.
    pub fn opens(&self) {
        until("its gate opens", || self.is_open());
    }

    /// Waits until its gate is closed; gives the epoch.
    pub fn closes(&self) -> u32 {
        until("its gate closes", || self.state() == GATE_CLOSED);
        self.epoch()
    }
}

/// A connection to a tenant's gate.
pub struct Peer {
    pub socket: OwnedFd,
}

impl Peer {
    /// Without a hello.
    pub fn connect(dir: &Path) -> Self {
        Self::connect_as(dir, SockFlag::SOCK_CLOEXEC)
    }

    pub fn connect_as(dir: &Path, flags: SockFlag) -> Self {
        Self::try_connect_as(dir, flags).unwrap()
    }

    /// Without a hello, where the arbiter may be gone.
    pub fn try_connect(dir: &Path) -> nix::Result<Self> {
        Self::try_connect_as(dir, SockFlag::SOCK_CLOEXEC)
    }

    fn try_connect_as(dir: &Path, flags: SockFlag) -> nix::Result<Self> {
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        let address = UnixAddr::new(&dir.join(GATE_SOCKET))?;
        connect(socket.as_raw_fd(), &address)?;
        Ok(Peer { socket })
    }

    /// Bound: its hello has been heard.
    pub fn bound(tenant: &Tenant, arbiter: &Arbiter) -> Self {
        let before = tenant.share(arbiter).processes;
        let peer = Self::connect(tenant.path()).hello();
        until("it is bound", || tenant.share(arbiter).processes > before);
        peer
    }

    /// Sends these bytes; whether the arbiter still listens.
    pub fn raw(&self, bytes: &[u8]) -> bool {
        send(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL).is_ok()
    }

    /// Sends a message; whether the arbiter still listens.
    pub fn say(&self, message: Message) -> bool {
        self.raw(&message.encode())
    }

    pub fn hello(self) -> Self {
        self.say(HELLO);
        self
    }

    /// Bound, with a flight page that the test writes.
    pub fn with_page(tenant: &Tenant, arbiter: &Arbiter) -> (Self, &'static FlightPage) {
        let before = tenant.share(arbiter).processes;
        let peer = Self::connect(tenant.path());
        let (file, page) = flight::create().unwrap();
        assert!(peer.send_with(HELLO, &[&file]));
        until("it is bound", || tenant.share(arbiter).processes > before);
        (peer, page)
    }

    /// Sends a message with these files; whether the arbiter still listens.
    pub fn send_with(&self, message: Message, files: &[&OwnedFd]) -> bool {
        let files: Vec<_> = files.iter().map(|file| file.as_raw_fd()).collect();
        let (bytes, rights) = (message.encode(), [ControlMessage::ScmRights(&files)]);
        let parts = [IoSlice::new(&bytes)];
        let fd = self.socket.as_raw_fd();
        sendmsg::<UnixAddr>(fd, &parts, &rights, MsgFlags::MSG_NOSIGNAL, None).is_ok()
    }

    pub fn want(&self) -> bool {
        self.say(Message::Want { gpu: 0 })
    }

    /// Says that nothing of that epoch is in flight.
    pub fn drained(&self, epoch: u32) -> bool {
        self.drained_after(epoch, Duration::ZERO)
    }

    /// The same, and that it used the GPU for so long.
    fn drained_after(&self, epoch: u32, used: Duration) -> bool {
        let used_ns = u64::try_from(used.as_nanos()).unwrap_or(u64::MAX);
        self.say(Message::Drained { gpu: 0, epoch, used_ns })
    }
}

/// What a backlogged process does: drains and wants at every closing, until its socket breaks or `stop`
/// is set.
pub fn work(dir: &Path, stop: &AtomicBool) {
    work_as(dir, &Peer::connect(dir).hello(), stop);
}

fn work_as(dir: &Path, peer: &Peer, stop: &AtomicBool) {
    let page = QuotaWriter::open(dir).unwrap();
    let (mut seen, mut opened) = (None, Instant::now());
    while !stop.load(Ordering::Relaxed) {
        let word = page.gate(0);
        if seen.replace(word) != Some(word) {
            if gate_state(word) != GATE_CLOSED {
                opened = Instant::now();
            } else if !(peer.drained_after(gate_epoch(word), opened.elapsed()) && peer.want()) {
                return;
            }
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Such a process with these pages, in a thread of this one.
pub fn working(dir: &Path) -> Background {
    let dir = dir.to_owned();
    Background::new(move |stop| work(&dir, stop))
}

/// A backlogged process of a tenant, in a thread of this one.
pub struct Worker {
    _thread: Background,
}

impl Worker {
    pub fn new(tenant: &Tenant) -> Self {
        Self::with(tenant, Peer::connect(tenant.path()).hello())
    }

    /// The process of that token, which has other shares as well and keeps to this gate.
    pub fn leading(tenant: &Tenant, token: u64) -> Self {
        let peer = Peer::connect(tenant.path()).hello();
        assert!(peer.say(Message::Joins { token, leads: true }));
        Self::with(tenant, peer)
    }

    fn with(tenant: &Tenant, peer: Peer) -> Self {
        let dir = tenant.path().to_owned();
        Worker { _thread: Background::new(move |stop| work_as(&dir, &peer, stop)) }
    }
}

/// Asserts that the first of these gets so many thousandths of what all get in a second.
pub fn first_gets(thousandths: RangeInclusive<u64>, arbiter: &Arbiter, tenants: &[&Tenant]) {
    let leased = || -> Vec<u64> {
        tenants.iter().map(|tenant| tenant.share(arbiter).totals.leased_ns).collect()
    };
    settles("thousandths of the first", &thousandths, || {
        let before = leased();
        std::thread::sleep(Duration::from_secs(1));
        let got: Vec<u64> =
            leased().iter().zip(&before).map(|(after, before)| after - before).collect();
        got[0] * 1000 / got.iter().sum::<u64>().max(1)
    });
}
