//! `--processes N`: copies forked before the driver is touched.

use crate::exit::Exit;
use crate::stop;

/// Runs `work` in `copies` child processes; ends with the worst of their exit codes.
///
/// The children die with this process, so a killed tenant leaves none behind. A request to stop
/// or to close a phase is passed on to all.
pub fn run(copies: u32, work: Box<dyn FnOnce() -> Result<(), Exit>>) -> Result<(), Exit> {
    let mut pids = Vec::new();
    let parent = std::process::id();
    for _ in 0..copies {
        // SAFETY: no thread was started and no driver loaded yet: the child is a full process.
        match unsafe { libc::fork() } {
            -1 => return Err(Exit::new(71, format!("fork: {}", std::io::Error::last_os_error()))),
            0 => {
                // SAFETY: plain prctl; the parent is checked after, in case it died before.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                if std::os::unix::process::parent_id() != parent {
                    std::process::exit(0);
                }
                return work();
            }
            pid => pids.push(pid),
        }
    }
    let mut worst = 0;
    while !pids.is_empty() {
        let asked = stop::wait(std::time::Duration::from_millis(20));
        for &pid in &pids {
            let signal = match asked {
                Some(stop::Asked::Stop) => libc::SIGTERM,
                Some(stop::Asked::Phase) => libc::SIGUSR1,
                None => break,
            };
            // SAFETY: a child of ours that was not yet waited for: the pid cannot be another's.
            unsafe { libc::kill(pid, signal) };
        }
        pids.retain(|&pid| {
            let mut status = 0;
            // SAFETY: waits for our own child, with a live status word.
            match unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } {
                0 => true,
                _ => {
                    let code = if libc::WIFSIGNALED(status) {
                        128 + libc::WTERMSIG(status)
                    } else {
                        libc::WEXITSTATUS(status)
                    };
                    worst = worst.max(code);
                    false
                }
            }
        });
    }
    if worst == 0 { Ok(()) } else { Err(Exit::new(worst, "")) }
}
