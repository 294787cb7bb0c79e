//! The memory pools of this process, charged by what the driver reserves for them.
//!
//! A pool takes device memory in chunks and keeps them beyond the frees, so neither the requests nor
//! the frees show what it holds; the driver does (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`, and for
//! graph memory, which is a pool without a handle, `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`). Each
//! pool has one charged word in its [`books`]; every call that can change what is reserved moves the
//! word to what the driver says ([`pool`]):
//!
//! - an allocation reserves the worst growth, calls the driver, and settles ([`allocate`]);
//! - after frees, whatever lets the driver give chunks back settles: synchronisations of streams,
//!   events and contexts, trims, a lowered threshold ([`sync`], [`hooks`]); and whatever shows the
//!   tenant its memory does so first;
//! - before the quota refuses anything, unused chunks are asked back ([`Pools::reclaim`]).
//!
//! # What a pool may hold beyond its charge, and for how long
//!
//! An allocation that cannot reserve the worst reserves what there is, and at least what certainly
//! does not fit into the chunks that are there. The driver may then take more. It is asked for
//! after the fact; if the quota has no room, the allocation is freed again on its own stream, the pool is
//! trimmed, and the application gets `CUDA_ERROR_OUT_OF_MEMORY`. Between the driver's call and the
//! free, physical memory is over the quota by that growth less what was reserved.
//!
//! - It is bounded: such a call is alone in its pool, so it is at most one growth per pool: the
//!   request rounded up to the chunk, less what was reserved. The same holds when a driver's chunk is larger
//!   than assumed; after the first such growth it is known.
//! - It is undone: at once if the driver can give the chunk back at the trim, else when the
//!   stream has passed the free: within a millisecond, or at the next synchronisation, look at free
//!   memory or request. Until then the pool is *in debt*: what it holds is charged, even beyond the
//!   quota, so that no process of the tenant gets anything beside it.

pub(crate) mod allocate;
pub(crate) mod ask;
pub mod books;
pub(crate) mod hooks;
pub(crate) mod pool;
pub(crate) mod sync;

use crate::pages;
use crate::spin::Spin;
use crate::state::Process;
use ask::Source;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use pool::{Home, Pool};
use tessera_cuda::types::*;
use tessera_region::layout::MAX_GPUS;

/// Pools per piece of the table.
const CHUNK: usize = 64;
/// Most pieces: 4096 pools at the same time.
const CHUNKS: usize = 64;

/// Whether frees may have let some pool shrink: all that a synchronisation looks at where no pool is
/// in use. A forked child inherits it, looks once, and lowers it.
static FREES: AtomicBool = AtomicBool::new(false);

/// Something was freed into a pool.
fn notice_frees() {
    if !FREES.load(Ordering::Relaxed) {
        FREES.store(true, Ordering::Relaxed);
    }
}

/// The pools that hooks have seen.
#[derive(Debug)]
pub struct Pools {
    chunks: [AtomicPtr<Pool>; CHUNKS],
    /// Places ever used.
    used: AtomicU32,
    /// Held to give a place to a new pool.
    growing: Spin<()>,
    /// What each GPU of the page keeps for graphs.
    graphs: [Pool; MAX_GPUS],
}

impl Default for Pools {
    fn default() -> Self {
        Self::new()
    }
}

impl Pools {
    /// None yet.
    pub const fn new() -> Self {
        Self {
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            used: AtomicU32::new(0),
            growing: Spin::new(()),
            graphs: [const { Pool::new() }; MAX_GPUS],
        }
    }

    fn at(&self, index: usize) -> Option<&Pool> {
        // Acquire: pairs with the Release in `place`, so that the memory reads as zero.
        let chunk = self.chunks.get(index / CHUNK)?.load(Ordering::Acquire);
        // SAFETY: a chunk holds CHUNK pools, zeroed when mapped, which is a valid `Pool`, and is
        // never unmapped.
        (!chunk.is_null()).then(|| unsafe { &*chunk.add(index % CHUNK) })
    }

    fn each(&self) -> impl Iterator<Item = &Pool> {
        let used = self.used.load(Ordering::Acquire) as usize;
        (0..used).filter_map(|index| self.at(index)).chain(&self.graphs)
    }

    /// The pool that an allocation was remembered with.
    pub(crate) fn numbered(&self, number: u32) -> Option<&Pool> {
        self.at((number as usize).checked_sub(1)?)
    }

    /// A pool that is known already.
    pub(crate) fn find(&self, handle: CUmemoryPool) -> Option<&Pool> {
        let (handle, used) = (handle.addr(), self.used.load(Ordering::Acquire) as usize);
        if handle == 0 {
            return None;
        }
        (0..used).filter_map(|index| self.at(index)).find(|pool| pool.is(handle))
    }

    /// Remembers a pool that the driver has just made. What had its handle before is gone without our
    /// seeing it. `None`: no memory for the table.
    pub(crate) fn insert(
        &self,
        process: &'static Process,
        handle: CUmemoryPool,
        home: Home,
    ) -> Option<&Pool> {
        let _growing = self.growing.lock();
        if let Some(stale) = self.find(handle) {
            stale.hide();
            stale.close(process);
        }
        self.begin(handle, home)
    }

    /// Remembers a pool that exists, unless another thread has just done so.
    pub(crate) fn adopt(&self, handle: CUmemoryPool, home: Home) -> Option<&Pool> {
        let _growing = self.growing.lock();
        self.find(handle).or_else(|| self.begin(handle, home))
    }

    /// Gives `handle` a place; the caller holds `growing`.
    fn begin(&self, handle: CUmemoryPool, home: Home) -> Option<&Pool> {
        let (index, pool) = self.place()?;
        pool.begin_life(Source::Pool(handle.expose_provenance()), home, index + 1);
        Some(pool)
    }

