//! The exports of stream capture.

use super::sequence::{begin, captures, end};
use super::{Mode, exchange, permit_legacy};
use crate::abi::{exports, exports_both, get, put, put_if};
use crate::driver::driver;
use crate::errors::Result;
use crate::graph::add::nodes;
use crate::graph::kind::Edge;
use crate::graph::{CUgraph, CUgraphNode};
use crate::handle::{handle, resolve};
use crate::stream::{Flavour, peek};
use std::ffi::c_int;
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUstream};

const ACTIVE: c_int = 1;
const INVALIDATED: c_int = 2;

fn start(s: CUstream, flavour: Flavour, mode: c_int) -> Result<()> {
    driver()?;
    let mode = Mode::of(mode).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    begin(peek(s, flavour)?, mode, None)
}

fn start_in_graph(
    s: CUstream,
    flavour: Flavour,
    (graph, deps, count): (CUgraph, *const CUgraphNode, usize),
    mode: c_int,
) -> Result<()> {
    driver()?;
    let mode = Mode::of(mode).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let tips = nodes(deps, count)?;
    begin(peek(s, flavour)?, mode, Some((resolve(graph)?, tips)))
}

fn finish(s: CUstream, flavour: Flavour, out: *mut CUgraph) -> Result<()> {
    driver()?;
    let s = peek(s, flavour)?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    put(out, std::ptr::null_mut())?;
    put(out, handle(end(s)?))
}

exports! {
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        driver()?;
        let new = Mode::of(get(mode)?).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        put(mode, exchange(new) as c_int)
    }
}

exports_both! {
    fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz(s: CUstream) |flavour| {
        start(s, flavour, Mode::Global as c_int)
    }
    fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(s: CUstream, mode: c_int) |flavour| {
        start(s, flavour, mode)
    }
    fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(s: CUstream, graph: CUgraph, deps: *const CUgraphNode, _data: *const Edge, count: usize, mode: c_int) |flavour| {
        start_in_graph(s, flavour, (graph, deps, count), mode)
    }
    fn cuStreamEndCapture, cuStreamEndCapture_ptsz(s: CUstream, out: *mut CUgraph) |flavour| {
        finish(s, flavour, out)
    }
    fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz(s: CUstream, out: *mut c_int) |flavour| {
        let s = peek(s, flavour)?;
        if s.is_legacy() {
            permit_legacy(s.context(), true)?;
        }
        put(out, captures().of(s).map_or(0, |(_, c)| if c.invalid { INVALIDATED } else { ACTIVE }))
    }
    fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(s: CUstream, status: *mut c_int, id: *mut u64, graph: *mut CUgraph, nodes: *mut *const CUgraphNode, edges: *mut *const Edge, count: *mut usize) |flavour| {
        let s = peek(s, flavour)?;
        if s.is_legacy() {
            permit_legacy(s.context(), true)?;
        }
        if status.is_null() || (nodes.is_null() && !edges.is_null()) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut all = captures();
        let Some((own, sequence)) = all.of(s) else { return put(status, 0) };
        if sequence.invalid {
            return put(status, INVALIDATED);
        }
        put_if(id, own);
        put_if(graph, handle(sequence.graph));
        let (participant, _) = all.active(s)?;
        let tips = participant.tips.iter().map(|tip| handle(*tip) as usize).collect();
        participant.list = (tips, vec![Edge::default(); participant.tips.len()].into());
        put_if(nodes, participant.list.0.as_ptr().cast());
        put_if(edges, participant.list.1.as_ptr());
        put_if(count, participant.tips.len());
        put(status, ACTIVE)
    }
}
