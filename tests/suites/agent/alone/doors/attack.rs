//! Clients that mean no good, from a thread of their own, at a rate; and a request as kubelet makes it beside them: one
//! connection, one answer, a time limit, no second try.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a connection does once it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Says nothing.
    Silent,
    /// Says half a request's head.
    HalfHead,
    /// Says a byte of a head each time that it has its turn.
    Drip,
    /// Says a head that never ends, as fast as it is read.
    Endless,
    /// Asks, and reads nothing.
    AsksAndStares,
    /// Asks for a probe's answer and keeps the connection.
    AsksAndStays,
    /// Asks for much on one connection, one request behind the other.
    Pipelines,
    /// Ends its side at once.
    HalfClosed,
    /// Goes at once.
    Gone,
    /// Says what is no HTTP.
    Garbage,
    /// Begins a body that never comes.
    NoBody,
}

pub const ALL: [Manner; 11] = [
    Manner::Silent,
    Manner::HalfHead,
    Manner::Drip,
    Manner::Endless,
    Manner::AsksAndStares,
    Manner::AsksAndStays,
    Manner::Pipelines,
    Manner::HalfClosed,
    Manner::Gone,
    Manner::Garbage,
    Manner::NoBody,
];

/// Connections that one flood keeps open, the newest.
const KEPT: usize = 3000;
const TURN: Duration = Duration::from_millis(5);

/// A flood, until it is dropped.
pub struct Flood {
    stop: Arc<AtomicBool>,
    pub connections: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// So many connections a second, which take these manners in turn.
    pub fn start(address: SocketAddr, rate: u64, manners: &[Manner]) -> Self {
        let (stop, connections) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (ended, count, manners) =
            (Arc::clone(&stop), Arc::clone(&connections), manners.to_vec());
        let thread = std::thread::spawn(move || flood(address, rate, &manners, &ended, &count));
        Flood { stop, connections, thread: Some(thread) }
    }

    /// Waits until there have been so many connections.
    pub fn reached(&self, count: u64) {
        let began = Instant::now();
        while self.connections.load(Ordering::Relaxed) < count {
            assert!(began.elapsed() < Duration::from_secs(120), "nobody can connect");
            std::thread::sleep(TURN);
        }
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

fn flood(address: SocketAddr, rate: u64, manners: &[Manner], stop: &AtomicBool, count: &AtomicU64) {
    let mut open: VecDeque<(Manner, TcpStream)> = VecDeque::new();
    let began = Instant::now();
    let mut made = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let due = u64::try_from(began.elapsed().as_millis()).unwrap() * rate / 1000;
        // A client that lags does not catch up with a burst of seconds.
        made = made.max(due.saturating_sub(rate / 10));
        while made < due {
            let manner = manners[usize::try_from(made).unwrap() % manners.len()];
            made += 1;
            let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) else {
                continue;
            };
            count.fetch_add(1, Ordering::Relaxed);
            if stream.set_nonblocking(true).is_ok() && begin(manner, &stream) {
                open.push_back((manner, stream));
            }
        }
        while open.len() > KEPT {
            open.pop_front();
        }
        open.retain_mut(|(manner, stream)| go_on(*manner, stream));
        std::thread::sleep(TURN);
    }
}

/// What it says first; whether it stays.
fn begin(manner: Manner, mut stream: &TcpStream) -> bool {
    let metrics = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    let probe = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
    let said = match manner {
        Manner::Silent | Manner::Gone => String::new(),
        Manner::HalfHead => "GET /metrics HTTP/1.1\r\nHost: x\r\nX-Y: ".to_owned(),
        Manner::Drip => "G".to_owned(),
        Manner::Endless => format!("GET / HTTP/1.1\r\nX: {}", "y".repeat(2000)),
        Manner::AsksAndStares => metrics.to_owned(),
        Manner::AsksAndStays => probe.to_owned(),
        Manner::Pipelines => metrics.repeat(20),
        Manner::HalfClosed => {
            let _ = stream.shutdown(std::net::Shutdown::Write);
            String::new()
        }
        Manner::Garbage => "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\r\n\r\n".to_owned(),
        Manner::NoBody => {
            "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".to_owned()
        }
    };
    let _ = stream.write_all(said.as_bytes());
    manner != Manner::Gone
}

/// Its next turn; whether it is still there.
fn go_on(manner: Manner, stream: &mut TcpStream) -> bool {
    let bytes: &[u8] = match manner {
        Manner::Drip => b"E",
        Manner::Endless => &[b'y'; 2000],
        Manner::AsksAndStares | Manner::Pipelines => return true,
        _ => b"",
    };
    let gone = |error: &std::io::Error| error.kind() != std::io::ErrorKind::WouldBlock;
    if !bytes.is_empty() && stream.write(bytes).is_err_and(|error| gone(&error)) {
        return false;
    }
    !matches!(stream.read(&mut [0; 256]), Ok(0) | Err(_)) || still_open(stream)
}

fn still_open(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0; 1]) {
        Ok(0) => false,
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}

/// Longer than kubelet waits: a busy machine is slow. One that is given up, or waits in vain, is seen all the same.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Whether it is answered with 200.
pub fn probe(address: SocketAddr, path: &str) -> Result<(), String> {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: node\r\nUser-Agent: kube-probe/1.34\r\n\
            Accept: */*\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask().map_err(|error| format!("{path}: {error}"))?;
    match answer.starts_with("HTTP/1.1 200 ") {
        true => Ok(()),
        false => Err(format!("{path}: {answer:?}")),
    }
}
