//! The hooks of executable graphs, and of their memory.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::{Needs, any_with_memory, needs_of};
use crate::gate::{self, Stream, is_capturing};
use crate::limits;
use crate::pools::pool::Pool;
use crate::quota::{self, Asked};
use crate::real::{self, Real};
use crate::state::Process;
use crate::thread::{Answer, Call, Depth, answer, entered, result};
use core::array;
use tessera_cuda::types::*;
use tessera_region::account::{Reason, Reservation};
use tessera_region::layout::MAX_GPUS;

/// What any instantiation is called in messages.
const INSTANTIATE: &str = "cuGraphInstantiate";

/// CUDA Driver API, "Graph Management": any instantiation that leaves the graph's memory for later.
pub unsafe fn cuGraphInstantiate(
    call: Call<'_>,
    pexec: *mut CUgraphExec,
    graph: CUgraph,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let needs = needs_of(process, INSTANTIATE, graph)?;
    call()?;
    // SAFETY: null, or the driver wrote the handle.
    match unsafe { pexec.as_ref() } {
        Some(&exec) => remember(process, exec, needs, false),
        None => Ok(()),
    }
}

pub use cuGraphInstantiate as cuGraphInstantiateWithFlags;

/// An instantiation that uploads. One of a graph with memory is made in two steps, of which the second can
/// be refused by itself.
unsafe fn instantiate_and_upload(
    call: Call<'_>,
    pexec: *mut CUgraphExec,
    graph: CUgraph,
    params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
    per_thread: bool,
) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let needs = needs_of(process, INSTANTIATE, graph)?;
    if needs.is_nothing() || pexec.is_null() {
        return call();
    }
    // SAFETY: the caller's own parameters, which the driver reads and writes in its calls alone.
    let (flags, stream) = unsafe { ((*params).flags, (*params).hUploadStream) };
    // SAFETY: as above.
    unsafe { (*params).flags = flags & !CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD };
    let made = call();
    // SAFETY: as above.
    unsafe { (*params).flags = flags };
    made?;
    // SAFETY: the driver wrote the handle.
    let exec = unsafe { *pexec };
    let mapping = || upload(exec, Stream::new(stream, per_thread));
    let run = Run { name: INSTANTIATE, process, needs: &needs, is_mapped: false };
    run.carry_out(&mapping, &mapping).inspect_err(|_| {
        destroy(exec);
        // SAFETY: as above.
        unsafe { (*params).result_out = CUDA_GRAPH_INSTANTIATE_ERROR };
    })?;
    remember(process, exec, needs, true)
}

fn destroy(exec: CUgraphExec) {
    // SAFETY: just made, and nobody else has seen it.
    real::cuGraphExecDestroy.tell(|destroy| unsafe { destroy(exec) });
}

/// Remembers a new executable graph, or destroys it for want of memory for the table.
fn remember(process: &'static Process, exec: CUgraphExec, needs: Needs, is_mapped: bool) -> Answer {
    if needs.is_nothing() {
        if any_with_memory()
            && let Some(stale) = process.graphs.leaving(exec.addr())
        {
            process.graphs.left(stale, true); // a handle made again
        }
        return Ok(());
    }
    if process.graphs.insert(exec.addr(), needs).is_err() {
        destroy(exec);
        return Err(quota::refuse_unnoted(INSTANTIATE));
    }
    if is_mapped {
        process.graphs.mapped(exec.addr());
    }
    Ok(())
}

/// CUDA Driver API, "Graph Management": may upload at once. `per_thread` says what NULL is for a stream.
pub unsafe fn cuGraphInstantiateWithParams(
    call: Call<'_>,
    per_thread: bool,
    pexec: *mut CUgraphExec,
    graph: CUgraph,
    params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
) -> Answer {
    // SAFETY: null, or the caller's own parameters, which the driver reads and writes too.
    let flags = unsafe { params.as_ref() }.map_or(0, |params| params.flags);
    // SAFETY: the caller's own arguments.
    unsafe {
        match flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD {
            0 => cuGraphInstantiate(call, pexec, graph),
            _ => instantiate_and_upload(call, pexec, graph, params, per_thread),
        }
    }
}

