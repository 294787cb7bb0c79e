//! Arrays and mipmapped arrays: memory in a layout of the driver's own, so that only it knows how
//! many bytes one takes.
//!
//! `cuArrayGetMemoryRequirements` says, but only of arrays made with
//! `CUDA_ARRAY3D_DEFERRED_MAPPING`, which own no memory yet (CUDA Driver API, "Memory Management").
//! So a twin with that flag is made first, asked, and destroyed; the answer is reserved, and the
//! array itself made. Answers are kept, because programs make arrays of few shapes. Where there is
//! no answer (an older driver, or a combination of flags that can't be deferred), what the shape
//! may take at most is charged.

pub mod hooks;
mod size;

use crate::allocations::{Allocation, Allocations};
use crate::contexts::Place;
use crate::memory::footprint;
use crate::place::{self, Look};
use crate::quota::{self, Asked};
use crate::real::{self, Real};
use crate::spin::Spin;
use crate::state::{self, Process, Standing};
use crate::thread::Depth;
use core::ptr;
pub use size::Shape;
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// Shapes whose size is remembered.
const REMEMBERED: usize = 32;

/// The arrays of this process.
#[derive(Debug)]
pub struct Arrays {
    /// By handle.
    live: Allocations,
    sizes: Spin<Sizes>,
}

impl Default for Arrays {
    fn default() -> Self {
        Self::new()
    }
}

impl Arrays {
    /// None yet.
    pub const fn new() -> Self {
        let sizes = Sizes { known: [None; REMEMBERED], next: 0 };
        Self { live: Allocations::new(), sizes: Spin::new(sizes) }
    }

    /// Gives back the arrays of a context that the driver has destroyed.
    pub(crate) fn context_ended(&self, process: &'static Process, serial: u32) {
        self.live.drain(|array| array.context == serial, |array| quota::give_back(process, array));
    }
}

/// Bytes that a shape takes on a GPU: at least, and at most. The driver's answer is both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    least: u64,
    worst: u64,
}

/// The last shapes asked for, oldest replaced first.
#[derive(Debug)]
struct Sizes {
    known: [Option<(u8, Shape, Size)>; REMEMBERED],
    next: usize,
}

impl Sizes {
    fn find(&self, gpu: u8, shape: &Shape) -> Option<Size> {
        let known = self.known.iter().flatten().find(|(on, of, _)| *on == gpu && of == shape);
        known.map(|(.., size)| *size)
    }

    fn remember(&mut self, gpu: u8, shape: Shape, size: Size) {
        self.known[self.next] = Some((gpu, shape, size));
        self.next = (self.next + 1) % REMEMBERED;
    }
}

/// How many bytes an array of `shape` takes in the current context, which is on `gpu`.
fn size_of(process: &'static Process, gpu: u8, shape: &Shape) -> Size {
    if let Some(size) = process.arrays.sizes.lock().find(gpu, shape) {
        return size;
    }
    let (size, lasting) = match ask(shape) {
        Ok(bytes) => (Size { least: bytes, worst: bytes }, true),
        Err(refusal) => {
            let (least, worst) = shape.estimate();
            // Other errors may pass: no memory, no context.
            let lasting = matches!(refusal, CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED);
            (Size { least, worst }, lasting)
        }
    };
    if lasting {
        process.arrays.sizes.lock().remember(gpu, *shape, size);
    }
    size
}

/// Asks the driver, by way of a twin without memory.
fn ask(shape: &Shape) -> Result<u64, CUresult> {
    let mut device: CUdevice = 0;
    let current = real::cuCtxGetDevice.get().ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
    // SAFETY: a valid place for a device.
    succeed(unsafe { current(&raw mut device) })?;
    let mut twin = shape.descriptor;
    twin.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
    let (twin, mut array) = (&raw const twin, ptr::null_mut());
    let (made, needs_of, end) = match shape.levels {
        None => {
            let create = real::cuArray3DCreate_v2.get().ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
            // SAFETY: a whole descriptor and a valid place for a handle.
            let made = unsafe { create(&raw mut array, twin) };
            (made, &real::cuArrayGetMemoryRequirements, &real::cuArrayDestroy)
        }
        Some(levels) => {
            let create = real::cuMipmappedArrayCreate.get().ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
            // SAFETY: as above.
            let made = unsafe { create(&raw mut array, twin, levels) };
            (made, &real::cuMipmappedArrayGetMemoryRequirements, &real::cuMipmappedArrayDestroy)
        }
    };
    succeed(made)?;
    let mut needs = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
    let asked = match needs_of.get() {
        // SAFETY: the array was just made, and there is a valid place for the answer.
        Some(needs_of) => unsafe { needs_of(&raw mut needs, array, device) },
        None => CUDA_ERROR_NOT_SUPPORTED,
    };
    destroy(end, array);
    succeed(asked)?;
    Ok(needs.size as u64)
}

