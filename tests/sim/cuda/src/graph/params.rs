//! What is asked of nodes: by the shim, of what a graph would launch and obtain; by tests, of what a
//! capture made.

use super::kind::{AllocParams, Kernel, KernelParams, KernelParamsV2, Kind};
use super::memory::Allocation;
use super::{CUgraph, CUgraphNode, Graph, Node};
use crate::abi::{exports, get, put};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{handle, resolve};
use std::ffi::{c_int, c_void};
use tessera_cuda::types::CUDA_ERROR_INVALID_VALUE;

fn kind(node: CUgraphNode) -> Result<Kind> {
    driver()?;
    Ok(resolve::<Node>(node)?.kind())
}

impl Kernel {
    fn params(&self) -> KernelParams {
        KernelParams {
            function: handle(self.function),
            grid: self.shape.grid,
            block: self.shape.block,
            shared: self.shared,
            params: self.params as *mut *mut c_void,
            extra: self.extra as *mut *mut c_void,
        }
    }
}

fn alloc_params(a: &Allocation) -> AllocParams {
    AllocParams {
        kind: 1,
        handles: 0,
        location: 1,
        location_id: a.device.ordinal,
        security: 0,
        max_size: 0,
        usage: 0,
        reserved: [0; 54],
        access: std::ptr::null(),
        access_count: 0,
        bytes: usize::try_from(a.size).unwrap_or(usize::MAX),
        at: a.at,
    }
}

/// Writes a list of handles as `cuGraphGetNodes` describes: the number if there is nowhere to
/// write, else as many as fit, null behind the last, and how many there were.
fn put_list(all: Vec<&'static Node>, out: *mut CUgraphNode, count: *mut usize) -> Result<()> {
    if out.is_null() {
        return put(count, all.len());
    }
    let room = get(count)?;
    for i in 0..room {
        let node = all.get(i).map_or(std::ptr::null_mut(), |node| handle(*node));
        put(out.wrapping_add(i), node)?;
    }
    put(count, room.min(all.len()))
}

fn wrong<T>() -> Result<T> {
    Err(CUDA_ERROR_INVALID_VALUE)
}

exports! {
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        driver()?;
        put_list(resolve::<Graph>(graph)?.nodes(), nodes, count)
    }
    fn cuGraphNodeGetDependencies(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) {
        driver()?;
        put_list(resolve::<Node>(node)?.after(), nodes, count)
    }
    fn cuGraphNodeGetType(node: CUgraphNode, out: *mut c_int) {
        put(out, kind(node)?.number())
    }
    fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph) {
        if let Kind::Child(own) = kind(node)? { put(graph, handle(own)) } else { wrong() }
    }
    fn cuGraphKernelNodeGetParams(node: CUgraphNode, out: *mut KernelParams) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params()) } else { wrong() }
    }
    fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, out: *mut KernelParamsV2) {
        let null = std::ptr::null_mut();
        match kind(node)? {
            Kind::Kernel(k) => put(out, KernelParamsV2 { v1: k.params(), kernel: null, context: null }),
            _ => wrong(),
        }
    }
    fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, out: *mut c_void) {
        if let Kind::MemAlloc(a) = kind(node)? { put(out.cast(), alloc_params(&a)) } else { wrong() }
    }
}