/// CUDA Driver API, "Graph Management": its memory stays with the device.
pub unsafe fn cuGraphExecDestroy(call: Call<'_>, exec: CUgraphExec) -> Answer {
    if !any_with_memory() {
        return call();
    }
    let Some((process, _depth)) = entered() else { return call() };
    // The entry goes first, because the driver may reuse the handle.
    let Some(leaving) = process.graphs.leaving(exec.addr()) else { return call() };
    let answer = call();
    process.graphs.left(leaving, answer.is_ok());
    answer
}

/// CUDA Driver API, "Graph Management": notes what `exec` may take as the graph is now.
pub unsafe fn cuGraphExecUpdate(call: Call<'_>, exec: CUgraphExec, graph: CUgraph) -> Answer {
    if !any_with_memory() && !limits::any_unpaid() {
        return call();
    }
    let Some((process, _depth)) = entered() else { return call() };
    let is_known = process.graphs.find(exec.addr()).is_some();
    if !is_known && !limits::any_unpaid() {
        return call();
    }
    let needs = needs_of(process, "cuGraphExecUpdate", graph)?;
    call()?;
    if is_known {
        // There is room: its own entry is replaced.
        let _ = process.graphs.insert(exec.addr(), needs);
    }
    Ok(())
}

pub use cuGraphExecUpdate as cuGraphExecUpdate_v2;

/// Gives a kernel node of an executable graph these parameters with `call`; null ones are the driver's to
/// refuse.
fn set_kernel(call: Call<'_>, params: Option<CUDA_KERNEL_NODE_PARAMS>) -> Answer {
    if limits::any_unpaid()
        && let Some(params) = params
        && let Some(_depth) = Depth::enter()
    {
        limits::node(&params)?;
    }
    call()
}

pub unsafe fn cuGraphExecKernelNodeSetParams<P: Copy + Into<CUDA_KERNEL_NODE_PARAMS>>(
    call: Call<'_>,
    params: *const P,
) -> Answer {
    // SAFETY: null, or the caller's own parameters, which the driver reads too.
    set_kernel(call, unsafe { params.as_ref() }.map(|&params| params.into()))
}

pub unsafe fn cuGraphExecNodeSetParams(call: Call<'_>, params: *mut CUgraphNodeParams) -> Answer {
    // SAFETY: null, or the caller's own parameters, which the driver reads too.
    let kernel = unsafe { params.as_ref() }.filter(|any| any.r#type == CU_GRAPH_NODE_TYPE_KERNEL);
    set_kernel(call, kernel.map(|any| any.kernel))
}

/// CUDA Driver API, "Graph Management": maps the graph's memory.
pub unsafe fn cuGraphUpload(call: Call<'_>, exec: CUgraphExec, stream: Stream) -> Answer {
    with_memory("cuGraphUpload", exec, stream, call)
}

/// Launches while any executable graph has memory of its own; [`crate::launch`] has the others.
/// `call` hands the caller's own arguments to the driver's function.
pub fn launch<F: Copy>(
    real: &Real<F>,
    exec: CUgraphExec,
    stream: Stream,
    call: impl Fn(F) -> CUresult,
) -> CUresult {
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // Through the gate with everything reserved, so that nobody waits for the quota with the flag up.
    let call = || {
        let _pass = gate::admit(gate::Kind::Graph, stream)?;
        answer(call(function))
    };
    result(match any_with_memory() {
        true => with_memory("cuGraphLaunch", exec, stream, &call),
        false => call(),
    })
}

/// A call that maps the memory of `exec`, if it has any. In a capturing stream it is a node itself.
#[cold]
fn with_memory(name: &'static str, exec: CUgraphExec, stream: Stream, call: Call<'_>) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let Some((needs, is_mapped)) = process.graphs.find(exec.addr()) else { return call() };
    if is_capturing(stream) {
        return call();
    }
    let run = Run { name, process, needs: &needs, is_mapped };
    run.carry_out(&|| upload(exec, stream), call)?;
    process.graphs.mapped(exec.addr());
    Ok(())
}

