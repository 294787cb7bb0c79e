//! Host functions in streams: `cuLaunchHostFunc`, `cuStreamAddCallback` (CUDA Driver API, "Stream
//! Management").
//!
//! A thread for each queue of a GPU waits for it to reach the function, calls it, and lets the queue go
//! on. Copies submitted behind a host function wait for it, because it may write what they read.

use crate::abi::exports_both;
use crate::capture;
use crate::driver::{Device, driver, lock};
use crate::errors::Result;
use crate::graph::kind::{HostNode, Kind};
use crate::stream::{Stream, stream};
use simgpu::engine::Op;
use std::ffi::{c_uint, c_void};
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUresult, CUstream};

pub(crate) type HostFn = unsafe extern "C" fn(data: *mut c_void);
type Callback = unsafe extern "C" fn(stream: CUstream, status: CUresult, data: *mut c_void);

/// A function to call, with its argument as an address.
enum Call {
    Plain(HostFn, usize),
    Callback(Callback, usize, usize),
    /// Work of the driver's own.
    Work(Box<dyn FnOnce() + Send>),
    /// Nothing: the memory writes up to this operation are due.
    Writes,
}

struct Job {
    seq: u64,
    /// The operation before it in its queue.
    before: Option<u64>,
    call: Call,
}

/// The way to a queue's host function thread, once there is one.
#[derive(Default)]
pub(crate) struct Caller(Mutex<Option<Sender<Job>>>);

/// Calls on behalf of one of a GPU's queues until the process ends.
fn spawn(device: &'static Device) -> Result<Sender<Job>> {
    let (sender, jobs) = channel::<Job>();
    let run = move || {
        for job in jobs {
            let Ok(driver) = driver() else { return };
            let channel = device.lane.channel();
            if matches!(job.call, Call::Writes) {
                driver.session.wait(channel, job.seq);
                device.settle_writes();
                continue;
            }
            if let Some(before) = job.before {
                driver.session.wait(channel, before);
            }
            // SAFETY: the caller of cuLaunchHostFunc promises a function that may be called once
            // with this argument, from any thread.
            unsafe {
                match job.call {
                    Call::Plain(f, data) => f(data as *mut c_void),
                    Call::Callback(f, s, data) => f(s as CUstream, 0, data as *mut c_void),
                    Call::Work(work) => work(),
                    Call::Writes => {}
                }
            }
            // Brings the model to now, which is when a kernel ends that had the GPU so long.
            driver.session.is_complete(channel, job.seq);
            driver.session.host_done(channel, job.seq);
        }
    };
    // Signals are the application's threads' business.
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises `all`; pthread_sigmask reads it and fills `before`.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
    }
    let spawned = std::thread::Builder::new().name("simgpu-host".into()).spawn(run);
    // SAFETY: `before` was filled in above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    spawned.map(|_| sender).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
}

/// Submits memory writes, and has them done when the queue gets there.
pub(crate) fn after(s: &'static Stream, writes: impl FnOnce() -> Result<u64>) -> Result<()> {
    if driver()?.session.is_served() {
        return writes().map(drop);
    }
    submit(s, || Ok((writes()?, None)), Call::Writes)
}

pub(crate) fn run(f: HostFn, data: usize, s: &'static Stream) -> Result<()> {
    if s.is_capturing() {
        let host = HostNode { function: f, data };
        return capture::add(s, |_| Ok(Kind::Host(host))).map(|_| ());
    }
    submit(s, || s.submit_behind(Op::Host), Call::Plain(f, data))
}

/// Has `work` done when the queue gets there, which then waits for its end.
pub(crate) fn later(s: &'static Stream, work: Box<dyn FnOnce() + Send>) -> Result<()> {
    submit(s, || s.submit_behind(Op::Host), Call::Work(work))
}

/// Has a kernel run until `work`, which is begun when the queue gets there, is done.
pub(crate) fn until(s: &'static Stream, work: Box<dyn FnOnce() + Send>) -> Result<()> {
    submit(s, || s.submit_behind(Op::Until), Call::Work(work))
}

fn submit(
    s: &'static Stream,
    submit: impl FnOnce() -> Result<(u64, Option<u64>)>,
    call: Call,
) -> Result<()> {
    let (device, queue) = (s.device(), s.queue());
    let mut sender = lock(&device.callers[queue].0);
    let sender = match &mut *sender {
        Some(sender) => sender,
        none => none.insert(spawn(device)?),
    };
    let (seq, before) = submit()?;
    device.lane.host_function(queue, seq);
    sender.send(Job { seq, before, call }).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
}

exports_both! {
    fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz(s: CUstream, f: Option<HostFn>, data: *mut c_void) |flavour| {
        let s = stream(s, flavour)?;
        let f = f.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        run(f, data as usize, s)
    }

    // How the host thread waits for the stream, which is nothing to see here.
    fn cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz(s: CUstream, f: Option<HostFn>, data: *mut c_void, _mode: c_uint) |flavour| {
        let s = stream(s, flavour)?;
        let f = f.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        run(f, data as usize, s)
    }

    fn cuStreamAddCallback, cuStreamAddCallback_ptsz(s: CUstream, f: Option<Callback>, data: *mut c_void, flags: c_uint) |flavour| {
        let handle = s as usize;
        let s = stream(s, flavour)?;
        let f = f.filter(|_| flags == 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if s.is_capturing() {
            return capture::fail(s);
        }
        submit(s, || s.submit_behind(Op::Host), Call::Callback(f, handle, data as usize))
    }
}
