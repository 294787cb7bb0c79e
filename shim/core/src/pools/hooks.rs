//! The hooks of the stream-ordered allocator, and synchronisations.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::pool::{Home, Pool};
use super::{FREES, ask, home_of};
use crate::allocations::Allocation;
use crate::contexts::Place;
use crate::gate::{self, Stream, Waited};
use crate::place::{self, Look};
use crate::quota::{self, Asked};
use crate::real;
use crate::spin::sleep_us;
use crate::state::{self, Process};
use crate::thread::{Answer, Call, Depth, entered, tenant};
use core::ffi::c_void;
use core::sync::atomic::Ordering;
use tessera_cuda::types::*;
use tessera_region::account::{Reason, Refused, Reservation};
use tessera_region::layout::Kind;

/// An allocation on `stream` from the pool that `which` names.
#[inline]
unsafe fn allocate(
    name: &'static str,
    call: &impl Fn() -> Answer,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: Stream,
    which: impl FnOnce(&'static Process, Place) -> Option<CUmemoryPool>,
) -> Answer {
    if dptr.is_null() || bytes == 0 {
        return call();
    }
    let Some((process, _depth)) = tenant()? else { return call() };
    // A node of a graph, which takes memory when the graph is launched.
    if gate::is_capturing(stream) {
        return call();
    }
    let place = place::of_stream(process, stream).or_refuse(process, name)?;
    let Some(place) = place else { return call() };
    let bytes = bytes as u64;
    let unlisted = || Err(quota::refuse_unlisted(process, name, Asked::Bytes(bytes)));
    let Some(handle) = which(process, place) else {
        // The driver has no pools, or its own objection.
        return if place.gpu.is_some() { call() } else { unlisted() };
    };
    let Some(pool) = pool(process, handle, place.gpu) else {
        return Err(quota::refuse_unnoted(name));
    };
    match pool.home() {
        Home::Free => call(),
        Home::Unlisted => unlisted(),
        Home::Gpu(gpu) => Order { name, process, pool, gpu, bytes, dptr, stream }.carry_out(call),
    }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": from the pool current to the stream's device.
pub unsafe fn cuMemAllocAsync(
    call: &impl Fn() -> Answer,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: Stream,
) -> Answer {
    let which = |process: &'static Process, place: Place| {
        ask::current_pool(process.gpus.device_of(place.gpu?)?)
    };
    // SAFETY: the caller's own arguments.
    unsafe { allocate("cuMemAllocAsync", call, dptr, bytes, stream, which) }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": the pool says where the memory is, which may
/// be another device than the stream's.
pub unsafe fn cuMemAllocFromPoolAsync(
    call: &impl Fn() -> Answer,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: Stream,
) -> Answer {
    let which = |_: &'static Process, _: Place| (!pool.is_null()).then_some(pool);
    // SAFETY: the caller's own arguments.
    unsafe { allocate("cuMemAllocFromPoolAsync", call, dptr, bytes, stream, which) }
}

/// Where managed memory without a place of its own is counted: on the current context's GPU.
fn here(process: &'static Process) -> Option<Home> {
    match place::current(process) {
        Look::At(place) => Some(place.gpu.map_or(Home::Unlisted, Home::Gpu)),
        _ => None,
    }
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": the properties say where the pool's memory
/// will be. It holds none yet.
pub unsafe fn cuMemPoolCreate(
    call: Call<'_>,
    pool: *mut CUmemoryPool,
    props: *const CUmemPoolProps,
) -> Answer {
    let Some((process, _depth)) = tenant()? else { return call() };
    call()?;
    if pool.is_null() || props.is_null() {
        return Ok(());
    }
    // SAFETY: the driver has read the one and written the other.
    let (handle, location, kind) = unsafe { (*pool, (*props).location, (*props).allocType) };
    let Some(home) = home_of(process, location, kind, here(process)) else {
        return Ok(()); // where it is first used
    };
    if let Some(pool) = process.pools.insert(process, handle, home) {
        pool.own.store(true, Ordering::Relaxed);
        return Ok(());
    }
    // SAFETY: just made, and nobody else has seen it.
    real::cuMemPoolDestroy.tell(|destroy| unsafe { destroy(handle) });
    Err(quota::refuse_unnoted("cuMemPoolCreate"))
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": "the resources associated with the pool will
/// be released automatically once there are no more outstanding allocations".
pub unsafe fn cuMemPoolDestroy(call: Call<'_>, pool: CUmemoryPool) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let Some(known) = process.pools.find(pool) else { return call() };
    known.prepare_end(process);
    known.hide();
    let answer = call();
    match answer {
        Ok(()) => known.orphan(),
        Err(_) => known.show(pool.expose_provenance()),
    }
    answer
}

/// A call after which the driver may hold less for `pool`.
fn then_settle(pool: CUmemoryPool, call: Call<'_>, before: impl FnOnce(&Pool)) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    if let Some(pool) = process.pools.find(pool) {
        before(pool);
        pool.settle(process);
    }
    Ok(())
}

pub unsafe fn cuMemPoolTrimTo(call: Call<'_>, pool: CUmemoryPool) -> Answer {
    then_settle(pool, call, |_| {})
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": a lower release threshold lets the next
/// synchronisation give chunks back.
pub unsafe fn cuMemPoolSetAttribute(
    call: Call<'_>,
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> Answer {
    if attr != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD || value.is_null() {
        return call();
    }
    then_settle(pool, call, |pool| {
        // SAFETY: the driver has just read this attribute's cuuint64_t there.
        let threshold = unsafe { value.cast::<u64>().read_unaligned() };
        pool.threshold.store(threshold, Ordering::Relaxed);
        pool.loosen();
    })
}

/// CUDA Driver API, "Stream Ordered Memory Allocator": the exporting process is charged, and an
/// imported pool allocates nothing.
pub unsafe fn cuMemPoolImportFromShareableHandle(
    call: Call<'_>,
    pool: *mut CUmemoryPool,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    // SAFETY: null, or the driver wrote the handle.
    if let Some(&pool) = unsafe { pool.as_ref() } {
        // Without memory for the table it is looked at when it is used, and fails then.
        process.pools.insert(process, pool, Home::Free);
    }
    Ok(())
}

/// CUDA Driver API, "Stream Ordered Memory Allocator" (CUDA 13). The pool that the driver names for a place is
/// remembered as being there: only drivers that came later can be asked where a pool is.
pub unsafe fn cuMemGetMemPool(
    call: Call<'_>,
    pool: *mut CUmemoryPool,
    location: *mut CUmemLocation,
    kind: CUmemAllocationType,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    call()?;
    // SAFETY: null, or the driver has read the one and written the other.
    let (Some(&pool), Some(&location)) = (unsafe { (pool.as_ref(), location.as_ref()) }) else {
        return Ok(());
    };
    if let Some(home) = home_of(process, location, kind, here(process)) {
        // Without memory for the table it is looked at when it is used.
        process.pools.adopt(pool, home);
    }
    Ok(())
}

pub use cuMemGetMemPool as cuMemGetDefaultMemPool;

/// Where the driver gives chunks back ("When more than the release threshold bytes of memory are held by the
/// memory pool, the allocator will try to release memory back to the OS on the next call to stream, event or
/// context synchronize", `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`). `cuStreamQuery` and `cuEventQuery` only make
/// memory reusable, so they are not hooked.
///
/// Some loads and branches where nothing was freed into a pool and nobody waits for the tenant's lease.
#[inline]
fn synchronise(call: &impl Fn() -> Answer, waited: Waited) -> Answer {
    let answer = call();
    gate::synchronised(if answer.is_ok() { waited } else { Waited::Event });
    if FREES.load(Ordering::Relaxed) && answer.is_ok() {
        settle();
    }
    answer
}

#[cold]
#[inline(never)]
fn settle() {
    let Some(_depth) = Depth::enter() else { return };
    match state::armed() {
        Some(process) => process.pools.settle_freed(process, true),
        // A forked child that has not used the driver: its parent's frees.
        None => FREES.store(false, Ordering::Relaxed),
    }
}

pub unsafe fn cuStreamSynchronize(call: &impl Fn() -> Answer, stream: Stream) -> Answer {
    synchronise(call, Waited::Stream(stream))
}

pub unsafe fn cuEventSynchronize(call: &impl Fn() -> Answer) -> Answer {
    synchronise(call, Waited::Event)
}

pub unsafe fn cuCtxSynchronize(call: &impl Fn() -> Answer) -> Answer {
    synchronise(call, Waited::Context(0))
}

pub unsafe fn cuCtxSynchronize_v2(call: &impl Fn() -> Answer, ctx: CUcontext) -> Answer {
    synchronise(call, Waited::Context(ctx.addr()))
}

// A stream-ordered allocation: reserve the worst, call the driver, settle to what it reserves.

pub(crate) struct Order<'a> {
    /// The driver's function, for messages.
    pub(crate) name: &'static str,
    pub(crate) process: &'static Process,
    pub(crate) pool: &'a Pool,
    pub(crate) gpu: u8,
    pub(crate) bytes: u64,
    pub(crate) dptr: *const CUdeviceptr,
    pub(crate) stream: Stream,
}

/// How long a refused call waits for the stream to pass its free, before it leaves that to the next
/// synchronisation.
const UNDONE_US: [u32; 5] = [20, 50, 100, 300, 500];

/// Settlements of one call: each is for what others' calls made lacking meanwhile.
const ROUNDS: u32 = 4;

impl Order<'_> {
    #[inline]
    pub(crate) fn carry_out(&self, call: &impl Fn() -> Answer) -> Answer {
        let worst = self.pool.worst(self.bytes);
        if let Some(reservation) = quota::reserve_if_room(self.process, self.gpu, worst)
            && self.pool.begin_beside_others(worst)
        {
            let (answer, lacking) = self.run(reservation, call);
            if lacking > 0 {
                self.pool.learn(worst, lacking);
            }
            return self.finish(answer, lacking);
        }
        self.squeeze_in(worst, call)
    }

    /// The driver's call, announced, and its settlement; what is lacking afterwards.
    #[inline]
    fn run(&self, reservation: Reservation<'static>, call: &impl Fn() -> Answer) -> (Answer, u64) {
        let answer = quota::insist(self.process, self.gpu, self.bytes, call);
        // A call that failed settles too: the driver may have taken or given back memory on the way.
        (answer, self.pool.settle_call(self.process, reservation))
    }

    /// Where the worst does not fit: alone in the pool, with the least reserved. See the module's text
    /// on what the driver may take meanwhile.
    #[cold]
    #[inline(never)]
    fn squeeze_in(&self, worst: u64, call: &impl Fn() -> Answer) -> Answer {
        let Self { process, pool, gpu, .. } = *self;
        let _alone = pool.alone();
        let reserved = self.pay_debt().and_then(|()| {
            let (at, least) = (usize::from(gpu), pool.least(self.bytes));
            let account = &process.account;
            // All that there is, which leaves the driver the least to exceed.
            let most = quota::room(process, gpu).min(worst);
            let reserved = if most > least { account.try_reserve(at, most).ok() } else { None };
            reserved.map_or_else(|| account.try_reserve(at, least), Ok).or_else(|_| {
                // What is unused is asked back, of this pool too, which then has to grow by more.
                process.pools.reclaim(process, gpu);
                quota::reserve(process, gpu, pool.least(self.bytes))
            })
        });
        let reservation = reserved.map_err(|refused| self.refuse(&refused))?;
        pool.begin(reservation.bytes());
        let (answer, lacking) = self.run(reservation, call);
        self.finish(answer, lacking)
    }

    fn refuse(&self, refused: &Refused) -> CUresult {
        quota::refuse(self.process, self.name, Asked::Bytes(self.bytes), refused)
    }

    /// Gives back what the pool holds beyond the quota, if it does. The caller is alone in it.
    fn pay_debt(&self) -> Result<(), Refused> {
        if !self.pool.in_debt() {
            return Ok(());
        }
        let Self { process, pool, gpu, .. } = *self;
        process.pools.reclaim(process, gpu);
        pool.owe(process);
        if !pool.in_debt() {
            return Ok(());
        }
        Err(process.account.refuse(Reason::OverQuota, usize::from(gpu), self.bytes))
    }

    /// Reserves what the pool holds and nobody has reserved: `lacking` bytes, or more by then.
    fn obtain(&self, mut lacking: u64) -> Result<(), Refused> {
        for _ in 0..ROUNDS {
            let more = quota::reserve(self.process, self.gpu, lacking)?;
            self.pool.begin(more.bytes());
            lacking = self.pool.settle_call(self.process, more);
            if lacking == 0 {
                return Ok(());
            }
        }
        // Others' calls keep growing the pool; each pays for what it sees.
        Ok(())
    }

    #[inline]
    fn finish(&self, answer: Answer, lacking: u64) -> Answer {
        let paid = if lacking > 0 { self.obtain(lacking) } else { Ok(()) };
        answer?;
        // SAFETY: the driver has written it.
        let pointer = unsafe { *self.dptr };
        if let Err(refused) = paid {
            self.give_up(pointer);
            return Err(self.refuse(&self.process.account.undone(&refused)));
        }
        let allocation = Allocation {
            bytes: self.bytes,
            context: self.pool.number.load(Ordering::Relaxed),
            gpu: self.gpu,
            kind: Kind::Async,
        };
        let noted = quota::remember(self.process, pointer, allocation);
        if noted.is_err() {
            self.give_up(pointer);
            return Err(quota::refuse_unnoted(self.name));
        }
        self.pool.live.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Frees what does not fit after all, and what the pool took for it.
    #[cold]
    fn give_up(&self, pointer: u64) {
        let Self { process, pool, gpu, stream, .. } = *self;
        // SAFETY: the driver has just made it on this stream, and nobody else has seen it.
        real::cuMemFreeAsync.tell(|free| unsafe { free(pointer, stream.handle()) });
        pool.loosen();
        process.pools.reclaim(process, gpu);
        pool.owe(process);
        // The free is in its stream; where that has not much to do, this is a matter of microseconds.
        for wait_us in UNDONE_US {
            if !pool.in_debt() {
                return;
            }
            sleep_us(wait_us);
            process.pools.reclaim(process, gpu);
        }
    }
}

/// The pool `handle`, made known if it is not: made behind the hooks' back, or a device's own.
pub(crate) fn pool(
    process: &'static Process,
    handle: CUmemoryPool,
    stream_gpu: Option<u8>,
) -> Option<&'static Pool> {
    process.pools.find(handle).or_else(|| adopt(process, handle, stream_gpu))
}

#[cold]
fn adopt(
    process: &'static Process,
    handle: CUmemoryPool,
    stream_gpu: Option<u8>,
) -> Option<&'static Pool> {
    let of_stream = stream_gpu.map_or(Home::Unlisted, Home::Gpu);
    // Nobody says: where its user is.
    let home = default_of(process, handle).unwrap_or(of_stream);
    let pool = process.pools.adopt(handle, home)?;
    // What it holds already is owed.
    pool.settle(process);
    Some(pool)
}

/// Whose default pool `handle` is.
fn default_of(process: &'static Process, handle: CUmemoryPool) -> Option<Home> {
    // SAFETY: a valid place for a count.
    let devices = real::cuDeviceGetCount.ask(0, |ask, count| unsafe { ask(count) }).ok()?;
    let device = (0..devices).find(|&device| ask::default_pool(device) == Some(handle))?;
    Some(Home::on(process, device))
}
