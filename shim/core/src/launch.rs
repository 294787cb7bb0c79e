//! Launch hooks: through the gate, then to the driver. All variants share this body, because
//! nothing in a launch's arguments changes what the gate decides.

use crate::gate::{self, Busy, Stream};
use crate::graphs;
use crate::limits;
use crate::real::Real;
use crate::state;
use tessera_cuda::types::{CUDA_ERROR_NOT_FOUND, CUfunction, CUresult};

/// The hot path: the driver's function and, for a tenant, the right to call it while the flag is up. `None` says
/// nothing but "ask [`otherwise`]".
#[inline(always)]
pub fn at_once<F: Copy>(real: &Real<F>, stream: Stream) -> Option<(F, Option<Busy>)> {
    if limits::any_unpaid() {
        return None;
    }
    admitted_at_once(real, stream)
}

#[inline(always)]
fn admitted_at_once<F: Copy>(real: &Real<F>, stream: Stream) -> Option<(F, Option<Busy>)> {
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
    admitted_at_once(real, stream)
}

/// Forwards any launch of `kernel`. `call` hands the caller's own arguments to the driver's function.
pub fn otherwise<F: Copy>(
    real: &Real<F>,
    kernel: CUfunction,
    stream: Stream,
    call: impl FnOnce(F) -> CUresult,
) -> CUresult {
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    if limits::any_unpaid()
        && let Err(refusal) = limits::launching(kernel, stream)
    {
        return refusal;
    }
    match gate::admit(stream) {
        Ok(_pass) => call(function),
        Err(refusal) => refusal,
    }
}

/// Forwards a launch of several kernels into a stream each.
pub fn on_several<F: Copy>(
    real: &Real<F>,
    mut launches: impl Iterator<Item = (CUfunction, Stream)> + Clone,
    call: impl FnOnce(F) -> CUresult,
) -> CUresult {
    let Some(function) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    let streams = launches.clone().map(|(_, stream)| stream);
    if limits::any_unpaid()
        && let Err(refusal) =
            launches.try_for_each(|(kernel, stream)| limits::launching(kernel, stream))
    {
        return refusal;
    }
    match gate::admit_several(streams) {
        Ok(_pass) => call(function),
        Err(refusal) => refusal,
    }
}
