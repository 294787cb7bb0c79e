//! `tessera top` in a terminal of its own, without a plugin.

use std::fs::File;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::pty::{Winsize, openpty};

/// `tessera top` in a new terminal, and that terminal's other end.
fn top() -> (Child, File) {
    let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(&size, None).unwrap();
    // Or the program holds the other end itself.
    fcntl(&pty.master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
    let end = || Stdio::from(pty.slave.try_clone().unwrap());
    let child = Command::new(env!("CARGO_BIN_EXE_tessera"))
        .args(["top", "--interval", "1s"])
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .unwrap();
    (child, File::from(pty.master))
}

/// Reads until the view is there.
fn drawn(terminal: &mut File) {
    let (mut seen, mut buffer) = (String::new(), [0; 4096]);
    while !seen.contains("tessera") {
        let count = terminal.read(&mut buffer).unwrap();
        seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
}

fn ends(mut child: Child) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    false
}

/// It went on for ever, with a CPU of its own: the terminal's library reads what has hung up again and again.
#[test]
fn top_ends_with_its_terminal() {
    let (child, mut terminal) = top();
    drawn(&mut terminal);
    drop(terminal);
    assert!(ends(child));
}

#[test]
fn top_ends_when_told_to() {
    use std::io::Write;
    let (child, mut terminal) = top();
    drawn(&mut terminal);
    terminal.write_all(b"q").unwrap();
    // Nobody reads what it writes at last; it is little.
    assert!(ends(child));
}
