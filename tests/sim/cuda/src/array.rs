//! Arrays and mipmapped arrays: CUDA Driver API, "Memory Management".
//!
//! An array's memory is linear host memory; small arrays share chunks of device memory as small allocations do. Deferred
//! ones have no memory. The layout is the simulator's: rows of 64 bytes, in groups of 8 where there are several, each
//! level for itself, the whole a multiple of 64 KiB, which is also the alignment that
//! `cuArrayGetMemoryRequirements` names. Real layouts differ by GPU; NVIDIA documents none.

use crate::abi::{Header, Recycler, Result, enliven, exports, get, handle, kill, object, resolve};
use crate::context::{Context, current};
use crate::driver::{Driver, driver, lock};
use crate::memory::{self, Kind};
use std::ffi::{c_uint, c_void};
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY_DESCRIPTOR_v1, CUDA_ARRAY_MEMORY_REQUIREMENTS,
    CUDA_ARRAY3D_CUBEMAP as CUBEMAP, CUDA_ARRAY3D_DEFERRED_MAPPING as DEFERRED,
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR_v1, CUDA_ARRAY3D_LAYERED as LAYERED,
    CUDA_ARRAY3D_SPARSE as SPARSE, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_SUPPORTED, CUarray, CUdevice, CUmipmappedArray,
};

/// An array, a mipmapped array, or a level of one.
#[repr(C)]
pub(crate) struct Array {
    header: Header,
    inner: Mutex<Option<Inner>>,
}

#[derive(Clone)]
struct Inner {
    shape: Shape,
    context: &'static Context,
    /// Where its memory is; `None` if the mapping is deferred.
    at: Option<u64>,
    part: Part,
}

#[derive(Clone)]
enum Part {
    Array,
    /// A mipmapped array, with its levels, which end with it.
    Mipmap(Vec<&'static Array>),
    /// A level of one, which owns the memory.
    Level(u32),
}

object!(Array, 0x4152_5259);

static DEAD: Recycler<Array> = Recycler::new();
/// What is alive and has memory of its own, for contexts that end.
static OWNERS: Mutex<Vec<&'static Array>> = Mutex::new(Vec::new());

impl Inner {
    /// With memory for it.
    fn take(descriptor: CUDA_ARRAY3D_DESCRIPTOR, levels: u32) -> Result<Inner> {
        let shape = Shape::check(descriptor, levels)?;
        let (driver, context) = (driver()?, current()?.owner());
        crate::capture::permit()?;
        context.device.check()?;
        // CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED is 0.
        if descriptor.Flags & SPARSE != 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let place = || memory::place(driver, context.device.gpu, shape.bytes(), Kind::Array);
        let at = if shape.is_deferred() { None } else { Some(place()?) };
        Ok(Inner { shape, context, at, part: Part::Array })
    }

    fn made(self) -> &'static Array {
        let owns = !matches!(self.part, Part::Level(_));
        let array = DEAD.take(|| Array { header: Header::new(), inner: Mutex::new(None) });
        *lock(&array.inner) = Some(self);
        if owns {
            lock(&OWNERS).push(array);
        }
        enliven(array)
    }

    /// "If the CUDA array is not allocated with flag CUDA_ARRAY3D_DEFERRED_MAPPING
    /// CUDA_ERROR_INVALID_VALUE will be returned."
    fn needs(&self, dev: CUdevice) -> Result<CUDA_ARRAY_MEMORY_REQUIREMENTS> {
        driver()?.device(dev)?;
        if !self.shape.is_deferred() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let (size, alignment) = (number(self.shape.bytes()), number(UNIT));
        Ok(CUDA_ARRAY_MEMORY_REQUIREMENTS { size, alignment, ..Default::default() })
    }
}

