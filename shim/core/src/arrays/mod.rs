//! Arrays and mipmapped arrays: memory in a layout of the driver's own, so that only it knows how
//! many bytes one takes.
//!
//! `cuArrayGetMemoryRequirements` says, but only of arrays made with
//! `CUDA_ARRAY3D_DEFERRED_MAPPING`, which own no memory yet (CUDA Driver API, "Memory Management").
//! So a twin with that flag is made first, asked, and destroyed; the answer is reserved, and the
//! array itself made. Answers are kept, because programs make arrays of few shapes. Where there is
//! no answer (an older driver, or a combination of flags that can't be deferred), what the shape
//! may take at most is charged.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

mod size;

use crate::allocations::Allocations;
use crate::memory::{Ask, Made, Width, charge};
use crate::place::{self, current_device};
use crate::quota;
use crate::real::{self, Real};
use crate::spin::Spin;
use crate::state::Process;
use crate::thread::{Answer, Call, entered, tenant};
use core::ffi::c_uint;
use core::ptr;
use size::{Shape, Size};
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// Shapes whose size is remembered.
const REMEMBERED: usize = 32;

#[derive(Debug, Default)]
pub struct Arrays {
    /// By handle.
    live: Allocations,
    sizes: Spin<Sizes>,
}

impl Arrays {
    /// Gives back the arrays of a context that the driver has destroyed.
    pub(crate) fn context_ended(&self, process: &'static Process, serial: u32) {
        self.live.drain(|array| array.context == serial, |array| quota::give_back(process, array));
    }
}

/// The last shapes asked for, oldest replaced first.
#[derive(Debug, Default)]
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
        // Other errors may pass: no memory, no context.
        Err(CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED) => (shape.estimate(), true),
        Err(_) => (shape.estimate(), false),
    };
    if lasting {
        process.arrays.sizes.lock().remember(gpu, *shape, size);
    }
    size
}

/// Asks the driver, by way of a twin without memory.
fn ask(shape: &Shape) -> Result<u64, CUresult> {
    let device = current_device().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    let mut twin = shape.descriptor;
    twin.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
    let twin = &raw const twin;
    let (array, needs_of, end) = match shape.levels {
        None => {
            // SAFETY: a whole descriptor and a valid place for a handle.
            let array = real::cuArray3DCreate_v2
                .ask(ptr::null_mut(), |create, array| unsafe { create(array, twin) });
            (array?, &real::cuArrayGetMemoryRequirements, &real::cuArrayDestroy)
        }
        Some(levels) => {
            // SAFETY: as above.
            let array = real::cuMipmappedArrayCreate
                .ask(ptr::null_mut(), |create, array| unsafe { create(array, twin, levels) });
            (array?, &real::cuMipmappedArrayGetMemoryRequirements, &real::cuMipmappedArrayDestroy)
        }
    };
    // SAFETY: the array was just made, and there is a valid place for the answer.
    let needs = needs_of.ask(CUDA_ARRAY_MEMORY_REQUIREMENTS::default(), |ask, needs| unsafe {
        ask(needs, array, device)
    });
    destroy(end, array);
    Ok(needs?.size as u64)
}

type Destroy = Real<unsafe extern "C" fn(CUarray) -> CUresult>;

/// Destroys what nobody but the shim has seen.
fn destroy(real: &Destroy, array: CUarray) {
    if let Some(destroy) = real.get() {
        // SAFETY: by the function's contract.
        unsafe { destroy(array) };
    }
}

/// What is at `place`, unless that is null; packed structures may hold it.
unsafe fn read<D: Copy>(place: *const D) -> Option<D> {
    // SAFETY: not null, hence the caller's.
    (!place.is_null()).then(|| unsafe { place.read_unaligned() })
}

