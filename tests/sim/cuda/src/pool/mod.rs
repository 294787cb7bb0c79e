//! Memory pools: CUDA Driver API, "Stream Ordered Memory Allocator"; CUDA C++ Programming Guide,
//! the chapter of the same name.
//!
//! A pool takes memory of the GPU in chunks (`[memory] pool_chunk`), a larger request in a chunk of
//! several; when the GPU has not that much, in one that just fits. A free takes effect when its
//! stream gets there; until then only work that comes after it may have the memory again. Chunks
//! go back when a stream, event or context is synchronised and the pool holds more than its
//! threshold, when it is trimmed or destroyed, and when the process would be refused memory.

mod calls;
mod space;

pub use calls::*;
pub(crate) use calls::{HANDLE_FABRIC, HANDLE_FD, Location, PINNED};

use crate::abi::{Header, Recycler, Result, enliven, kill, object};
use crate::context::Context;
use crate::driver::{Device, Driver, driver, lock};
use crate::stream::Stream;
use calls::Props;
use simgpu::engine::Op;
use simgpu::memory::Use;
use space::{Space, rounded};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};

#[repr(C)]
pub(crate) struct Pool {
    header: Header,
    inner: Mutex<Inner>,
    release_threshold: AtomicU64,
    /// Follow event dependencies, opportunistic, internal dependencies.
    reuse: [AtomicU32; 3],
}

struct Inner {
    props: Props,
    /// The GPU whose memory it is; host memory: none.
    device: Option<&'static Device>,
    /// Whether a device owns it, which can't be destroyed.
    is_default: bool,
    destroyed: bool,
    /// Somebody saw its end, and puts it among the dead.
    buried: bool,
    space: Space<After>,
    live: u64,
    touched: bool,
    reserved_high: u64,
    used_high: u64,
}

object!(Pool, 0x504f_4f4c, CUDA_ERROR_INVALID_VALUE);

/// Every pool of the process that may hold memory.
static POOLS: Mutex<Vec<&'static Pool>> = Mutex::new(Vec::new());
static DEAD: Recycler<Pool> = Recycler::new();
/// Whether some pool holds memory that a synchronisation may release.
static HOLDING: AtomicBool = AtomicBool::new(false);

impl Inner {
    fn new(props: Props, device: Option<&'static Device>, is_default: bool) -> Inner {
        Inner {
            props,
            device,
            is_default,
            destroyed: false,
            buried: false,
            space: Space::new(),
            live: 0,
            touched: false,
            reserved_high: 0,
            used_high: 0,
        }
    }
}

