//! The two libraries' functions: each scenario calls them in a process of its own, with its own state.

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::AtomicU32;
use tessera_cuda::types::CUipcMemHandle;

pub const CONFIG: &str = r#"
default_kernel_us = 20.0
memory.reserved = 0
memory.context_overhead = "64MiB"
memory.module_overhead = 0
costs.launch_ns = 0
costs.event_ns = 1000
[[kernel]]
name = "spin"
parameter = 1
[[kernel]]
name = "until"
word = 0
"#;

pub type Result = c_int;
pub type Outcome<T> = std::result::Result<T, Result>;
pub type Handle = *mut c_void;
pub type Name = CUipcMemHandle;

pub const MIB: usize = 1 << 20;
pub const NULL: Handle = std::ptr::null_mut();

/// Runs the ignored test at this path in a fresh process on a fresh state, with keys before the configuration's others.
pub fn in_its_own_process(keys: &str, name: &str) {
    let (_crate, name) = name.split_once("::").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("gpus.toml");
    std::fs::write(&config, format!("{keys}{CONFIG}")).unwrap();
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"])
        .env("SIMGPU_CONFIG", &config)
        .env("SIMGPU_STATE", dir.path().join("state"))
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && text.contains("1 passed"), "{name}: {text}");
}

/// Tests, each in a process and with a state of its own: `fn name() { … }`, or with keys of its own
/// `fn name() with "key = value\n" { … }`.
macro_rules! scenarios {
    ($($(#[$meta:meta])* fn $name:ident() $(with $keys:literal)? $body:block)*) => {
        $(
            #[test]
            fn $name() {
                let name = concat!(module_path!(), "::alone::", stringify!($name));
                crate::harness::in_its_own_process(concat!($($keys)?), name);
            }
        )*
        mod alone {
            use super::*;
            $(
                $(#[$meta])*
                #[test]
                #[ignore = "run by its namesake in a process of its own"]
                fn $name() $body
            )*
        }
    };
}

/// `cuda!(name(args))`: the call's CUresult, or NVML's result.
macro_rules! cuda {
    ($name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the arguments are valid for the call, or meant to be refused by it.
        unsafe { $crate::exports::$name($($arg),*) }
    };
}

/// The answer that a call puts where it is told to.
pub fn made<T: Default>(call: impl FnOnce(*mut T) -> Result) -> Outcome<T> {
    put_over(T::default(), call)
}

/// The same, over what is there.
pub fn put_over<T>(mut answer: T, call: impl FnOnce(*mut T) -> Result) -> Outcome<T> {
    match call(&raw mut answer) {
        0 => Ok(answer),
        e => Err(e),
    }
}

/// The same of a call that must succeed.
pub fn must<T: Default>(call: impl FnOnce(*mut T) -> Result) -> T {
    made(call).unwrap()
}

pub fn ok(result: Result) {
    assert_eq!(result, 0);
}

/// Sets a variable, in a process of its own and before `cuInit`.
#[expect(clippy::disallowed_methods, reason = "the test that calls it has the process to itself")]
pub fn set(variable: &str, value: &str) {
    // SAFETY: no other thread of the process reads or sets variables.
    unsafe { std::env::set_var(variable, value) };
}

pub fn retain(ordinal: c_int) -> Handle {
    let mut context = NULL;
    ok(cuda!(cuInit(0)));
    ok(cuda!(cuDevicePrimaryCtxRetain(&raw mut context, ordinal)));
    ok(cuda!(cuCtxSetCurrent(context)));
    context
}

pub fn alloc(bytes: usize) -> Outcome<u64> {
    made(|to| cuda!(cuMemAlloc_v2(to, bytes)))
}

/// An allocation's or event's name for other processes.
pub const fn named(reserved: [u8; 64]) -> Name {
    CUipcMemHandle { reserved }
}

pub fn free(at: u64) -> Result {
    cuda!(cuMemFree_v2(at))
}

/// Free and total.
fn info() -> (usize, usize) {
    let (mut free, mut total) = (0usize, 0usize);
    ok(cuda!(cuMemGetInfo_v2(&raw mut free, &raw mut total)));
    (free, total)
}

pub fn free_bytes() -> usize {
    info().0
}

/// Device memory in use beyond `contexts` contexts.
pub fn used(contexts: usize) -> usize {
    let (free, total) = info();
    total - free - contexts * 64 * MIB
}

/// A kernel that is loaded: the first launch of another waits for the context's work.
pub fn kernel(name: &str) -> Handle {
    let function = unloaded(name);
    ok(cuda!(cuFuncLoad(function)));
    function
}

pub fn unloaded(name: &str) -> Handle {
    let ptx = c".version 8.0\n.entry spin()\n.entry plain()\n.entry until()\n";
    let (mut module, mut function) = (NULL, NULL);
    let name = CString::new(name).unwrap();
    ok(cuda!(cuModuleLoadData(&raw mut module, ptx.as_ptr().cast())));
    ok(cuda!(cuModuleGetFunction(&raw mut function, module, name.as_ptr())));
    function
}

pub fn launch(function: Handle, blocks: c_uint, stream: Handle, params: *mut Handle) -> Result {
    cuda!(cuLaunchKernel(
        function,
        blocks,
        1,
        1,
        128,
        1,
        1,
        0,
        stream,
        params,
        std::ptr::null_mut()
    ))
}

/// One block of a kernel that takes two numbers.
pub fn launch_with(function: Handle, stream: Handle, mut numbers: [u64; 2]) -> Result {
    let mut params = numbers.each_mut().map(|number| std::ptr::from_mut(number).cast());
    launch(function, 1, stream, params.as_mut_ptr())
}

/// A word that the host registers, and that the kernel `until` waits for.
pub static WORD: AtomicU32 = AtomicU32::new(0);

pub fn word() -> u64 {
    (&raw const WORD).addr() as u64
}

pub fn register_the_word() -> Result {
    cuda!(cuMemHostRegister_v2(word() as Handle, 4, 0))
}

/// Launches a kernel with the word and 1: `until` runs until they are equal.
pub fn run(function: Handle, stream: Handle) {
    ok(launch_with(function, stream, [word(), 1]));
}

pub fn new_stream() -> Handle {
    must(|to| cuda!(cuStreamCreate(to, 1)))
}

pub fn new_event() -> Handle {
    must(|to| cuda!(cuEventCreate(to, 0)))
}

pub fn record(event: Handle, stream: Handle) {
    ok(cuda!(cuEventRecord(event, stream)));
}

pub fn synchronize(stream: Handle) {
    ok(cuda!(cuStreamSynchronize(stream)));
}

pub fn query(stream: Handle) -> Result {
    cuda!(cuStreamQuery(stream))
}

pub fn fill(at: u64, value: u8, len: usize) {
    ok(cuda!(cuMemsetD8_v2(at, value, len)));
}

pub fn elapsed_us(from: Handle, to: Handle) -> f32 {
    let ms: f32 = must(|ms| cuda!(cuEventElapsedTime(ms, from, to)));
    ms * 1000.0
}

/// Occupies the GPU while what is measured is submitted, so that it then runs back to back.
pub fn keep_busy(spin: Handle, stream: Handle) {
    ok(launch_with(spin, stream, [0, 100_000_000]));
}

pub fn read<const N: usize>(at: u64) -> [u8; N] {
    let mut bytes = [0u8; N];
    ok(cuda!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), at, N)));
    bytes
}

