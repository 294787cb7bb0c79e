//! Device memory of allocation nodes: CUDA Programming Guide, "Graph Memory Nodes".
//!
//! An allocation has its address from when its node is created. Physical memory comes when an
//! executable graph is uploaded or first launched, because only then its stream is known: graphs
//! of one stream never run at once and share memory, those of different streams do not ("Physical
//! Memory Management and Sharing"). It is kept, also when the graph is destroyed, until
//! `cuDeviceGraphMemTrim` ("Physical Memory Footprint"), for what is still in use beyond that.
//!
//! So a device has *reserved* bytes, charged to the GPU, of which those *used* are mapped: by
//! allocations that live on outside of a graph, and for each stream by the most demanding graph
//! last launched there.

use crate::abi::{Result, exports, put};
use crate::context::Context;
use crate::driver::{Device, Driver, driver, lock};
use crate::memory::Kind;
use simgpu::memory::Use;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tessera_cuda::types::{
    CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUdevice,
};

/// What an allocation node obtains. Its address is given back with the last reference: of its
/// node, of executable graphs, or of its being alive.
pub(crate) struct Allocation {
    pub at: u64,
    /// As asked for.
    pub size: u64,
    pub device: &'static Device,
    /// A free node of the owning graph exists.
    pub freed_inside: AtomicBool,
    /// A free node of another graph exists.
    pub freed_outside: AtomicBool,
    /// The graph that owns it: its address.
    pub owner: AtomicUsize,
}

/// Graph memory of all devices, and the allocations that live outside of a running graph.
#[derive(Default)]
struct State {
    pools: BTreeMap<c_int, Pool>,
    /// By address; with the executable graph that allocated each.
    live: BTreeMap<u64, (Arc<Allocation>, u64)>,
}

static STATE: Mutex<State> = Mutex::new(State { pools: BTreeMap::new(), live: BTreeMap::new() });

/// One device's graph memory, in bytes.
#[derive(Default)]
struct Pool {
    reserved: u64,
    /// Executable graphs whose memory is mapped, by their number.
    mapped: BTreeMap<u64, Mapped>,
    /// Of allocations alive, by the executable graph that made them.
    live: BTreeMap<u64, u64>,
}

struct Mapped {
    stream: u64,
    bytes: u64,
    last: u64,
    /// Of them, what allocations take that live on behind the launch: shared with no other graph.
    /// 0 once the launch is submitted, which then has them among the living.
    lasting: u64,
    launching: bool,
}

impl Pool {
    fn used(&self, page: u64) -> u64 {
        let mut streams = BTreeMap::<u64, u64>::new();
        let mut live: u64 = self.live.values().sum();
        for (exec, m) in &self.mapped {
            // What lives on belongs to the allocation rather than to the graph.
            let alive = self.live.get(exec).copied().unwrap_or(0);
            live += m.lasting.saturating_sub(alive);
            let own = m.bytes.saturating_sub(alive.max(m.lasting));
            let most = streams.entry(m.stream).or_default();
            *most = own.max(*most);
        }
        (live + streams.values().sum::<u64>()).next_multiple_of(page)
    }
}

fn page(driver: &Driver) -> u64 {
    driver.session.config().memory.granularity_bytes
}

pub(crate) fn footprint(size: u64) -> u64 {
    size.next_multiple_of(crate::arena::ALIGN)
}

impl Allocation {
    /// Addresses for an allocation on `context`'s GPU, made by a node of the graph at `owner`.
    pub(crate) fn create(context: &'static Context, size: u64, owner: usize) -> Result<Arc<Self>> {
        let driver = driver()?;
        let device = context.device;
        if size == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let at = crate::memory::place(driver, device.gpu, size, Kind::Graph)?;
        driver.memory().insert(at, size, Kind::Graph, context, 0);
        Ok(Arc::new(Allocation {
            at,
            size,
            device,
            freed_inside: AtomicBool::new(false),
            freed_outside: AtomicBool::new(false),
            owner: AtomicUsize::new(owner),
        }))
    }

