//! Floods of every kind of message, in simulated time: what they leave in the arbiter's state, by how much its
//! work grows, and what the neighbours lose.
//!
//! The thread's own code runs on real sockets and pages, and is handed the time. Its state is measured as the
//! length of its `Debug` text, so that no part of it can be forgotten; its work as CPU time of this thread.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use nix::sys::eventfd::EventFd;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr};
use nix::time::{ClockId, clock_gettime};
use tessera_region::layout::{GATE_CLOSED, GATE_SOCKET, SLOTS, gate_epoch, gate_state};
use tessera_region::quota::{GpuQuota, Policy as PagePolicy, QuotaSpec, QuotaWriter};
use tessera_region::session::Kind;
use tessera_region::{quota, usage};

use super::*;
use crate::arbitrated_tenant::Served;
use crate::reactor::wake;

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;
/// From one look of everybody at everything to the next, and messages of a flood in between: twice as many as
/// the arbiter reads.
const STEP: u64 = 50 * US;
const AT_ONCE: u64 = 2;
/// How long a closed process takes to drain.
const DRAIN: u64 = 100 * US;
/// How long a flood lasts.
const LENGTH: u64 = 500 * MS;
/// Steps whose work is measured together.
const CHUNK: u64 = 250;

struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("gate-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Dir(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How a process behaves at its gate, beside any flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// It wants and drains at every closing.
    Works,
    /// It wants at every closing and never drains: beside such a tenant others lose, without any flood.
    Takes,
    /// It says hello and no more.
    Rests,
    /// It does not even say hello.
    Stranger,
}

/// A process at its gate.
struct Process {
    socket: OwnedFd,
    page: QuotaWriter,
    manner: Manner,
    seen: u32,
    opened: u64,
    due: Option<u64>,
}

impl Process {
    fn connect(dir: &Path, manner: Manner) -> Self {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket =
            nix::sys::socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None);
        let (socket, page) = (socket.unwrap(), QuotaWriter::open(dir).unwrap());
        let address = UnixAddr::new(&dir.join(GATE_SOCKET)).unwrap();
        // Fails where it would have to wait: then it is a connection that is not there.
        let _ = nix::sys::socket::connect(socket.as_raw_fd(), &address);
        let process = Process { socket, page, manner, seen: u32::MAX, opened: 0, due: None };
        if manner != Manner::Stranger {
            process.say(Message::Hello { slot: 0, pid: 1, generation: 1 });
        }
        process
    }

    /// Whether the arbiter still listens.
    fn say(&self, message: Message) -> bool {
        let sent = nix::sys::socket::send(
            self.socket.as_raw_fd(),
            &message.encode(),
            MsgFlags::MSG_NOSIGNAL,
        );
        sent.is_ok() || sent == Err(nix::errno::Errno::EAGAIN)
    }

    fn act(&mut self, now: u64) {
        let word = self.page.gate(0);
        if std::mem::replace(&mut self.seen, word) != word {
            let is_closed = gate_state(word) == GATE_CLOSED;
            let acts = matches!(self.manner, Manner::Works | Manner::Takes);
            self.due = (is_closed && acts).then_some(now + DRAIN);
            if !is_closed {
                self.opened = now;
            }
        }
        if self.due.take_if(|at| *at <= now).is_some() {
            let used_ns = now - self.opened;
            if self.manner == Manner::Works {
                self.say(Message::Drained { gpu: 0, epoch: gate_epoch(word), used_ns });
            }
            self.say(Message::Want { gpu: 0 });
        }
    }
}

struct World {
    thread: Thread,
    waker: Arc<EventFd>,
    /// The thread ends without it.
    _orders: Sender<Order>,
    ready: Ready,
    begin: Now,
    now: Now,
    dirs: Vec<Dir>,
    processes: Vec<Process>,
}

