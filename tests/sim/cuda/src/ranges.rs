//! What is advised and prefetched of managed memory: CUDA Driver API, `cuMemAdvise`,
//! `cuMemPrefetchAsync`, `cuMemDiscardBatchAsync`, `cuMemRangeGetAttribute`. Managed memory is device
//! memory here and never moves, so that all this is kept and answered, and changes nothing else.

use crate::abi::{exports, exports_both, get, put};
use crate::capture;
use crate::context::current;
use crate::driver::{Driver, driver, lock};
use crate::errors::Result;
use crate::memory::Kind;
use crate::stream::{Stream, stream};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUdevice, CUdeviceptr, CUmemLocation,
    CUstream,
};

const DEVICE: c_int = 1;
const HOST: c_int = 2;
const HOST_NUMA: c_int = 3;
const HOST_NUMA_CURRENT: c_int = 4;
/// `CU_DEVICE_CPU`, `CU_DEVICE_INVALID`.
const CPU: c_int = -1;
const INVALID: c_int = -2;

/// What is known of a range: a location is its type and id, or (0, 0) for none.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Advice {
    read_mostly: bool,
    preferred: (c_int, c_int),
    prefetched: (c_int, c_int),
    /// By ordinal; the host is bit 63.
    accessed_by: u64,
}

/// Ranges without gaps or overlaps where something is known: the end and what, by the start.
static RANGES: Mutex<BTreeMap<u64, (u64, Advice)>> = Mutex::new(BTreeMap::new());

/// Cuts ranges so that one begins at `at`, if any contains it.
fn cut(ranges: &mut BTreeMap<u64, (u64, Advice)>, at: u64) {
    if let Some((&start, &(end, advice))) = ranges.range(..at).next_back()
        && end > at
    {
        ranges.insert(start, (at, advice));
        ranges.insert(at, (end, advice));
    }
}

/// Changes what is known of `[from, to)`.
fn change(from: u64, to: u64, how: impl Fn(&mut Advice)) {
    let mut ranges = lock(&RANGES);
    cut(&mut ranges, from);
    cut(&mut ranges, to);
    let mut at = from;
    while at < to {
        let next = ranges.range(at..to).next().map(|(start, (end, _))| (*start, *end));
        match next {
            Some((start, end)) if start == at => {
                if let Some((_, advice)) = ranges.get_mut(&at) {
                    how(advice);
                }
                at = end;
            }
            gap => {
                let end = gap.map_or(to, |(start, _)| start);
                let mut advice = Advice::default();
                how(&mut advice);
                ranges.insert(at, (end, advice));
                at = end;
            }
        }
    }
}

/// Forgets a range: its memory is gone.
pub(crate) fn forget(from: u64, len: u64) {
    let to = from.saturating_add(len);
    let mut ranges = lock(&RANGES);
    if ranges.is_empty() {
        return;
    }
    cut(&mut ranges, from);
    cut(&mut ranges, to);
    ranges.retain(|start, _| !(from..to).contains(start));
}

/// Everything that is known within `[from, to)`; gaps are [`Advice::default`].
fn known(from: u64, to: u64) -> Vec<Advice> {
    let ranges = lock(&RANGES);
    let mut found = Vec::new();
    let mut at = from;
    let first = ranges.range(..=from).next_back().map_or(from, |(start, _)| *start);
    for (&start, &(end, advice)) in ranges.range(first..to) {
        if end <= from {
            continue;
        }
        if start > at {
            found.push(Advice::default());
        }
        found.push(advice);
        at = end;
    }
    if at < to {
        found.push(Advice::default());
    }
    found
}

/// The one value that all parts of a range have.
fn common<T: PartialEq>(parts: &[Advice], of: impl Fn(&Advice) -> T) -> Option<T> {
    let first = parts.first().map(&of)?;
    parts.iter().all(|part| of(part) == first).then_some(first)
}

/// Refuses what is not all managed memory.
fn managed(driver: &Driver, at: u64, len: usize) -> Result<(u64, u64)> {
    let memory = driver.memory();
    let found = memory.find(at, len as u64).filter(|(_, a)| a.kind == Kind::Managed);
    if len == 0 || found.is_none() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok((at, at + len as u64))
}

