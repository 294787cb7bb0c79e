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
use crate::thread::Answer;
use core::{mem, ptr};
use tessera_cuda::types::*;

/// Graphs within graphs that are looked into; deeper ones nobody builds.
const DEEPEST: u32 = 64;

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
) -> Answer {
    let get_nodes = |place: *mut CUgraphNode, count: usize| {
        // SAFETY: the caller's graph, and room for `count` nodes; a null array asks for the count.
        real::cuGraphGetNodes.ask(count, |ask, count| unsafe { ask(graph, place, count) })
    };
    let Ok(count @ 1..) = get_nodes(ptr::null_mut(), 0) else { return Ok(()) };
    let mut nodes = Table::<Place>::new(count).ok_or_else(|| quota::refuse_unnoted(name))?;
    let place = nodes.as_mut_slice().as_mut_ptr().cast::<CUgraphNode>();
    let Ok(count) = get_nodes(place, count) else { return Ok(()) };
    for &Place(node) in nodes.as_slice().iter().take(count) {
        // SAFETY: a node of the graph, and a place for its type.
        match real::cuGraphNodeGetType.ask(-1, |ask, kind| unsafe { ask(node, kind) }) {
            Ok(CU_GRAPH_NODE_TYPE_KERNEL) if limits::any_unpaid() => charge_node(node)?,
            Ok(CU_GRAPH_NODE_TYPE_MEM_ALLOC) => add_node(process, node, needs),
            Ok(CU_GRAPH_NODE_TYPE_GRAPH) if depth > 0 => {
                // SAFETY: a child graph node, and a place for the graph.
                let child = real::cuGraphChildGraphNodeGetGraph
                    .ask(ptr::null_mut(), |ask, child| unsafe { ask(node, child) });
                if let Ok(child) = child
                    && !child.is_null()
                {
                    add(process, name, child, needs, depth - 1)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn charge_node(node: CUgraphNode) -> Answer {
    let (new, old) = (&real::cuGraphKernelNodeGetParams_v2, &real::cuGraphKernelNodeGetParams);
    // SAFETY: numbers and pointers, for which zero is a value.
    let nothing: CUDA_KERNEL_NODE_PARAMS = unsafe { mem::zeroed() };
    // SAFETY: a kernel node, and a place for its parameters, of which those of before CUDA 12 are a part.
    let params = [new, old][usize::from(new.get().is_none())]
        .ask(nothing, |ask, params| unsafe { ask(node, params) });
    params.map_or(Ok(()), |params| limits::node(&params))
}

fn add_node(process: &'static Process, node: CUgraphNode, needs: &mut Needs) {
    // SAFETY: numbers and pointers, for which zero is a value.
    let nothing: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { mem::zeroed() };
    // SAFETY: an allocation node, and a place for its parameters.
    let params =
        real::cuGraphMemAllocNodeGetParams.ask(nothing, |ask, params| unsafe { ask(node, params) });
    let Ok(params) = params else { return };
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
