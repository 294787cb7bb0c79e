//! The ways to make an executable graph.

use super::exec::{Exec, Refusal};
use super::{CUgraph, CUgraphNode, Graph};
use crate::abi::{exports, exports_both, get, put, put_if, put_text};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{handle, resolve};
use crate::stream::stream;
use std::ffi::{c_char, c_int};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_GRAPH_INSTANTIATE_PARAMS as Params, CUgraphExec,
};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_*`.
mod flag {
    pub(super) const UPLOAD: u64 = 2;
    /// Automatic free and device launch, which exclude each other.
    pub(super) const EXCLUSIVE: u64 = 1 | 4;
    pub(super) const ALL: u64 = 15;
}

/// `cuGraphInstantiateWithFlags`.
fn with_flags(out: *mut CUgraphExec, graph: CUgraph, flags: u64) -> Result<Option<Refusal>> {
    driver()?;
    let graph: &'static Graph = resolve(graph)?;
    if out.is_null() || flags & !flag::ALL != 0 || flags & flag::EXCLUSIVE == flag::EXCLUSIVE {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match Exec::create(graph, flags & !flag::UPLOAD) {
        Ok(exec) => put(out, handle(exec)).map(|()| None),
        Err(refusal) => Ok(Some(refusal)),
    }
}

/// The forms of before CUDA 12.
fn with_log(
    out: *mut CUgraphExec,
    graph: CUgraph,
    error: *mut CUgraphNode,
    log: *mut c_char,
    len: usize,
) -> Result<()> {
    put_if(error, std::ptr::null_mut());
    match with_flags(out, graph, 0)? {
        None => Ok(()),
        Some(refusal) => {
            put_if(error, refusal.node.map_or(std::ptr::null_mut(), handle));
            if !log.is_null() && len > 0 {
                let len = i32::try_from(len).unwrap_or(i32::MAX);
                put_text(log, len, "the graph has a cycle, or an executable graph already")?;
            }
            Err(CUDA_ERROR_INVALID_VALUE)
        }
    }
}

exports! {
    fn cuGraphInstantiate(out: *mut CUgraphExec, graph: CUgraph, error: *mut CUgraphNode, log: *mut c_char, len: usize) {
        with_log(out, graph, error, log, len)
    }
    fn cuGraphInstantiate_v2(out: *mut CUgraphExec, graph: CUgraph, error: *mut CUgraphNode, log: *mut c_char, len: usize) {
        with_log(out, graph, error, log, len)
    }
    fn cuGraphInstantiateWithFlags(out: *mut CUgraphExec, graph: CUgraph, flags: u64) {
        // "Only supported by cuGraphInstantiateWithParams."
        if flags & flag::UPLOAD != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        match with_flags(out, graph, flags)? {
            None => Ok(()),
            Some(_) => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

exports_both! {
    fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(out: *mut CUgraphExec, graph: CUgraph, params: *mut Params) |flavour| {
        const ERROR: c_int = 1;
        let p = get(params)?;
        let answer = |result, node| put(params, Params { result_out: result, hErrNode_out: node, ..p });
        let null = std::ptr::null_mut();
        match with_flags(out, graph, p.flags) {
            Ok(None) => {}
            Ok(Some(refusal)) => {
                answer(refusal.result, refusal.node.map_or(null, handle))?;
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            Err(code) => {
                answer(ERROR, null)?;
                return Err(code);
            }
        }
        if p.flags & flag::UPLOAD != 0 {
            let exec: &'static Exec = resolve(get(out)?)?;
            let uploaded = stream(p.hUploadStream, flavour).and_then(|s| exec.upload(s));
            if let Err(code) = uploaded {
                exec.destroy();
                answer(ERROR, null)?;
                return Err(code);
            }
        }
        answer(0, null)
    }
}
