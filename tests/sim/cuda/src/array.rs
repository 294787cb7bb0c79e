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
use std::ffi::c_uint;
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY_DESCRIPTOR_v1, CUDA_ARRAY_MEMORY_REQUIREMENTS,
    CUDA_ARRAY3D_CUBEMAP as CUBEMAP, CUDA_ARRAY3D_DEFERRED_MAPPING as DEFERRED,
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR_v1, CUDA_ARRAY3D_LAYERED as LAYERED,
    CUDA_ARRAY3D_SPARSE as SPARSE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUarray,
    CUdevice, CUmipmappedArray,
};

/// An array, or one level of a mipmapped array.
#[repr(C)]
pub(crate) struct Array {
    header: Header,
    inner: Mutex<Option<View>>,
}

#[repr(C)]
pub(crate) struct Mipmap {
    header: Header,
    inner: Mutex<Option<Whole>>,
}

/// What an array handle means: one level of some memory.
#[derive(Clone, Copy)]
struct View {
    memory: Memory,
    level: Level,
    /// It is a level of a mipmapped array, which owns the memory.
    borrowed: bool,
}

struct Whole {
    memory: Memory,
    levels: Vec<&'static Array>,
}

#[derive(Clone, Copy)]
struct Memory {
    shape: Shape,
    context: &'static Context,
    /// Where; `None` if the mapping is deferred.
    at: Option<u64>,
}

object!(Array, 0x4152_5259);

object!(Mipmap, 0x4d49_504d);

static DEAD_ARRAYS: Recycler<Array> = Recycler::new();
static DEAD_MIPMAPS: Recycler<Mipmap> = Recycler::new();
/// What is alive, for contexts that end.
static ARRAYS: Mutex<Vec<&'static Array>> = Mutex::new(Vec::new());
static MIPMAPS: Mutex<Vec<&'static Mipmap>> = Mutex::new(Vec::new());

impl Memory {
    fn take(context: &'static Context, shape: Shape) -> Result<Memory> {
        let driver = driver()?;
        let context = context.owner();
        crate::capture::permit(crate::capture::Call::Array)?;
        context.device.check()?;
        // CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED is 0.
        if shape.is_sparse() {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        if shape.is_deferred() {
            return Ok(Memory { shape, context, at: None });
        }
        let at = memory::place(driver, context.device.gpu, shape.bytes(), Kind::Array)?;
        Ok(Memory { shape, context, at: Some(at) })
    }

    fn give(&self, driver: &Driver) {
        if let Some(at) = self.at {
            let (gpu, bytes) = (self.context.device.gpu, self.shape.bytes());
            crate::arena::forget_pages(at, bytes);
            memory::displace(driver, gpu, at, bytes, Kind::Array);
        }
    }
}

impl Array {
    fn enlivened(view: View) -> &'static Array {
        let array = DEAD_ARRAYS.take(|| Array { header: Header::new(), inner: Mutex::new(None) });
        *lock(&array.inner) = Some(view);
        enliven(array)
    }

