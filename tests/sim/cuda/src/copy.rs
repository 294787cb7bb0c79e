//! Copies and fills: CUDA Driver API, "Memory Management".
//!
//! The bytes move when the call is made: all streams share one queue and kernels compute nothing,
//! so nobody can tell the difference from moving them when the queue gets there. The time is spent
//! in the queue: host ↔ device copies on a copy engine, device-to-device copies and fills on the GPU.

use crate::abi::{Result, exports_both, get, put_if, resolve};
use crate::array::Array;
use crate::capture;
use crate::driver::driver;
use crate::graph::{Kind, Memset};
use crate::stream::Stream;
use crate::work::later;
use simgpu::engine::Op;
use std::ffi::{c_uchar, c_uint, c_ushort, c_void};
use std::sync::Arc;
use tessera_cuda::types::{
    CU_MEMORYTYPE_ARRAY as ARRAY, CU_MEMORYTYPE_DEVICE as DEVICE, CU_MEMORYTYPE_HOST as HOST,
    CU_MEMORYTYPE_UNIFIED as UNIFIED, CUDA_ERROR_INVALID_VALUE, CUDA_MEMCPY2D, CUDA_MEMCPY3D,
    CUcontext, CUdeviceptr, CUmemcpyAttributes, CUstream,
};

