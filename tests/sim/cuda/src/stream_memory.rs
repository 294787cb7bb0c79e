//! Waiting for and writing words of memory: CUDA Driver API, "Stream memory operations".
//!
//! A write takes effect when the queue gets there ([`simgpu::channel`]): the machine's GPU thread does it. Where there
//! is none, a caller that then waits for or asks about the queue does, and a thread for those who only watch the
//! memory. A queue that waits goes on when somebody, perhaps another process, has written the word: the GPU thread sees
//! it, or a host function that watches it. Streams may share a queue, so a wait that only a later operation of another stream would end may never end, as the manual
//! warns ("may deadlock the application").
//!
//! Semaphores of other APIs (CUDA Driver API, "External Resource Interoperability") are such words, too. No other API runs
//! beside, so its part is played by shared memory: a timeline semaphore's descriptor is that of a file which can be mapped
//! and whose first eight bytes are the counter. A process that maps it signals by writing, and waits by looking. Other kinds
//! of handles are not simulated, nor are captures.

use crate::abi::{
    Header, Result, enliven, exports, exports_both, get, handle, kill, object, resolve,
};
use crate::arena::{self, READ_WRITE};
use crate::capture;
use crate::driver::{Device, driver, lock};
use crate::graph::Kind;
use crate::stream::Stream;
use crate::work::{after, later};
use simgpu::channel::{Comparison, Word};
use simgpu::engine::Op;
use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUdeviceptr,
    CUexternalSemaphore, CUstream,
};

/// A wait for a word, or a write of it.
#[derive(Clone, Copy)]
pub(crate) struct MemOp {
    address: u64,
    word: Word,
    /// How a wait compares; a write: `None`.
    wait: Option<c_uint>,
}

/// `CU_STREAM_WAIT_VALUE_FLUSH`: the simulated GPUs can't flush remote writes.
const FLUSH: u32 = 1 << 30;

impl Device {
    /// Does the writes that the queue has reached.
    #[inline]
    pub(crate) fn settle_writes(&self) {
        let channel = self.lane.channel();
        if let Ok(driver) = driver()
            && let Some(ring) = driver.session.shared().rings.get(channel as usize)
            && ring.writes.wait()
        {
            driver.session.land_writes(channel);
        }
    }
}

impl MemOp {
    /// With its flags: `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER` is the only one of a write.
    fn check(&self, flags: c_uint) -> Result<()> {
        match self.wait {
            Some(_) if flags & FLUSH != 0 => return Err(CUDA_ERROR_NOT_SUPPORTED),
            Some(_) if Comparison::of(flags).is_some() => {}
            None if flags <= 1 => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        let bytes = self.word.bytes();
        if !self.address.is_multiple_of(bytes) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let found = driver()?.memory().touch(self.address, bytes);
        found.map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    pub(crate) fn run(self, s: &'static Stream) -> Result<()> {
        let MemOp { address, word, wait } = self;
        match wait.and_then(Comparison::of) {
            None => write(s, address, word),
            Some(how) => wait_for(s, address, word, how),
        }
    }
}

/// A kernel that looks at a word until that has reached the lower half of `value`, cyclically. It has the
/// GPU all the time.
pub(crate) fn run_until(s: &'static Stream, address: u64, value: u64) -> Result<()> {
    let [a, b, c, d, ..] = value.to_le_bytes();
    let word = Word::Short(u32::from_le_bytes([a, b, c, d]));
    let how = Comparison::Geq;
    MemOp { address, word, wait: Some(how as u32) }.check(how as u32)?;
    later(s, Op::Until, Box::new(move || watch(address, word, how)))
}

/// Waits until a word is as wanted, or the process ends.
fn watch(address: u64, value: Word, how: Comparison) {
    let mut pause = Duration::from_micros(10);
    // SAFETY: when it was submitted the address lay in memory that the driver knows, aligned; the caller promises to keep
    // it until the operation is complete.
    while !unsafe { value.is_met(how, address) } && driver().is_ok() {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(1));
    }
}

fn write(s: &'static Stream, address: u64, value: Word) -> Result<()> {
    let session = &driver()?.session;
    let cost = session.config().costs.marker_ns;
    after(s, || {
        let _alone = s.context().owner().calls.alone();
        let _writer = lock(&s.device().lane.writer);
        let (seq, _) = s.submit_held(Op::Mark(cost), None)?;
        session.write_after(s.device().lane.channel(), seq, address, value);
        Ok(seq)
    })
}

/// Has the queue wait until the word is as wanted.
fn wait_for(s: &'static Stream, address: u64, word: Word, how: Comparison) -> Result<()> {
    let session = &driver()?.session;
    if !session.is_served() {
        return later(s, Op::Host, Box::new(move || watch(address, word, how)));
    }
    let lane = &s.device().lane;
    let _alone = s.context().owner().calls.alone();
    let _writer = lock(&lane.writer);
    let (seq, _) = s.submit_held(Op::Host, None)?;
    lane.host_function(s.queue(), seq);
    session.wait_for(lane.channel(), seq, address, word, how);
    Ok(())
}

fn submit(s: &'static Stream, op: MemOp, flags: c_uint) -> Result<()> {
    op.check(flags)?;
    if s.is_capturing() {
        return capture::add(s, |_| Ok(Kind::MemOp(op))).map(|_| ());
    }
    s.context().check_alive()?;
    op.run(s)
}

exports_both! {
    fn cuStreamWriteValue32, cuStreamWriteValue32_ptsz;
       cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(s: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) |s| {
        submit(s, MemOp { address, word: Word::Short(value), wait: None }, flags)
    }
    fn cuStreamWriteValue64, cuStreamWriteValue64_ptsz;
       cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(s: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) |s| {
        submit(s, MemOp { address, word: Word::Long(value), wait: None }, flags)
    }
    fn cuStreamWaitValue32, cuStreamWaitValue32_ptsz;
       cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(s: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) |s| {
        submit(s, MemOp { address, word: Word::Short(value), wait: Some(flags) }, flags)
    }
    fn cuStreamWaitValue64, cuStreamWaitValue64_ptsz;
       cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(s: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) |s| {
        submit(s, MemOp { address, word: Word::Long(value), wait: Some(flags) }, flags)
    }
}

// Semaphores.

/// `CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD`, and the least and greatest of all.
const TIMELINE_FD: c_int = 9;
const KINDS: std::ops::RangeInclusive<c_int> = 1..=10;

/// `CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Description {
    kind: c_int,
    padding: c_int,
    /// A union with two pointers; a descriptor is at its beginning.
    fd: c_int,
    rest: [c_int; 3],
    flags: c_uint,
    reserved: [c_uint; 16],
}
const _: () = assert!(std::mem::offset_of!(Description, flags) == 24);