fn succeed(result: CUresult) -> Result<(), CUresult> {
    if result == CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

type Destroy = Real<unsafe extern "C" fn(CUarray) -> CUresult>;

/// Destroys what nobody but the shim has seen.
fn destroy(real: &Destroy, array: CUarray) {
    if let Some(destroy) = real.get() {
        // SAFETY: by the function's contract.
        unsafe { destroy(array) };
    }
}

/// Every hook that makes an array, in one piece of code, as none of them is hot: `call` runs the driver's function, which writes `handle`.
fn create(
    name: &'static str,
    shape: Option<Shape>,
    handle: *mut CUarray,
    undo: &Destroy,
    call: &dyn Fn() -> CUresult,
) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let process = match state::standing() {
        Standing::Pass => return call(),
        Standing::Closed => return CUDA_ERROR_SYSTEM_NOT_READY,
        Standing::Armed(process) => process,
    };
    // Without a descriptor or a place for the handle: the driver's own error.
    let Some(shape) = shape.filter(|shape| !handle.is_null() && !shape.owns_nothing()) else {
        return call();
    };
    let Place { serial, gpu } = match place::current(process) {
        Look::At(place) => place,
        Look::Nowhere => return call(),
        Look::Refused(refused) => return quota::refuse(process, name, Asked::Context, &refused),
        Look::Unnoted(_) => return quota::refuse_unnoted(name),
    };
    let Some(gpu) = gpu else {
        let asked = Asked::Bytes(shape.estimate().0);
        return quota::refuse_unlisted(process, name, asked);
    };
    let size = size_of(process, gpu, &shape);
    let (worst, least) = (footprint(size.worst), footprint(size.least));
    let reservation = match quota::reserve_between(process, gpu, worst, least) {
        Ok(reservation) => reservation,
        Err(refused) => {
            let asked = Asked::Bytes(size.least);
            return quota::refuse(process, name, asked, &refused);
        }
    };
    let bytes = reservation.bytes();
    let result = quota::insist(process, gpu, bytes, &call);
    if result != CUDA_SUCCESS {
        return result; // the reservation rolls back
    }
    // SAFETY: the driver wrote the handle when it succeeded.
    let made = unsafe { *handle };
    // What was reserved, which never fails.
    if reservation.commit(bytes, Kind::Array).is_err() {
        return CUDA_SUCCESS;
    }
    let array = Allocation { bytes, context: serial, gpu, kind: Kind::Array };
    match process.arrays.live.insert(made.addr() as u64, array) {
        Ok(None) => CUDA_SUCCESS,
        Ok(Some(stale)) => {
            // The driver gave the handle again, so its array is gone, though we saw no end of it.
            quota::give_back(process, stale);
            CUDA_SUCCESS
        }
        Err(_full) => {
            destroy(undo, made);
            quota::give_back(process, array);
            quota::refuse_unnoted(name)
        }
    }
}

/// Forgets the array, then calls the driver; see [`crate::free`].
fn release(array: CUarray, call: &dyn Fn() -> CUresult) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let handle = array.addr() as u64;
    let allocation = process.arrays.live.remove(handle);
    let result = call();
    if result == CUDA_SUCCESS {
        process.vmm.array_ended(process, array);
    }
    let Some(allocation) = allocation else { return result };
    if result == CUDA_SUCCESS {
        quota::give_back(process, allocation);
    } else {
        quota::keep(process, &process.arrays.live, handle, allocation);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(width: usize) -> Shape {
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            Width: width,
            Height: 1,
            Depth: 0,
            Format: 1,
            NumChannels: 1,
            Flags: 0,
        };
        Shape { descriptor, levels: None }
    }

    #[test]
    fn the_last_shapes_are_remembered_by_gpu() {
        let mut sizes = Sizes { known: [None; REMEMBERED], next: 0 };
        for width in 0..REMEMBERED + 1 {
            let bytes = width as u64;
            sizes.remember(0, shape(width), Size { least: bytes, worst: bytes });
        }
        assert_eq!(sizes.find(0, &shape(0)), None, "the oldest made room");
        assert_eq!(sizes.find(0, &shape(1)), Some(Size { least: 1, worst: 1 }));
        assert_eq!(sizes.find(1, &shape(1)), None, "another GPU");
        let levels = Shape { levels: Some(1), ..shape(1) };
        assert_eq!(sizes.find(0, &levels), None, "a mipmap is no array");
    }
}
