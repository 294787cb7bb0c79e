//! The hooks of executable graphs, and of their memory.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use super::run::{self, Run};
use super::walk::needs_of;
use super::{Needs, any_with_memory};
use crate::gate::{self, Stream};
use crate::limits;
use crate::pools::ask::is_capturing;
use crate::pools::hooks::is_per_thread;
use crate::quota;
use crate::real::{self, Real};
use crate::state::{self, Process};
use crate::thread::Depth;
use core::cell::Cell;
use core::ffi::{c_char, c_ulonglong};
use tessera_cuda::types::*;

/// What any instantiation is called in messages.
const INSTANTIATE: &str = "cuGraphInstantiate";

/// Any instantiation that leaves the graph's memory for later.
fn instantiate(graph: CUgraph, pexec: *mut CUgraphExec, call: impl Fn() -> CUresult) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let needs = match needs_of(process, INSTANTIATE, graph) {
        Ok(needs) => needs,
        Err(refusal) => return refusal,
    };
    let result = call();
    if result != CUDA_SUCCESS || pexec.is_null() {
        return result;
    }
    // SAFETY: the driver wrote the handle.
    remember(process, unsafe { *pexec }, needs, false)
}

/// An instantiation that uploads. Where there is no room for the worst it is made in two steps, of
/// which the second can be refused by itself.
fn instantiate_and_upload(
    graph: CUgraph,
    pexec: *mut CUgraphExec,
    params: &mut CUDA_GRAPH_INSTANTIATE_PARAMS,
    per_thread: bool,
    call: impl Fn(&mut CUDA_GRAPH_INSTANTIATE_PARAMS) -> CUresult,
) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call(params) };
    let Some(process) = state::armed() else { return call(params) };
    let needs = match needs_of(process, INSTANTIATE, graph) {
        Ok(needs) => needs,
        Err(refusal) => return refusal,
    };
    if needs.is_nothing() || pexec.is_null() {
        return call(params);
    }
    let run = Run { name: INSTANTIATE, process, needs: &needs, is_mapped: false };
    let whole = Cell::new(*params);
    let at_once = run.at_once(&|| {
        let mut with = *params;
        let result = call(&mut with);
        whole.set(with);
        result
    });
    let result = at_once.unwrap_or_else(|| {
        let mut without = *params;
        without.flags &= !CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
        let mut result = call(&mut without);
        if result == CUDA_SUCCESS {
            // SAFETY: the driver wrote the handle.
            let exec = unsafe { *pexec };
            let upload = || run::upload(exec, params.hUploadStream, per_thread);
            result = run.carry_out(upload, upload);
            if result != CUDA_SUCCESS {
                destroy(exec);
                without.result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
            }
        }
        whole.set(CUDA_GRAPH_INSTANTIATE_PARAMS { flags: params.flags, ..without });
        result
    });
    *params = whole.get();
    if result != CUDA_SUCCESS {
        return result;
    }
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
fn remember(
    process: &'static Process,
    exec: CUgraphExec,
    needs: Needs,
    is_mapped: bool,
) -> CUresult {
    if needs.is_nothing() {
        if any_with_memory() {
            process.graphs.remove(exec.addr()); // a handle made again
        }
        return CUDA_SUCCESS;
    }
    if !process.graphs.insert(exec.addr(), needs) {
        destroy(exec);
        return quota::refuse_unnoted(INSTANTIATE);
    }
    if is_mapped {
        process.graphs.mapped(exec.addr());
    }
    CUDA_SUCCESS
}

/// CUDA Driver API, "Graph Management": the form of before CUDA 12.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphInstantiate(
    real: &Real<
        unsafe extern "C" fn(
            *mut CUgraphExec,
            CUgraph,
            *mut CUgraphNode,
            *mut c_char,
            usize,
        ) -> CUresult,
    >,
    pexec: *mut CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    log: *mut c_char,
    log_bytes: usize,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(pexec, graph, error_node, log, log_bytes) };
    instantiate(graph, pexec, call)
}

