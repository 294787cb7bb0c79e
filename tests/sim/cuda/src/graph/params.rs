//! What is asked of nodes: by the shim, of what a graph would launch and obtain; by tests, of what a
//! capture made.

use super::kind::{Kernel, Kind};
use super::memory::Allocation;
use super::{CUgraph, CUgraphNode, Graph, Node};
use crate::abi::{exports, get, put};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{handle, resolve};
use std::ffi::{c_int, c_void};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v1,
    CUDA_MEM_ALLOC_NODE_PARAMS, CUmemLocation, CUmemPoolProps,
};

fn kind(node: CUgraphNode) -> Result<Kind> {
    driver()?;
    Ok(resolve::<Node>(node)?.kind())
}

impl Kernel {
    fn params(&self) -> CUDA_KERNEL_NODE_PARAMS_v1 {
        let ([gx, gy, gz], [bx, by, bz]) = (self.shape.grid, self.shape.block);
        CUDA_KERNEL_NODE_PARAMS_v1 {
            func: handle(self.function),
            shape: [gx, gy, gz, bx, by, bz, self.shared],
            kernelParams: self.params as *mut *mut c_void,
            extra: self.extra as *mut *mut c_void,
        }
    }
}

fn alloc_params(a: &Allocation) -> CUDA_MEM_ALLOC_NODE_PARAMS {
    CUDA_MEM_ALLOC_NODE_PARAMS {
        poolProps: CUmemPoolProps {
            allocType: 1,
            handleTypes: 0,
            location: CUmemLocation { r#type: 1, id: a.device.ordinal },
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        },
        accessDescs: std::ptr::null(),
        accessDescCount: 0,
        bytesize: usize::try_from(a.size).unwrap_or(usize::MAX),
        dptr: a.at,
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
    fn cuGraphKernelNodeGetParams(node: CUgraphNode, out: *mut CUDA_KERNEL_NODE_PARAMS_v1) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params()) } else { wrong() }
    }
    fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, out: *mut CUDA_KERNEL_NODE_PARAMS) {
        if let Kind::Kernel(k) = kind(node)? { put(out, k.params().into()) } else { wrong() }
    }
    fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, out: *mut c_void) {
        if let Kind::MemAlloc(a) = kind(node)? { put(out.cast(), alloc_params(&a)) } else { wrong() }
    }
}
