//! The hooks of executable graphs, and of their memory.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::run::{Run, upload};
use super::walk::needs_of;
use super::{Needs, any_with_memory};
use crate::gate::{self, Stream};
use crate::limits;
use crate::pools::ask::is_capturing;
use crate::quota;
use crate::real::{self, Real};
use crate::state::Process;
use crate::thread::{Answer, Call, Depth, answer, entered, result};
use core::ffi::{c_char, c_ulonglong};
use tessera_cuda::types::*;

/// What any instantiation is called in messages.
const INSTANTIATE: &str = "cuGraphInstantiate";

/// Any instantiation that leaves the graph's memory for later.
unsafe fn instantiate(call: Call<'_>, pexec: *mut CUgraphExec, graph: CUgraph) -> Answer {
    let Some((process, _depth)) = entered() else { return call() };
    let needs = needs_of(process, INSTANTIATE, graph)?;
    call()?;
    // SAFETY: null, or the driver wrote the handle.
    match unsafe { pexec.as_ref() } {
        Some(&exec) => remember(process, exec, needs, false),
        None => Ok(()),
    }
}

/// An instantiation that uploads. Where there is no room for the worst it is made in two steps, of
/// which the second can be refused by itself.
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
    let run = Run { name: INSTANTIATE, process, needs: &needs, is_mapped: false };
    let made = run.at_once(call).unwrap_or_else(|| {
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
        run.carry_out(&mapping, &mapping).inspect_err(|_| {
            destroy(exec);
            // SAFETY: as above.
            unsafe { (*params).result_out = CUDA_GRAPH_INSTANTIATE_ERROR };
        })
    });
    made?;
    // SAFETY: the driver wrote the handle.
    remember(process, unsafe { *pexec }, needs, true)
}

fn destroy(exec: CUgraphExec) {
    if let Some(destroy) = real::cuGraphExecDestroy.get() {
        // SAFETY: just made, and nobody else has seen it.
        unsafe { destroy(exec) };
    }
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

/// CUDA Driver API, "Graph Management": the form of before CUDA 12.
pub unsafe fn cuGraphInstantiate(
    call: Call<'_>,
    pexec: *mut CUgraphExec,
    graph: CUgraph,
    _: *mut CUgraphNode,
    _: *mut c_char,
    _: usize,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { instantiate(call, pexec, graph) }
}

pub unsafe fn cuGraphInstantiateWithFlags(
    call: Call<'_>,
    pexec: *mut CUgraphExec,
    graph: CUgraph,
    _: c_ulonglong,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { instantiate(call, pexec, graph) }
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
            0 => instantiate(call, pexec, graph),
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
pub unsafe fn cuGraphExecUpdate_v2(
    call: Call<'_>,
    exec: CUgraphExec,
    graph: CUgraph,
    _: *mut CUgraphExecUpdateResultInfo,
) -> Answer {
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

/// CUDA Driver API, "Graph Management": the form of before CUDA 12.
pub unsafe fn cuGraphExecUpdate(
    call: Call<'_>,
    exec: CUgraphExec,
    graph: CUgraph,
    _: *mut CUgraphNode,
    _: *mut CUgraphExecUpdateResult,
) -> Answer {
    // SAFETY: the caller's own arguments.
    unsafe { cuGraphExecUpdate_v2(call, exec, graph, core::ptr::null_mut()) }
}

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
    _: CUgraphExec,
    _: CUgraphNode,
    params: *const P,
) -> Answer {
    // SAFETY: null, or the caller's own parameters, which the driver reads too.
    set_kernel(call, unsafe { params.as_ref() }.map(|&params| params.into()))
}

pub unsafe fn cuGraphExecNodeSetParams(
    call: Call<'_>,
    _: CUgraphExec,
    _: CUgraphNode,
    params: *mut CUgraphNodeParams,
) -> Answer {
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
        let _pass = gate::admit_graph(stream)?;
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
