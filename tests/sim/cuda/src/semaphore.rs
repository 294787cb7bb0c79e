//! Semaphores of other APIs: CUDA Driver API, "External Resource Interoperability".
//!
//! No other API runs beside, so its part is played by shared memory: a timeline semaphore's descriptor
//! is that of a file which can be mapped and whose first eight bytes are the counter. A process that maps it
//! signals by writing, and waits by looking. Other kinds of handles are not simulated, nor are captures.

use crate::abi::{exports, exports_both, get, put};
use crate::capture;
use crate::context::current;
use crate::errors::Result;
use crate::handle::{Header, enliven, handle, kill, object, resolve};
use crate::stream::{Stream, stream};
use crate::stream_memory;
use std::ffi::{c_int, c_uint, c_void};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUexternalSemaphore, CUstream,
};

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
    let (fd, bytes) = (description.fd, size_of::<u64>());
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a fresh mapping, which disturbs nobody's memory; the kernel judges the descriptor.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, fd, 0) };
    if at == libc::MAP_FAILED {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    // "Ownership of the file descriptor is transferred to the CUDA driver when the handle is imported
    // successfully."
    // SAFETY: the caller gave it away.
    unsafe { libc::close(fd) };
    let semaphore = Semaphore { header: Header::new(), at: at as u64 };
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

fn submit(
    s: &'static Stream,
    list: Vec<(u64, u64)>,
    each: fn(&'static Stream, u64, u64) -> Result<()>,
) -> Result<()> {
    if s.is_capturing() {
        return capture::fail(s);
    }
    s.context().check_alive()?;
    list.into_iter().try_for_each(|(at, value)| each(s, at, value))
}

exports! {
    fn cuImportExternalSemaphore(out: *mut CUexternalSemaphore, description: *const Description) {
        current()?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, handle(import(&get(description)?)?))
    }
    fn cuDestroyExternalSemaphore(semaphore: CUexternalSemaphore) {
        current()?;
        let semaphore: &Semaphore = resolve(semaphore)?;
        if kill(semaphore) { Ok(()) } else { Err(CUDA_ERROR_INVALID_HANDLE) }
    }
}

exports_both! {
    fn cuSignalExternalSemaphoresAsync, cuSignalExternalSemaphoresAsync_ptsz(semaphores: *const CUexternalSemaphore, params: *const c_void, count: c_uint, s: CUstream) |flavour| {
        let list = listed(semaphores, params, count)?;
        submit(stream(s, flavour)?, list, stream_memory::write_at)
    }
    fn cuWaitExternalSemaphoresAsync, cuWaitExternalSemaphoresAsync_ptsz(semaphores: *const CUexternalSemaphore, params: *const c_void, count: c_uint, s: CUstream) |flavour| {
        let list = listed(semaphores, params, count)?;
        submit(stream(s, flavour)?, list, stream_memory::wait_at)
    }
}
