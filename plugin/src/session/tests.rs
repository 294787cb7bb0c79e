use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tessera_region::layout::SESSION_SOCKET;
use tessera_region::session::{Event, EventKind};

use super::*;

#[derive(Default)]
struct FakePages {
    recovered: AtomicU32,
}

impl Pages for FakePages {
    fn recover(&self) {
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
    let dir = tempfile::tempdir().unwrap();
    let pages = Arc::new(FakePages::default());
    let listener =
        Listener::bind(dir.path(), Arc::clone(&pages) as _, Arc::new(Tenant::default())).unwrap();
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
        self.listener.tenant().counters()
    }
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
    assert_eq!(Message::decode(&packet[..length]), Ok(Message::Welcome { generation: 7 }));
    let peers = fixture.listener.tenant().peers();
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

#[tokio::test]
async fn garbage_is_counted_and_then_the_session_is_closed() {
    let fixture = fixture();
    let peer = fixture.connect();
    let (junk, long, short) = ([0xa5; 64], [0; 4096], [1; 1]);
    let packets: [&[u8]; 3] = [&junk, &long, &short];
    for packet in packets.into_iter().cycle().take(tenant::MAX_GARBAGE as usize) {
        socket::send(peer.get_ref(), packet).unwrap();
    }
    until(|| fixture.counters().dropped == 1).await;
    assert_eq!(fixture.counters().garbage, u64::from(tenant::MAX_GARBAGE));
    // The socket is closed, and others are still served.
    until(|| socket::send(peer.get_ref(), &junk).is_err()).await;
    let other = fixture.connect();
    socket::send(other.get_ref(), &hello()).unwrap();
    until(|| fixture.listener.tenant().peers().iter().any(|peer| peer.hello.is_some())).await;
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
    until(|| fixture.listener.tenant().peers().iter().any(|peer| peer.hello.is_some())).await;
    drop(peer);
    until(|| fixture.pages.recovered.load(Ordering::SeqCst) >= 2).await;
    // Slots were looked at, and the process is still known: it lives.
    assert_eq!(fixture.listener.tenant().peers().len(), 1);
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
    until(|| fixture.listener.tenant().peers().is_empty()).await;
    let group = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn a_directory_in_the_sockets_place_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join(SESSION_SOCKET)).unwrap();
    let tenant = Arc::new(Tenant::default());
    Listener::bind(dir.path(), Arc::new(FakePages::default()), tenant).unwrap();
}

#[tokio::test]
async fn thousands_of_listeners_are_served_by_one_thread() {
    let fixtures: Vec<Fixture> = (0..1000).map(|_| fixture()).collect();
    let peers: Vec<_> = fixtures.iter().map(Fixture::connect).collect();
    for peer in &peers {
        socket::send(peer.get_ref(), &hello()).unwrap();
    }
    until(|| {
        fixtures.iter().all(|fixture| {
            fixture.listener.tenant().peers().iter().any(|peer| peer.hello.is_some())
        })
    })
    .await;
}