    /// Notes a free node in the graph at `graph`; "an allocation twice in the same graph" and the
    /// other combinations that `cuGraphAddMemFreeNode` and `cuGraphAddMemAllocNode` name fail.
    pub(crate) fn add_free(&self, graph: usize) -> Result<()> {
        let inside = self.owner.load(Ordering::Acquire) == graph;
        if self.freed_inside.load(Ordering::Acquire)
            || (inside && self.freed_outside.load(Ordering::Acquire))
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let to = if inside { &self.freed_inside } else { &self.freed_outside };
        to.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Ok(driver) = driver() else { return };
        if driver.memory().remove(self.at) {
            crate::arena::forget_pages(self.at, footprint(self.size));
        }
        crate::memory::displace(driver, self.device.gpu, self.at, self.size, Kind::Graph);
    }
}

/// Every allocation node's allocation by address, while its node or anything else holds it.
static KNOWN: Mutex<BTreeMap<u64, std::sync::Weak<Allocation>>> = Mutex::new(BTreeMap::new());

pub(crate) fn remember(allocation: &Arc<Allocation>) {
    let mut known = lock(&KNOWN);
    known.retain(|_, weak| weak.strong_count() > 0);
    known.insert(allocation.at, Arc::downgrade(allocation));
}

/// The allocation that an allocation node returned at exactly this address.
pub(crate) fn find(at: u64) -> Option<Arc<Allocation>> {
    lock(&KNOWN).get(&at).and_then(std::sync::Weak::upgrade)
}

