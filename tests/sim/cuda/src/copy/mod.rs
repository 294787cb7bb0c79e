//! Copies and fills: CUDA Driver API, "Memory Management".
//!
//! The bytes move when the call is made: all streams share one queue and kernels compute nothing,
//! so nobody can tell the difference from moving them when the queue gets there. The time is spent
//! in the queue: host ↔ device copies on a copy engine, device-to-device copies and fills on the GPU.

mod batch;
mod old;

pub use batch::*;
pub use old::*;

use crate::abi::{exports_both, get};
use crate::array::Array;
use crate::capture;
use crate::driver::driver;
use crate::errors::Result;
use crate::graph::kind::{Kind, Memset};
use crate::handle::resolve;
use crate::host_function::later;
use crate::stream::{Stream, stream};
use simgpu::engine::Op;
use std::ffi::{c_uchar, c_uint, c_ushort, c_void};
use std::sync::Arc;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUarray, CUcontext, CUdeviceptr,
    CUstream,
};

const HOST: c_uint = 1;
const DEVICE: c_uint = 2;
const ARRAY: c_uint = 3;
const UNIFIED: c_uint = 4;

/// Which ends of a copy must be memory that the driver knows.
#[derive(Clone, Copy)]
pub(crate) enum End {
    Host,
    Device,
    Either,
    /// An array's memory, checked already.
    Array,
}

impl End {
    /// `CU_MEMORYTYPE_*`.
    fn number(self) -> c_uint {
        match self {
            End::Host => HOST,
            End::Device => DEVICE,
            End::Either => UNIFIED,
            End::Array => ARRAY,
        }
    }
}