impl World {
    /// Tenants of one GPU with these shares. All but the first have a process with work without end.
    fn new(shares: impl IntoIterator<Item = u32>) -> Self {
        let reactor = Reactor::new().unwrap();
        let (waker, (orders, receiver)) = (reactor.waker(), channel());
        let begin = Now::read();
        let mut world = World {
            thread: Thread::new(reactor, receiver, Leases::default(), 2 * SLOTS),
            waker,
            _orders: orders,
            ready: Ready::new(),
            begin,
            now: begin,
            dirs: Vec::new(),
            processes: Vec::new(),
        };
        for (number, millis) in shares.into_iter().enumerate() {
            world.admit(number, millis);
        }
        world
    }

    fn admit(&mut self, number: usize, cores_millis: u32) {
        let dir = Dir::new();
        let gpu = GpuQuota {
            uuid: "GPU-0".into(),
            memory_limit_bytes: 1 << 30,
            context_overhead_bytes: 0,
            cores_millis,
            policy: PagePolicy::Burst,
        };
        let spec = QuotaSpec { allocation: name(number), generation: 1, gpus: vec![gpu] };
        quota::create(&dir.0, &spec).unwrap();
        usage::create(&dir.0, 1).unwrap();
        let opened = OpenedPages::open(&dir.0, &Served::new()).unwrap();
        self.thread.admit(opened, self.now);
        if number > 0 {
            self.processes.push(Process::connect(&dir.0, Manner::Works));
        }
        self.dirs.push(dir);
        self.turn();
    }

    /// One round of the arbiter's thread; the CPU time that it took, nanoseconds.
    fn turn(&mut self) -> u64 {
        // Nothing waits for the real time.
        wake(&self.waker);
        self.thread.reactor.wait(&mut self.ready).unwrap();
        let before = cpu_ns();
        for token in &self.ready.tokens {
            self.thread.handle(*token, self.now);
        }
        self.thread.keep_time(self.now);
        let _ = self.thread.next_due();
        cpu_ns() - before
    }

    fn step(&mut self) -> u64 {
        let ns = self.now.ns - self.begin.ns + STEP;
        self.now =
            Now { instant: self.begin.instant + Duration::from_nanos(ns), ns: self.begin.ns + ns };
        for process in &mut self.processes {
            process.act(self.now.ns);
        }
        self.turn()
    }

    fn state(&self) -> usize {
        format!("{:?}", self.thread).len()
    }

    /// What all but the first tenant have had: leases, and GPU time.
    fn neighbours(&self) -> (u64, u64) {
        let view = self.thread.view(self.now);
        let all = view.tenants.iter().filter(|tenant| tenant.id != name(0));
        all.map(|t| (t.totals.leases, t.totals.leased_ns))
            .fold((0, 0), |(leases, ns), (l, n)| (leases + l, ns + n))
    }
}

fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    u64::try_from(time.tv_sec() * 1_000_000_000 + time.tv_nsec()).unwrap()
}

fn name(number: usize) -> String {
    format!("tenant-{number}")
}

/// What was measured of a flood.
#[derive(Debug)]
struct Figures {
    state: usize,
    /// What the neighbours had.
    leases: u64,
    leased_ns: u64,
    /// CPU time of as many steps, nanoseconds: the least of the first and of the last quarter.
    early: u64,
    late: u64,
}

/// The first tenant floods with messages of this kind, each with other values, over so many connections.
/// Without a kind they are there and do not.
fn flood(world: &mut World, kind: Option<Kind>, connections: usize, manner: Manner) -> Figures {
    let dir = world.dirs[0].0.clone();
    for _ in 0..connections {
        world.processes.push(Process::connect(&dir, manner));
        world.step();
        world.thread.tenants.get_mut(&0).unwrap().connections.hide_pids();
    }
    let flooders = world.processes.len() - connections;
    let (mut number, mut chunks, mut steps, mut spent) = (0u64, Vec::new(), 0, 0);
    let (begin, before) = (world.now.ns, world.neighbours());
    while world.now.ns < begin + LENGTH {
        for _ in 0..kind.map_or(0, |_| AT_ONCE) {
            let at = flooders + usize::try_from(number).unwrap() % connections;
            let process = &world.processes[at];
            // Some of them of the present epoch.
            let epoch = u64::from(gate_epoch(process.page.gate(0)));
            let low = if number.is_multiple_of(3) { epoch } else { number };
            let message = kind.map(|kind| Message::specimen(kind, number << 32 | low));
            if !message.is_some_and(|message| process.say(message)) {
                world.processes[at] = Process::connect(&dir, manner);
            }
            number += 1;
        }
        spent += world.step();
        steps += 1;
        if steps == CHUNK {
            chunks.push(spent);
            (steps, spent) = (0, 0);
        }
    }
    let after = world.neighbours();
    let quarter = chunks.len() / 4;
    Figures {
        state: world.state(),
        leases: after.0 - before.0,
        leased_ns: after.1 - before.1,
        early: *chunks[..quarter].iter().min().unwrap(),
        late: *chunks[chunks.len() - quarter..].iter().min().unwrap(),
    }
}