    fn create(context: &'static Context, shape: Shape) -> Result<&'static Array> {
        let memory = Memory::take(context, shape)?;
        let array = Array::enlivened(View { memory, level: shape.level(0), borrowed: false });
        lock(&ARRAYS).push(array);
        Ok(array)
    }

    fn view(&self) -> Result<View> {
        lock(&self.inner).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    fn end(&'static self) -> Option<View> {
        if !kill(self) {
            return None;
        }
        let view = lock(&self.inner).take();
        DEAD_ARRAYS.give(self);
        view
    }

    fn destroy(&'static self, driver: &Driver) -> Result<()> {
        // A level goes with its mipmapped array.
        if self.view()?.borrowed {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        lock(&ARRAYS).retain(|a| !std::ptr::eq(*a, self));
        if let Some(view) = self.end() {
            view.memory.give(driver);
        }
        Ok(())
    }

    /// Where its bytes are, for copies: address and level; it has none, or several planes: an error.
    pub(crate) fn bytes(&self) -> Result<(u64, Level)> {
        let view = self.view()?;
        if view.memory.shape.format.planar {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let at = view.memory.at.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        Ok((at + view.level.offset, view.level))
    }
}

impl Mipmap {
    fn create(context: &'static Context, shape: Shape) -> Result<&'static Mipmap> {
        let memory = Memory::take(context, shape)?;
        let levels = (0..shape.levels)
            .map(|n| View { memory, level: shape.level(n), borrowed: true })
            .map(Array::enlivened)
            .collect();
        let mipmap =
            DEAD_MIPMAPS.take(|| Mipmap { header: Header::new(), inner: Mutex::new(None) });
        *lock(&mipmap.inner) = Some(Whole { memory, levels });
        lock(&MIPMAPS).push(mipmap);
        Ok(enliven(mipmap))
    }

    fn destroy(&'static self, driver: &Driver) {
        if !kill(self) {
            return;
        }
        lock(&MIPMAPS).retain(|m| !std::ptr::eq(*m, self));
        if let Some(whole) = lock(&self.inner).take() {
            for level in whole.levels {
                let _ = level.end();
            }
            whole.memory.give(driver);
        }
        DEAD_MIPMAPS.give(self);
    }
}

pub(crate) fn free_all_of(driver: &Driver, context: &'static Context) {
    let mine = |memory: &Memory| std::ptr::eq(memory.context, context);
    let arrays = lock(&ARRAYS).clone();
    for array in arrays {
        if array.view().is_ok_and(|v| mine(&v.memory)) {
            let _ = array.destroy(driver);
        }
    }
    let mipmaps = lock(&MIPMAPS).clone();
    for mipmap in mipmaps {
        let is_mine = lock(&mipmap.inner).as_ref().is_some_and(|w| mine(&w.memory));
        if is_mine {
            mipmap.destroy(driver);
        }
    }
}

// The array functions.

fn create(descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Result<CUarray> {
    let shape = Shape::check(descriptor, 1).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    Ok(handle(Array::create(current()?, shape)?))
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

/// "If the CUDA array is not allocated with flag CUDA_ARRAY3D_DEFERRED_MAPPING
/// CUDA_ERROR_INVALID_VALUE will be returned."
fn needs(shape: &Shape, dev: CUdevice) -> Result<CUDA_ARRAY_MEMORY_REQUIREMENTS> {
    driver()?.device(dev)?;
    if !shape.is_deferred() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let (size, alignment) = (number(shape.bytes()), number(UNIT));
    Ok(CUDA_ARRAY_MEMORY_REQUIREMENTS { size, alignment, ..Default::default() })
}

exports! {
    fn cuArrayCreate_v2(descriptor: *const CUDA_ARRAY_DESCRIPTOR) -> CUarray { create(get(descriptor)?.into()) }
    fn cuArrayCreate(descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1) -> CUarray { create(wide(get(descriptor)?.into())) }
    fn cuArray3DCreate_v2(descriptor: *const CUDA_ARRAY3D_DESCRIPTOR) -> CUarray { create(get(descriptor)?) }
    fn cuArray3DCreate(descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1) -> CUarray { create(wide(get(descriptor)?)) }
    fn cuArrayDestroy(array: CUarray) { resolve::<Array>(array)?.destroy(driver()?) }
    fn cuArrayGetMemoryRequirements(array: CUarray, dev: CUdevice) -> CUDA_ARRAY_MEMORY_REQUIREMENTS {
        let view = resolve::<Array>(array)?.view()?;
        if view.borrowed { Err(CUDA_ERROR_INVALID_VALUE) } else { needs(&view.memory.shape, dev) }
    }

    fn cuMipmappedArrayCreate(descriptor: *const CUDA_ARRAY3D_DESCRIPTOR, levels: c_uint) -> CUmipmappedArray {
        // "clamped to the range [1, …]".
        let shape = Shape::check(get(descriptor)?, levels.max(1)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        Ok(handle(Mipmap::create(current()?, shape)?))
    }
    fn cuMipmappedArrayGetLevel(mipmap: CUmipmappedArray, level: c_uint) -> CUarray {
        let inner = lock(&resolve::<Mipmap>(mipmap)?.inner);
        let level = inner.as_ref().and_then(|whole| whole.levels.get(level as usize));
        level.map(|array| handle(*array)).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
    fn cuMipmappedArrayDestroy(mipmap: CUmipmappedArray) {
        resolve::<Mipmap>(mipmap)?.destroy(driver()?);
        Ok(())
    }
    fn cuMipmappedArrayGetMemoryRequirements(mipmap: CUmipmappedArray, dev: CUdevice) -> CUDA_ARRAY_MEMORY_REQUIREMENTS {
        let inner = lock(&resolve::<Mipmap>(mipmap)?.inner);
        needs(&inner.as_ref().ok_or(CUDA_ERROR_INVALID_VALUE)?.memory.shape, dev)
    }
}

// An array's shape: what is possible, and how many bytes it takes.

/// Size and alignment of an array are multiples of this.
pub(crate) const UNIT: u64 = 64 << 10;
const ROW: u64 = 64;
const ROWS: u64 = 8;
const ALL_FLAGS: u32 = 0x1ff;

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    pub format: Format,
    /// Mipmap levels; an array has one.
    pub levels: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level {
    pub offset: u64,
    pub pitch: u64,
    /// Elements of a row, and their bytes.
    pub width: u64,
    pub row: u64,
    /// Rows of a slice (of blocks, if compressed), and how many there are with padding.
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

impl Shape {
    /// Checks a descriptor (`cuArray3DCreate`: the table of valid extents); impossible: `None`.
    pub(crate) fn check(d: CUDA_ARRAY3D_DESCRIPTOR, levels: u32) -> Option<Shape> {
        let format = format_of(d.Format, d.NumChannels)?;
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
        if !(known && not_both && fits && is_box && is_cube && has_layers && levels > 0) {
            return None;
        }
        let deepest = if layered || cube { w.max(h) } else { w.max(h).max(z) };
        // "clamped to the range [1, 1 + floor(log2(max(width, height, depth)))]".
        Some(Shape { descriptor: d, format, levels: levels.min(1 + deepest.ilog2()) })
    }

    pub(crate) fn is_deferred(&self) -> bool {
        self.descriptor.Flags & DEFERRED != 0
    }

    /// Whether its memory would come tile by tile.
    pub(crate) fn is_sparse(&self) -> bool {
        self.descriptor.Flags & SPARSE != 0
    }

    /// A level's place; levels follow each other.
    pub(crate) fn level(&self, level: u32) -> Level {
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
        let (w, h) = (shrunk(d.Width), shrunk(d.Height));
        let slices = if layers { d.Depth.max(1) as u64 } else { shrunk(d.Depth) };
        let block = self.format.block;
        let row = (w.div_ceil(block) * self.format.bits).div_ceil(8);
        let rows = h.div_ceil(block);
        let padded_rows = if rows == 1 { 1 } else { rows.next_multiple_of(ROWS) };
        let pitch = row.next_multiple_of(ROW);
        Level { offset, pitch, width: w, row, rows, padded_rows, slices }
    }

    pub(crate) fn bytes(&self) -> u64 {
        let last = self.level(self.levels - 1);
        (last.offset + last.bytes()).next_multiple_of(UNIT)
    }
}

/// How many bits an element of a format takes, and for compressed formats the edge of a block: cuda.h, `CUarray_format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bits of an element; of a block for compressed ones.
    pub bits: u64,
    /// Elements along the edge of a block.
    pub block: u64,
    /// Whether it has several planes, which can't be copied as one.
    pub planar: bool,
}

/// The format with this many channels; no such thing: `None`.
fn format_of(format: i32, channels: u32) -> Option<Format> {
    let plain = |bits: u64| Some(Format { bits, block: 1, planar: false });
    let packed = |n: u32, bits: u64| if channels == n { plain(bits) } else { None };
    let planar =
        |bits: u64| (1..=4).contains(&channels).then_some(Format { bits, block: 1, planar: true });
    let compressed =
        |bits: u64| (1..=4).contains(&channels).then_some(Format { bits, block: 4, planar: false });
    let channel_bits = match format {
        0x01 | 0x08 => 8,
        0x02 | 0x09 | 0x10 => 16,
        0x03 | 0x0a | 0x20 => 32,
        _ => 0,
    };
    if channel_bits > 0 {
        return match channels {
            1 | 2 | 4 => plain(channel_bits * u64::from(channels)),
            _ => None,
        };
    }
    match format {
        // UNORM and SNORM of 8 and 16 bits with 1, 2 and 4 channels.
        0xc0 | 0xc6 => packed(1, 8),
        0xc1 | 0xc7 => packed(2, 16),
        0xc2 | 0xc8 => packed(4, 32),
        0xc3 | 0xc9 => packed(1, 16),
        0xc4 | 0xca => packed(2, 32),
        0xc5 | 0xcb => packed(4, 64),
        // UNORM_INT_101010_2.
        0x50 => packed(4, 32),
        // BC1 and BC4 have 8 bytes a block, the others 16.
        0x91 | 0x92 | 0x97 | 0x98 => compressed(64),
        0x93..=0x96 | 0x99..=0x9e => compressed(128),
        // Two planes at 4:2:0, 4:2:2 and 4:4:4, of 8 and 16 bits.
        0xb0 | 0x53 | 0x59 => planar(12),
        0x9f | 0xa1 | 0x54 | 0x5a => planar(24),
        0xa2 | 0x55 | 0x5b => planar(16),
        0xa3 | 0xa4 | 0x56 | 0x5c => planar(32),
        0xb2 | 0xb4 | 0x57 | 0x5d => planar(24),
        0xb3 | 0xb5 | 0x58 | 0x5e => planar(48),
        // YUY2, Y210, Y216, AYUV, Y410, Y416 and their successors: packed.
        0xa5 | 0x51 => plain(16),
        0xa6..=0xa9 | 0x52 => plain(32),
        0xb1 => plain(64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(w: usize, h: usize, z: usize, flags: u32, levels: u32) -> Option<Shape> {
        let d = CUDA_ARRAY3D_DESCRIPTOR {
            Width: w,
            Height: h,
            Depth: z,
            Format: 0x20,
            NumChannels: 1,
            Flags: flags,
        };
        Shape::check(d, levels)
    }

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
            let bytes = shape(w, h, z, flags, 1).unwrap().bytes();
            let elements = (w * h.max(1) * z.max(1) * 4) as u64;
            assert!(bytes >= elements && bytes.is_multiple_of(UNIT), "{w} {h} {z}: {bytes}");
            assert!(bytes <= 16 * elements + UNIT);
        }
    }
}