#[repr(C)]
struct Semaphore {
    header: Header,
    /// Where its counter is. It stays mapped: what is in flight may look at it.
    at: u64,
}

object!(Semaphore, 0x5345_4d41);

/// `CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS` and `…_WAIT_PARAMS`, as far as timelines have a use of them.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    /// `fence.value`.
    value: u64,
    others: [u64; 8],
    flags: c_uint,
    reserved: [c_uint; 16],
}
const _: () = assert!(size_of::<Params>() == 144 && std::mem::offset_of!(Params, flags) == 72);

fn import(description: &Description) -> Result<&'static Semaphore> {
    if !KINDS.contains(&description.kind) || description.flags != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if description.kind != TIMELINE_FD {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let (fd, bytes) = (description.fd, size_of::<u64>() as u64);
    // SAFETY: at no fixed address; the kernel judges the descriptor.
    let at = unsafe { arena::map(0, bytes, READ_WRITE, libc::MAP_SHARED, Some((fd, 0))) };
    let at = at.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    // "Ownership of the file descriptor is transferred to the CUDA driver when the handle is imported
    // successfully."
    // SAFETY: the caller gave it away.
    unsafe { libc::close(fd) };
    let semaphore = Semaphore { header: Header::new(), at };
    Ok(enliven(Box::leak(Box::new(semaphore))))
}

/// The semaphores and what each is to be or to have reached, as a caller lists them.
fn listed(
    semaphores: *const CUexternalSemaphore,
    params: *const c_void,
    count: c_uint,
) -> Result<Vec<(u64, u64)>> {
    let one = |at: usize| {
        let semaphore: &Semaphore = resolve(get(semaphores.wrapping_add(at))?)?;
        let params = get(params.cast::<Params>().wrapping_add(at))?;
        if params.flags != 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        Ok((semaphore.at, params.value))
    };
    (0..count as usize).map(one).collect()
}

/// The stream, if it can wait for semaphores and signal them.
fn able(s: &'static Stream) -> Result<&'static Stream> {
    if s.is_capturing() { capture::fail(s) } else { s.context().check_alive().map(|()| s) }
}

exports! {
    fn cuImportExternalSemaphore(description: *const Description) -> CUexternalSemaphore {
        Ok(handle(import(&get(description)?)?))
    }
    fn cuDestroyExternalSemaphore(semaphore: CUexternalSemaphore) {
        let semaphore: &Semaphore = resolve(semaphore)?;
        if kill(semaphore) { Ok(()) } else { Err(CUDA_ERROR_INVALID_HANDLE) }
    }
}

exports_both! {
    fn cuSignalExternalSemaphoresAsync, cuSignalExternalSemaphoresAsync_ptsz(semaphores: *const CUexternalSemaphore, params: *const c_void, count: c_uint, s: CUstream) |s| {
        let list = listed(semaphores, params, count)?;
        let s = able(s)?;
        list.into_iter().try_for_each(|(at, value)| write(s, at, Word::Long(value)))
    }
    fn cuWaitExternalSemaphoresAsync, cuWaitExternalSemaphoresAsync_ptsz(semaphores: *const CUexternalSemaphore, params: *const c_void, count: c_uint, s: CUstream) |s| {
        let list = listed(semaphores, params, count)?;
        let s = able(s)?;
        let wait = |(at, value)| wait_for(s, at, Word::Long(value), Comparison::Geq);
        list.into_iter().try_for_each(wait)
    }
}
