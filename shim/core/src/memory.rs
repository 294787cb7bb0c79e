//! Allocations: reserve, call the driver, settle to what it really took. Frees: forget the pointer, call the
//! driver, give the bytes back only when it succeeded.
//!
//! A freed entry goes *before* the call, because the driver may give the address to another thread at
//! once; the bytes go *after* it, because until then they are not free. Synchronous and
//! stream-ordered frees take any pointer: CUDA lets both release the other's allocations. Pointers
//! that are not charged (NULL, imported, already freed) are the driver's to judge. What was made in a
//! pool goes back to the pool, whose charge follows the driver ([`crate::pools`]).
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::allocations::Allocation;
use crate::contexts::Place;
use crate::place;
use crate::quota::{self, Asked};
use crate::real;
use crate::state::Process;
use crate::thread::{Answer, entered, tenant};
use tessera_cuda::types::*;
use tessera_region::layout::Kind;

/// A number in the width of a function's version: those of before CUDA 3.2 take 32 bits.
pub trait Width: Copy + Default {
    /// In 64 bits.
    fn wide(self) -> u64;
    /// A larger figure is the largest.
    fn saturating(wide: u64) -> Self;
}

macro_rules! widths {
    ($($width:ty),+) => {
        $(impl Width for $width {
            #[inline]
            fn wide(self) -> u64 {
                self as u64
            }

            #[inline]
            fn saturating(wide: u64) -> Self {
                Self::try_from(wide).unwrap_or(Self::MAX)
            }
        })+
    };
}
widths!(u32, u64, usize);

pub(crate) struct Ask {
    /// The driver's function, for messages.
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// What the application asks for, for messages.
    pub(crate) asked: u64,
    /// The most that the driver may take.
    pub(crate) most: u64,
}

pub(crate) struct Made {
    pub(crate) pointer: u64,
    pub(crate) bytes: u64,
}

/// Device memory is handed out in pages of this size (`cuMemGetAllocationGranularity` of every GPU
/// so far), and larger allocations take whole ones.
pub(crate) const CHUNK: u64 = 2 << 20;
/// Smaller allocations share a page, aligned to this.
const ALIGN: u64 = 512;

/// The device memory behind an allocation of `bytes`: what NVML shows, and what a quota is about.
/// Charging what was asked for would let a loop of 2 MiB + 1 byte take twice its quota.
#[inline]
pub(crate) const fn footprint(bytes: u64) -> u64 {
    let step = if bytes <= CHUNK / 2 { ALIGN } else { CHUNK };
    // What overflows fits no quota.
    match bytes.checked_next_multiple_of(step) {
        Some(bytes) => bytes,
        None => u64::MAX,
    }
}

/// Charges what `call` makes at a place, and remembers it: `call` runs the driver's function (again,
/// if a refusal may pass), `made` reads its result, for which so many bytes were reserved, `undo` frees it.
#[inline]
pub(crate) fn charge(
    process: &'static Process,
    Place { serial, gpu }: Place,
    ask: &Ask,
    call: &(impl Fn() -> Answer + ?Sized),
    made: impl FnOnce(u64) -> Made,
    undo: impl FnOnce(u64),
) -> Answer {
    let asked = Asked::Bytes(ask.asked);
    let Some(gpu) = gpu else { return Err(quota::refuse_unlisted(process, ask.name, asked)) };
    let bytes = footprint(ask.most);
    let reservation = quota::reserve_for(process, gpu, bytes, ask.name, asked)?;
    quota::insist(process, gpu, bytes, call)?; // the reservation rolls back
    let made = made(bytes);
    let bytes = footprint(made.bytes);
    if let Err(overrun) = quota::commit(process, gpu, reservation, bytes, ask.kind) {
        // Freed while its bytes are still reserved: nobody may take them before.
        undo(made.pointer);
        let refused = overrun.refused;
        drop(overrun);
        return Err(quota::refuse(process, ask.name, asked, &refused));
    }
    let allocation = Allocation { bytes, context: serial, gpu, kind: ask.kind };
    quota::remember(process, made.pointer, allocation).map_err(|_full| {
        undo(made.pointer);
        quota::give_back(process, allocation);
        quota::refuse_unnoted(ask.name)
    })
}

