//! Events of one process in another: CUDA Driver API, "Memory Management", `cuIpcGetEventHandle`.
//!
//! An interprocess event is an entry of the shared state from its creation, and its name says which.
//! It ends with the process that made it, or when that destroys it: what is then done with imports is
//! undefined by the manual; here they read as never recorded.

use crate::abi::{exports, put};
use crate::context::current;
use crate::driver::driver;
use crate::errors::Result;
use crate::event::{CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS, Common, Event};
use crate::handle::{handle, resolve};
use crate::shared::created;
use simgpu::memory::ObjectId;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUevent,
    CUipcMemHandle,
};

const CUDA_ERROR_MAP_FAILED: i32 = 205;
const MAGIC: u64 = u64::from_le_bytes(*b"SIMGPUEV");

/// `CUipcEventHandle`: of the same form as the handles of memory.
type Handle = CUipcMemHandle;

/// What a handle says.
#[derive(Clone, Copy)]
#[repr(C)]
struct Name {
    magic: u64,
    /// When the shared state was created.
    state: u64,
    pid: i32,
    index: u32,
    generation: u64,
    zero: [u64; 4],
}
const _: () = assert!(size_of::<Name>() == size_of::<Handle>());

fn name(event: CUevent) -> Result<Name> {
    let driver = driver()?;
    let event: &'static Event = resolve(event)?;
    // "This event must have been created with the CU_EVENT_INTERPROCESS and CU_EVENT_DISABLE_TIMING
    // flags set."
    let common = event.common().filter(|c| !c.imported).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    Ok(Name {
        magic: MAGIC,
        state: created(driver),
        // SAFETY: getpid has no preconditions.
        pid: unsafe { libc::getpid() },
        index: common.id.index,
        generation: common.id.generation,
        zero: [0; 4],
    })
}

fn open(name: &Name) -> Result<&'static Event> {
    let driver = driver()?;
    current()?;
    if name.magic != MAGIC || name.state != created(driver) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let id = ObjectId { index: name.index, generation: name.generation };
    let gpu = driver.session.event_gpu(id).ok_or(CUDA_ERROR_MAP_FAILED)?;
    // SAFETY: getpid has no preconditions.
    if name.pid == unsafe { libc::getpid() } {
        // A process does not open its own handles.
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    let home = driver.devices.iter().find(|d| d.gpu == gpu).ok_or(CUDA_ERROR_MAP_FAILED)?;
    // "behaves like a locally created event with the CU_EVENT_DISABLE_TIMING flag specified".
    let flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    Ok(Event::create(flags, Some(Common { id, home, imported: true })))
}

exports! {
    fn cuIpcGetEventHandle(out: *mut Handle, event: CUevent) {
        driver()?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: 64 bytes for 64 bytes.
        put(out, unsafe { std::mem::transmute::<Name, Handle>(name(event)?) })
    }
    fn cuIpcOpenEventHandle(out: *mut CUevent, name: Handle) {
        driver()?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: 64 bytes for 64 bytes; every bit pattern is a Name.
        put(out, handle(open(&unsafe { std::mem::transmute::<Handle, Name>(name) })?))
    }
}
