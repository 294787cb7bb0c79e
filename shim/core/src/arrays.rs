//! Arrays and mipmapped arrays: memory in a layout of the driver's own, so that only it knows how
//! many bytes one takes.
//!
//! `cuArrayGetMemoryRequirements` says, but only of arrays made with
//! `CUDA_ARRAY3D_DEFERRED_MAPPING`, which own no memory yet (CUDA Driver API, "Memory Management").
//! So a twin with that flag is made first, asked, and destroyed; the answer is reserved, and the
//! array itself made. Answers are kept, because programs make arrays of few shapes. Where there is
//! no answer (an older driver, or a combination of flags that can't be deferred), what the shape
//! may take at most is charged. Arrays are kept among the allocations: a handle is a host address, which
//! no device pointer is.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::memory::{Ask, Made, Width, charge};
use crate::place::{self, current_device};
use crate::quota;
use crate::real::{self, Real};
use crate::state::Process;
use crate::thread::{Answer, Call, entered, tenant};
use core::ffi::c_uint;
use core::ptr;
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

const REMEMBERED: usize = 32;

/// The last shapes asked for, oldest replaced first.
#[derive(Debug, Default)]
pub struct Sizes {
    known: [Option<(u8, Shape, u64)>; REMEMBERED],
    next: usize,
}

impl Sizes {
    fn find(&self, gpu: u8, shape: &Shape) -> Option<u64> {
        let known = self.known.iter().flatten().find(|(on, of, _)| *on == gpu && of == shape);
        known.map(|(.., bytes)| *bytes)
    }

    fn remember(&mut self, gpu: u8, shape: Shape, bytes: u64) {
        self.known[self.next] = Some((gpu, shape, bytes));
        self.next = (self.next + 1) % REMEMBERED;
    }
}

/// How many bytes an array of `shape` takes in the current context, which is on `gpu`.
fn size_of(process: &'static Process, gpu: u8, shape: &Shape) -> u64 {
    if let Some(bytes) = process.array_sizes.lock().find(gpu, shape) {
        return bytes;
    }
    let (bytes, lasting) = match ask(shape) {
        Ok(bytes) => (bytes, true),
        // Other errors may pass: no memory, no context.
        Err(CUDA_ERROR_INVALID_VALUE | CUDA_ERROR_NOT_SUPPORTED) => (shape.estimate(), true),
        Err(_) => (shape.estimate(), false),
    };
    if lasting {
        process.array_sizes.lock().remember(gpu, *shape, bytes);
    }
    bytes
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
    // SAFETY: by the function's contract.
    real.tell(|destroy| unsafe { destroy(array) });
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
    let bytes = match place.gpu {
        Some(gpu) => size_of(process, gpu, &shape),
        None => shape.estimate(),
    };
    let ask = Ask { name, kind: Kind::Array, asked: bytes, most: bytes };
    // SAFETY: the driver wrote the handle when it succeeded.
    let array = || unsafe { *handle };
    // Charged what was reserved: the driver does not say what it took.
    let made = |bytes| Made { pointer: array().addr() as u64, bytes };
    let end = match levels {
        None => &real::cuArrayDestroy,
        Some(_) => &real::cuMipmappedArrayDestroy,
    };
    charge(process, place, &ask, call, made, |_| destroy(end, array()))
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
    let allocation = process.allocations.remove(handle);
    let answer = call();
    if answer.is_ok() {
        process.vmm.array_ended(process, array);
    }
    match (allocation, answer) {
        (Some(allocation), Ok(())) => quota::give_back(process, allocation),
        (Some(allocation), Err(_)) => quota::keep(process, handle, allocation),
        (None, _) => {}
    }
    answer
}

pub use cuArrayDestroy as cuMipmappedArrayDestroy;

// What an array takes at most, from its descriptor: for drivers and descriptors where the driver
// itself can't be asked (CUDA Driver API, "Memory Management": `cuArray3DCreate`,
// `cuMipmappedArrayCreate`). Errs upwards.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// As the caller gave it, in the newest form.
    pub(super) descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    /// Mipmap levels asked for; `None` for an array.
    pub(super) levels: Option<u32>,
}

/// Bytes of one texel, by format (`CUarray_format`): planes, packed and compressed ones, and those of later drivers, count
/// as the largest that there is.
fn texel(format: CUarray_format, channels: u32) -> u64 {
    let channels = u64::from(channels.clamp(1, 4));
    match format {
        // UNSIGNED_INT8, SIGNED_INT8
        0x01 | 0x08 => channels,
        // UNSIGNED_INT16, SIGNED_INT16, HALF
        0x02 | 0x09 | 0x10 => 2 * channels,
        // UNSIGNED_INT32, SIGNED_INT32, FLOAT
        0x03 | 0x0a | 0x20 => 4 * channels,
        _ => 16,
    }
}

/// Texels are stored in tiles 64 bytes wide and 8 rows high, up to 16 of which are stacked.
const TILE_WIDTH: u64 = 64;
const TILE_HEIGHT: u64 = 8;
const STACKED: u64 = 16;
/// Arrays begin at multiples of this (`CUDA_ARRAY_MEMORY_REQUIREMENTS::alignment` of current GPUs).
const ALIGN: u64 = 64 << 10;