/// A location of the newer functions, checked.
fn location(driver: &'static Driver, location: CUmemLocation) -> Result<(c_int, c_int)> {
    match location.r#type {
        DEVICE => driver.device(location.id).map(|d| (DEVICE, d.ordinal)),
        HOST | HOST_NUMA_CURRENT => Ok((HOST, 0)),
        HOST_NUMA if location.id >= 0 => Ok((HOST_NUMA, location.id)),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// A device ordinal or `CU_DEVICE_CPU` of the older ones.
fn place(driver: &'static Driver, device: CUdevice) -> Result<(c_int, c_int)> {
    if device == CPU {
        Ok((HOST, 0))
    } else {
        location(driver, CUmemLocation { r#type: DEVICE, id: device })
    }
}

fn advise(
    at: u64,
    len: usize,
    advice: c_int,
    to: impl Fn() -> Result<(c_int, c_int)>,
) -> Result<()> {
    let driver = driver()?;
    current()?;
    let (from, end) = managed(driver, at, len)?;
    let bit = |place: (c_int, c_int)| match place {
        (DEVICE, id) => u32::try_from(id).ok().filter(|id| *id < 63).map(|id| 1u64 << id),
        _ => Some(1 << 63),
    };
    match advice {
        1 => change(from, end, |a| a.read_mostly = true),
        2 => change(from, end, |a| a.read_mostly = false),
        3 => {
            let to = to()?;
            change(from, end, |a| a.preferred = to);
        }
        4 => change(from, end, |a| a.preferred = (0, 0)),
        5 | 6 => {
            let bit = bit(to()?).ok_or(CUDA_ERROR_INVALID_DEVICE)?;
            let set = advice == 5;
            change(from, end, |a| {
                a.accessed_by = if set { a.accessed_by | bit } else { a.accessed_by & !bit }
            });
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    Ok(())
}

/// Prefetches and discards are no work of the GPU's here; a capture does not take them.
fn permit(s: &'static Stream) -> Result<()> {
    if s.is_capturing() { capture::fail(s) } else { s.context().check_alive() }
}

fn prefetch(s: &'static Stream, at: u64, len: usize, to: (c_int, c_int)) -> Result<()> {
    permit(s)?;
    let (from, end) = managed(driver()?, at, len)?;
    change(from, end, |a| a.prefetched = to);
    Ok(())
}

/// The ranges of a batch, all of managed memory.
fn batch(at: *const CUdeviceptr, sizes: *const usize, count: usize) -> Result<Vec<(u64, u64)>> {
    let driver = driver()?;
    if count == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let one = |i: usize| managed(driver, get(at.wrapping_add(i))?, get(sizes.wrapping_add(i))?);
    (0..count).map(one).collect()
}

/// Where each part of a batch goes: "the first entry in prefetchLocIdxs must always be 0. Also, each
/// entry must be greater than the previous entry and the last entry should be less than count".
fn destinations(
    places: *const CUmemLocation,
    indices: *const usize,
    of: usize,
    count: usize,
) -> Result<Vec<(c_int, c_int)>> {
    let driver = driver()?;
    if of == 0 || of > count {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let indices = (0..of).map(|i| get(indices.wrapping_add(i))).collect::<Result<Vec<usize>>>()?;
    let rising = indices.windows(2).all(|pair| pair[0] < pair[1]);
    if indices[0] != 0 || !rising || indices[of - 1] >= count {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let places = (0..of).map(|i| location(driver, get(places.wrapping_add(i))?));
    let places = places.collect::<Result<Vec<_>>>()?;
    Ok((0..count).map(|i| places[indices.partition_point(|from| *from <= i) - 1]).collect())
}

/// What every batch begins with: "Flags reserved for future use. Must be zero."
fn begin_batch(s: &'static Stream, flags: u64) -> Result<()> {
    if flags == 0 { permit(s) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

fn prefetch_batch(to: Vec<(c_int, c_int)>, ranges: Vec<(u64, u64)>) -> Result<()> {
    for ((from, end), to) in ranges.into_iter().zip(to) {
        change(from, end, |a| a.prefetched = to);
    }
    Ok(())
}

/// `CU_MEM_RANGE_ATTRIBUTE_*`.
fn attribute(which: c_int, out: *mut c_void, size: usize, range: (u64, u64)) -> Result<()> {
    let parts = known(range.0, range.1);
    let preferred = common(&parts, |a| a.preferred).unwrap_or((0, 0));
    let prefetched = common(&parts, |a| a.prefetched).unwrap_or((0, 0));
    // As the older attributes name a place.
    let named = |place: (c_int, c_int)| match place.0 {
        DEVICE => place.1,
        0 => INVALID,
        _ => CPU,
    };
    if which == 3 {
        if size == 0 || !size.is_multiple_of(4) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let by = parts.iter().fold(u64::MAX, |all, part| all & part.accessed_by);
        let devices = (0..63).filter(|i| by & 1 << i != 0);
        let host = (by & 1 << 63 != 0).then_some(CPU);
        let all = devices.chain(host).chain(std::iter::repeat(INVALID));
        return (0..size / 4)
            .zip(all)
            .try_for_each(|(i, id)| put(out.cast::<c_int>().wrapping_add(i), id));
    }
    if size != 4 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let value = match which {
        1 => c_int::from(parts.iter().all(|a| a.read_mostly)),
        2 => named(preferred),
        4 => named(prefetched),
        5 => preferred.0,
        6 => preferred.1,
        7 => prefetched.0,
        8 => prefetched.1,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    put(out.cast(), value)
}

exports! {
    fn cuMemAdvise(at: CUdeviceptr, len: usize, advice: c_int, dev: CUdevice) {
        let driver = driver()?;
        advise(at, len, advice, || place(driver, dev))
    }
    fn cuMemAdvise_v2(at: CUdeviceptr, len: usize, advice: c_int, to: CUmemLocation) {
        let driver = driver()?;
        advise(at, len, advice, || location(driver, to))
    }
    fn cuMemRangeGetAttribute(out: *mut c_void, size: usize, which: c_int, at: CUdeviceptr, len: usize) {
        attribute(which, out, size, managed(driver()?, at, len)?)
    }
    fn cuMemRangeGetAttributes(outs: *mut *mut c_void, sizes: *const usize, which: *const c_int, count: usize, at: CUdeviceptr, len: usize) {
        let range = managed(driver()?, at, len)?;
        if count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        (0..count).try_for_each(|i| {
            attribute(get(which.wrapping_add(i))?, get(outs.wrapping_add(i))?, get(sizes.wrapping_add(i))?, range)
        })
    }
}

exports_both! {
    fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(at: CUdeviceptr, len: usize, dev: CUdevice, s: CUstream) |flavour| {
        prefetch(stream(s, flavour)?, at, len, place(driver()?, dev)?)
    }
    fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(at: CUdeviceptr, len: usize, to: CUmemLocation, flags: c_uint, s: CUstream) |flavour| {
        let s = stream(s, flavour)?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        prefetch(s, at, len, location(driver()?, to)?)
    }
    fn cuMemPrefetchBatchAsync, cuMemPrefetchBatchAsync_ptsz(at: *const CUdeviceptr, sizes: *const usize, count: usize, places: *const CUmemLocation, indices: *const usize, of: usize, flags: u64, s: CUstream) |flavour| {
        begin_batch(stream(s, flavour)?, flags)?;
        prefetch_batch(destinations(places, indices, of, count)?, batch(at, sizes, count)?)
    }
    fn cuMemDiscardBatchAsync, cuMemDiscardBatchAsync_ptsz(at: *const CUdeviceptr, sizes: *const usize, count: usize, flags: u64, s: CUstream) |flavour| {
        begin_batch(stream(s, flavour)?, flags)?;
        batch(at, sizes, count).map(|_| ())
    }
    fn cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardAndPrefetchBatchAsync_ptsz(at: *const CUdeviceptr, sizes: *const usize, count: usize, places: *const CUmemLocation, indices: *const usize, of: usize, flags: u64, s: CUstream) |flavour| {
        begin_batch(stream(s, flavour)?, flags)?;
        prefetch_batch(destinations(places, indices, of, count)?, batch(at, sizes, count)?)
    }
}
