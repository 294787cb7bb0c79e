//! `cuInit`: where absence closes, and where the plugin first hears of the process.
#![allow(non_snake_case, reason = "hooks carry the driver's own names")]

use crate::real::Real;
use crate::state::{self, Standing};
use crate::thread::Depth;
use core::ffi::c_uint;
use tessera_cuda::types::*;

/// CUDA Driver API, "Initialization".
///
/// # Safety
/// As the driver's.
pub unsafe fn cuInit(
    real: &Real<unsafe extern "C" fn(c_uint) -> CUresult>,
    flags: c_uint,
) -> CUresult {
    let Some(real) = real.get() else { return CUDA_ERROR_NOT_FOUND };
    let depth = Depth::enter();
    if depth.is_some() && matches!(state::standing_at_init(), Standing::Closed) {
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    // SAFETY: the caller's own argument.
    unsafe { real(flags) }
}