/// Whether `[address, address + len)` is device memory; it must be if the copy says so.
fn check((address, len): (u64, usize), kind: c_uint, written: bool) -> Result<bool> {
    if address == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match kind {
        HOST => return Ok(false),
        // Checked already.
        ARRAY => return Ok(true),
        _ => {}
    }
    let mut memory = driver()?.memory();
    let found = if written {
        memory.touch(address, len as u64)
    } else {
        memory.find(address, len as u64).map(|(_, a)| a.kind)
    };
    match found {
        Some(found) => Ok(found.is_device()),
        None if kind == UNIFIED => Ok(false),
        None => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// Waits for host functions submitted before: they may write what is about to be copied.
fn after_host_functions(s: &'static Stream) -> Result<()> {
    s.context().check_alive()?;
    if !s.device().has_host_functions()? {
        return Ok(());
    }
    // Behind the stream's own work, which waits for those that it has to.
    let seq = s.submit(Op::Delay(0))?;
    s.device().wait(seq)
}

/// Whether the driver knows all of this memory: of a device, or pinned.
fn is_known((address, len): (u64, usize)) -> Result<bool> {
    Ok(driver()?.memory().find(address, len as u64).is_some())
}

/// Moves bytes behind the host functions submitted before: at once where there are none, else
/// when the queue gets there, or after waiting for them where the caller expects that.
fn in_order(
    s: &'static Stream,
    may_come_later: bool,
    act: impl FnOnce() + Send + 'static,
) -> Result<()> {
    if may_come_later && s.device().has_host_functions()? {
        s.context().check_alive()?;
        return later(s, Op::Host, Box::new(act));
    }
    after_host_functions(s)?;
    act();
    Ok(())
}

/// Bookkeeping of a copy of `bytes` that was or is about to be done, with its time.
fn spend(s: &'static Stream, bytes: usize, on_device: bool, wait: bool) -> Result<()> {
    let costs = &driver()?.session.config().costs;
    let rate = if on_device { costs.device_bytes_per_us } else { costs.pcie_bytes_per_us };
    let ns = costs.copy_ns + (bytes as u64).saturating_mul(1_000) / rate;
    let seq = s.submit(if on_device { Op::Compute(ns) } else { Op::Delay(ns) })?;
    if wait { s.device().wait(seq) } else { Ok(()) }
}

/// One end of a pitched copy: where row (z, y) begins is `start + z * slice + y * pitch`.
struct Pitched {
    start: u64,
    pitch: usize,
    slice: usize,
    kind: c_uint,
}

impl Pitched {
    /// Linear memory, from an offset in bytes, rows and slices. A pitch of 0 means tightly packed.
    fn new(
        kind: c_uint,
        base: u64,
        [x, y, z]: [usize; 3],
        [pitch, rows]: [usize; 2],
        [width, height, _]: [usize; 3],
    ) -> Result<Pitched> {
        let pitch = if pitch == 0 { x + width } else { pitch };
        let rows = if rows == 0 { y + height } else { rows };
        if pitch < x + width || base == 0 || !matches!(kind, HOST | DEVICE | UNIFIED) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let slice = pitch.checked_mul(rows).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let start = base + (z * slice + y * pitch + x) as u64;
        Ok(Pitched { start, pitch, slice, kind })
    }

    /// An array: "x in bytes", rows and slices must lie in it.
    fn of_array(
        array: *mut c_void,
        [x, y, z]: [usize; 3],
        [width, height, depth]: [usize; 3],
    ) -> Result<Pitched> {
        let (start, level) = resolve::<Array>(array)?.bytes()?;
        let within = |from: usize, len: usize, most: u64| {
            from.checked_add(len).is_some_and(|end| end as u64 <= most)
        };
        let fits = within(x, width, level.row)
            && within(y, height, level.rows)
            && within(z, depth, level.slices);
        if !fits {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let bytes = |n: u64| usize::try_from(n).map_err(|_| CUDA_ERROR_INVALID_VALUE);
        let pitch = bytes(level.pitch)?;
        let slice = bytes(level.pitch * level.padded_rows)?;
        let start = start + (z * slice + y * pitch + x) as u64;
        Ok(Pitched { start, pitch, slice, kind: ARRAY })
    }

    fn span(&self, [width, height, depth]: [usize; 3]) -> usize {
        (depth - 1) * self.slice + (height - 1) * self.pitch + width
    }

    fn row(&self, z: usize, y: usize) -> *mut u8 {
        (self.start + (z * self.slice + y * self.pitch) as u64) as *mut u8
    }
}

/// A copy of a box: what all copies are that are captured.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Copy3d(CUDA_MEMCPY3D);
// SAFETY: its pointers are addresses that the driver is asked to copy from and to, whichever thread does it.
unsafe impl Send for Copy3d {}
// SAFETY: as above.
unsafe impl Sync for Copy3d {}

impl Copy3d {
    // SAFETY: numbers and pointers, for which zero is a value.
    const NONE: CUDA_MEMCPY3D = unsafe { std::mem::zeroed() };

    fn flat(c: CUDA_MEMCPY2D) -> Copy3d {
        Copy3d(CUDA_MEMCPY3D {
            srcXInBytes: c.srcXInBytes,
            srcY: c.srcY,
            srcMemoryType: c.srcMemoryType,
            srcHost: c.srcHost,
            srcDevice: c.srcDevice,
            srcArray: c.srcArray,
            srcPitch: c.srcPitch,
            dstXInBytes: c.dstXInBytes,
            dstY: c.dstY,
            dstMemoryType: c.dstMemoryType,
            dstHost: c.dstHost,
            dstDevice: c.dstDevice,
            dstArray: c.dstArray,
            dstPitch: c.dstPitch,
            WidthInBytes: c.WidthInBytes,
            Height: c.Height,
            Depth: 1,
            ..Copy3d::NONE
        })
    }

    /// `len` bytes in a row.
    fn linear((dst, to): (u64, c_uint), (src, from): (u64, c_uint), len: usize) -> Copy3d {
        Copy3d(CUDA_MEMCPY3D {
            srcMemoryType: from,
            srcHost: src as *const c_void,
            srcDevice: src,
            dstMemoryType: to,
            dstHost: dst as *mut c_void,
            dstDevice: dst,
            WidthInBytes: len,
            Height: 1,
            Depth: 1,
            ..Copy3d::NONE
        })
    }

    fn size(&self) -> [usize; 3] {
        [self.0.WidthInBytes, self.0.Height, self.0.Depth]
    }

    /// Destination and source.
    fn ends(&self) -> Result<(Pitched, Pitched)> {
        let (c, size) = (&self.0, self.size());
        // "srcLOD and dstLOD … must be set to 0".
        if c.srcLOD != 0 || c.dstLOD != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let end = |kind, array, [host, device]: [u64; 2], from, pitch| match kind {
            ARRAY => Pitched::of_array(array, from, size),
            HOST => Pitched::new(kind, host, from, pitch, size),
            _ => Pitched::new(kind, device, from, pitch, size),
        };
        let (to, from) = ([c.dstXInBytes, c.dstY, c.dstZ], [c.srcXInBytes, c.srcY, c.srcZ]);
        let (dst, src) = ([c.dstHost as u64, c.dstDevice], [c.srcHost as u64, c.srcDevice]);
        let dst = end(c.dstMemoryType, c.dstArray, dst, to, [c.dstPitch, c.dstHeight])?;
        Ok((dst, end(c.srcMemoryType, c.srcArray, src, from, [c.srcPitch, c.srcHeight])?))
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.ends().map(|_| ())
    }

    /// "Changing either the source or destination memory type … is not supported."
    pub(crate) fn same_kinds(&self, other: &Copy3d) -> bool {
        let kinds = |c: &Copy3d| (c.0.dstMemoryType, c.0.srcMemoryType);
        kinds(self) == kinds(other)
    }

    /// Synchronous: it returns when the data is there, except device to device, where "no host-side
    /// synchronization is performed" ("API synchronization behavior").
    pub(crate) fn run(&self, s: &'static Stream, synchronous: bool) -> Result<()> {
        if s.is_capturing() {
            return self.capture(s, synchronous);
        }
        if synchronous {
            capture::permit()?;
        }
        let size @ [width, height, depth] = self.size();
        if size.contains(&0) {
            return after_host_functions(s);
        }
        let (dst, src) = self.ends()?;
        let (to, from) = ((dst.start, dst.span(size)), (src.start, src.span(size)));
        let to_device = check(to, dst.kind, true)?;
        let from_device = check(from, src.kind, false)?;
        let act = move || {
            for (z, y) in (0..depth).flat_map(|z| (0..height).map(move |y| (z, y))) {
                // SAFETY: rows within spans that were checked (device) or promised (host); they may
                // overlap.
                unsafe { std::ptr::copy(src.row(z, y), dst.row(z, y), width) };
            }
        };
        in_order(s, !synchronous && is_known(to)? && is_known(from)?, act)?;
        let on_device = to_device && from_device;
        spend(s, width * height * depth, on_device, synchronous && !on_device)
    }

    fn capture(self, s: &'static Stream, synchronous: bool) -> Result<()> {
        if synchronous {
            return capture::fail(s);
        }
        capture::add(s, |_| self.check().map(|()| Kind::Memcpy(Arc::new(self)))).map(|_| ())
    }
}

impl Memset {
    pub(crate) fn check(&self) -> Result<()> {
        let fits = matches!(self.element, 1 | 2 | 4)
            && self.dst != 0
            && self.dst.is_multiple_of(u64::from(self.element))
            && self.width > 0
            && self.height > 0;
        if fits { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }

    pub(crate) fn run(&self, s: &'static Stream) -> Result<()> {
        let size = (self.width, self.height);
        let [low, second, _, _] = self.value.to_le_bytes();
        match self.element {
            1 => fill(self.dst, self.pitch, low, size, s, false),
            2 => fill(self.dst, self.pitch, u16::from_le_bytes([low, second]), size, s, false),
            _ => fill(self.dst, self.pitch, self.value, size, s, false),
        }
    }
}

/// Fills `height` rows of `width` elements; a fill of device memory is asynchronous.
pub(crate) fn fill<T: Copy + Into<c_uint> + Send + 'static>(
    at: u64,
    pitch: usize,
    value: T,
    (width, height): (usize, usize),
    s: &'static Stream,
    synchronous: bool,
) -> Result<()> {
    let size = size_of::<T>();
    if s.is_capturing() {
        if synchronous {
            return capture::fail(s);
        }
        let element = c_uint::try_from(size).unwrap_or(0);
        let fill = Memset { dst: at, pitch, value: value.into(), element, width, height };
        return capture::add(s, |_| fill.check().map(|()| Kind::Memset(fill))).map(|_| ());
    }
    if synchronous {
        capture::permit()?;
    }
    if !at.is_multiple_of(size as u64) || (height > 1 && !pitch.is_multiple_of(size)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if width == 0 || height == 0 {
        return after_host_functions(s);
    }
    let row = width.checked_mul(size).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if height > 1 && pitch < row {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let span = pitch
        .checked_mul(height - 1)
        .and_then(|n| n.checked_add(row))
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let on_device = check((at, span), DEVICE, true)?;
    let act = move || {
        for y in 0..height {
            let start = (at + (y * pitch) as u64) as *mut T;
            // SAFETY: aligned, and inside an allocation of ours that `check` found.
            unsafe { std::slice::from_raw_parts_mut(start, width) }.fill(value);
        }
    };
    in_order(s, !synchronous && on_device, act)?;
    // "if the target is pinned host memory, the function is fully synchronous".
    spend(s, row * height, true, !on_device)
}

/// The same operation in the default stream, waited for, and in a stream that the caller names.
macro_rules! operations {
    ($(fn $($now:ident, $now_own:ident);+ & $($later:ident, $later_own:ident);+($($args:tt)*) |$s:ident, $synchronous:ident| $body:block)*) => {
        exports_both! {
            $(
                fn $($now, $now_own);+($($args)*) |$s, flavour| {
                    let ($s, $synchronous) = (crate::stream::stream(std::ptr::null_mut(), flavour)?, true);
                    $body
                }
                fn $($later, $later_own);+($($args)*, $s: CUstream) |$s| {
                    let $synchronous = false;
                    $body
                }
            )*
        }
    };
}

operations! {
    fn cuMemcpy, cuMemcpy_ptds & cuMemcpyAsync, cuMemcpyAsync_ptsz(dst: CUdeviceptr, src: CUdeviceptr, len: usize) |s, synchronous| {
        Copy3d::linear((dst, UNIFIED), (src, UNIFIED), len).run(s, synchronous)
    }
    fn cuMemcpyPeer, cuMemcpyPeer_ptds & cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(dst: CUdeviceptr, dst_ctx: CUcontext, src: CUdeviceptr, src_ctx: CUcontext, len: usize) |s, synchronous| {
        let _ = (dst_ctx, src_ctx);
        Copy3d::linear((dst, DEVICE), (src, DEVICE), len).run(s, synchronous)
    }
    fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds & cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz(dst: CUdeviceptr, src: *const c_void, len: usize) |s, synchronous| {
        Copy3d::linear((dst, DEVICE), (src as u64, HOST), len).run(s, synchronous)
    }
    fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds & cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz(dst: *mut c_void, src: CUdeviceptr, len: usize) |s, synchronous| {
        Copy3d::linear((dst as u64, HOST), (src, DEVICE), len).run(s, synchronous)
    }
    fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds & cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz(dst: CUdeviceptr, src: CUdeviceptr, len: usize) |s, synchronous| {
        Copy3d::linear((dst, DEVICE), (src, DEVICE), len).run(s, synchronous)
    }
    fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds; cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds & cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(copy: *const CUDA_MEMCPY2D) |s, synchronous| {
        Copy3d::flat(get(copy)?).run(s, synchronous)
    }
    // Of a peer's copy the contexts say which GPUs; addresses are unified.
    fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds; cuMemcpy3DPeer, cuMemcpy3DPeer_ptds & cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz; cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(copy: *const CUDA_MEMCPY3D) |s, synchronous| {
        Copy3d(get(copy)?).run(s, synchronous)
    }
    fn cuMemsetD8_v2, cuMemsetD8_v2_ptds & cuMemsetD8Async, cuMemsetD8Async_ptsz(at: CUdeviceptr, value: c_uchar, n: usize) |s, synchronous| {
        fill(at, 0, value, (n, 1), s, synchronous)
    }
    fn cuMemsetD16_v2, cuMemsetD16_v2_ptds & cuMemsetD16Async, cuMemsetD16Async_ptsz(at: CUdeviceptr, value: c_ushort, n: usize) |s, synchronous| {
        fill(at, 0, value, (n, 1), s, synchronous)
    }
    fn cuMemsetD32_v2, cuMemsetD32_v2_ptds & cuMemsetD32Async, cuMemsetD32Async_ptsz(at: CUdeviceptr, value: c_uint, n: usize) |s, synchronous| {
        fill(at, 0, value, (n, 1), s, synchronous)
    }
    fn cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds & cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz(at: CUdeviceptr, pitch: usize, value: c_uchar, width: usize, height: usize) |s, synchronous| {
        fill(at, pitch, value, (width, height), s, synchronous)
    }
    fn cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds & cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz(at: CUdeviceptr, pitch: usize, value: c_ushort, width: usize, height: usize) |s, synchronous| {
        fill(at, pitch, value, (width, height), s, synchronous)
    }
    fn cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds & cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz(at: CUdeviceptr, pitch: usize, value: c_uint, width: usize, height: usize) |s, synchronous| {
        fill(at, pitch, value, (width, height), s, synchronous)
    }
}

// Batches. The attributes are hints, and the order in which sources are read: here they are read when the call is made,
// which satisfies each.

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`, `…_DURING_API_CALL`, `…_ANY`.
const ORDERS: std::ops::RangeInclusive<i32> = 1..=3;

/// `CUmemcpyAttributes`: only its order can be wrong.
fn check_attributes(attributes: *const CUmemcpyAttributes, count: usize) -> Result<()> {
    /// Two locations as hints, then flags.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Attributes {
        order: i32,
        hints: [i32; 4],
        flags: c_uint,
    }
    for i in 0..count {
        let a: Attributes = get(attributes.cast::<Attributes>().wrapping_add(i))?;
        let _ = (a.hints, a.flags);
        if !ORDERS.contains(&a.order) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    Ok(())
}

/// `cuMemcpyBatchAsync`; the number of the copy that can't be made is written to `failed`.
fn batch(
    (dsts, srcs, sizes, count): (*const CUdeviceptr, *const CUdeviceptr, *const usize, usize),
    (attributes, indices, sets): (*const CUmemcpyAttributes, *const usize, usize),
    failed: *mut usize,
    s: &'static Stream,
) -> Result<()> {
    // No copy in particular.
    put_if(failed, usize::MAX);
    // "Must not be legacy NULL stream."
    if s.is_legacy() || count == 0 || sets == 0 || sets > count {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if s.is_capturing() {
        return capture::fail(s);
    }
    check_attributes(attributes, sets)?;
    // "The first entry in attrsIdxs must always be 0. Also, each entry must be greater than the
    // previous entry and the last entry should be less than count."
    let mut last = None;
    for i in 0..sets {
        let index = get(indices.wrapping_add(i))?;
        let right = last.map_or(index == 0, |last| index > last);
        if !right || index >= count {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        last = Some(index);
    }
    for i in 0..count {
        let copy = || {
            let dst = get(dsts.wrapping_add(i))?;
            let src = get(srcs.wrapping_add(i))?;
            let len = get(sizes.wrapping_add(i))?;
            Copy3d::linear((dst, UNIFIED), (src, UNIFIED), len).run(s, false)
        };
        copy().inspect_err(|_| put_if(failed, i))?;
    }
    Ok(())
}

exports_both! {
    fn cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attributes: *mut CUmemcpyAttributes, indices: *mut usize, sets: usize, failed: *mut usize, s: CUstream) |s| {
        batch((dsts, srcs, sizes, count), (attributes, indices, sets), failed, s)
    }
    fn cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attributes: *mut CUmemcpyAttributes, indices: *mut usize, sets: usize, s: CUstream) |s| {
        batch((dsts, srcs, sizes, count), (attributes, indices, sets), std::ptr::null_mut(), s)
    }
}