/// CUDA Driver API, "Graph Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphInstantiateWithFlags(
    real: &Real<unsafe extern "C" fn(*mut CUgraphExec, CUgraph, c_ulonglong) -> CUresult>,
    pexec: *mut CUgraphExec,
    graph: CUgraph,
    flags: c_ulonglong,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    instantiate(graph, pexec, || unsafe { real(pexec, graph, flags) })
}

/// CUDA Driver API, "Graph Management": may upload at once.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphInstantiateWithParams(
    real: &Real<
        unsafe extern "C" fn(
            *mut CUgraphExec,
            CUgraph,
            *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
        ) -> CUresult,
    >,
    pexec: *mut CUgraphExec,
    graph: CUgraph,
    params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
) -> CUresult {
    let per_thread = is_per_thread(real);
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments, and parameters of ours or the caller's.
    let call = |params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS| unsafe { real(pexec, graph, params) };
    // SAFETY: null, or the caller's own parameters, which the driver reads and writes too.
    match unsafe { params.as_mut() } {
        Some(params) if params.flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD != 0 => {
            instantiate_and_upload(graph, pexec, params, per_thread, |params| call(params))
        }
        _ => instantiate(graph, pexec, || call(params)),
    }
}

/// CUDA Driver API, "Graph Management": its memory stays with the device.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphExecDestroy(
    real: &Real<unsafe extern "C" fn(CUgraphExec) -> CUresult>,
    exec: CUgraphExec,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(exec) };
    if !any_with_memory() {
        return call();
    }
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    // The entry goes first, because the driver may reuse the handle.
    let Some(leaving) = process.graphs.leaving(exec.addr()) else { return call() };
    let result = call();
    process.graphs.left(leaving, result == CUDA_SUCCESS);
    result
}

/// Updates `exec` from `graph` with `call`, and notes what it may take then.
fn update(exec: CUgraphExec, graph: CUgraph, call: impl FnOnce() -> CUresult) -> CUresult {
    if !any_with_memory() && !limits::any_unpaid() {
        return call();
    }
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let is_known = process.graphs.find(exec.addr()).is_some();
    if !is_known && !limits::any_unpaid() {
        return call();
    }
    let needs = match needs_of(process, "cuGraphExecUpdate", graph) {
        Ok(needs) => needs,
        Err(refusal) => return refusal,
    };
    let result = call();
    if result == CUDA_SUCCESS && is_known {
        // There is room: its own entry is replaced.
        process.graphs.insert(exec.addr(), needs);
    }
    result
}

/// CUDA Driver API, "Graph Management": the form of before CUDA 12.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphExecUpdate(
    real: &Real<
        unsafe extern "C" fn(
            CUgraphExec,
            CUgraph,
            *mut CUgraphNode,
            *mut CUgraphExecUpdateResult,
        ) -> CUresult,
    >,
    exec: CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    outcome: *mut CUgraphExecUpdateResult,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    update(exec, graph, || unsafe { real(exec, graph, error_node, outcome) })
}

/// CUDA Driver API, "Graph Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphExecUpdate_v2(
    real: &Real<
        unsafe extern "C" fn(CUgraphExec, CUgraph, *mut CUgraphExecUpdateResultInfo) -> CUresult,
    >,
    exec: CUgraphExec,
    graph: CUgraph,
    outcome: *mut CUgraphExecUpdateResultInfo,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    update(exec, graph, || unsafe { real(exec, graph, outcome) })
}

/// Gives a kernel node of an executable graph these parameters with `call`; null ones are the driver's to
/// refuse.
fn set_kernel(
    params: Option<&CUDA_KERNEL_NODE_PARAMS>,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    if limits::any_unpaid()
        && let Some(params) = params
        && let Some(_depth) = Depth::enter()
        && let Err(refusal) = limits::node(params)
    {
        return refusal;
    }
    call()
}

/// CUDA Driver API, "Graph Management": the form of before CUDA 12.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphExecKernelNodeSetParams_v1(
    real: &Real<
        unsafe extern "C" fn(
            CUgraphExec,
            CUgraphNode,
            *const CUDA_KERNEL_NODE_PARAMS_v1,
        ) -> CUresult,
    >,
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const CUDA_KERNEL_NODE_PARAMS_v1,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: null, or the caller's own parameters, which the driver reads too.
    let whole = unsafe { params.as_ref() }.map(|&v1| CUDA_KERNEL_NODE_PARAMS::from(v1));
    // SAFETY: the caller's own arguments.
    set_kernel(whole.as_ref(), || unsafe { real(exec, node, params) })
}

