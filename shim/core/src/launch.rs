//! Launch hooks: through the gate, then to the driver. All variants share this body, because
//! nothing in a launch's arguments changes what the gate decides.

use crate::gate;
use crate::real::Real;
use tessera_cuda::types::{CUDA_ERROR_NOT_FOUND, CUresult};

/// Forwards a launch. `call` hands the caller's own arguments to the driver's function.
#[inline(always)]
pub fn launch<F: Copy>(real: &Real<F>, call: impl FnOnce(F) -> CUresult) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    match gate::admit() {
        Ok(_pass) => call(real),
        Err(refusal) => refusal,
    }
}
