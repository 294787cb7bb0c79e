//! Stream capture: CUDA Driver API, "Stream Management"; CUDA Programming Guide, "Stream Capture".
//!
//! Work submitted to a capturing stream becomes nodes of the sequence's graph. [`sequence`] is the
//! state of all captures and how work, forks and joins change it; [`rules`] says whom a capture
//! prohibits what, [`unsafe_calls`] which calls those are; [`calls`] are the exports. Programs that never capture pay one load of a
//! flag per call.

pub(crate) mod calls;
pub(crate) mod rules;
pub(crate) mod sequence;
mod unsafe_calls;

pub(crate) use rules::{permit_context, permit_legacy};
pub(crate) use sequence::{add, alloc, fail, forget_event, free, is_captured, record, wait};
pub(crate) use unsafe_calls::{Call, permit};

use tessera_cuda::types::CUresult;

/// "The operation is not permitted when the stream is capturing."
pub(crate) const UNSUPPORTED: CUresult = 900;
const INVALIDATED: CUresult = 901;
const MERGE: CUresult = 902;
const UNMATCHED: CUresult = 903;
const UNJOINED: CUresult = 904;
const ISOLATION: CUresult = 905;
const IMPLICIT: CUresult = 906;
const CAPTURED_EVENT: CUresult = 907;
const WRONG_THREAD: CUresult = 908;
const ILLEGAL_STATE: CUresult = 401;

/// `CU_STREAM_CAPTURE_MODE_*`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nobody but relaxed threads may make unsafe calls.
    Global = 0,
    /// This thread may not.
    ThreadLocal = 1,
    /// Everybody may.
    Relaxed = 2,
}

impl Mode {
    fn of(number: i32) -> Option<Mode> {
        [Mode::Global, Mode::ThreadLocal, Mode::Relaxed].into_iter().find(|m| *m as i32 == number)
    }
}
