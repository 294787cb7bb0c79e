//! A stream-ordered allocation: reserve the worst, call the driver, settle to what it reserves.

use super::ask;
use super::pool::{Home, Pool};
use crate::allocations::Allocation;
use crate::gate::Stream;
use crate::quota::{self, Asked};
use crate::real;
use crate::spin::sleep_us;
use crate::state::Process;
use crate::thread::Answer;
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
    /// Where the driver writes the pointer.
    pub(crate) dptr: *const CUdeviceptr,
    pub(crate) stream: Stream,
}

/// How long a refused call waits for the stream to pass its free, before it leaves that to the next
/// synchronisation.
const UNDONE_US: [u32; 5] = [20, 50, 100, 300, 500];

/// Settlements of one call: each is for what others' calls made lacking meanwhile.
const ROUNDS: u32 = 4;

impl Order<'_> {
    /// Makes the allocation with `call`.
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
            context: self.pool.number(),
            gpu: self.gpu,
            kind: Kind::Async,
        };
        let noted = quota::remember(self.process, &self.process.allocations, pointer, allocation);
        if noted.is_err() {
            self.give_up(pointer);
            return Err(quota::refuse_unnoted(self.name));
        }
        self.pool.gained();
        Ok(())
    }

    /// Frees what does not fit after all, and what the pool took for it.
    #[cold]
    fn give_up(&self, pointer: u64) {
        let Self { process, pool, gpu, stream, .. } = *self;
        if let Some(free) = real::cuMemFreeAsync.get() {
            // SAFETY: the driver has just made it on this stream, and nobody else has seen it.
            unsafe { free(pointer, stream.handle()) };
        }
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
    let said = || {
        let (location, kind) = ask::location(handle)?;
        super::home_of(process, location, kind, Some(of_stream))
    };
    // Nobody says: where its user is.
    let home = default_of(process, handle).or_else(said).unwrap_or(of_stream);
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
