//! Kubelet's probes while others flood the port that they go to.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::node::{self, Node};
use crate::report::Report;
use crate::soak;
use crate::stats::Sample;
use crate::world::World;

/// New connections a second.
const RATE: u32 = 2000;
/// Connections that the flood keeps open at most, the newest.
const KEPT: usize = 4000;
/// Probes, and from one to the next.
const PROBES: usize = 500;
const INTERVAL: Duration = Duration::from_millis(40);
/// How long a probe waits, as in `deploy/`.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long the flood has lasted when the first probe is made.
const LEAD: Duration = Duration::from_secs(3);

/// Measures probes beside the flood.
///
/// # Errors
/// A plugin that does not start or register.
#[allow(clippy::cast_precision_loss, reason = "some hundreds")]
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let setup = soak::setup(world, "flood")?;
    let (probes, missed) = node::runtime()?.block_on(async {
        let node = Node::start(&setup).await?;
        let address = soak::address(&node).await?;
        soak::start(&node, "stay").await?;
        let flood = Flood::start(address);
        tokio::time::sleep(LEAD).await;
        let outcome = probes(address);
        drop(flood);
        node.end().await;
        anyhow::Ok(outcome)
    })?;
    let what = "a probe beside 2,000 connections a second, p99";
    report.p99("probe_p99_ms_flood", what, &probes, 1000.0);
    report.figure("probes_missed_flood", "· not answered, of 500", "", missed as f64, 0.0);
    Ok(())
}

/// From the connection to the last byte of the answer, milliseconds, and how many were not answered with 200; those
/// count as the whole time limit.
fn probes(address: SocketAddr) -> (Sample, usize) {
    let (mut times, mut missed) = (Vec::new(), 0);
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
        std::thread::sleep(INTERVAL.saturating_sub(began.elapsed()));
    }
    (Sample::new(times), missed)
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
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Flood {
    fn start(address: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        Flood { stop, thread: Some(std::thread::spawn(move || flood(address, &ended))) }
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

fn flood(address: SocketAddr, stop: &AtomicBool) {
    let mut made = 0u64;
    let mut open: VecDeque<TcpStream> = VecDeque::new();
    let mut slow: Vec<TcpStream> = Vec::new();
    let (began, mut due) = (Instant::now(), 0.0);
    while !stop.load(Ordering::Relaxed) {
        let now = began.elapsed().as_secs_f64() * f64::from(RATE);
        while due < now {
            due += 1.0;
            let Ok(mut stream) = TcpStream::connect_timeout(&address, TIMEOUT) else { continue };
            made += 1;
            let _ = stream.set_nonblocking(true);
            match made % 4 {
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
