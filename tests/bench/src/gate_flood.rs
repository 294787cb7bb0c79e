//! Neighbours of a tenant that floods its gate socket, for every kind of message that the protocol has.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use tessera_arbiter::Arbiter;
use tessera_config::Leases;
use tessera_region::layout::{GATE_CLOSED, GATE_SOCKET, gate_epoch, gate_state};
use tessera_region::quota::{GpuQuota, Policy, QuotaSpec, QuotaWriter};
use tessera_region::session::{Kind, Message};
use tessera_region::{quota, usage};

use crate::report::Report;
use crate::stats::Sample;

/// Rounds, and how long each of their two parts is measured.
const ROUNDS: usize = 5;
const PART: Duration = Duration::from_millis(600);
/// How long a part has lasted when it is measured.
const LEAD: Duration = Duration::from_millis(150);
/// From one look of a process at its gate to the next.
const LOOK: Duration = Duration::from_micros(50);
/// Shares of the neighbours, and of the one that floods; thousandths.
const NEIGHBOURS: [u32; 2] = [500, 250];
const FLOODER: u32 = 250;

/// Measures by how much less of the time the neighbours' gates were open beside a flood than before it, for each
/// kind of its messages.
///
/// # Errors
/// Pages or sockets that cannot be made.
pub fn run(report: &mut Report) -> anyhow::Result<()> {
    let arbiter = Arbiter::start(&Leases::default()).context("the arbiter")?;
    let admit = |id: &str, millis| tenant(&arbiter, id, millis);
    let neighbours =
        [admit("a", NEIGHBOURS[0])?, admit("b", NEIGHBOURS[1])?, admit("flooder", FLOODER)?];
    let open_ns = Arc::new(AtomicU64::new(0));
    let _work = neighbours[..2]
        .iter()
        .map(|dir| worker(dir.path(), &open_ns, true))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for (at, &kind) in Kind::ALL.iter().enumerate() {
        let dir = neighbours[2].path();
        let mut losses = Vec::new();
        for _ in 0..ROUNDS {
            // Who wants takes leases, and these flooders drain none: that alone costs the others, without any flood.
            let quiet = match kind {
                Kind::Want => worker(dir, &Arc::default(), false)?,
                _ => flooder(dir, None)?,
            };
            let before = measure(&open_ns);
            drop(quiet);
            let flood = flooder(dir, Some(kind))?;
            let beside = measure(&open_ns);
            drop(flood);
            losses.push(100.0 * (1.0 - beside / before.max(1e-9)));
        }
        let key = format!("{}_flood_neighbour_loss_pct", kind.name());
        let what = match at {
            0 => "neighbours' time at an open gate, lost to a flood of hellos",
            _ => "· of the message that the key names",
        };
        report.figure(&key, what, "%", Sample::new(losses).median(), 2.0);
    }
    Ok(())
}

/// The part of the time for which the neighbours' gates are open.
#[allow(clippy::cast_precision_loss, reason = "nanoseconds of a second")]
fn measure(open_ns: &AtomicU64) -> f64 {
    std::thread::sleep(LEAD);
    let (before, began) = (open_ns.load(Ordering::Relaxed), Instant::now());
    std::thread::sleep(PART);
    let open = open_ns.load(Ordering::Relaxed) - before;
    open as f64 / began.elapsed().as_nanos() as f64
}

fn tenant(arbiter: &Arbiter, id: &str, cores_millis: u32) -> anyhow::Result<tempfile::TempDir> {
    let dir = tempfile::tempdir()?;
    let gpu = GpuQuota {
        uuid: "GPU-0".into(),
        memory_limit_bytes: 1 << 30,
        context_overhead_bytes: 0,
        cores_millis,
        policy: Policy::Burst,
    };
    quota::create(
        dir.path(),
        &QuotaSpec { allocation: id.into(), generation: 1, gpus: vec![gpu] },
    )?;
    usage::create(dir.path(), 1)?;
    arbiter.admit(dir.path())?;
    Ok(dir)
}

/// A thread that ends when this is dropped.
struct Running {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(run: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Running { stop, thread: Some(std::thread::spawn(move || run(&stopped))) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A process with work without end: it wants at every closing, after it has drained if it `drains`, and adds up for
/// how long it may work.
fn worker(dir: &Path, open_ns: &Arc<AtomicU64>, drains: bool) -> anyhow::Result<Running> {
    let (page, socket, open_ns) = (QuotaWriter::open(dir)?, connect(dir)?, Arc::clone(open_ns));
    let _ = say(&socket, &hello());
    Ok(Running::start(move |stop| {
        let (mut seen, mut opened) = (None, Instant::now());
        while !stop.load(Ordering::Relaxed) {
            let word = page.gate(0);
            if seen.replace(word) != Some(word) && gate_state(word) == GATE_CLOSED {
                let used = opened.elapsed();
                let used_ns = u64::try_from(used.as_nanos()).unwrap_or(u64::MAX);
                let drained = Message::Drained { gpu: 0, epoch: gate_epoch(word), used_ns };
                let _ = drains.then(|| say(&socket, &drained));
                let _ = say(&socket, &Message::Want { gpu: 0 });
            }
            let looked = Instant::now();
            std::thread::sleep(LOOK);
            if gate_state(word) == GATE_CLOSED {
                opened = Instant::now();
            } else {
                let passed = u64::try_from(looked.elapsed().as_nanos()).unwrap_or(0);
                open_ns.fetch_add(passed, Ordering::Relaxed);
            }
        }
    }))
}

/// A process that says something new of this kind without end, and connects again when it is dropped; or, without a
/// kind, is there.
fn flooder(dir: &Path, kind: Option<Kind>) -> anyhow::Result<Running> {
    let greeted = |dir: &Path| {
        connect(dir).inspect(|socket| {
            let _ = say(socket, &hello());
        })
    };
    let (dir, mut socket) = (dir.to_owned(), greeted(dir)?);
    Ok(Running::start(move |stop| {
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            let Some(kind) = kind else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            number += 1;
            match say(&socket, &Message::specimen(kind, number)) {
                Ok(()) => {}
                // Its own queue is full.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(_) => match greeted(&dir) {
                    Ok(new) => socket = new,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                },
            }
        }
    }))
}

fn hello() -> Message {
    Message::Hello { slot: 0, pid: 1, generation: 1 }
}

fn say(socket: &OwnedFd, message: &Message) -> io::Result<()> {
    let bytes = message.encode();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the buffer is as long as said, and the descriptor is open.
    let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn connect(dir: &Path) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let socket =
        unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: all zeros are an address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX.try_into().unwrap_or_default();
    let path = dir.join(GATE_SOCKET);
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    let length = size_of_val(&address).try_into().unwrap_or_default();
    // SAFETY: the address outlives the call and is as long as said.
    match unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}