/// Every hook that makes an array. `descriptor` may be of any width.
unsafe fn create<N: Width>(
    name: &'static str,
    call: Call<'_>,
    handle: *mut CUarray,
    descriptor: Option<Array3dDescriptor<N>>,
    levels: Option<u32>,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    // Without a descriptor or a place for the handle: the driver's own error.
    let Some(d) = descriptor.filter(|_| !handle.is_null()) else { return call() };
    let [width, height, depth] =
        [d.Width, d.Height, d.Depth].map(|of| usize::saturating(of.wide()));
    let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: depth,
        Format: d.Format,
        NumChannels: d.NumChannels,
        Flags: d.Flags,
    };
    let shape = Shape { descriptor, levels };
    if shape.owns_nothing() {
        return call();
    }
    let Some(place) = place::current(process).or_refuse(process, name)? else { return call() };
    let size = match place.gpu {
        Some(gpu) => size_of(process, gpu, &shape),
        None => shape.estimate(),
    };
    let ask = Ask { name, kind: Kind::Array, worst: size.worst, least: size.least };
    // SAFETY: the driver wrote the handle when it succeeded.
    let array = || unsafe { *handle };
    // Charged what was reserved: the driver does not say what it took.
    let made = |bytes| Made { pointer: array().addr() as u64, bytes };
    let end = match levels {
        None => &real::cuArrayDestroy,
        Some(_) => &real::cuMipmappedArrayDestroy,
    };
    charge(process, place, &process.arrays.live, &ask, call, made, |_| destroy(end, array()))
}

/// One or two dimensions.
pub unsafe fn cuArrayCreate<N: Width>(
    call: Call<'_>,
    handle: *mut CUarray,
    descriptor: *const ArrayDescriptor<N>,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { create("cuArrayCreate", call, handle, read(descriptor).map(Into::into), None) }
}

pub unsafe fn cuArray3DCreate<N: Width>(
    call: Call<'_>,
    handle: *mut CUarray,
    descriptor: *const Array3dDescriptor<N>,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { create("cuArray3DCreate", call, handle, read(descriptor), None) }
}

pub unsafe fn cuMipmappedArrayCreate(
    call: Call<'_>,
    handle: *mut CUmipmappedArray,
    descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
    levels: c_uint,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { create("cuMipmappedArrayCreate", call, handle, read(descriptor), Some(levels)) }
}

/// CUDA Driver API, "Memory Management". Planes and levels of an array are views, unknown here. Forgets the array,
/// then calls the driver; see [`crate::memory`].
pub unsafe fn cuArrayDestroy(call: Call<'_>, array: CUarray) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let handle = array.addr() as u64;
    let allocation = process.arrays.live.remove(handle);
    let answer = call();
    if answer.is_ok() {
        process.vmm.array_ended(process, array);
    }
    match (allocation, answer) {
        (Some(allocation), Ok(())) => quota::give_back(process, allocation),
        (Some(allocation), Err(_)) => {
            quota::keep(process, &process.arrays.live, handle, allocation)
        }
        (None, _) => {}
    }
    answer
}

pub use cuArrayDestroy as cuMipmappedArrayDestroy;

#[cfg(test)]
mod tests {
    use super::size::tests::shape;
    use super::*;

    #[test]
    fn the_last_shapes_are_remembered_by_gpu() {
        let mut sizes = Sizes::default();
        let of = |width| shape([width, 1, 0], 1, 1);
        for width in 0..REMEMBERED + 1 {
            let bytes = width as u64;
            sizes.remember(0, of(width), Size { least: bytes, worst: bytes });
        }
        assert_eq!(sizes.find(0, &of(0)), None, "the oldest made room");
        assert_eq!(sizes.find(0, &of(1)), Some(Size { least: 1, worst: 1 }));
        assert_eq!(sizes.find(1, &of(1)), None, "another GPU");
        let levels = Shape { levels: Some(1), ..of(1) };
        assert_eq!(sizes.find(0, &levels), None, "a mipmap is no array");
    }
}
