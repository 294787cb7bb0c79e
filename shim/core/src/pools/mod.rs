//! The memory pools of this process, charged by what the driver reserves for them.
//!
//! A pool takes device memory in chunks and keeps them beyond the frees, so neither the requests nor
//! the frees show what it holds; the driver does (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`, and for
//! graph memory, which is a pool without a handle, `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`). Each
//! pool has one charged word in its [`books`]; every call that can change what is reserved moves the
//! word to what the driver says ([`pool`]):
//!
//! - an allocation reserves the worst growth, calls the driver, and settles ([`hooks`]);
//! - after frees, whatever lets the driver give chunks back settles: synchronisations of streams,
//!   events and contexts, trims, a lowered threshold ([`hooks`]); and whatever shows the tenant its
//!   memory does so first;
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

pub(crate) mod ask;
pub(crate) mod books;
pub mod hooks;
pub(crate) mod pool;

use crate::pages::Chunks;
use crate::spin::Spin;
use crate::state::Process;
use crate::vmm::device_of;
use ask::Source;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use pool::{Home, Pool};
use tessera_cuda::types::*;
use tessera_region::layout::MAX_GPUS;

/// Whether frees may have let some pool shrink: all that a synchronisation looks at where no pool is
/// in use. A forked child inherits it, looks once, and lowers it.
static FREES: AtomicBool = AtomicBool::new(false);

fn notice_frees() {
    if !FREES.load(Ordering::Relaxed) {
        FREES.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub struct Pools {
    /// 4096 at the same time.
    chunks: Chunks<Pool, 64>,
    /// Places ever used.
    used: AtomicU32,
    /// Held to give a place to a new pool.
    growing: Spin<()>,
    /// What each GPU of the page keeps for graphs.
    graphs: [Pool; MAX_GPUS],
}

impl Pools {
    pub fn new() -> Self {
        Self {
            chunks: Chunks::new(),
            used: AtomicU32::new(0),
            growing: Spin::new(()),
            graphs: Default::default(),
        }
    }

    /// Those that have been in the table.
    fn listed(&self) -> impl Iterator<Item = &Pool> {
        let used = self.used.load(Ordering::Acquire) as usize;
        (0..used).filter_map(|index| self.chunks.at(index))
    }

    fn each(&self) -> impl Iterator<Item = &Pool> {
        self.listed().chain(&self.graphs)
    }

    /// The pool that an allocation was remembered with.
    pub(crate) fn numbered(&self, number: u32) -> Option<&Pool> {
        self.chunks.at((number as usize).checked_sub(1)?)
    }

    pub(crate) fn find(&self, handle: CUmemoryPool) -> Option<&Pool> {
        self.listed().find(|pool| !handle.is_null() && pool.is(handle.addr()))
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

    fn place(&self) -> Option<(u32, &Pool)> {
        let unused = (0..).zip(self.listed()).find(|(_, pool)| pool.is_unused());
        unused.or_else(|| {
            let used = self.used.load(Ordering::Relaxed);
            let pool = self.chunks.grow(used as usize)?;
            self.used.store(used + 1, Ordering::Release);
            Some((used, pool))
        })
    }

    /// What the page's GPU `gpu`, which is `device`, keeps for graphs.
    pub(crate) fn graphs(&self, gpu: u8, device: CUdevice) -> &Pool {
        let pool = &self.graphs[usize::from(gpu)];
        if !pool.is_known() {
            let _growing = self.growing.lock();
            if !pool.is_known() {
                pool.begin_life(Source::Graphs(device), Home::Gpu(gpu), 0);
            }
        }
        pool
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
            if !pool.is_known() {
                if synchronised {
                    pool.end_orphan(process);
                }
            } else if !pool.in_debt() {
                pool.settle(process);
            } else if !pool.is_of_graphs() {
                pool.trim(process);
            } else if let Some(_untrimmed) = pool.tight.try_lock() {
                pool.trim(process);
            }
            if pool.is_loose() {
                notice_frees();
            }
        }
    }

    /// Asks the driver to give back what this process's pools on `gpu` hold and do not use. False
    /// when nothing came. Waits for launches that nobody may trim under; the calling thread holds no
    /// unsettled reservation, for which such a launch might wait.
    #[cold]
    pub(crate) fn reclaim(&self, process: &'static Process, gpu: u8) -> bool {
        let _untrimmed = self.graphs[usize::from(gpu)].tight.lock();
        self.trim(process, gpu, true)
    }

    /// As [`Pools::reclaim`], for who holds an unsettled reservation: graph memory is left alone while
    /// nobody may trim it.
    #[cold]
    pub(crate) fn reclaim_at_once(&self, process: &'static Process, gpu: u8) -> bool {
        let untrimmed = self.graphs[usize::from(gpu)].tight.try_lock();
        self.trim(process, gpu, untrimmed.is_some())
    }

    /// As [`Pools::reclaim`]; for graph memory, too, the caller holds `tight` of the GPU's.
    #[cold]
    pub(crate) fn trim(&self, process: &'static Process, gpu: u8, graphs: bool) -> bool {
        let mut released = 0;
        for pool in self.each().filter(|pool| graphs || !pool.is_of_graphs()) {
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
    match device_of(location) {
        Some(device) => Some(Home::on(process, device)),
        // Managed memory may be resident on a device whatever it prefers.
        None if kind == CU_MEM_ALLOCATION_TYPE_MANAGED => elsewhere,
        None => Some(Home::Free),
    }
}
