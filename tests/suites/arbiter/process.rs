//! Peers and arbiters that are processes of their own: this test program, started again.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::SockFlag;
use nix::unistd::Pid;
use tessera_arbiter::Arbiter;
use tessera_config::Leases;
use tessera_harness::{Owned, again};
use tessera_region::layout::{GATE_CLOSED, gate_epoch, gate_state};
use tessera_region::quota::QuotaWriter;
use tessera_region::session::Message;

use tessera_harness::gate_tenants::{Peer, work};

const DIRS: &str = "ARBITER_TEST_DIRS";
const ROLE: &str = "ARBITER_TEST_ROLE";

/// A process in a role.
pub struct Process(pub Owned);

impl Process {
    pub fn new(role: &str, dirs: &[&Path]) -> Self {
        Self::under(&[], role, dirs)
    }

    /// Started by a command with its arguments.
    pub fn under(prefix: &[&str], role: &str, dirs: &[&Path]) -> Self {
        let child = again(prefix, "process::in_a_role")
            .env(ROLE, role)
            .env(DIRS, std::env::join_paths(dirs).unwrap())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Process(Owned(child))
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }

    pub fn stop(&self) {
        tessera_harness::stop(self.0.id());
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Not a test by itself: what [`Process`] runs.
#[test]
#[ignore = "started by other tests"]
fn in_a_role() {
    let Some(dirs) = std::env::var_os(DIRS) else { return };
    let dirs: Vec<_> = std::env::split_paths(&dirs).collect();
    match std::env::var(ROLE).unwrap().as_str() {
        // Launches all the time.
        "works" => work(&dirs[0], &AtomicBool::new(false)),
        // Wants, and never drains.
        "holds" => {
            let peer = Peer::connect(&dirs[0]).hello();
            peer.want();
            std::thread::sleep(Duration::from_secs(60));
        }
        // Drains nothing, and says at each closing that what it has in flight stands still.
        "stuck" => {
            let peer = Peer::connect(&dirs[0]).hello();
            let page = QuotaWriter::open(&dirs[0]).unwrap();
            let mut seen = None;
            loop {
                let word = page.gate(0);
                if seen.replace(word) != Some(word) && gate_state(word) == GATE_CLOSED {
                    peer.say(Message::Idle { gpu: 0, epoch: gate_epoch(word) });
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        // The same, with a child that keeps its socket.
        "forks" => {
            let peer = Peer::connect_as(&dirs[0], SockFlag::empty()).hello();
            let mut child = Command::new("sleep").arg("20").spawn().unwrap();
            peer.want();
            let _ = child.wait();
        }
        "arbitrates" => {
            let arbiter = Arbiter::start(&Leases::default()).unwrap();
            dirs.iter().for_each(|dir| arbiter.admit(dir).unwrap());
            std::thread::sleep(Duration::from_secs(60));
        }
        role => panic!("{role}"),
    }
}
