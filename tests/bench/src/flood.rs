//! Kubelet's probes while others flood the port that they go to.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::node::Node;
use crate::soak;
use crate::stats::Sample;
use crate::world::World;

/// New connections a second.
pub const RATE: u32 = 2000;
/// Connections that the flood keeps open at most, the newest.
const KEPT: usize = 4000;
/// Probes of each part, and from one to the next.
const PROBES: usize = 500;
const INTERVAL: Duration = Duration::from_millis(40);
/// How long a probe waits, as in `deploy/`.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long the flood has lasted when the first probe is made.
const LEAD: Duration = Duration::from_secs(3);

/// Probes, with or without a flood beside them.
#[derive(Clone, Debug)]
pub struct Part {
    /// From the connection to the last byte of the answer, milliseconds; those that were not answered count as
    /// the whole time limit.
    pub probe_ms: Sample,
    /// Probes that were not answered with 200.
    pub missed: usize,
    /// Most resident memory, by looks 20 ms apart, KiB.
    pub rss_kib: u64,
    /// CPU time of the plugin, percent of a core.
    pub cpu_percent: f64,
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Without a flood.
    pub quiet: Part,
    /// Beside it.
    pub flood: Part,
    /// Connections a second that the flood really made.
    pub rate: f64,
}

/// Measures both, the quiet part first.
///
/// # Errors
/// A plugin that does not start or register.
pub fn run(world: &World) -> anyhow::Result<Figures> {
    let setup = soak::setup(world, "flood")?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let node = Node::start(&setup).await?;
        let address = soak::address(&node).await?;
        soak::start(&node, "stay").await?;
        // Past what only starting needs.
        tokio::time::sleep(LEAD).await;
        let quiet = part(&node, address)?;
        let flood = Flood::start(address);
        tokio::time::sleep(LEAD).await;
        let (before, began) = (flood.made.load(Ordering::Relaxed), Instant::now());
        let beside = part(&node, address)?;
        #[allow(clippy::cast_precision_loss, reason = "thousands")]
        let made = (flood.made.load(Ordering::Relaxed) - before) as f64;
        let rate = made / began.elapsed().as_secs_f64();
        drop(flood);
        node.end().await;
        Ok(Figures { quiet, flood: beside, rate })
    })
}

#[allow(clippy::cast_precision_loss, reason = "nanoseconds of a minute")]
fn part(node: &Node, address: SocketAddr) -> anyhow::Result<Part> {
    let (mut times, mut missed, mut rss_kib) = (Vec::new(), 0, 0);
    let (cpu, all) = (node.process()?.cpu()?.all, Instant::now());
    for round in 0..PROBES {
        let began = Instant::now();
        let path = if round % 2 == 0 { "/healthz" } else { "/readyz" };
        let took = match probe(address, path) {
            Ok(true) => began.elapsed(),
            _ => {
                missed += 1;
                TIMEOUT
            }
        };
        times.push(took.as_secs_f64() * 1e3);
        while began.elapsed() < INTERVAL {
            rss_kib = rss_kib.max(node.process()?.rss_kib()?.0);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let used = (node.process()?.cpu()?.all - cpu) as f64;
    let cpu_percent = used / all.elapsed().as_secs_f64() / 1e7;
    Ok(Part { probe_ms: Sample::new(times), missed, rss_kib, cpu_percent })
}

/// One, as kubelet makes it: a connection of its own, once.
fn probe(address: SocketAddr, path: &str) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: bench\r\nUser-Agent: kube-probe/1.34\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.starts_with("HTTP/1.1 200 "))
}

/// Connections in equal parts: silent; with half a head, and nothing more; with a head of a byte every 10 ms;
/// whose client has ended its side. Until it is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    made: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Flood {
    fn start(address: SocketAddr) -> Self {
        let (stop, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ended, count) = (Arc::clone(&stop), Arc::clone(&made));
        let thread = Some(std::thread::spawn(move || flood(address, &ended, &count)));
        Flood { stop, made, thread }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn flood(address: SocketAddr, stop: &AtomicBool, made: &AtomicU64) {
    let mut open: VecDeque<TcpStream> = VecDeque::new();
    let mut slow: Vec<TcpStream> = Vec::new();
    let (began, mut due) = (Instant::now(), 0.0);
    while !stop.load(Ordering::Relaxed) {
        let now = began.elapsed().as_secs_f64() * f64::from(RATE);
        while due < now {
            due += 1.0;
            let number = made.load(Ordering::Relaxed);
            let Ok(mut stream) = TcpStream::connect_timeout(&address, TIMEOUT) else { continue };
            made.store(number + 1, Ordering::Relaxed);
            let _ = stream.set_nonblocking(true);
            match number % 4 {
                0 => {}
                1 => drop(stream.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Y: ")),
                2 => {
                    let _ = stream.write(b"G");
                    slow.push(stream);
                    continue;
                }
                _ => drop(stream.shutdown(std::net::Shutdown::Write)),
            }
            open.push_back(stream);
        }
        while open.len() > KEPT {
            open.pop_front();
        }
        slow.retain_mut(|stream| stream.write(b"E").is_ok());
        std::thread::sleep(Duration::from_millis(10));
    }
}