impl Array {
    fn inner(&self) -> Result<Inner> {
        lock(&self.inner).clone().ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// What a handle means that must be a mipmapped array's, or an array's.
    fn of(handle: *mut c_void, mipmapped: bool) -> Result<(&'static Array, Inner)> {
        let array: &'static Array = resolve(handle)?;
        let inner = array.inner()?;
        match inner.part {
            Part::Mipmap(_) if !mipmapped => Err(CUDA_ERROR_INVALID_HANDLE),
            Part::Array | Part::Level(_) if mipmapped => Err(CUDA_ERROR_INVALID_HANDLE),
            // A level goes with its mipmapped array.
            Part::Level(_) => Err(CUDA_ERROR_INVALID_VALUE),
            _ => Ok((array, inner)),
        }
    }

    fn end(&'static self, driver: &Driver) {
        if !kill(self) {
            return;
        }
        lock(&OWNERS).retain(|a| !std::ptr::eq(*a, self));
        let inner = lock(&self.inner).take();
        DEAD.give(self);
        let Some(Inner { shape, context, at, part }) = inner else { return };
        if let Part::Mipmap(levels) = &part {
            levels.iter().for_each(|level| level.end(driver));
        }
        if let (Some(at), Part::Array | Part::Mipmap(_)) = (at, part) {
            crate::arena::forget_pages(at, shape.bytes());
            memory::displace(driver, context.device.gpu, at, shape.bytes(), Kind::Array);
        }
    }

    /// Where its bytes are, for copies: address and level.
    pub(crate) fn bytes(&self) -> Result<(u64, Level)> {
        let inner = self.inner()?;
        let level = match inner.part {
            Part::Array => 0,
            Part::Level(level) => level,
            Part::Mipmap(_) => return Err(CUDA_ERROR_INVALID_HANDLE),
        };
        let level = inner.shape.level(level);
        Ok((inner.at.ok_or(CUDA_ERROR_INVALID_VALUE)? + level.offset, level))
    }
}

pub(crate) fn free_all_of(driver: &Driver, context: &'static Context) {
    let all = lock(&OWNERS).clone();
    for array in all {
        if array.inner().is_ok_and(|inner| std::ptr::eq(inner.context, context)) {
            array.end(driver);
        }
    }
}

// The array functions.

fn create(descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Result<CUarray> {
    Ok(handle(Inner::take(descriptor, 1)?.made()))
}

fn wide(d: CUDA_ARRAY3D_DESCRIPTOR_v1) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: d.Width as usize,
        Height: d.Height as usize,
        Depth: d.Depth as usize,
        Format: d.Format,
        NumChannels: d.NumChannels,
        Flags: d.Flags,
    }
}