pub unsafe fn cuDeviceGraphMemTrim(call: Call<'_>, dev: CUdevice) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let Some(gpu) = process.listed(dev).flatten() else { return call() };
    let pool = process.pools.graphs(gpu, dev);
    let _untrimmed = pool.tight.lock();
    call()?;
    process.graphs.trimmed();
    pool.settle(process);
    Ok(())
}

// Uploads and launches of graphs with allocation nodes.

/// A call that may take the memory of a graph.
struct Run<'a> {
    /// The driver's function, for messages.
    pub(crate) name: &'static str,
    pub(crate) process: &'static Process,
    pub(crate) needs: &'a Needs,
    /// Its memory has been mapped before, and nothing was trimmed since.
    pub(crate) is_mapped: bool,
}

type Reserved = [Option<Reservation<'static>>; MAX_GPUS];

enum Lack {
    /// The quota has not so many bytes of a GPU.
    Quota {
        gpu: u8,
        bytes: u64,
        reason: Reason,
    },
    Driver(CUresult),
}

impl Run<'_> {
    /// Makes `call`; `upload` is the part of it that maps the graph's memory and nothing else.
    pub(crate) fn carry_out(&self, upload: Call<'_>, call: Call<'_>) -> Answer {
        if self.needs.unlisted > 0 {
            let unlisted = Asked::Bytes(self.needs.unlisted);
            return Err(quota::refuse_unlisted(self.process, self.name, unlisted));
        }
        match self.reserve_if_room() {
            Some(reserved) => self.settled(reserved, call),
            None => self.squeeze_in(upload, call),
        }
    }

    fn pools(&self) -> impl Iterator<Item = (u8, u64, &'static Pool)> {
        let process = self.process;
        self.needs.each().filter_map(move |(gpu, bytes)| {
            let device = process.gpus.device_of(gpu)?;
            Some((gpu, bytes, process.pools.graphs(gpu, device)))
        })
    }

    /// The worst on every GPU, if there is room.
    fn reserve_if_room(&self) -> Option<Reserved> {
        let mut reserved: Reserved = [const { None }; MAX_GPUS];
        for (gpu, bytes, pool) in self.pools() {
            if pool.in_debt() {
                return None;
            }
            let here = quota::reserve_if_room(self.process, gpu, pool.worst(bytes))?;
            reserved[usize::from(gpu)] = Some(here);
        }
        Some(reserved)
    }

    /// `call` between announcement and settlement. What the driver takes beyond the reservations
    /// leaves its pool in debt: a launch cannot be undone.
    fn settled(&self, mut reserved: Reserved, call: Call<'_>) -> Answer {
        let mut worst = [0; MAX_GPUS];
        for (gpu, bytes, pool) in self.pools() {
            if let Some(here) = &reserved[usize::from(gpu)] {
                pool.begin(here.bytes());
                worst[usize::from(gpu)] = pool.worst(bytes);
            }
        }
        let (first, bytes) = self.needs.each().next().unwrap_or((0, 0));
        let answer = quota::insist(self.process, first, bytes, call);
        for (gpu, _, pool) in self.pools() {
            let at = usize::from(gpu);
            match reserved[at].take() {
                Some(here) => {
                    let lacking = pool.settle_call(self.process, here);
                    if lacking > 0 {
                        pool.learn(worst[at], lacking);
                        // Nobody to refuse any more.
                        pool.owe(self.process);
                    }
                }
                None => pool.owe(self.process),
            }
        }
        answer
    }

    /// Where the worst does not fit: the graph is uploaded first, which maps its memory and can be
    /// undone by a trim, and is launched only if what the driver took is paid. One that is mapped
    /// takes nothing more, unless it moves to another stream. Otherwise everything unused is trimmed,
    /// and what the nodes ask for is reserved.
    ///
    /// Nobody else trims between the upload and the end of the launch: what was mapped and paid would
    /// be unmapped, and mapped again unpaid.
    #[cold]
    fn squeeze_in(&self, upload: Call<'_>, call: Call<'_>) -> Answer {
        let Self { name, process, .. } = *self;
        let _untrimmed: [Option<_>; MAX_GPUS] = {
            let mut pools = self.pools().peekable();
            array::from_fn(|at| {
                let next = pools.next_if(|(gpu, ..)| usize::from(*gpu) == at);
                next.map(|(_, _, pool)| pool.tight.lock())
            })
        };
        let mut outcome = self.attempt(upload, |bytes| if self.is_mapped { 0 } else { bytes });
        if matches!(outcome, Err(Lack::Quota { .. })) {
            self.reclaim();
            outcome = self.attempt(upload, |bytes| bytes);
        }
        match outcome {
            Ok(()) => self.settled([const { None }; MAX_GPUS], call),
            Err(Lack::Quota { gpu, bytes, reason }) => {
                self.reclaim();
                for (_, _, pool) in self.pools() {
                    pool.owe(process);
                }
                let refused = process.account.refuse(reason, usize::from(gpu), bytes);
                let asked = Asked::Bytes(self.needs.bytes[usize::from(gpu)]);
                Err(quota::refuse(process, name, asked, &refused))
            }
            Err(Lack::Driver(refusal)) => Err(refusal),
        }
    }

    /// The caller holds the pools' `tight`.
    fn reclaim(&self) {
        for (gpu, ..) in self.pools() {
            self.process.pools.trim(self.process, gpu, true);
        }
    }

    /// Uploads with `least` reserved of what each GPU's nodes ask for.
    fn attempt(&self, upload: Call<'_>, least: impl Fn(u64) -> u64) -> Result<(), Lack> {
        let mut reserved: Reserved = [const { None }; MAX_GPUS];
        for (gpu, bytes, _) in self.pools() {
            let here = match least(bytes) {
                0 => None,
                least => Some(self.try_reserve(gpu, least)?),
            };
            reserved[usize::from(gpu)] = here;
        }
        for (gpu, _, pool) in self.pools() {
            if let Some(here) = &reserved[usize::from(gpu)] {
                pool.begin(here.bytes());
            }
        }
        let uploaded = upload();
        let mut short = None;
        for (gpu, _, pool) in self.pools() {
            let lacking = match reserved[usize::from(gpu)].take() {
                Some(here) => pool.settle_call(self.process, here),
                None => pool.settle(self.process).lacking,
            };
            if lacking > 0 {
                match self.try_reserve(gpu, lacking) {
                    Ok(more) => {
                        pool.begin(lacking);
                        pool.settle_call(self.process, more);
                    }
                    Err(lack) => short = Some(lack),
                }
            }
        }
        uploaded.map_err(Lack::Driver)?;
        short.map_or(Ok(()), Err)
    }

    /// Asks nothing back: that would unmap what has just been mapped.
    fn try_reserve(&self, gpu: u8, bytes: u64) -> Result<Reservation<'static>, Lack> {
        let reserved = self.process.account.try_reserve(usize::from(gpu), bytes);
        reserved.map_err(|reason| Lack::Quota { gpu, bytes, reason })
    }
}

/// `cuGraphUpload`. Drivers without it have no allocation nodes.
pub(crate) fn upload(exec: CUgraphExec, stream: Stream) -> Answer {
    match real::cuGraphUpload.get() {
        // SAFETY: the caller's graph and stream.
        Some(upload) => answer(unsafe { upload(exec, stream.handle()) }),
        None => Ok(()),
    }
}
