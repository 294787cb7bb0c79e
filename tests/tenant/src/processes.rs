//! `--processes N`: copies forked before the driver is touched.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::exit::Exit;
use crate::stop;

/// How long one copy waits for the others in [`muster`].
const MUSTER: Duration = Duration::from_secs(3);

/// Shared by all copies: how many there are, and how many have arrived.
static COPIES: OnceLock<(u32, &'static AtomicU32)> = OnceLock::new();

/// Waits until every copy has come here (or ended its wait), so that none is done before another
/// has begun. Returns at once where there is one process.
pub fn muster() {
    let Some((copies, arrived)) = COPIES.get() else { return };
    arrived.fetch_add(1, Ordering::Relaxed);
    let end = Instant::now() + MUSTER;
    while arrived.load(Ordering::Relaxed) < *copies && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A counter that children of this process share.
fn shared_counter() -> Result<&'static AtomicU32, Exit> {
    // SAFETY: a fresh anonymous mapping, shared with children and never unmapped; the kernel
    // zeroes it, and zero is a valid AtomicU32.
    unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            size_of::<AtomicU32>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page == libc::MAP_FAILED {
            return Err(Exit::new(71, format!("mmap: {}", std::io::Error::last_os_error())));
        }
        Ok(&*page.cast::<AtomicU32>())
    }
}

/// Runs `work` in `copies` child processes; ends with the worst of their exit codes.
///
/// The children die with this process, so a killed tenant leaves none behind. A request to stop
/// or to close a phase is passed on to all.
pub fn run(copies: u32, work: impl FnOnce() -> Result<(), Exit>) -> Result<(), Exit> {
    let counter = shared_counter()?;
    COPIES.get_or_init(|| (copies, counter));
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
        let asked = stop::wait(Duration::from_millis(20));
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
