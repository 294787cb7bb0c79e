//! A stream-ordered allocation: reserve the worst, call the driver, settle to what it reserves.

use super::ask;
use super::pool::{Home, Pool};
use crate::allocations::Allocation;
use crate::quota::{self, Asked};
use crate::spin::sleep_us;
use crate::state::Process;
use tessera_cuda::types::*;
use tessera_region::account::{Reason, Refused, Reservation};
use tessera_region::layout::Kind;

/// What is to be allocated.
pub(crate) struct Order<'a> {
    /// The driver's function, for messages.
    pub(crate) name: &'static str,
    pub(crate) process: &'static Process,
    pub(crate) pool: &'a Pool,
    pub(crate) gpu: u8,
    pub(crate) bytes: u64,
}

/// How long a refused call waits for the stream to pass its free, before it leaves that to the next
/// synchronisation.
const UNDONE_US: [u32; 5] = [20, 50, 100, 300, 500];

/// Settlements of one call: each is for what others' calls made lacking meanwhile.
const ROUNDS: u32 = 4;

impl Order<'_> {
    /// Makes the allocation with `call`; `made` reads the pointer, `undo` frees it again.
    #[inline]
    pub(crate) fn carry_out(
        &self,
        call: &impl Fn() -> CUresult,
        made: impl FnOnce() -> u64,
        undo: impl FnOnce(u64),
    ) -> CUresult {
        let worst = self.pool.worst(self.bytes);
        if let Some(reservation) = quota::reserve_if_room(self.process, self.gpu, worst)
            && self.pool.begin_beside_others(worst)
        {
            let (result, lacking) = self.run(reservation, call);
            if lacking > 0 {
                self.pool.learn(worst, lacking);
            }
            return self.finish(result, lacking, made, undo);
        }
        self.squeeze_in(worst, call, made, undo)
    }

    /// The driver's call, announced, and its settlement; what is lacking afterwards.
    #[inline]
    fn run(
        &self,
        reservation: Reservation<'static>,
        call: &impl Fn() -> CUresult,
    ) -> (CUresult, u64) {
        let result = quota::insist(self.process, self.gpu, self.bytes, call);
        // A call that failed settles too: the driver may have taken or given back memory on the way.
        (result, self.pool.settle_call(self.process, reservation))
    }

    /// Where the worst does not fit: alone in the pool, with the least reserved. See the module's text
    /// on what the driver may take meanwhile.
    #[cold]
    #[inline(never)]
    fn squeeze_in(
        &self,
        worst: u64,
        call: &impl Fn() -> CUresult,
        made: impl FnOnce() -> u64,
        undo: impl FnOnce(u64),
    ) -> CUresult {
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
        match reserved {
            Ok(reservation) => {
                pool.begin(reservation.bytes());
                let (result, lacking) = self.run(reservation, call);
                self.finish(result, lacking, made, undo)
            }
            Err(refused) => quota::refuse(process, self.name, Asked::Bytes(self.bytes), &refused),
        }
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
    fn finish(
        &self,
        result: CUresult,
        lacking: u64,
        made: impl FnOnce() -> u64,
        undo: impl FnOnce(u64),
    ) -> CUresult {
        let paid = if lacking > 0 { self.obtain(lacking) } else { Ok(()) };
        if result != CUDA_SUCCESS {
            return result;
        }
        let pointer = made();
        if let Err(refused) = paid {
            self.give_up(pointer, undo);
            let refused = self.process.account.undone(&refused);
            let asked = Asked::Bytes(self.bytes);
            return quota::refuse(self.process, self.name, asked, &refused);
        }
        self.remember(pointer, undo)
    }

    /// Frees what does not fit after all, and what the pool took for it.
    #[cold]
    fn give_up(&self, pointer: u64, undo: impl FnOnce(u64)) {
        let Self { process, pool, gpu, .. } = *self;
        undo(pointer);
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

    #[inline]
    fn remember(&self, pointer: u64, undo: impl FnOnce(u64)) -> CUresult {
        let allocation = Allocation {
            bytes: self.bytes,
            context: self.pool.number(),
            gpu: self.gpu,
            kind: Kind::Async,
        };
        match self.process.allocations.insert(pointer, allocation) {
            Ok(stale) => {
                self.pool.gained();
                if let Some(stale) = stale {
                    // The driver gave the address again, so what was there is gone.
                    quota::give_back(self.process, stale);
                }
                CUDA_SUCCESS
            }
            Err(_full) => {
                self.give_up(pointer, undo);
                quota::refuse_unnoted(self.name)
            }
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
    let home = match default_of(process, handle) {
        Some(home) => home,
        None => match ask::location(handle) {
            Some((location, kind)) => {
                super::home_of(process, location, kind, Some(of_stream)).unwrap_or(of_stream)
            }
            // Nobody says: where its user is.
            None => of_stream,
        },
    };
    let pool = process.pools.adopt(handle, home)?;
    // What it holds already is owed.
    pool.settle(process);
    Some(pool)
}

/// Whose default pool `handle` is.
fn default_of(process: &'static Process, handle: CUmemoryPool) -> Option<Home> {
    let mut devices = 0;
    let count = crate::real::cuDeviceGetCount.get()?;
    // SAFETY: a valid place for a count.
    if unsafe { count(&raw mut devices) } != CUDA_SUCCESS {
        return None;
    }
    let device = (0..devices).find(|&device| ask::default_pool(device) == Some(handle))?;
    Some(match process.listed(device) {
        Some(Some(gpu)) => Home::Gpu(gpu),
        _ => Home::Unlisted,
    })
}