/// Most text that one connection may leave.
const ENTRY: usize = 512;

/// The first one's share, and the neighbours'.
const SHARES: [u32; 3] = [250, 500, 250];

/// A flood of each kind leaves no more state than its connections, costs no more work later than at first, and
/// takes no more than two of a hundred from the neighbours, beside the same tenant that does not flood. Where it
/// takes leases an honest one is beside them instead.
fn harms_nobody(connections: usize, manner: Manner) {
    let mut faults = Vec::new();
    let quiet = flood(&mut World::new(SHARES), None, connections, manner);
    let honest = flood(&mut World::new(SHARES), None, connections, Manner::Works);
    assert!(quiet.leases > 50 && honest.leases > 50, "{quiet:?} {honest:?}");
    for &kind in Kind::ALL {
        let seen = flood(&mut World::new(SHARES), Some(kind), connections, manner);
        let takes_leases = match manner {
            Manner::Takes | Manner::Works => true,
            Manner::Rests => kind == Kind::Want,
            Manner::Stranger => false,
        };
        let same = if takes_leases { &honest } else { &quiet };
        let mut check = |what: &str, holds: bool| {
            if !holds {
                faults.push(format!("{kind:?}: {what}: {seen:?} beside {same:?}"));
            }
        };
        check("state", seen.state <= quiet.state + (connections + 1) * ENTRY);
        check("work", seen.late <= 3 * seen.early);
        // Who takes leases and does not drain them costs the others a little by that alone.
        let least = if takes_leases { 90 } else { 98 };
        check("GPU time", seen.leased_ns * 100 >= same.leased_ns * least);
        // Shorter leases of its own are more of them.
        check("leases", takes_leases || seen.leases * 100 >= same.leases * 98);
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn one_hostile_process_harms_nobody() {
    harms_nobody(1, Manner::Rests);
}

#[test]
fn many_hostile_processes_harm_nobody() {
    harms_nobody(8, Manner::Rests);
}

#[test]
fn one_that_takes_leases_harms_nobody_the_more() {
    harms_nobody(1, Manner::Takes);
}

#[test]
fn many_that_take_leases_harm_nobody_the_more() {
    harms_nobody(8, Manner::Takes);
}

#[test]
fn strangers_harm_nobody() {
    harms_nobody(8, Manner::Stranger);
}

/// What a message costs does not depend on how many other tenants the node has, nor on how many other processes
/// its own has.
#[test]
fn the_work_for_a_message_is_bounded_by_its_connection() {
    let cost = |tenants: usize, connections: usize, kind: Kind| {
        let shares = std::iter::once(250).chain(std::iter::repeat_n(1, tenants));
        let mut world = World::new(shares);
        // Nobody else has anything to do.
        world.processes.clear();
        world.step();
        let seen = flood(&mut world, Some(kind), connections, Manner::Rests);
        seen.early.min(seen.late)
    };
    for kind in [Kind::Drained, Kind::Idle, Kind::Late, Kind::Joins] {
        let mut seen = Vec::new();
        // CPU time, too, is more while others use the same caches; but not always.
        let is_bounded = (0..3).any(|_| {
            let all = [cost(2, 4, kind), cost(250, 4, kind), cost(2, 120, kind)];
            seen.push(all);
            all[1] <= 2 * all[0] && all[2] <= 2 * all[0]
        });
        assert!(is_bounded, "{kind:?}: alone, with many tenants, many processes: {seen:?}");
    }
}