impl Shape {
    /// Whether it owns no memory: that comes with `cuMemMapArrayAsync`, from `cuMemCreate`.
    pub(super) fn owns_nothing(&self) -> bool {
        self.descriptor.Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) != 0
    }

    /// The most that its texels may take with padding; `u64::MAX`, which fits no quota, where that overflows.
    fn estimate(&self) -> u64 {
        self.padded().unwrap_or(u64::MAX)
    }

    /// The sum of all levels, slices and layers.
    fn padded(&self) -> Option<u64> {
        let d = &self.descriptor;
        // An extent of 0 says that there is no such dimension.
        let extent = |n: usize| (n as u64).max(1);
        let (width, height, depth) = (extent(d.Width), extent(d.Height), extent(d.Depth));
        let layered = d.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) != 0;
        let largest = width.max(height).max(if layered { 1 } else { depth });
        let levels = self.levels.unwrap_or(1).clamp(1, 1 + largest.ilog2());
        let texel = texel(d.Format, d.NumChannels);
        let mut total = 0u64;
        for level in 0..levels {
            let halved = |extent: u64| (extent >> level).max(1);
            let row = halved(width).checked_mul(texel)?.checked_next_multiple_of(TILE_WIDTH)?;
            let rows = halved(height);
            let stack = rows.checked_next_power_of_two()?.clamp(TILE_HEIGHT, TILE_HEIGHT * STACKED);
            let slices = if layered { depth } else { halved(depth) };
            let plane = row.checked_mul(rows.checked_next_multiple_of(stack)?)?;
            total = total.checked_add(plane.checked_mul(slices)?)?;
        }
        total.checked_next_multiple_of(ALIGN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_shapes_are_remembered_by_gpu() {
        let mut sizes = Sizes::default();
        let of = |width| shape([width, 1, 0], 1, 1);
        for width in 0..REMEMBERED + 1 {
            let bytes = width as u64;
            sizes.remember(0, of(width), bytes);
        }
        assert_eq!(sizes.find(0, &of(0)), None, "the oldest made room");
        assert_eq!(sizes.find(0, &of(1)), Some(1));
        assert_eq!(sizes.find(1, &of(1)), None, "another GPU");
        let levels = Shape { levels: Some(1), ..of(1) };
        assert_eq!(sizes.find(0, &levels), None, "a mipmap is no array");
    }

    const UINT8: CUarray_format = 0x01;
    const FLOAT: CUarray_format = 0x20;
    const BC7: CUarray_format = 0x9d;

    fn shape(extents: [usize; 3], format: CUarray_format, channels: u32) -> Shape {
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            Width: extents[0],
            Height: extents[1],
            Depth: extents[2],
            Format: format,
            NumChannels: channels,
            Flags: 0,
        };
        Shape { descriptor, levels: None }
    }

    fn with(mut shape: Shape, flags: u32, levels: Option<u32>) -> Shape {
        shape.descriptor.Flags = flags;
        shape.levels = levels;
        shape
    }

    #[test]
    fn texels_are_counted_by_format_and_extents() {
        for (shape, bytes) in [
            (shape([1000, 0, 0], UINT8, 1), 64 << 10),
            (shape([4096, 4096, 0], UINT8, 1), 16 << 20),
            (shape([1000, 1000, 0], FLOAT, 4), 16_000 * 1024),
            (shape([1024, 1024, 7], FLOAT, 1), 28 << 20),
            (shape([1024, 1024, 0], BC7, 4), 16 << 20),
        ] {
            assert_eq!(shape.estimate(), bytes, "{shape:?}");
        }
    }

    #[test]
    fn levels_shrink_but_layers_do_not() {
        let cube = shape([1024, 1024, 6], UINT8, 1);
        // 1024² + 512² of six faces, and of a volume whose depth is halved too.
        let faces = with(cube, CUDA_ARRAY3D_CUBEMAP, Some(2));
        assert_eq!(faces.estimate(), (6 * (1024 + 256)) << 10);
        assert_eq!(with(cube, 0, Some(2)).estimate(), (6 * 1024 + 3 * 256) << 10);
        // Levels beyond the last are not made.
        let most = with(cube, CUDA_ARRAY3D_LAYERED, Some(11)).estimate();
        assert_eq!(with(cube, CUDA_ARRAY3D_LAYERED, Some(1000)).estimate(), most);
    }

    #[test]
    fn unknown_formats_count_as_the_largest() {
        let unknown = shape([100, 100, 0], 0x7777, 1).estimate();
        for format in [UINT8, FLOAT, BC7] {
            assert!(shape([100, 100, 0], format, 4).estimate() <= unknown, "{format:#x}");
        }
    }

    #[test]
    fn what_overflows_fits_nothing() {
        let huge = shape([usize::MAX, usize::MAX, usize::MAX], FLOAT, 4);
        assert_eq!(huge.estimate(), u64::MAX);
        let wraps = shape([1 << 32, 1 << 32, 1], UINT8, 1);
        assert_eq!(wraps.estimate(), u64::MAX);
    }
}
