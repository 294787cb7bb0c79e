//! Processes that hold a slot and a session each, as the shim takes them at a process's first call of
//! the driver, and rest. They are forks of one process and hold nothing else, so that a machine of two
//! cores has room for a thousand.

use std::io::BufRead;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::Context;
use tessera_region::layout::SESSION_SOCKET;
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
    let session = connect(&dir.join(SESSION_SOCKET))?;
    let hello = Message::Hello { slot, pid: std::process::id(), generation }.encode();
    let mut answer = [0u8; MESSAGE_BYTES];
    // SAFETY: both buffers are as long as is said.
    let heard = unsafe {
        libc::send(session, hello.as_ptr().cast(), hello.len(), 0);
        libc::recv(session, answer.as_mut_ptr().cast(), answer.len(), 0)
    };
    anyhow::ensure!(usize::try_from(heard) == Ok(MESSAGE_BYTES), "no welcome");
    anyhow::ensure!(matches!(Message::decode(&answer), Ok(Message::Welcome { .. })), "no welcome");
    // SAFETY: one byte of a live buffer.
    unsafe { libc::write(ready, [1u8].as_ptr().cast(), 1) };
    loop {
        // SAFETY: waits for a signal, of which the only one that comes is the last.
        unsafe { libc::pause() };
    }
}

fn connect(path: &Path) -> anyhow::Result<i32> {
    // SAFETY: `sockaddr_un` is integers, for which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX)?;
    let path = path.as_os_str().as_bytes();
    anyhow::ensure!(path.len() < address.sun_path.len(), "the socket's path is too long");
    for (to, from) in address.sun_path.iter_mut().zip(path) {
        *to = from.cast_signed();
    }
    let length = libc::socklen_t::try_from(size_of_val(&address))?;
    // SAFETY: `address` is as long as is said.
    let socket = unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0);
        match libc::connect(socket, (&raw const address).cast(), length) {
            0 => Some(socket),
            _ => None,
        }
    };
    socket.with_context(|| format!("connect: {}", std::io::Error::last_os_error()))
}