    /// An unused place and its index.
    fn place(&self) -> Option<(u32, &Pool)> {
        let used = self.used.load(Ordering::Relaxed);
        for index in 0..used {
            if let Some(pool) = self.at(index as usize).filter(|pool| pool.is_unused()) {
                return Some((index, pool));
            }
        }
        let chunk = self.chunks.get(used as usize / CHUNK)?;
        if chunk.load(Ordering::Relaxed).is_null() {
            let memory = pages::map(CHUNK * size_of::<Pool>())?;
            chunk.store(memory.as_ptr().cast(), Ordering::Release);
        }
        let pool = self.at(used as usize)?;
        self.used.store(used + 1, Ordering::Release);
        Some((used, pool))
    }

    /// What the page's GPU `gpu`, which is `device`, keeps for graphs.
    pub(crate) fn graphs(&self, gpu: u8, device: CUdevice) -> Option<&Pool> {
        let pool = self.graphs.get(usize::from(gpu))?;
        if !pool.is_known() {
            let _growing = self.growing.lock();
            if !pool.is_known() {
                pool.begin_life(Source::Graphs(device), Home::Gpu(gpu), 0);
            }
        }
        Some(pool)
    }

    /// Gives back what the driver may have given back since something was freed. `synchronised`:
    /// what was freed before is known to be free now.
    #[inline]
    pub(crate) fn settle_freed(&self, process: &'static Process, synchronised: bool) {
        if FREES.load(Ordering::Relaxed) {
            self.settle_loose(process, synchronised);
        }
    }

    #[cold]
    fn settle_loose(&self, process: &'static Process, synchronised: bool) {
        // Lowered first: a free from here on raises it again.
        FREES.store(false, Ordering::Relaxed);
        for pool in self.each().filter(|pool| pool.is_loose()) {
            if pool.is_known() {
                self.settle_one(process, pool);
            } else if synchronised {
                pool.end_orphan(process);
            }
            if pool.is_loose() {
                notice_frees();
            }
        }
    }

    /// What a synchronisation does to a pool: one that is in debt is trimmed.
    fn settle_one(&self, process: &'static Process, pool: &Pool) {
        if !pool.in_debt() {
            pool.settle(process);
            return;
        }
        if !pool.is_of_graphs() {
            pool.trim(process);
        } else if let Some(_untrimmed) = pool.tight.try_lock() {
            pool.trim(process);
        }
    }

    /// Asks the driver to give back what this process's pools on `gpu` hold and do not use. False
    /// when nothing came. Waits for launches that nobody may trim under; the calling thread holds no
    /// unsettled reservation, for which such a launch might wait.
    #[cold]
    pub(crate) fn reclaim(&self, process: &'static Process, gpu: u8) -> bool {
        let graphs = self.graphs.get(usize::from(gpu));
        let _untrimmed = graphs.map(|graphs| graphs.tight.lock());
        self.reclaim_untrimmed(process, gpu)
    }

    /// As [`Pools::reclaim`], for who holds an unsettled reservation: graph memory is left alone while
    /// nobody may trim it.
    #[cold]
    pub(crate) fn reclaim_at_once(&self, process: &'static Process, gpu: u8) -> bool {
        let graphs = self.graphs.get(usize::from(gpu));
        match graphs.map(|graphs| graphs.tight.try_lock()) {
            Some(None) => self.trim(process, gpu, |pool| !pool.is_of_graphs()),
            Some(Some(_)) | None => self.reclaim_untrimmed(process, gpu),
        }
    }

    /// As [`Pools::reclaim`]; the caller holds `tight` of the GPU's graph memory.
    #[cold]
    pub(crate) fn reclaim_untrimmed(&self, process: &'static Process, gpu: u8) -> bool {
        self.trim(process, gpu, |_| true)
    }

    fn trim(&self, process: &'static Process, gpu: u8, wanted: impl Fn(&Pool) -> bool) -> bool {
        let mut released = 0;
        for pool in self.each().filter(|pool| wanted(pool)) {
            if pool.home() == Home::Gpu(gpu) && (pool.charged() > 0 || pool.in_debt()) {
                released += pool.trim(process);
            }
        }
        released > 0
    }

    /// A context on `gpu` has ended, after `last` no other is left. Pools belong to the device, so
    /// the driver is asked what became of them; one that it knows no more is gone.
    pub(crate) fn context_ended(&self, process: &'static Process, gpu: u8, last: bool) {
        for pool in self.each().filter(|pool| pool.home() == Home::Gpu(gpu)) {
            if pool.charged() == 0 {
                continue;
            }
            if pool.lives() {
                pool.settle(process);
            } else if last {
                pool.close(process);
            }
        }
    }
}

/// Where memory described by `location` and `kind` is; `elsewhere`, if it is managed and has no
/// place of its own.
pub(crate) fn home_of(
    process: &'static Process,
    location: CUmemLocation,
    kind: CUmemAllocationType,
    elsewhere: Option<Home>,
) -> Option<Home> {
    let on = |device: CUdevice| match process.listed(device) {
        Some(Some(gpu)) => Some(Home::Gpu(gpu)),
        Some(None) | None => Some(Home::Unlisted),
    };
    match location.r#type {
        CU_MEM_LOCATION_TYPE_DEVICE => on(location.id),
        // Two bytes: the device, and which part of its memory.
        CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN => on(location.id & 0xff),
        // Managed memory may be resident on a device whatever it prefers.
        _ if kind == CU_MEM_ALLOCATION_TYPE_MANAGED => elsewhere,
        _ => Some(Home::Free),
    }
}
