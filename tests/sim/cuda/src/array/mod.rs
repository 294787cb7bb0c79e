//! Arrays and mipmapped arrays: CUDA Driver API, "Memory Management".
//!
//! An array's memory is linear host memory in the layout of [`shape`]; small arrays share chunks of
//! device memory as small allocations do. Deferred ones have no memory.

pub(crate) mod shape;

use crate::abi::{exports, get, put};
use crate::arena::Arena;
use crate::context::{Context, current};
use crate::driver::{Driver, driver, lock};
use crate::errors::Result;
use crate::handle::{Header, Recycler, enliven, handle, kill, object, resolve};
use shape::{Level, Shape, UNIT};
use simgpu::memory::Use;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY_DESCRIPTOR_v1, CUDA_ARRAY_MEMORY_REQUIREMENTS,
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR_v1, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUarray, CUdevice, CUmipmappedArray,
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
/// Addresses by GPU.
static ARENAS: Mutex<BTreeMap<usize, Arena>> = Mutex::new(BTreeMap::new());

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
        let at = match Memory::place(driver, context, shape.bytes()) {
            None if crate::pool::release_unused(driver, context.device.gpu) > 0 => {
                Memory::place(driver, context, shape.bytes())
            }
            at => at,
        };
        let at = at.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(Memory { shape, context, at: Some(at) })
    }

    fn place(driver: &Driver, context: &'static Context, bytes: u64) -> Option<u64> {
        let gpu = context.device.gpu;
        let chunk = driver.session.config().memory.granularity_bytes;
        let mut arenas = lock(&ARENAS);
        let arena = arenas.entry(gpu).or_insert_with(|| Arena::new(chunk, false));
        let need = arena.need(bytes)?;
        if need.charge > 0 && !driver.session.charge(gpu, Use::Array, need.charge) {
            return None;
        }
        let at = arena.take(need);
        if at.is_none() {
            driver.session.uncharge(gpu, Use::Array, need.charge);
        }
        at
    }

    fn give(&self, driver: &Driver) {
        let Some(at) = self.at else { return };
        let (gpu, bytes) = (self.context.device.gpu, self.shape.bytes());
        crate::arena::forget_pages(at, bytes);
        if let Some(arena) = lock(&ARENAS).get_mut(&gpu) {
            let freed = arena.give(at, bytes);
            driver.session.uncharge(gpu, Use::Array, freed);
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

fn create(out: *mut CUarray, descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Result<()> {
    let context = current()?;
    let shape = Shape::check(descriptor, 1).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    put(out, handle(Array::create(context, shape)?))
}

fn flat(d: CUDA_ARRAY_DESCRIPTOR) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: d.Width,
        Height: d.Height,
        Depth: 0,
        Format: d.Format,
        NumChannels: d.NumChannels,
        Flags: 0,
    }
}

fn wide(d: CUDA_ARRAY_DESCRIPTOR_v1) -> CUDA_ARRAY_DESCRIPTOR {
    CUDA_ARRAY_DESCRIPTOR {
        Width: d.Width as usize,
        Height: d.Height as usize,
        Format: d.Format,
        NumChannels: d.NumChannels,
    }
}

/// "If the CUDA array is not allocated with flag CUDA_ARRAY3D_DEFERRED_MAPPING
/// CUDA_ERROR_INVALID_VALUE will be returned."
fn needs(out: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, shape: &Shape, dev: CUdevice) -> Result<()> {
    driver()?.device(dev)?;
    if !shape.is_deferred() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let size = usize::try_from(shape.bytes()).unwrap_or(usize::MAX);
    let alignment = usize::try_from(UNIT).unwrap_or(usize::MAX);
    put(out, CUDA_ARRAY_MEMORY_REQUIREMENTS { size, alignment, ..Default::default() })
}

exports! {
    fn cuArrayCreate_v2(out: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR) {
        driver()?;
        create(out, flat(get(descriptor)?))
    }
    fn cuArrayCreate(out: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1) {
        driver()?;
        create(out, flat(wide(get(descriptor)?)))
    }
    fn cuArray3DCreate_v2(out: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR) {
        driver()?;
        create(out, get(descriptor)?)
    }
    fn cuArray3DCreate(out: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1) {
        driver()?;
        let d = get(descriptor)?;
        create(out, CUDA_ARRAY3D_DESCRIPTOR {
            Width: d.Width as usize,
            Height: d.Height as usize,
            Depth: d.Depth as usize,
            Format: d.Format,
            NumChannels: d.NumChannels,
            Flags: d.Flags,
        })
    }
    fn cuArrayDestroy(array: CUarray) {
        let driver = driver()?;
        resolve::<Array>(array)?.destroy(driver)
    }

    fn cuArrayGetMemoryRequirements(out: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUarray, dev: CUdevice) {
        driver()?;
        let view = resolve::<Array>(array)?.view()?;
        if view.borrowed {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        needs(out, &view.memory.shape, dev)
    }

    fn cuMipmappedArrayCreate(out: *mut CUmipmappedArray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR, levels: c_uint) {
        let context = current()?;
        // "clamped to the range [1, …]".
        let shape = Shape::check(get(descriptor)?, levels.max(1)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, handle(Mipmap::create(context, shape)?))
    }
    fn cuMipmappedArrayGetLevel(out: *mut CUarray, mipmap: CUmipmappedArray, level: c_uint) {
        driver()?;
        let inner = crate::driver::lock(&resolve::<Mipmap>(mipmap)?.inner);
        let whole = inner.as_ref().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let array = whole.levels.get(level as usize).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        put(out, handle(*array))
    }
    fn cuMipmappedArrayDestroy(mipmap: CUmipmappedArray) {
        let driver = driver()?;
        resolve::<Mipmap>(mipmap)?.destroy(driver);
        Ok(())
    }
    fn cuMipmappedArrayGetMemoryRequirements(out: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, mipmap: CUmipmappedArray, dev: CUdevice) {
        driver()?;
        let inner = crate::driver::lock(&resolve::<Mipmap>(mipmap)?.inner);
        let whole = inner.as_ref().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        needs(out, &whole.memory.shape, dev)
    }
}
