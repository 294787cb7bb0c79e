//! Looks through a graph for allocation nodes, and for kernels whose frames are to be charged.

use super::Needs;
use crate::limits;
use crate::pages::{Table, Zeroed};
use crate::pools::books::pages;
use crate::pools::home_of;
use crate::pools::pool::Home;
use crate::quota;
use crate::real;
use crate::state::Process;
use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::ptr;
use tessera_cuda::types::*;

/// Graphs within graphs that are looked into; deeper ones nobody builds.
const DEEPEST: u32 = 64;

/// A place for a node.
#[derive(Clone, Copy)]
struct Place(CUgraphNode);

// SAFETY: a pointer, which may be null, and is only ever handed to the driver.
unsafe impl Zeroed for Place {}

/// What the allocation nodes of `graph` and of the graphs in it may take. Bodies of conditional
/// nodes have none: "Allowed node types are kernel nodes, empty nodes, child graphs, memsets,
/// memcopies, and conditionals. This applies recursively" (`CUDA_CONDITIONAL_NODE_PARAMS`).
///
/// Frames of kernels are charged on the way ([`crate::limits`]).
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` when a frame does not fit, or the kernel has no memory to look through the
/// graph: then it may need anything. `name` is the call that is refused.
pub(super) fn needs_of(
    process: &'static Process,
    name: &'static str,
    graph: CUgraph,
) -> Result<Needs, CUresult> {
    let mut needs = Needs::default();
    if !graph.is_null() {
        add(process, name, graph, &mut needs, DEEPEST)?;
    }
    Ok(needs)
}

fn add(
    process: &'static Process,
    name: &'static str,
    graph: CUgraph,
    needs: &mut Needs,
    depth: u32,
) -> Result<(), CUresult> {
    let (Some(get_nodes), Some(get_type)) =
        (real::cuGraphGetNodes.get(), real::cuGraphNodeGetType.get())
    else {
        return Ok(());
    };
    let mut count = 0usize;
    // SAFETY: the caller's graph; a null array asks for the count.
    if unsafe { get_nodes(graph, ptr::null_mut(), &raw mut count) } != CUDA_SUCCESS || count == 0 {
        return Ok(());
    }
    let Some(mut nodes) = Table::<Place>::new(count) else {
        return Err(quota::refuse_unnoted(name));
    };
    let place = nodes.as_mut_slice().as_mut_ptr().cast::<CUgraphNode>();
    // SAFETY: room for `count` nodes, each a pointer.
    if unsafe { get_nodes(graph, place, &raw mut count) } != CUDA_SUCCESS {
        return Ok(());
    }
    for &Place(node) in &nodes.as_slice()[..count.min(nodes.as_slice().len())] {
        let mut kind: c_int = -1;
        // SAFETY: a node of the graph, and a place for its type.
        if unsafe { get_type(node, &raw mut kind) } != CUDA_SUCCESS {
            continue;
        }
        match kind {
            CU_GRAPH_NODE_TYPE_KERNEL if limits::any_unpaid() => charge_node(node)?,
            CU_GRAPH_NODE_TYPE_MEM_ALLOC => add_node(process, node, needs),
            CU_GRAPH_NODE_TYPE_GRAPH if depth > 0 => {
                if let Some(child) = child_of(node) {
                    add(process, name, child, needs, depth - 1)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn child_of(node: CUgraphNode) -> Option<CUgraph> {
    let ask = real::cuGraphChildGraphNodeGetGraph.get()?;
    let mut child: CUgraph = ptr::null_mut();
    // SAFETY: a child graph node, and a place for the graph.
    (unsafe { ask(node, &raw mut child) } == CUDA_SUCCESS && !child.is_null()).then_some(child)
}

fn charge_node(node: CUgraphNode) -> Result<(), CUresult> {
    let (new, old) = (&real::cuGraphKernelNodeGetParams_v2, &real::cuGraphKernelNodeGetParams);
    let Some(ask) = new.get().or_else(|| old.get()) else { return Ok(()) };
    let mut params = MaybeUninit::<CUDA_KERNEL_NODE_PARAMS>::zeroed();
    // SAFETY: a kernel node, and a place for its parameters, of which those of before CUDA 12 are a part.
    if unsafe { ask(node, params.as_mut_ptr()) } != CUDA_SUCCESS {
        return Ok(());
    }
    // SAFETY: zeroed, which is valid, and then written by the driver.
    limits::node(&unsafe { params.assume_init() })
}

fn add_node(process: &'static Process, node: CUgraphNode, needs: &mut Needs) {
    let Some(ask) = real::cuGraphMemAllocNodeGetParams.get() else { return };
    let mut params = MaybeUninit::<CUDA_MEM_ALLOC_NODE_PARAMS>::zeroed();
    // SAFETY: an allocation node, and a place for its parameters.
    if unsafe { ask(node, params.as_mut_ptr()) } != CUDA_SUCCESS {
        return;
    }
    // SAFETY: zeroed, which is valid, and then written by the driver.
    let params = unsafe { params.assume_init() };
    let (props, bytes) = (params.poolProps, pages(params.bytesize as u64));
    match home_of(process, props.location, props.allocType, None) {
        Some(Home::Gpu(gpu)) => {
            if let Some(sum) = needs.bytes.get_mut(usize::from(gpu)) {
                *sum = sum.saturating_add(bytes);
            }
        }
        Some(Home::Unlisted) => needs.unlisted = needs.unlisted.saturating_add(bytes),
        Some(Home::Free) | None => {}
    }
}
