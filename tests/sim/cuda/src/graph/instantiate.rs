//! The ways to make an executable graph.

use super::exec::Exec;
use super::{CUgraph, CUgraphNode, Graph};
use crate::abi::{exports, exports_both, get, put, put_if, put_text};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{handle, resolve};
use crate::stream::stream;
use std::ffi::c_char;
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
fn with_flags(out: *mut CUgraphExec, graph: CUgraph, flags: u64) -> Result<()> {
    driver()?;
    let graph: &'static Graph = resolve(graph)?;
    if out.is_null() || flags & !flag::ALL != 0 || flags & flag::EXCLUSIVE == flag::EXCLUSIVE {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let exec = Exec::create(graph, flags & !flag::UPLOAD).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    put(out, handle(exec))
}

exports! {
    fn cuGraphInstantiate, cuGraphInstantiate_v2(out: *mut CUgraphExec, graph: CUgraph, error: *mut CUgraphNode, log: *mut c_char, len: usize) {
        put_if(error, std::ptr::null_mut());
        let made = with_flags(out, graph, 0);
        if made.is_err() && !log.is_null() && len > 0 {
            let len = i32::try_from(len).unwrap_or(i32::MAX);
            put_text(log, len, "the graph has an executable graph already, or is no graph to launch")?;
        }
        made
    }
    fn cuGraphInstantiateWithFlags(out: *mut CUgraphExec, graph: CUgraph, flags: u64) {
        // "Only supported by cuGraphInstantiateWithParams."
        if flags & flag::UPLOAD != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        with_flags(out, graph, flags)
    }
}

exports_both! {
    fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(out: *mut CUgraphExec, graph: CUgraph, params: *mut Params) |flavour| {
        let p = get(params)?;
        let mut made = with_flags(out, graph, p.flags);
        if made.is_ok() && p.flags & flag::UPLOAD != 0 {
            let exec: &'static Exec = resolve(get(out)?)?;
            made = stream(p.hUploadStream, flavour).and_then(|s| exec.upload(s));
            if made.is_err() {
                exec.destroy();
            }
        }
        // CUDA_GRAPH_INSTANTIATE_SUCCESS, …_ERROR.
        let result_out = i32::from(made.is_err());
        put(params, Params { result_out, hErrNode_out: std::ptr::null_mut(), ..p })?;
        made
    }
}