pub(crate) fn next_exec() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Maps `bytes` of `device`, of which `lasting` live on, for an executable graph in a stream. `launching`: until [`launched`],
/// what the launch allocates is not alive yet, and a trim by another thread leaves it alone.
pub(crate) fn map(
    exec: u64,
    device: &'static Device,
    stream: u64,
    (bytes, lasting): (u64, u64),
    launching: bool,
) -> Result<()> {
    let driver = driver()?;
    let page = page(driver);
    let mut state = lock(&STATE);
    let pool = state.pools.entry(device.ordinal).or_default();
    let before = pool.mapped.remove(&exec);
    let last = before.as_ref().map_or(0, |m| m.last);
    pool.mapped.insert(exec, Mapped { stream, bytes, last, lasting, launching });
    let missing = pool.used(page).saturating_sub(pool.reserved);
    if missing > 0 && !crate::pool::charge(driver, device.gpu, missing) {
        match before {
            Some(before) => pool.mapped.insert(exec, before),
            None => pool.mapped.remove(&exec),
        };
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    pool.reserved += missing;
    Ok(())
}

/// Notes the last operation of an executable graph's launch on `device`.
pub(crate) fn launched(exec: u64, device: &Device, last: u64) {
    if let Some(pool) = lock(&STATE).pools.get_mut(&device.ordinal)
        && let Some(mapped) = pool.mapped.get_mut(&exec)
    {
        mapped.last = last;
        (mapped.lasting, mapped.launching) = (0, false);
    }
}

/// An executable graph is gone: its memory is kept for others.
pub(crate) fn unmap(exec: u64) {
    for pool in lock(&STATE).pools.values_mut() {
        pool.mapped.remove(&exec);
    }
}

/// An allocation lives on behind the launch of the executable graph that made it.
pub(crate) fn enliven(exec: u64, allocation: &Arc<Allocation>) {
    let mut state = lock(&STATE);
    let replaced = state.live.insert(allocation.at, (Arc::clone(allocation), exec));
    if replaced.is_none() {
        let pool = state.pools.entry(allocation.device.ordinal).or_default();
        *pool.live.entry(exec).or_default() += footprint(allocation.size);
    }
}

/// Whether an allocation lives on outside of a graph.
pub(crate) fn is_live(at: u64) -> bool {
    lock(&STATE).live.contains_key(&at)
}

/// Frees an allocation that lives on; `None`: there is none at this address.
pub(crate) fn free(at: u64) -> Option<Arc<Allocation>> {
    let mut state = lock(&STATE);
    let (allocation, exec) = state.live.remove(&at)?;
    if let Some(pool) = state.pools.get_mut(&allocation.device.ordinal)
        && let Some(live) = pool.live.get_mut(&exec)
    {
        *live = live.saturating_sub(footprint(allocation.size));
        if *live == 0 {
            pool.live.remove(&exec);
        }
    }
    // Returned, so that the last reference is dropped without the lock.
    Some(allocation)
}

/// `cuMemFree` and `cuMemFreeAsync` of an address that an allocation node returned: "immediately
/// upon freeing call", "in stream order"; `None` if it is not such an address.
pub(crate) fn free_outside(at: u64) -> Option<Result<Arc<Allocation>>> {
    match free(at) {
        Some(allocation) => Some(Ok(allocation)),
        None => find(at).map(|_| Err(CUDA_ERROR_INVALID_VALUE)),
    }
}

/// `cuDeviceGraphMemTrim`: what no running or waiting graph and no live allocation uses.
fn trim(driver: &Driver, device: &'static Device) {
    let page = page(driver);
    let mut state = lock(&STATE);
    let Some(pool) = state.pools.get_mut(&device.ordinal) else { return };
    let channel = device.lane.channel();
    let is_running = |m: &Mapped| m.last > 0 && !driver.session.is_complete(channel, m.last - 1);
    pool.mapped.retain(|_, m| m.launching || is_running(m));
    let used = pool.used(page);
    let idle = pool.reserved.saturating_sub(used);
    pool.reserved -= idle;
    driver.session.uncharge(device.gpu, Use::Own, idle);
}

/// A device's primary context ends, and all of the device's graph memory with it.
pub(crate) fn release_all(driver: &Driver, device: &'static Device) {
    let mut state = lock(&STATE);
    let (gone, kept) = std::mem::take(&mut state.live)
        .into_iter()
        .partition(|(_, (allocation, _))| std::ptr::eq(allocation.device, device));
    state.live = kept;
    if let Some(pool) = state.pools.remove(&device.ordinal) {
        driver.session.uncharge(device.gpu, Use::Own, pool.reserved);
    }
    drop(state);
    let gone: BTreeMap<u64, (Arc<Allocation>, u64)> = gone;
    drop(gone);
}

/// What a step means for graph memory.
#[derive(Clone, Copy)]
pub(crate) enum Effect {
    None,
    /// Obtains so many bytes at an address.
    Alloc(u64, u64),
    /// Gives back what is at an address.
    Free(u64),
}

/// Bytes of physical memory that the steps need together. Memory freed by a step serves an
/// allocation that depends on it ("Optimized Memory Reuse"), never one that might run beside it.
pub(crate) fn launch_footprint(effects: &[Effect], after: &[Vec<usize>]) -> u64 {
    /// Physical memory that allocations use one after another.
    struct Slot {
        bytes: u64,
        at: u64,
        free_since: Option<usize>,
    }
    let mut slots = Vec::<Slot>::new();
    for (step, effect) in effects.iter().enumerate() {
        match *effect {
            Effect::None => {}
            Effect::Free(at) => {
                if let Some(slot) = slots.iter_mut().find(|s| s.at == at && s.free_since.is_none())
                {
                    slot.free_since = Some(step);
                }
            }
            Effect::Alloc(at, bytes) => {
                let ancestors = slots.iter().any(|s| s.free_since.is_some()).then(|| {
                    let mut seen = vec![false; step];
                    let mut look = after[step].clone();
                    while let Some(next) = look.pop() {
                        if next < step && !std::mem::replace(&mut seen[next], true) {
                            look.extend(&after[next]);
                        }
                    }
                    seen
                });
                let usable = |s: &&mut Slot| {
                    s.bytes >= bytes
                        && s.free_since
                            .is_some_and(|free| ancestors.as_ref().is_some_and(|seen| seen[free]))
                };
                match slots.iter_mut().filter(usable).min_by_key(|s| s.bytes) {
                    Some(slot) => (slot.at, slot.free_since) = (at, None),
                    None => slots.push(Slot { bytes, at, free_since: None }),
                }
            }
        }
    }
    slots.iter().map(|s| s.bytes).sum()
}

exports! {
    fn cuDeviceGraphMemTrim(dev: CUdevice) {
        let driver = driver()?;
        trim(driver, driver.device(dev)?);
        Ok(())
    }
    fn cuDeviceGetGraphMemAttribute(dev: CUdevice, which: c_int, value: *mut c_void) {
        let driver = driver()?;
        let device = driver.device(dev)?;
        let mut state = lock(&STATE);
        let pool = state.pools.entry(device.ordinal).or_default();
        let answer = match which {
            CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT => pool.used(page(driver)),
            CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT => pool.reserved,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        put(value.cast(), answer)
    }
}