// Two processes: the scenario's own and a child, forked before either initialises the driver.

/// The way to the other process.
pub struct Peer(UnixStream);

/// Runs `child` in a child process while `parent` runs here; both must end well.
pub fn pair(parent: impl FnOnce(&Peer), child: impl FnOnce(&Peer)) {
    let (mine, its) = UnixStream::pair().unwrap();
    // SAFETY: this test process has one thread that matters; the child leaves with _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        drop(mine);
        let peer = Peer(its);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| child(&peer)));
        // SAFETY: ends this process.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    drop(its);
    let peer = Peer(mine);
    parent(&peer);
    drop(peer);
    let mut status = 0;
    // SAFETY: our own child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
    assert!(killed || libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
}

impl Peer {
    pub fn send(&self, bytes: &[u8]) {
        use std::io::Write;
        (&self.0).write_all(bytes).unwrap();
    }

    pub fn receive<const N: usize>(&self) -> [u8; N] {
        use std::io::Read;
        let mut bytes = [0; N];
        (&self.0).read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The other is as far as this one.
    pub fn meet(&self) {
        self.send(&[1]);
        assert_eq!(self.receive::<1>(), [1]);
    }

    /// Waits until the other is gone.
    pub fn until_gone(&self) {
        use std::io::Read;
        assert!(matches!((&self.0).read(&mut [0]), Ok(0) | Err(_)));
    }

    /// Sends a descriptor (unix(7), SCM_RIGHTS).
    pub fn send_fd(&self, fd: RawFd) {
        let (fds, byte) = ([fd], [IoSlice::new(&[7])]);
        let rights = [ControlMessage::ScmRights(&fds)];
        sendmsg::<()>(self.0.as_raw_fd(), &byte, &rights, MsgFlags::empty(), None).unwrap();
    }

    pub fn receive_fd(&self) -> OwnedFd {
        let (mut byte, mut space) = ([0], nix::cmsg_space!(RawFd));
        let mut bytes = [IoSliceMut::new(&mut byte)];
        let (from, flags) = (self.0.as_raw_fd(), MsgFlags::empty());
        let message = recvmsg::<()>(from, &mut bytes, Some(&mut space), flags).unwrap();
        let rights = message.cmsgs().unwrap().next();
        let Some(ControlMessageOwned::ScmRights(fds)) = rights else { panic!("{rights:?}") };
        // SAFETY: new, and nobody else's.
        unsafe { OwnedFd::from_raw_fd(fds[0]) }
    }
}

pub(crate) use {cuda, scenarios};