exports! {
    fn cuArrayCreate_v2(descriptor: *const CUDA_ARRAY_DESCRIPTOR) -> CUarray { create(get(descriptor)?.into()) }
    fn cuArrayCreate(descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1) -> CUarray { create(wide(get(descriptor)?.into())) }
    fn cuArray3DCreate_v2(descriptor: *const CUDA_ARRAY3D_DESCRIPTOR) -> CUarray { create(get(descriptor)?) }
    fn cuArray3DCreate(descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1) -> CUarray { create(wide(get(descriptor)?)) }
    fn cuArrayDestroy(array: CUarray) {
        Array::of(array, false)?.0.end(driver()?);
        Ok(())
    }
    fn cuArrayGetMemoryRequirements(array: CUarray, dev: CUdevice) -> CUDA_ARRAY_MEMORY_REQUIREMENTS {
        Array::of(array, false)?.1.needs(dev)
    }

    fn cuMipmappedArrayCreate(descriptor: *const CUDA_ARRAY3D_DESCRIPTOR, levels: c_uint) -> CUmipmappedArray {
        // "clamped to the range [1, …]".
        let mut whole = Inner::take(get(descriptor)?, levels.max(1))?;
        let level = |n| Inner { part: Part::Level(n), ..whole.clone() }.made();
        whole.part = Part::Mipmap((0..whole.shape.levels).map(level).collect());
        Ok(handle(whole.made()))
    }
    fn cuMipmappedArrayGetLevel(mipmap: CUmipmappedArray, level: c_uint) -> CUarray {
        let Part::Mipmap(levels) = Array::of(mipmap, true)?.1.part else { return Err(CUDA_ERROR_INVALID_HANDLE) };
        levels.get(level as usize).map(|array| handle(*array)).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
    fn cuMipmappedArrayDestroy(mipmap: CUmipmappedArray) {
        Array::of(mipmap, true)?.0.end(driver()?);
        Ok(())
    }
    fn cuMipmappedArrayGetMemoryRequirements(mipmap: CUmipmappedArray, dev: CUdevice) -> CUDA_ARRAY_MEMORY_REQUIREMENTS {
        Array::of(mipmap, true)?.1.needs(dev)
    }
}

// An array's shape: what is possible, and how many bytes it takes.

/// Size and alignment of an array are multiples of this.
const UNIT: u64 = 64 << 10;
const ROW: u64 = 64;
const ROWS: u64 = 8;
const ALL_FLAGS: u32 = 0x1ff;

#[derive(Clone, Copy)]
struct Shape {
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    element: u64,
    /// Mipmap levels; an array has one.
    levels: u32,
}

#[derive(Clone, Copy)]
pub(crate) struct Level {
    offset: u64,
    pub pitch: u64,
    pub row: u64,
    /// Rows of a slice, and how many there are with padding.
    pub rows: u64,
    pub padded_rows: u64,
    /// Slices: depth or layers.
    pub slices: u64,
}

impl Level {
    fn bytes(&self) -> u64 {
        self.pitch * self.padded_rows * self.slices
    }
}

/// Bytes of an element: of integers and floats (cuda.h, `CUarray_format`). Other formats are not simulated.
fn element(format: i32, channels: u32) -> Result<u64> {
    let bytes = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return Err(CUDA_ERROR_NOT_SUPPORTED),
    };
    match channels {
        1 | 2 | 4 => Ok(bytes * u64::from(channels)),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

impl Shape {
    /// Checks a descriptor (`cuArray3DCreate`: the table of valid extents).
    fn check(d: CUDA_ARRAY3D_DESCRIPTOR, levels: u32) -> Result<Shape> {
        let element = element(d.Format, d.NumChannels)?;
        let (layered, cube) = (d.Flags & LAYERED != 0, d.Flags & CUBEMAP != 0);
        let known = d.Flags & !ALL_FLAGS == 0;
        let not_both = d.Flags & (SPARSE | DEFERRED) != SPARSE | DEFERRED;
        let [w, h, z] = [d.Width, d.Height, d.Depth];
        let most = match (h, z) {
            _ if cube => [32_768, 32_768, if layered { 2046 } else { 6 }],
            (0, 0) => [131_072, 0, 0],
            (0, _) if layered => [32_768, 0, 2048],
            (_, 0) => [131_072, 65_536, 0],
            _ if layered => [32_768, 32_768, 2048],
            _ => [16_384, 16_384, 16_384],
        };
        let fits = w > 0 && w <= most[0] && h <= most[1] && z <= most[2];
        let is_box = layered || cube || h > 0 || z == 0;
        let is_cube = !cube || w == h && z > 0 && z.is_multiple_of(6);
        let has_layers = !layered || z > 0;
        if !(known && not_both && fits && is_box && is_cube && has_layers) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let deepest = if layered || cube { w.max(h) } else { w.max(h).max(z) };
        // "clamped to the range [1, 1 + floor(log2(max(width, height, depth)))]".
        Ok(Shape { descriptor: d, element, levels: levels.min(1 + deepest.ilog2()) })
    }

    fn is_deferred(&self) -> bool {
        self.descriptor.Flags & DEFERRED != 0
    }

    /// A level's place; levels follow each other.
    fn level(&self, level: u32) -> Level {
        let mut offset = 0;
        for before in 0..level {
            offset += self.at(before, offset).bytes().next_multiple_of(512);
        }
        self.at(level, offset)
    }

    fn at(&self, level: u32, offset: u64) -> Level {
        let d = &self.descriptor;
        let layers = d.Flags & (LAYERED | CUBEMAP) != 0;
        let shrunk = |n: usize| ((n as u64) >> level).max(1);
        let slices = if layers { d.Depth.max(1) as u64 } else { shrunk(d.Depth) };
        let (row, rows) = (shrunk(d.Width) * self.element, shrunk(d.Height));
        let padded_rows = if rows == 1 { 1 } else { rows.next_multiple_of(ROWS) };
        let pitch = row.next_multiple_of(ROW);
        Level { offset, pitch, row, rows, padded_rows, slices }
    }

    fn bytes(&self) -> u64 {
        let last = self.level(self.levels - 1);
        (last.offset + last.bytes()).next_multiple_of(UNIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_units_and_hold_every_element() {
        for (w, h, z, flags) in [
            (1, 0, 0, 0),
            (100_000, 0, 0, 0),
            (1000, 777, 0, 0),
            (50, 60, 70, 0),
            (64, 0, 9, LAYERED),
            (64, 33, 9, LAYERED),
            (64, 64, 6, CUBEMAP),
            (64, 64, 12, CUBEMAP | LAYERED),
        ] {
            let d = CUDA_ARRAY3D_DESCRIPTOR {
                Width: w,
                Height: h,
                Depth: z,
                Format: 0x20,
                NumChannels: 1,
                Flags: flags,
            };
            let Ok(shape) = Shape::check(d, 1) else { panic!("{w} {h} {z}") };
            let (bytes, elements) = (shape.bytes(), (w * h.max(1) * z.max(1) * 4) as u64);
            assert!(bytes >= elements && bytes.is_multiple_of(UNIT), "{w} {h} {z}: {bytes}");
            assert!(bytes <= 16 * elements + UNIT);
        }
    }
}