impl Pool {
    fn create(driver: &'static Driver, props: Props, is_default: bool) -> Result<&'static Pool> {
        let device = match props.location {
            Location::Device(ordinal) => Some(driver.device(ordinal)?),
            _ => None,
        };
        let pool = DEAD.take(|| Pool {
            header: Header::new(),
            inner: Mutex::new(Inner::new(props, device, is_default)),
            release_threshold: AtomicU64::default(),
            reuse: Default::default(),
        });
        pool.release_threshold.store(0, Ordering::Relaxed);
        pool.reuse.iter().for_each(|r| r.store(1, Ordering::Relaxed));
        *lock(&pool.inner) = Inner::new(props, device, is_default);
        lock(&POOLS).push(pool);
        Ok(enliven(pool))
    }

    /// Allocates `bytes` for work that comes after what `stream` has so far.
    pub(crate) fn allocate(
        &'static self,
        context: &'static Context,
        stream: &'static Stream,
        bytes: u64,
    ) -> Result<u64> {
        let driver = driver()?;
        if bytes == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let len = rounded(bytes).filter(|n| *n < 1 << 46).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let start = self.take(driver, stream, len)?;
        driver.memory().insert_pooled(start, bytes, context, self);
        Ok(start)
    }

    fn take(&'static self, driver: &Driver, stream: &'static Stream, len: u64) -> Result<u64> {
        let allows = |i: usize| self.reuse[i].load(Ordering::Relaxed) != 0;
        let mut inner = lock(&self.inner);
        if let Some(device) = inner.device {
            device.check()?;
        }
        let found = inner.space.take_pending(len, |a| a.is_in(stream)).map(|p| p.0);
        let found = found.or_else(|| inner.space.take_ready(len));
        let found = found.or_else(|| {
            let follow = allows(0);
            inner.space.take_pending(len, |a| follow && a.is_before(stream)).map(|p| p.0)
        });
        let found = found.or_else(|| {
            if allows(1) {
                inner.space.settle(After::is_reached);
            }
            inner.space.take_ready(len)
        });
        let found = found.or_else(|| inner.grow(driver, len));
        if let Some(start) = found {
            return Ok(inner.taken(start));
        }
        drop(inner);
        // What pools hold unused is given up before anybody is refused.
        let gpu = lock(&self.inner).device.map(|d| d.gpu);
        let released = gpu.is_some_and(|gpu| release_unused(driver, gpu) > 0);
        let mut inner = lock(&self.inner);
        if released && let Some(start) = inner.grow(driver, len) {
            return Ok(inner.taken(start));
        }
        // "the driver will look for memory whose availability depends on another stream's pending
        // progress … insert the required dependency into the allocating stream".
        if allows(2)
            && let Some((start, after)) = inner.space.take_pending(len, |_| true)
        {
            let channel = after.device.lane.channel();
            let _ = stream.submit(Op::Wait { channel, seq: after.seq });
            return Ok(inner.taken(start));
        }
        Err(CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Frees an allocation: at once, or when `stream` gets there.
    pub(crate) fn free(&'static self, start: u64, bytes: u64, stream: Option<&'static Stream>) {
        let len = rounded(bytes).unwrap_or(bytes);
        let after = stream.and_then(After::now_in);
        let mut inner = lock(&self.inner);
        match after {
            Some(after) => inner.space.free_after(start, len, after, After::joined),
            None => inner.space.free_now(start, len),
        }
        inner.live -= 1;
        inner.touched = true;
        HOLDING.store(true, Ordering::Release);
        if inner.destroyed && inner.live == 0 {
            let driver = driver();
            if let Ok(driver) = driver {
                inner.release(driver, 0);
            }
            let over = inner.ends();
            drop(inner);
            if over {
                self.bury();
            }
        }
    }

    /// Gives unused chunks back as long as `keep` bytes stay; how many bytes went.
    fn trim(&'static self, driver: &Driver, keep: u64) -> u64 {
        let mut inner = lock(&self.inner);
        let released = inner.release(driver, keep);
        let over = inner.ends();
        drop(inner);
        if over {
            self.bury();
        }
        released
    }

    fn destroy(&'static self, driver: &'static Driver) -> Result<()> {
        let mut inner = lock(&self.inner);
        if inner.is_default || !kill(self) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        inner.destroyed = true;
        drop(inner);
        for device in &driver.devices {
            let mut pools = lock(&device.pools);
            if pools.current.is_some_and(|p| std::ptr::eq(p, self)) {
                pools.current = None;
            }
        }
        self.trim(driver, 0);
        Ok(())
    }

    /// The last of a destroyed pool is gone; once in its life, see [`Inner::ends`].
    fn bury(&'static self) {
        lock(&POOLS).retain(|p| !std::ptr::eq(*p, self));
        DEAD.give(self);
    }
}

impl Inner {
    /// Whether the caller has to bury the pool: the first that sees the end does, because the object
    /// may be another pool before a second one gets to it.
    fn ends(&mut self) -> bool {
        let over = self.destroyed && self.live == 0 && self.space.reserved() == 0;
        over && !std::mem::replace(&mut self.buried, true)
    }

    fn taken(&mut self, start: u64) -> u64 {
        self.live += 1;
        self.used_high = self.used_high.max(self.space.used());
        start
    }

    /// Takes `len` bytes of a new chunk; the GPU has not that much: `None`.
    fn grow(&mut self, driver: &Driver, len: u64) -> Option<u64> {
        let memory = driver.session.config().memory;
        let fitting = len.checked_next_multiple_of(memory.granularity_bytes)?;
        let whole = fitting.checked_next_multiple_of(memory.pool_chunk_bytes)?;
        let (bytes, start) = [whole, fitting].into_iter().find_map(|bytes| {
            let charge = |d: &Device| driver.session.charge(d.gpu, self.props.counts_as(), bytes);
            if !self.device.is_none_or(charge) {
                return None;
            }
            let start = driver.memory().take_range(self.device.map_or(0, |d| d.gpu), bytes);
            if start.is_none() {
                self.uncharge(driver, bytes);
            }
            start.map(|start| (bytes, start))
        })?;
        self.space.add_chunk(start, bytes);
        self.reserved_high = self.reserved_high.max(self.space.reserved());
        self.space.take_ready(len)
    }

    fn uncharge(&self, driver: &Driver, bytes: u64) {
        if let Some(device) = self.device {
            driver.session.uncharge(device.gpu, self.props.counts_as(), bytes);
        }
    }

    fn release(&mut self, driver: &Driver, keep: u64) -> u64 {
        self.space.settle(After::is_reached);
        let mut released = 0;
        for (start, len) in self.space.release(keep) {
            let gpu = self.device.map_or(0, |d| d.gpu);
            if self.touched {
                crate::arena::forget_pages(start, len);
            }
            driver.memory().give_range(gpu, start, len);
            self.uncharge(driver, len);
            released += len;
        }
        if self.space.reserved() == 0 {
            self.touched = false;
        }
        released
    }
}

/// The host has waited for a stream, an event or a context: pools give back what they hold beyond
/// their thresholds (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`: "on the next call to stream, event or
/// context synchronize").
#[inline]
pub(crate) fn synchronized() {
    if HOLDING.load(Ordering::Acquire) {
        release_beyond_thresholds();
    }
}

#[cold]
fn release_beyond_thresholds() {
    let Ok(driver) = driver() else { return };
    HOLDING.store(false, Ordering::Release);
    let pools = lock(&POOLS).clone();
    for pool in pools {
        let destroyed = lock(&pool.inner).destroyed;
        let keep = if destroyed { 0 } else { pool.release_threshold.load(Ordering::Relaxed) };
        pool.trim(driver, keep);
        if lock(&pool.inner).space.has_free() {
            HOLDING.store(true, Ordering::Release);
        }
    }
}

/// Gives back whatever pools hold unused of a GPU's memory; how many bytes went.
pub(crate) fn release_unused(driver: &Driver, gpu: usize) -> u64 {
    let pools = lock(&POOLS).clone();
    let of_gpu = |p: &&Pool| lock(&p.inner).device.is_some_and(|d| d.gpu == gpu);
    pools.into_iter().filter(of_gpu).map(|pool| pool.trim(driver, 0)).sum()
}

/// Charges a GPU's memory; before it is refused, pools give up what they hold unused.
pub(crate) fn charge(driver: &Driver, gpu: usize, bytes: u64) -> bool {
    driver.session.charge(gpu, Use::Own, bytes)
        || release_unused(driver, gpu) > 0 && driver.session.charge(gpu, Use::Own, bytes)
}

/// A device's pools: the default one and the current one, made when first asked for.
#[derive(Default)]
pub(crate) struct DevicePools {
    default: Option<&'static Pool>,
    /// Unless it is the default.
    current: Option<&'static Pool>,
}

impl Device {
    pub(crate) fn default_pool(&'static self) -> Result<&'static Pool> {
        let mut pools = lock(&self.pools);
        if let Some(pool) = pools.default {
            return Ok(pool);
        }
        let pool = Pool::create(
            driver()?,
            Props { allocation: PINNED, location: Location::Device(self.ordinal) },
            true,
        )?;
        pools.default = Some(pool);
        Ok(pool)
    }

    pub(crate) fn current_pool(&'static self) -> Result<&'static Pool> {
        let current = lock(&self.pools).current;
        current.map_or_else(|| self.default_pool(), Ok)
    }
}

/// Frees pool memory, if that is what begins at `address`; whether it was.
pub(crate) fn free(driver: &Driver, address: u64, stream: Option<&'static Stream>) -> bool {
    let Some((pool, bytes)) = driver.memory().remove_pooled(address) else { return false };
    pool.free(address, bytes, stream);
    true
}

// Which stream's work comes after which: for memory that was freed in one stream and is wanted in another (CUDA C++
// Programming Guide, "Stream Ordered Memory Allocator", "Physical Page Caching Behavior":
// `cudaMemPoolReuseFollowEventDependencies`). Nothing is followed before the first free in stream order: an event recorded
// earlier can't have captured it.

/// Streams and events beyond this many are forgotten: reuse is lost, nothing else.
const MOST: usize = 8192;

/// A place in a stream: what was freed there is free once its GPU's queue has completed `seq`.
#[derive(Clone, Copy)]
struct After {
    device: &'static Device,
    /// The last operation submitted before.
    seq: u64,
    stream: u64,
    context: usize,
    legacy: bool,
    blocking: bool,
}

/// Streams' numbers, and up to which operation another's work comes before.
type Known = BTreeMap<u64, u64>;

#[derive(Default)]
struct Order {
    streams: BTreeMap<u64, Known>,
    /// By the event's address: what its last record captured.
    events: BTreeMap<usize, Known>,
}

static FOLLOWING: AtomicBool = AtomicBool::new(false);
static ORDER: Mutex<Option<Order>> = Mutex::new(None);

impl After {
    /// The place that `stream` has reached with its submissions; `None`: nothing to wait for.
    fn now_in(stream: &'static Stream) -> Option<After> {
        FOLLOWING.store(true, Ordering::Relaxed);
        stream.place().map(|seq| After {
            device: stream.device(),
            seq,
            stream: stream.number(),
            context: std::ptr::from_ref(stream.context()).addr(),
            legacy: stream.is_legacy(),
            blocking: stream.is_blocking(),
        })
    }

    /// One place for two of the same stream.
    fn joined(a: &After, b: &After) -> Option<After> {
        (a.stream == b.stream).then_some(if a.seq >= b.seq { *a } else { *b })
    }

    fn is_reached(&self) -> bool {
        // A lost GPU's work is over.
        self.device.is_complete(self.seq).unwrap_or(true)
    }

    fn is_in(&self, stream: &Stream) -> bool {
        self.stream == stream.number()
    }

    /// Whether the work of `stream` comes after it, by events or by the legacy default stream.
    fn is_before(&self, stream: &'static Stream) -> bool {
        let same_context = self.context == std::ptr::from_ref(stream.context()).addr();
        if same_context
            && (self.legacy && stream.is_blocking() || self.blocking && stream.is_legacy())
        {
            return true;
        }
        let order = lock(&ORDER);
        let known = order.as_ref().and_then(|o| o.streams.get(&stream.number()));
        known.and_then(|k| k.get(&self.stream)).is_some_and(|&seq| seq >= self.seq)
    }
}

pub(crate) fn recorded(event: usize, stream: &Stream, seq: u64) {
    if !FOLLOWING.load(Ordering::Relaxed) {
        return;
    }
    let mut order = lock(&ORDER);
    let order = order.get_or_insert_default();
    let mut known = order.streams.get(&stream.number()).cloned().unwrap_or_default();
    known.insert(stream.number(), seq);
    if order.events.len() >= MOST {
        order.events.clear();
    }
    order.events.insert(event, known);
}

pub(crate) fn waited(event: usize, stream: &Stream) {
    if !FOLLOWING.load(Ordering::Relaxed) {
        return;
    }
    let mut order = lock(&ORDER);
    let order = order.get_or_insert_default();
    let Some(captured) = order.events.get(&event).cloned() else { return };
    if order.streams.len() >= MOST {
        order.streams.clear();
    }
    let known = order.streams.entry(stream.number()).or_default();
    for (other, seq) in captured {
        let latest = known.entry(other).or_default();
        *latest = seq.max(*latest);
    }
}