/// CUDA Driver API, "Graph Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphExecKernelNodeSetParams(
    real: &Real<
        unsafe extern "C" fn(CUgraphExec, CUgraphNode, *const CUDA_KERNEL_NODE_PARAMS) -> CUresult,
    >,
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *const CUDA_KERNEL_NODE_PARAMS,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: null, or the caller's own parameters, which the driver reads too; its own arguments.
    unsafe { set_kernel(params.as_ref(), || real(exec, node, params)) }
}

/// CUDA Driver API, "Graph Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphExecNodeSetParams(
    real: &Real<unsafe extern "C" fn(CUgraphExec, CUgraphNode, *mut CUgraphNodeParams) -> CUresult>,
    exec: CUgraphExec,
    node: CUgraphNode,
    params: *mut CUgraphNodeParams,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: null, or the caller's own parameters, which the driver reads too.
    let kernel = unsafe { params.as_ref() }.filter(|any| any.r#type == CU_GRAPH_NODE_TYPE_KERNEL);
    // SAFETY: the caller's own arguments.
    set_kernel(kernel.map(|any| &any.kernel), || unsafe { real(exec, node, params) })
}

/// CUDA Driver API, "Graph Management": maps the graph's memory.
///
/// # Safety
/// As the driver's.
pub unsafe fn cuGraphUpload(
    real: &Real<unsafe extern "C" fn(CUgraphExec, CUstream) -> CUresult>,
    exec: CUgraphExec,
    stream: CUstream,
) -> CUresult {
    let per_thread = is_per_thread(real);
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own arguments.
    let call = || unsafe { real(exec, stream) };
    with_memory("cuGraphUpload", exec, stream, per_thread, call)
}

/// Launches while any executable graph has memory of its own; [`crate::launch`] has the others.
/// `call` hands the caller's own arguments to the driver's function.
pub fn launch<F: Copy>(
    real: &Real<F>,
    exec: CUgraphExec,
    stream: CUstream,
    call: impl Fn(F) -> CUresult,
) -> CUresult {
    let per_thread = is_per_thread(real);
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // Through the gate with everything reserved, so that nobody waits for the quota with the flag up.
    let call = || match gate::admit_graph(Stream::new(stream, per_thread)) {
        Ok(_pass) => call(function),
        Err(refusal) => refusal,
    };
    if any_with_memory() {
        with_memory("cuGraphLaunch", exec, stream, per_thread, call)
    } else {
        call()
    }
}

/// A call that maps the memory of `exec`, if it has any. In a capturing stream it is a node itself.
#[cold]
fn with_memory(
    name: &'static str,
    exec: CUgraphExec,
    stream: CUstream,
    per_thread: bool,
    call: impl Fn() -> CUresult,
) -> CUresult {
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let Some((needs, is_mapped)) = process.graphs.find(exec.addr()) else { return call() };
    if is_capturing(stream, per_thread) {
        return call();
    }
    let run = Run { name, process, needs: &needs, is_mapped };
    let result = run.carry_out(|| run::upload(exec, stream, per_thread), call);
    if result == CUDA_SUCCESS {
        process.graphs.mapped(exec.addr());
    }
    result
}

/// CUDA Driver API, "Graph Management".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuDeviceGraphMemTrim(
    real: &Real<unsafe extern "C" fn(CUdevice) -> CUresult>,
    dev: CUdevice,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    // SAFETY: the caller's own argument.
    let call = || unsafe { real(dev) };
    let Some(_depth) = Depth::enter() else { return call() };
    let Some(process) = state::armed() else { return call() };
    let pool = process.listed(dev).flatten().and_then(|gpu| process.pools.graphs(gpu, dev));
    let Some(pool) = pool else { return call() };
    let _untrimmed = pool.tight.lock();
    let result = call();
    if result == CUDA_SUCCESS {
        process.graphs.trimmed();
        pool.settle(process);
    }
    result
}
