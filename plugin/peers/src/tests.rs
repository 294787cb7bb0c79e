use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use tessera_region::layout::SESSION_SOCKET;
use tessera_region::session::{Event, EventKind, Kind};

use super::*;

#[derive(Default)]
struct FakePages {
    recovered: AtomicU32,
    /// What the tenant makes every recovery take.
    slow: Duration,
}

impl Pages for FakePages {
    fn recover(&self) {
        std::thread::sleep(self.slow);
        self.recovered.fetch_add(1, Ordering::SeqCst);
    }

    fn generation(&self) -> u64 {
        7
    }
}

struct Fixture {
    dir: tempfile::TempDir,
    pages: Arc<FakePages>,
    listener: Listener,
}

fn fixture() -> Fixture {
    fixture_with(FakePages::default())
}

fn fixture_with(pages: FakePages) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let pages = Arc::new(pages);
    let listener = Listener::bind(dir.path(), Arc::clone(&pages) as _, Arc::default()).unwrap();
    Fixture { dir, pages, listener }
}

impl Fixture {
    fn connect(&self) -> AsyncFd<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let address = SocketAddrUnix::new(self.dir.path().join(SESSION_SOCKET)).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        socket::watch(socket).unwrap()
    }

    fn counters(&self) -> Counters {
        self.listener.tenant.counters()
    }
}

impl Fixture {
    /// A process of this allocation comes, and is heard within [`until`]'s bound.
    async fn is_served(&self) {
        let peer = self.connect();
        socket::send(peer.get_ref(), &hello()).unwrap();
        let heard = || self.listener.tenant.peers().iter().any(|peer| peer.hello.is_some());
        until(heard).await;
    }
}

/// Sends a message that carries `fd`, which is closed here.
fn send_with(peer: &AsyncFd<OwnedFd>, fd: OwnedFd) -> Result<usize, rustix::io::Errno> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [std::os::fd::AsFd::as_fd(&fd)];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let message = hello();
    sendmsg(peer.get_ref(), &[io::IoSlice::new(&message)], &mut control, SendFlags::DONTWAIT)
}

/// A TCP socket whose last close takes a minute: data that its peer does not read, and `SO_LINGER`.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    use std::io::Write;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.write(&[0; 1 << 16]).is_ok() {}
    sender.set_nonblocking(false).unwrap();
    let minute = Some(Duration::from_secs(60));
    rustix::net::sockopt::set_socket_linger(&sender, minute).unwrap();
    (sender.into(), peer)
}

async fn until(mut condition: impl FnMut() -> bool) {
    let limit = Duration::from_secs(10);
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(limit, wait).await.expect("condition holds in time");
}

fn hello() -> [u8; 64] {
    Message::Hello { slot: 3, pid: 42, generation: 7 }.encode()
}

#[tokio::test]
async fn a_hello_is_welcomed_and_the_kernel_names_the_peer() {
    let fixture = fixture();
    let peer = fixture.connect();
    socket::send(peer.get_ref(), &hello()).unwrap();
    let mut packet = [0; socket::PACKET];
    let receive =
        peer.async_io(tokio::io::Interest::READABLE, |fd| socket::receive(fd, &mut packet));
    let length = tokio::time::timeout(Duration::from_secs(10), receive).await.unwrap().unwrap();
    assert_eq!(Message::decode(&packet[..length]), Some(Message::Welcome { generation: 7 }));
    let peers = fixture.listener.tenant.peers();
    assert_eq!(peers, [Peer { host_pid: Some(std::process::id()), hello: Some((42, 3)) }]);
}

#[tokio::test]
async fn events_are_counted() {
    let fixture = fixture();
    let peer = fixture.connect();
    for kind in [EventKind::OverQuota, EventKind::OverQuota, EventKind::NoSlot] {
        let event = Event { kind, gpu: Some(0), bytes: 1, uuid: [0; 40] };
        socket::send(peer.get_ref(), &Message::Event(event).encode()).unwrap();
    }
    until(|| fixture.counters().no_slot == 1).await;
    assert_eq!(fixture.counters().over_quota, 2);
}

