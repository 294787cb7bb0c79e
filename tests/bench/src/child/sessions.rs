//! Processes that hold a slot and a session each, as the shim takes them at a process's first call of
//! the driver, and rest. They are forks of one process and hold nothing else, so that a machine of two
//! cores has room for a thousand.

use std::io::BufRead;
use std::os::fd::AsRawFd;
use std::path::Path;

use tessera_region::quota::QuotaReader;
use tessera_region::session::{MESSAGE_BYTES, Message};
use tessera_region::usage::UsageMap;

/// For every line on standard input, the directory of an allocation, forks a process that is a tenant
/// of it; prints its pid when the plugin has heard it. They end with this process.
pub fn run() -> anyhow::Result<()> {
    for line in std::io::stdin().lock().lines() {
        let dir = line?;
        let mut ready = [0; 2];
        // SAFETY: `ready` has room for two descriptors.
        anyhow::ensure!(unsafe { libc::pipe(ready.as_mut_ptr()) } == 0, "pipe");
        // SAFETY: this process has one thread, so its copy may do all that it may.
        match unsafe { libc::fork() } {
            -1 => anyhow::bail!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                let outcome = tenant(Path::new(&dir), ready[1]);
                eprintln!("a session ended: {outcome:?}");
                // SAFETY: ends this process, without what its parent registered for its own end.
                unsafe { libc::_exit(1) }
            }
            pid => {
                let mut byte = 0u8;
                // SAFETY: both are this process's own, and one byte fits.
                let read = unsafe {
                    libc::close(ready[1]);
                    let read = libc::read(ready[0], (&raw mut byte).cast(), 1);
                    libc::close(ready[0]);
                    read
                };
                anyhow::ensure!(read == 1, "process {pid} got no session in {dir}");
                super::say(&pid.to_string())?;
            }
        }
    }
    Ok(())
}

fn tenant(dir: &Path, ready: i32) -> anyhow::Result<()> {
    // SAFETY: plain calls on numbers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // The parent's end of what it hears and says is not this process's.
        libc::close(0);
        libc::close(1);
    }
    let generation = QuotaReader::attach(dir)?.generation();
    let usage = UsageMap::attach(dir)?;
    let slot = usage.claim().map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let slot = u32::try_from(slot.index())?;
    let session = tessera_harness::plugin::connect(dir);
    let hello = Message::Hello { slot, pid: std::process::id(), generation }.encode();
    let mut answer = [0u8; MESSAGE_BYTES];
    // SAFETY: both buffers are as long as is said.
    let heard = unsafe {
        libc::send(session.as_raw_fd(), hello.as_ptr().cast(), hello.len(), 0);
        libc::recv(session.as_raw_fd(), answer.as_mut_ptr().cast(), answer.len(), 0)
    };
    anyhow::ensure!(usize::try_from(heard) == Ok(MESSAGE_BYTES), "no welcome");
    anyhow::ensure!(
        matches!(Message::decode(&answer), Some(Message::Welcome { .. })),
        "no welcome"
    );
    // SAFETY: one byte of a live buffer.
    unsafe { libc::write(ready, [1u8].as_ptr().cast(), 1) };
    loop {
        // SAFETY: waits for a signal, of which the only one that comes is the last.
        unsafe { libc::pause() };
    }
}
