//! Tensor maps: CUDA Driver API, "Tensor Map Object Management". A map is opaque: what was encoded is
//! checked as the manual says and kept in it; nothing reads it.

use crate::abi::{exports, get, put};
use crate::context::current;
use crate::errors::Result;
use std::ffi::{c_int, c_uint, c_void};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};

/// `CUtensorMap`: 128 bytes, aligned to 64.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Map {
    address: u64,
    kind: u32,
    what: [u32; 8],
    dims: [u32; 5],
    rest: [u32; 16],
}
const _: () = assert!(size_of::<Map>() == 128);

const PACKED_8: c_uint = 13;
const PACKED_16: c_uint = 14;
const PACKED_6: c_uint = 15;
const TILED: u32 = 1;
const IM2COL: u32 = 2;
const IM2COL_WIDE: u32 = 3;

/// Bits of an element by `CUtensorMapDataType`.
const BITS: [u64; 16] = [8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6];
/// Which of them are floating point.
const FLOATS: [bool; 16] = [
    false, false, false, false, false, false, true, true, true, true, true, true, true, false,
    false, false,
];

/// What all encodings have.
struct Common {
    element: c_uint,
    rank: usize,
    address: u64,
    dims: *const u64,
    strides: *const u64,
    element_strides: *const u32,
    interleave: c_uint,
    swizzle: c_uint,
    promotion: c_uint,
    fill: c_uint,
}

fn require(holds: bool) -> Result<()> {
    if holds { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

fn list<T: Copy>(from: *const T, len: usize) -> Result<Vec<T>> {
    (0..len).map(|i| get(from.wrapping_add(i))).collect()
}

impl Common {
    /// Checks it; the map so far.
    fn check(&self, out: *mut Map, kind: u32, least_rank: usize) -> Result<Map> {
        let device = current()?.device;
        if device.config.compute_capability.0 < 9 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        require(!out.is_null() && (out as u64).is_multiple_of(64))?;
        require(self.element < 16 && self.interleave <= 2 && self.swizzle <= 6)?;
        require(self.promotion <= 3 && self.fill <= 1)?;
        let least = if self.interleave == 0 { least_rank } else { 3 };
        require((least..=5).contains(&self.rank))?;
        let wide = matches!(self.element, PACKED_16 | PACKED_6);
        let align = if self.interleave == 2 || wide { 32 } else { 16 };
        require(self.address != 0 && self.address.is_multiple_of(align))?;
        let dims = list(self.dims, self.rank)?;
        require(dims.iter().all(|d| (1..=1 << 31).contains(d)))?;
        require(!wide || dims[0].is_multiple_of(128))?;
        require(self.element != PACKED_8 || dims[0].is_multiple_of(2))?;
        let strides = list(self.strides, self.rank - 1)?;
        require(strides.iter().all(|s| s.is_multiple_of(align) && *s < 1 << 40))?;
        let steps = list(self.element_strides, self.rank)?;
        let first = usize::from(self.interleave == 0);
        require(steps[first.min(self.rank)..].iter().all(|s| (1..=8).contains(s)))?;
        require(self.fill == 0 || FLOATS[self.element as usize])?;
        require(self.element != PACKED_6 || self.interleave == 0)?;
        let mut map =
            Map { address: self.address, kind, what: [0; 8], dims: [0; 5], rest: [0; 16] };
        let rank = u32::try_from(self.rank).unwrap_or(0);
        map.what =
            [self.element, rank, self.interleave, self.swizzle, self.promotion, self.fill, 0, 0];
        for (to, from) in map.dims.iter_mut().zip(dims) {
            *to = u32::try_from(from).unwrap_or(u32::MAX);
        }
        Ok(map)
    }

    /// What the inner dimension of a box may have in bytes.
    fn check_inner(&self, elements: u64) -> Result<()> {
        let bytes = elements * BITS[self.element as usize] / 8;
        if self.interleave != 0 {
            return Ok(());
        }
        require(matches!(self.element, PACKED_16 | PACKED_6) || bytes.is_multiple_of(16))?;
        let span = match self.swizzle {
            0 => u64::MAX,
            1 => 32,
            2 => 64,
            _ => 128,
        };
        require(bytes <= span)
    }
}

/// Corners of a box by rank: 3, 4, 5 dimensions have 1, 2, 3 offsets of 16, 8 and 5 bits.
fn corners(rank: usize, lower: *const c_int, upper: *const c_int) -> Result<()> {
    let limit = [1 << 15, 1 << 7, 1 << 4][rank - 3];
    let all = [list(lower, rank - 2)?, list(upper, rank - 2)?].concat();
    require(all.iter().all(|n| (-limit..limit).contains(n)))
}

exports! {
    fn cuTensorMapEncodeTiled(out: *mut Map, element: c_uint, rank: c_uint, address: *mut c_void, dims: *const u64, strides: *const u64, extent: *const u32, element_strides: *const u32, interleave: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint) {
        let common = Common { element, rank: rank as usize, address: address as u64, dims, strides, element_strides, interleave, swizzle, promotion, fill };
        let mut map = common.check(out, TILED, 1)?;
        let extent = list(extent, common.rank)?;
        require(extent.iter().all(|n| (1..=256).contains(n)))?;
        require(!matches!(element, PACKED_16 | PACKED_6) || extent[0] == 128)?;
        common.check_inner(extent[0].into())?;
        map.rest[..extent.len()].copy_from_slice(&extent);
        put(out, map)
    }
    fn cuTensorMapEncodeIm2col(out: *mut Map, element: c_uint, rank: c_uint, address: *mut c_void, dims: *const u64, strides: *const u64, lower: *const c_int, upper: *const c_int, channels: c_uint, pixels: c_uint, element_strides: *const u32, interleave: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint) {
        let common = Common { element, rank: rank as usize, address: address as u64, dims, strides, element_strides, interleave, swizzle, promotion, fill };
        let mut map = common.check(out, IM2COL, 3)?;
        corners(common.rank, lower, upper)?;
        require(channels <= 256 && pixels <= 1024)?;
        common.check_inner(channels.into())?;
        map.rest[..2].copy_from_slice(&[channels, pixels]);
        put(out, map)
    }
    // "only supported on devices of compute capability 10.0 or higher".
    fn cuTensorMapEncodeIm2colWide(out: *mut Map, element: c_uint, rank: c_uint, address: *mut c_void, dims: *const u64, strides: *const u64, lower: c_int, upper: c_int, channels: c_uint, pixels: c_uint, element_strides: *const u32, interleave: c_uint, mode: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint) {
        if current()?.device.config.compute_capability.0 < 10 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let common = Common { element, rank: rank as usize, address: address as u64, dims, strides, element_strides, interleave, swizzle, promotion, fill };
        let mut map = common.check(out, IM2COL_WIDE, 3)?;
        let limit = 1 << 15;
        require([lower, upper].iter().all(|n| (-limit..limit).contains(n)))?;
        require(mode <= 1 && channels <= 256 && pixels <= 1024)?;
        map.rest[..3].copy_from_slice(&[channels, pixels, mode]);
        put(out, map)
    }
    fn cuTensorMapReplaceAddress(out: *mut Map, address: *mut c_void) {
        current()?;
        require((out as u64).is_multiple_of(64))?;
        let map = get(out)?;
        require((TILED..=IM2COL_WIDE).contains(&map.kind))?;
        let wide = map.what[2] == 2 || matches!(map.what[0], PACKED_16 | PACKED_6);
        let address = address as u64;
        require(address != 0 && address.is_multiple_of(if wide { 32 } else { 16 }))?;
        put(out, Map { address, ..map })
    }
}