/// Every allocation in the current context.
#[inline]
fn allocate(ask: &Ask, call: &impl Fn() -> Answer, made: impl FnOnce() -> Made) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    let Some(place) = place::current(process).or_refuse(process, ask.name)? else { return call() };
    charge(
        process,
        place,
        ask,
        call,
        |_| made(),
        // SAFETY: the driver has just made it, and nobody else has seen it.
        |pointer| real::cuMemFree_v2.tell(|free| unsafe { free(pointer) }),
    )
}

/// Those whose bytes are known beforehand.
#[inline]
unsafe fn allocate_exactly<P: Width>(
    name: &'static str,
    kind: Kind,
    call: &impl Fn() -> Answer,
    dptr: *mut P,
    bytes: u64,
) -> Answer {
    if dptr.is_null() || bytes == 0 {
        return call();
    }
    let ask = Ask { name, kind, asked: bytes, most: bytes };
    // SAFETY: the driver wrote `dptr` when it succeeded.
    allocate(&ask, call, || Made { pointer: unsafe { *dptr }.wide(), bytes })
}

pub unsafe fn cuMemAlloc<P: Width, N: Width>(
    call: &impl Fn() -> Answer,
    dptr: *mut P,
    bytes: N,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { allocate_exactly("cuMemAlloc", Kind::Plain, call, dptr, bytes.wide()) }
}

/// CUDA Driver API, "Memory Management". Charged whole on the current device: managed memory may
/// be resident there at any time.
pub unsafe fn cuMemAllocManaged(
    call: &impl Fn() -> Answer,
    dptr: *mut CUdeviceptr,
    bytes: usize,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { allocate_exactly("cuMemAllocManaged", Kind::Managed, call, dptr, bytes.wide()) }
}

/// Rows are padded to the pitch, which only the driver knows: every driver and GPU so far takes a
/// multiple of 512 bytes or less, so that is reserved, and settled to what it reports.
const PITCH: u64 = 512;

pub unsafe fn cuMemAllocPitch<P: Width, N: Width>(
    call: &impl Fn() -> Answer,
    dptr: *mut P,
    pitch: *mut N,
    width_bytes: N,
    height: N,
) -> Answer {
    let (width_bytes, height) = (width_bytes.wide(), height.wide());
    if dptr.is_null() || pitch.is_null() || width_bytes == 0 || height == 0 {
        return call();
    }
    // A product that overflows fits no quota.
    let row = width_bytes.checked_next_multiple_of(PITCH).unwrap_or(u64::MAX);
    let ask = Ask {
        name: "cuMemAllocPitch",
        kind: Kind::Pitched,
        asked: width_bytes.saturating_mul(height),
        most: row.saturating_mul(height),
    };
    allocate(&ask, call, || {
        // SAFETY: the driver wrote both when it succeeded.
        let (pointer, pitch) = unsafe { ((*dptr).wide(), (*pitch).wide()) };
        Made { pointer, bytes: pitch.saturating_mul(height) }
    })
}

/// `waited`: the free is complete when the driver's call returns.
#[inline]
fn release(pointer: u64, waited: bool, call: &impl Fn() -> Answer) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let Some(allocation) = process.allocations.remove(pointer) else { return call() };
    let answer = call();
    if answer.is_err() {
        quota::keep(process, pointer, allocation);
    } else if allocation.kind != Kind::Async {
        process.shares.freed(process, pointer, allocation);
    } else if let Some(pool) = process.pools.numbered(allocation.context) {
        pool.lost(process, waited);
    }
    answer
}

pub unsafe fn cuMemFree<P: Width>(call: &impl Fn() -> Answer, dptr: P) -> Answer {
    release(dptr.wide(), true, call)
}

pub unsafe fn cuMemFreeAsync(call: &impl Fn() -> Answer, dptr: CUdeviceptr) -> Answer {
    release(dptr, false, call)
}

#[cfg(test)]
mod tests {
    use super::footprint;

    #[test]
    fn small_allocations_share_a_page_and_large_ones_take_whole_ones() {
        const MIB: u64 = 1 << 20;
        for (asked, taken) in [
            (1, 512),
            (512, 512),
            (513, 1024),
            (MIB, MIB),
            (MIB + 1, 2 * MIB),
            (2 * MIB, 2 * MIB),
            (2 * MIB + 1, 4 * MIB),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(footprint(asked), taken, "{asked}");
        }
    }
}