/// Of every kind that the protocol has, each with other values: what is kept does not grow with them, and who says
/// what makes no sense is not listened to.
#[tokio::test]
async fn no_kind_of_message_grows_what_is_kept() {
    for &kind in Kind::ALL {
        let fixture = fixture();
        let state = || format!("{:?}", fixture.listener.tenant).len();
        let quiet = state();
        let peer = fixture.connect();
        let makes_sense = kind == Kind::Event;
        for number in 0..2000 {
            let packet = Message::specimen(kind, number).encode();
            while let Err(error) = socket::send(peer.get_ref(), &packet) {
                if error.kind() != io::ErrorKind::WouldBlock {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::task::yield_now().await;
        }
        until(|| {
            let counters = fixture.counters();
            let events = counters.over_quota + counters.driver_refused;
            if makes_sense { events > 700 } else { counters.dropped == 1 }
        })
        .await;
        let counters = fixture.counters();
        let expected = if makes_sense { 0 } else { u64::from(tenant::MAX_GARBAGE) };
        assert_eq!(counters.garbage, expected, "{kind:?}");
        assert!(state() < quiet + 256, "{kind:?}: {quiet}, then {}", state());
    }
}

#[tokio::test]
async fn a_flood_waits_in_the_senders_own_queue() {
    let fixture = fixture();
    let peer = fixture.connect();
    let flooding = async {
        while fixture.counters().throttled == 0 {
            if socket::send(peer.get_ref(), &hello()).is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), flooding).await.expect("throttled in time");
    assert_eq!(fixture.counters().garbage, 0);
}

#[tokio::test]
async fn closing_the_socket_alone_is_not_death() {
    let fixture = fixture();
    let peer = fixture.connect();
    socket::send(peer.get_ref(), &hello()).unwrap();
    until(|| fixture.listener.tenant.peers().iter().any(|peer| peer.hello.is_some())).await;
    drop(peer);
    until(|| fixture.pages.recovered.load(Ordering::SeqCst) >= 2).await;
    // Slots were looked at, and the process is still known: it lives.
    assert_eq!(fixture.listener.tenant.peers().len(), 1);
}

#[tokio::test]
async fn death_is_seen_though_a_child_keeps_the_socket() {
    let fixture = fixture();
    // `sleep` inherits the socket of a shell that dies.
    let script = "exec python3 - \"$1\"";
    let program = r#"
import os, socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.set_inheritable(True)
if os.fork() == 0:
    time.sleep(60)
os.kill(os.getpid(), 9)
"#;
    let path = fixture.dir.path().join(SESSION_SOCKET);
    let mut child = std::process::Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(&path)
        .stdin(std::process::Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), program.as_bytes()).unwrap();
    let pid = child.id();
    tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
    until(|| fixture.pages.recovered.load(Ordering::SeqCst) >= 1).await;
    until(|| fixture.listener.tenant.peers().is_empty()).await;
    let group = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn a_directory_in_the_sockets_place_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join(SESSION_SOCKET)).unwrap();
    let tenant = Arc::new(TenantSessions::default());
    Listener::bind(dir.path(), Arc::new(FakePages::default()), tenant).unwrap();
}

#[tokio::test]
async fn a_message_with_descriptors_ends_the_session() {
    let fixture = fixture();
    let peer = fixture.connect();
    send_with(&peer, std::fs::File::open("/dev/null").unwrap().into()).unwrap();
    until(|| fixture.counters().dropped == 1).await;
    assert!(fixture.listener.tenant.peers().iter().all(|peer| peer.hello.is_none()));
}

#[tokio::test]
async fn descriptors_that_take_a_minute_to_close_hold_nobody_up() {
    let (neighbour, bad) = (fixture(), fixture());
    let (mut ends, mut open) = (Vec::new(), Vec::new());
    // In a session, in one whose owner is gone again, and where too many are waiting already.
    for round in 0..40 {
        let peer = bad.connect();
        let (fd, end) = lingering();
        send_with(&peer, fd).unwrap();
        ends.push(end);
        if round % 2 == 1 {
            open.push(peer);
        } else {
            drop(peer);
        }
    }
    until(|| bad.counters().dropped > 0).await;
    let start = Instant::now();
    for _ in 0..10 {
        neighbour.is_served().await;
    }
    // The listener and whatever it has not accepted go as well.
    drop(bad.listener);
    neighbour.is_served().await;
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    // Ends the lingering: the peers go.
    drop((ends, open));
}

#[tokio::test]
async fn a_storm_of_connections_and_deaths_does_not_delay_a_neighbour() {
    let neighbour = fixture();
    // Each look at the pages of this one takes long.
    let slow = FakePages { slow: Duration::from_millis(200), ..FakePages::default() };
    let bad = fixture_with(slow);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let storms: Vec<_> = (0..2)
        .map(|_| {
            let (stop, path) = (Arc::clone(&stop), bad.dir.path().join(SESSION_SOCKET));
            std::thread::spawn(move || {
                let (mut held, mut connections) = (Vec::new(), 0);
                while !stop.load(Ordering::SeqCst) {
                    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                    let kind = SocketType::SEQPACKET;
                    let unix = AddressFamily::UNIX;
                    let Ok(socket) = rustix::net::socket_with(unix, kind, flags, None) else {
                        held.clear();
                        continue;
                    };
                    let address = SocketAddrUnix::new(&path).unwrap();
                    if rustix::net::connect(&socket, &address).is_err() {
                        std::thread::yield_now();
                        continue;
                    }
                    connections += 1;
                    // Half-open, garbage, large, or gone at once.
                    match connections % 4 {
                        0 => held.push(socket),
                        1 => drop(socket::send(&socket, &[0xa5; 64])),
                        2 => drop(socket::send(&socket, &[0; 60_000])),
                        _ => {}
                    }
                    held.truncate(300);
                }
                connections
            })
        })
        .collect();
    until(|| bad.counters().garbage > 100).await;
    for _ in 0..20 {
        neighbour.is_served().await;
    }
    stop.store(true, Ordering::SeqCst);
    let connections: u32 = storms.into_iter().map(|storm| storm.join().unwrap()).sum();
    assert!(connections > 200, "{connections}");
    assert!(bad.listener.tenant.peers().len() <= MAX_SESSIONS);
}
