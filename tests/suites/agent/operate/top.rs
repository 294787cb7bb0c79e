//! `tessera top` in a terminal of its own, without a plugin.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, Termios, tcgetattr};
use nix::unistd::Pid;

/// Longer than any machine should need.
const BOUND: Duration = Duration::from_secs(180);

/// A terminal with `tessera top` in it.
struct Terminal {
    child: Child,
    /// What the terminal shows and where keys come from; none once it has hung up.
    master: Option<File>,
    /// The program's end, kept open to see how it is set.
    slave: Option<OwnedFd>,
    before: Termios,
}

/// `tessera top` in a new terminal.
fn top() -> Terminal {
    let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(&size, None).unwrap();
    let before = tcgetattr(&pty.slave).unwrap();
    // Or the program holds the other end itself.
    fcntl(&pty.master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
    let end = || Stdio::from(pty.slave.try_clone().unwrap());
    let child = tessera_harness::plugin::tessera()
        .args(["top", "--interval", "1s"])
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .unwrap();
    Terminal { child, master: Some(File::from(pty.master)), slave: Some(pty.slave), before }
}

/// On the terminal's own screen, and on the other one that programs draw on.
const OWN_SCREEN: &str = "\x1b[?1049l";
const OTHER_SCREEN: &str = "\x1b[?1049h";
const CURSOR: &str = "\x1b[?25h";

impl Terminal {
    /// Reads until all of these were written.
    fn shows(&mut self, texts: &[&str]) {
        let (mut seen, mut buffer) = (String::new(), [0; 4096]);
        let master = self.master.as_mut().unwrap();
        let deadline = Instant::now() + BOUND;
        while !texts.iter().all(|text| seen.contains(text)) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{texts:?} not in {seen:?}");
            let mut fds = [PollFd::new(master.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, PollTimeout::try_from(left).unwrap()).unwrap() > 0 {
                let count = master.read(&mut buffer).unwrap();
                seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
            }
        }
    }

    /// The view, on its own screen.
    fn drawn(&mut self) {
        self.shows(&[OTHER_SCREEN, "tessera"]);
        assert!(self.is_raw());
    }

    fn is_raw(&self) -> bool {
        let now = tcgetattr(self.slave.as_ref().unwrap()).unwrap();
        !now.local_flags.intersects(LocalFlags::ICANON | LocalFlags::ECHO)
    }

    /// As it was before.
    fn is_given_back(&mut self) {
        self.shows(&[OWN_SCREEN, CURSOR]);
        let now = tcgetattr(self.slave.as_ref().unwrap()).unwrap();
        assert_eq!(now, self.before);
    }

    fn send(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().try_into().unwrap())
    }

    fn ends(&mut self) -> bool {
        let deadline = Instant::now() + BOUND;
        while Instant::now() < deadline {
            if self.child.try_wait().unwrap().is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Where the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// It went on for ever, with a CPU of its own: the terminal's library reads what has hung up again and again.
#[test]
fn top_ends_with_its_terminal() {
    let mut terminal = top();
    terminal.drawn();
    drop((terminal.master.take(), terminal.slave.take()));
    assert!(terminal.ends());
}

#[test]
fn whoever_ends_top_finds_the_terminal_as_it_was() {
    let signals = [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT];
    for signal in signals.map(Some).into_iter().chain([None]) {
        let mut terminal = top();
        terminal.drawn();
        match signal {
            Some(signal) => terminal.send(signal),
            None => terminal.master.as_mut().unwrap().write_all(b"q").unwrap(),
        }
        assert!(terminal.ends(), "{signal:?}");
        terminal.is_given_back();
    }
}
