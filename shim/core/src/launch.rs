//! Launch hooks: through the gate, then to the driver. All variants share this body, because
//! nothing in a launch's arguments changes what the gate decides.

use crate::gate::{self, Busy, Stream};
use crate::graphs;
use crate::real::Real;
use crate::state;
use tessera_cuda::types::{CUDA_ERROR_NOT_FOUND, CUresult};

/// The hot path: the driver's function and, for a tenant, the right to call it while the flag is up. `None` says
/// nothing but "ask [`otherwise`]".
#[inline(always)]
pub fn at_once<F: Copy>(real: &Real<F>, stream: Stream) -> Option<(F, Option<Busy>)> {
    let function = real.bound()?;
    let busy = gate::admit_at_once(stream, true);
    (busy.is_some() || state::passes()).then_some((function, busy))
}

/// As [`at_once`], for graph launches: one that may take memory goes the other way.
#[inline(always)]
pub fn graph_at_once<F: Copy>(real: &Real<F>, stream: Stream) -> Option<(F, Option<Busy>)> {
    if graphs::any_with_memory() {
        return None;
    }
    at_once(real, stream)
}

/// Forwards any launch. `call` hands the caller's own arguments to the driver's function.
pub fn otherwise<F: Copy>(
    real: &Real<F>,
    stream: Stream,
    call: impl FnOnce(F) -> CUresult,
) -> CUresult {
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    match gate::admit(stream) {
        Ok(_pass) => call(function),
        Err(refusal) => refusal,
    }
}

/// Forwards a launch into several streams.
pub fn on_several<F: Copy>(
    real: &Real<F>,
    streams: impl Iterator<Item = Stream> + Clone,
    call: impl FnOnce(F) -> CUresult,
) -> CUresult {
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    match gate::admit_several(streams) {
        Ok(_pass) => call(function),
        Err(refusal) => refusal,
    }
}