/// Whether `[address, address + len)` is device memory; it must be if the copy says so.
fn check(address: u64, len: usize, end: End, written: bool) -> Result<bool> {
    if address == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match end {
        End::Host => return Ok(false),
        End::Array => return Ok(true),
        End::Device | End::Either => {}
    }
    let mut memory = driver()?.memory();
    let found = if written {
        memory.touch(address, len as u64)
    } else {
        memory.find(address, len as u64).map(|(_, a)| a.kind)
    };
    match (found, end) {
        (Some(kind), _) => Ok(kind.is_device()),
        (None, End::Either) => Ok(false),
        (None, _) => Err(CUDA_ERROR_INVALID_VALUE),
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
fn is_known(address: u64, len: usize) -> Result<bool> {
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
        return later(s, Box::new(act));
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

/// A linear copy. Synchronous: it returns when the data is there, except device to device, where
/// "no host-side synchronization is performed" ("API synchronization behavior").
pub(crate) fn linear(
    dst: (u64, End),
    src: (u64, End),
    len: usize,
    s: &'static Stream,
    synchronous: bool,
) -> Result<()> {
    if s.is_capturing() {
        return capture_copy(s, Copy3d::linear(dst, src, len), synchronous);
    }
    if synchronous {
        capture::permit(capture::Call::Synchronous)?;
    }
    if len == 0 {
        return after_host_functions(s);
    }
    let to_device = check(dst.0, len, dst.1, true)?;
    let from_device = check(src.0, len, src.1, false)?;
    let (from, to) = (src.0, dst.0);
    // SAFETY: device ends lie in allocations of ours (checked); host ends are the caller's
    // promise; they may overlap.
    let act = move || unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) };
    in_order(s, !synchronous && is_known(from, len)? && is_known(to, len)?, act)?;
    let on_device = to_device && from_device;
    spend(s, len, on_device, synchronous && !on_device)
}

/// One end of a pitched copy: where row (z, y) begins is `start + z * slice + y * pitch`.
struct Pitched {
    start: u64,
    pitch: usize,
    slice: usize,
    end: End,
}

impl Pitched {
    /// Offsets are in bytes, rows and slices.
    fn new(
        kind: c_uint,
        (host, device, array): (u64, u64, u64),
        (x, y, z): (usize, usize, usize),
        (pitch, rows): (usize, usize),
        (width, height, depth): (usize, usize, usize),
    ) -> Result<Pitched> {
        if kind == ARRAY {
            return Pitched::of_array(array, (x, y, z), (width, height, depth));
        }
        let (base, end) = match kind {
            HOST => (host, End::Host),
            DEVICE => (device, End::Device),
            UNIFIED => (device, End::Either),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        // A pitch of 0 means tightly packed.
        let pitch = if pitch == 0 { x + width } else { pitch };
        let rows = if rows == 0 { y + height } else { rows };
        if pitch < x + width || base == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let slice = pitch.checked_mul(rows).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let start = base + (z * slice + y * pitch + x) as u64;
        Ok(Pitched { start, pitch, slice, end })
    }

    /// An array: "x in bytes", rows and slices must lie in it.
    fn of_array(
        array: u64,
        (x, y, z): (usize, usize, usize),
        (width, height, depth): (usize, usize, usize),
    ) -> Result<Pitched> {
        let array: &Array = resolve(array as *mut c_void)?;
        let (start, level) = array.bytes()?;
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
        Ok(Pitched { start, pitch, slice, end: End::Array })
    }

    fn span(&self, width: usize, height: usize, depth: usize) -> usize {
        (depth - 1) * self.slice + (height - 1) * self.pitch + width
    }

    fn row(&self, z: usize, y: usize) -> *mut u8 {
        (self.start + (z * self.slice + y * self.pitch) as u64) as *mut u8
    }
}

fn boxed(
    dst: &Pitched,
    src: &Pitched,
    (width, height, depth): (usize, usize, usize),
    s: &'static Stream,
    synchronous: bool,
) -> Result<()> {
    after_host_functions(s)?;
    if width == 0 || height == 0 || depth == 0 {
        return Ok(());
    }
    let to_device = check(dst.start, dst.span(width, height, depth), dst.end, true)?;
    let from_device = check(src.start, src.span(width, height, depth), src.end, false)?;
    for z in 0..depth {
        for y in 0..height {
            // SAFETY: rows within spans that were checked (device) or promised (host).
            unsafe { std::ptr::copy(src.row(z, y), dst.row(z, y), width) };
        }
    }
    let on_device = to_device && from_device;
    spend(s, width * height * depth, on_device, synchronous && !on_device)
}

/// `CUDA_MEMCPY3D`.
#[derive(Clone, Copy)]
#[repr(C)]
#[allow(missing_docs, reason = "cuda.h's structure")]
pub struct Copy3d {
    src_x: usize,
    src_y: usize,
    src_z: usize,
    src_lod: usize,
    src_kind: c_uint,
    src_host: u64,
    src_device: u64,
    src_array: u64,
    reserved0: u64,
    src_pitch: usize,
    src_height: usize,
    dst_x: usize,
    dst_y: usize,
    dst_z: usize,
    dst_lod: usize,
    dst_kind: c_uint,
    dst_host: u64,
    dst_device: u64,
    dst_array: u64,
    reserved1: u64,
    dst_pitch: usize,
    dst_height: usize,
    width: usize,
    height: usize,
    depth: usize,
}
const _: () = assert!(size_of::<Copy3d>() == 200);

/// What the structures of all copies say, of whichever width their fields are.
macro_rules! plane {
    ($c:expr) => {{
        let c = $c;
        Copy3d {
            src_x: c.srcXInBytes as usize,
            src_y: c.srcY as usize,
            src_kind: c.srcMemoryType,
            src_host: c.srcHost as u64,
            src_device: c.srcDevice.into(),
            src_array: c.srcArray as u64,
            src_pitch: c.srcPitch as usize,
            dst_x: c.dstXInBytes as usize,
            dst_y: c.dstY as usize,
            dst_kind: c.dstMemoryType,
            dst_host: c.dstHost as u64,
            dst_device: c.dstDevice.into(),
            dst_array: c.dstArray as u64,
            dst_pitch: c.dstPitch as usize,
            width: c.WidthInBytes as usize,
            height: c.Height as usize,
            depth: 1,
            ..Copy3d::NONE
        }
    }};
}
pub(crate) use plane;

pub(crate) fn copy_3d(c: &Copy3d, s: &'static Stream, synchronous: bool) -> Result<()> {
    let (dst, src) = c.ends()?;
    if s.is_capturing() {
        return capture_copy(s, *c, synchronous);
    }
    if synchronous {
        capture::permit(capture::Call::Synchronous)?;
    }
    boxed(&dst, &src, (c.width, c.height, c.depth), s, synchronous)
}

impl Copy3d {
    // SAFETY: numbers only, for which zero is a value.
    const NONE: Copy3d = unsafe { std::mem::zeroed() };

    fn ends(&self) -> Result<(Pitched, Pitched)> {
        // "srcLOD and dstLOD … must be set to 0".
        if self.src_lod != 0 || self.dst_lod != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let size = (self.width, self.height, self.depth);
        let dst = Pitched::new(
            self.dst_kind,
            (self.dst_host, self.dst_device, self.dst_array),
            (self.dst_x, self.dst_y, self.dst_z),
            (self.dst_pitch, self.dst_height),
            size,
        )?;
        let src = Pitched::new(
            self.src_kind,
            (self.src_host, self.src_device, self.src_array),
            (self.src_x, self.src_y, self.src_z),
            (self.src_pitch, self.src_height),
            size,
        )?;
        Ok((dst, src))
    }

    /// `len` bytes in a row.
    fn linear((dst, to): (u64, End), (src, from): (u64, End), len: usize) -> Copy3d {
        let (dst_kind, src_kind) = (to.number(), from.number());
        Copy3d {
            src_kind,
            src_host: src,
            src_device: src,
            dst_kind,
            dst_host: dst,
            dst_device: dst,
            width: len,
            height: 1,
            depth: 1,
            ..Copy3d::NONE
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.ends().map(|_| ())
    }

    /// "Changing either the source or destination memory type … is not supported."
    pub(crate) fn same_kinds(&self, other: &Copy3d) -> bool {
        (self.dst_kind, self.src_kind) == (other.dst_kind, other.src_kind)
    }
}

/// `len` bytes between an array from an offset, row after row, and linear memory or another array.
/// Copies that begin and end inside rows are several.
pub(crate) fn with_array(
    (dst, dst_from): (Side, usize),
    (src, src_from): (Side, usize),
    len: usize,
    s: &'static Stream,
    synchronous: bool,
) -> Result<()> {
    let (mut to, mut from, mut left) = (dst_from, src_from, len);
    while left > 0 {
        let most = dst.rest_of_row(to)?.min(src.rest_of_row(from)?);
        let width = left.min(most);
        let mut copy = Copy3d { width, height: 1, depth: 1, ..Copy3d::NONE };
        let (kind, base, x, y) = dst.place(to)?;
        (copy.dst_kind, copy.dst_x, copy.dst_y) = (kind, x, y);
        (copy.dst_host, copy.dst_device, copy.dst_array) = (base, base, base);
        let (kind, base, x, y) = src.place(from)?;
        (copy.src_kind, copy.src_x, copy.src_y) = (kind, x, y);
        (copy.src_host, copy.src_device, copy.src_array) = (base, base, base);
        copy_3d(&copy, s, synchronous)?;
        (to, from, left) = (to + width, from + width, left - width);
    }
    Ok(())
}

#[derive(Clone, Copy)]
pub(crate) enum Side {
    Linear(u64, End),
    Array(CUarray),
}

impl Side {
    fn row_of(array: CUarray) -> Result<usize> {
        let (_, level) = resolve::<Array>(array)?.bytes()?;
        usize::try_from(level.row).map_err(|_| CUDA_ERROR_INVALID_VALUE)
    }

    fn rest_of_row(&self, at: usize) -> Result<usize> {
        match self {
            Side::Linear(..) => Ok(usize::MAX),
            Side::Array(array) => Side::row_of(*array).map(|row| row - at % row),
        }
    }

    /// Kind, base, and where in it.
    fn place(&self, at: usize) -> Result<(c_uint, u64, usize, usize)> {
        match *self {
            Side::Linear(base, end) => Ok((end.number(), base, at, 0)),
            Side::Array(array) => {
                let row = Side::row_of(array)?;
                Ok((ARRAY, array as u64, at % row, at / row))
            }
        }
    }
}

fn capture_copy(s: &'static Stream, copy: Copy3d, synchronous: bool) -> Result<()> {
    if synchronous {
        return capture::fail(s);
    }
    capture::add(s, |_| Ok(Kind::Memcpy(Arc::new(copy)))).map(|_| ())
}

pub(crate) fn run(copy: &Copy3d, s: &'static Stream) -> Result<()> {
    copy_3d(copy, s, false)
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
        capture::permit(capture::Call::Synchronous)?;
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
    let on_device = check(at, span, End::Device, true)?;
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

exports_both! {
    fn cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds(dst: CUarray, offset: usize, src: CUdeviceptr, len: usize) |flavour| {
        with_array((Side::Array(dst), offset), (Side::Linear(src, End::Device), 0), len, stream(std::ptr::null_mut(), flavour)?, true)
    }
    fn cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds(dst: CUdeviceptr, src: CUarray, offset: usize, len: usize) |flavour| {
        with_array((Side::Linear(dst, End::Device), 0), (Side::Array(src), offset), len, stream(std::ptr::null_mut(), flavour)?, true)
    }
    fn cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds(dst: CUarray, to: usize, src: CUarray, from: usize, len: usize) |flavour| {
        with_array((Side::Array(dst), to), (Side::Array(src), from), len, stream(std::ptr::null_mut(), flavour)?, true)
    }
}

/// The same operation in the default stream, waited for, and in a stream that the caller names.
macro_rules! operations {
    ($(fn $($now:ident, $now_own:ident);+ & $($later:ident, $later_own:ident);+($($args:tt)*) |$s:ident, $synchronous:ident| $body:block)*) => {
        exports_both! {
            $(
                fn $($now, $now_own);+($($args)*) |flavour| {
                    let ($s, $synchronous) = (stream(std::ptr::null_mut(), flavour)?, true);
                    $body
                }
                fn $($later, $later_own);+($($args)*, queue: CUstream) |flavour| {
                    let ($s, $synchronous) = (stream(queue, flavour)?, false);
                    $body
                }
            )*
        }
    };
}

operations! {
    fn cuMemcpy, cuMemcpy_ptds & cuMemcpyAsync, cuMemcpyAsync_ptsz(dst: CUdeviceptr, src: CUdeviceptr, len: usize) |s, synchronous| {
        linear((dst, End::Either), (src, End::Either), len, s, synchronous)
    }
    fn cuMemcpyPeer, cuMemcpyPeer_ptds & cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(dst: CUdeviceptr, dst_ctx: CUcontext, src: CUdeviceptr, src_ctx: CUcontext, len: usize) |s, synchronous| {
        let _ = (dst_ctx, src_ctx);
        linear((dst, End::Device), (src, End::Device), len, s, synchronous)
    }
    fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds & cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz(dst: CUdeviceptr, src: *const c_void, len: usize) |s, synchronous| {
        linear((dst, End::Device), (src as u64, End::Host), len, s, synchronous)
    }
    fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds & cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz(dst: *mut c_void, src: CUdeviceptr, len: usize) |s, synchronous| {
        linear((dst as u64, End::Host), (src, End::Device), len, s, synchronous)
    }
    fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds & cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz(dst: CUdeviceptr, src: CUdeviceptr, len: usize) |s, synchronous| {
        linear((dst, End::Device), (src, End::Device), len, s, synchronous)
    }
    fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds; cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds & cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(copy: *const CUDA_MEMCPY2D) |s, synchronous| {
        copy_3d(&plane!(get(copy)?), s, synchronous)
    }
    // Of a peer's copy the contexts say which GPUs; addresses are unified.
    fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds; cuMemcpy3DPeer, cuMemcpy3DPeer_ptds & cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz; cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(copy: *const CUDA_MEMCPY3D) |s, synchronous| {
        copy_3d(&get(copy.cast::<Copy3d>())?, s, synchronous)
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
