//! `cuStreamWriteValue32` and `64`: CUDA Driver API, "Stream memory operations".
//!
//! The write takes effect when the queue gets there: whoever then waits for or asks about the
//! queue does it, and a thread does it for those who only watch the memory. The queue itself never
//! waits for a thread.

use crate::abi::exports_both;
use crate::driver::{Device, driver, lock};
use crate::errors::Result;
use crate::host_function::after;
use crate::stream::stream;
use simgpu::engine::Op;
use std::collections::VecDeque;
use std::ffi::c_uint;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUdeviceptr, CUstream};

/// Writes that the queue has not reached, oldest first.
#[derive(Default)]
pub(crate) struct PendingWrites {
    count: AtomicUsize,
    writes: Mutex<VecDeque<Write>>,
}

#[derive(Clone, Copy)]
struct Write {
    seq: u64,
    address: u64,
    value: Value,
}

#[derive(Clone, Copy)]
enum Value {
    Word(u32),
    Double(u64),
}

impl Device {
    /// Does the writes that the queue has reached.
    #[inline]
    pub(crate) fn settle_writes(&self) {
        if self.lane.writes.count.load(Ordering::Acquire) > 0 {
            self.settle_pending();
        }
    }

    #[cold]
    fn settle_pending(&self) {
        let Ok(driver) = driver() else { return };
        let channel = self.lane.channel();
        let mut writes = lock(&self.lane.writes.writes);
        while let Some(w) = writes.front().copied() {
            if !driver.session.is_complete(channel, w.seq) {
                return;
            }
            // SAFETY: when it was submitted the address lay in memory that the driver knows,
            // aligned; the caller promises to keep it until the write is complete.
            unsafe {
                match w.value {
                    Value::Word(v) => {
                        (*(w.address as *const AtomicU32)).store(v, Ordering::Release)
                    }
                    Value::Double(v) => {
                        (*(w.address as *const AtomicU64)).store(v, Ordering::Release);
                    }
                }
            }
            writes.pop_front();
            self.lane.writes.count.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn write(
    s: &'static crate::stream::Stream,
    address: u64,
    value: Value,
    flags: c_uint,
) -> Result<()> {
    let bytes = match value {
        Value::Word(_) => 4,
        Value::Double(_) => 8,
    };
    // CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER is the only flag.
    if flags > 1 || !address.is_multiple_of(bytes) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let driver = driver()?;
    driver.memory().touch(address, bytes).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let device = s.device();
    let submit = || {
        let mut writes = lock(&device.lane.writes.writes);
        let seq = s.submit(Op::Compute(driver.session.config().costs.marker_ns))?;
        writes.push_back(Write { seq, address, value });
        device.lane.writes.count.fetch_add(1, Ordering::AcqRel);
        Ok(seq)
    };
    after(device, submit)
}

exports_both! {
    fn cuStreamWriteValue32, cuStreamWriteValue32_ptsz(s: CUstream, at: CUdeviceptr, value: u32, flags: c_uint) |flavour| {
        write(stream(s, flavour)?, at, Value::Word(value), flags)
    }
    fn cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(s: CUstream, at: CUdeviceptr, value: u32, flags: c_uint) |flavour| {
        write(stream(s, flavour)?, at, Value::Word(value), flags)
    }
    fn cuStreamWriteValue64, cuStreamWriteValue64_ptsz(s: CUstream, at: CUdeviceptr, value: u64, flags: c_uint) |flavour| {
        write(stream(s, flavour)?, at, Value::Double(value), flags)
    }
    fn cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(s: CUstream, at: CUdeviceptr, value: u64, flags: c_uint) |flavour| {
        write(stream(s, flavour)?, at, Value::Double(value), flags)
    }
}
