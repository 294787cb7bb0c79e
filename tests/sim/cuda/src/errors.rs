//! The `CUresult`s that this driver returns, or the shim in its place, with their names: CUDA Driver API, "Error Handling".

use crate::abi::{exports, put};
use std::ffi::{CStr, c_char};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUresult};

pub(crate) type Result<T> = std::result::Result<T, CUresult>;

const NAMES: &[(CUresult, &CStr)] = &[
    (0, c"CUDA_SUCCESS"),
    (1, c"CUDA_ERROR_INVALID_VALUE"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED"),
    (4, c"CUDA_ERROR_DEINITIALIZED"),
    (100, c"CUDA_ERROR_NO_DEVICE"),
    (101, c"CUDA_ERROR_INVALID_DEVICE"),
    (200, c"CUDA_ERROR_INVALID_IMAGE"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT"),
    (205, c"CUDA_ERROR_MAP_FAILED"),
    (215, c"CUDA_ERROR_UNSUPPORTED_LIMIT"),
    (400, c"CUDA_ERROR_INVALID_HANDLE"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE"),
    (500, c"CUDA_ERROR_NOT_FOUND"),
    (600, c"CUDA_ERROR_NOT_READY"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
    (800, c"CUDA_ERROR_NOT_PERMITTED"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE"),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"),
    (904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED"),
    (905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    (907, c"CUDA_ERROR_CAPTURED_EVENT"),
    (908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"),
    (910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"),
    (914, c"CUDA_ERROR_INVALID_RESOURCE_TYPE"),
    (915, c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"),
    (917, c"CUDA_ERROR_STREAM_DETACHED"),
    (999, c"CUDA_ERROR_UNKNOWN"),
];

exports! {
    fn cuGetErrorName(error: CUresult, text: *mut *const c_char) {
        let found = NAMES.iter().find(|(code, _)| *code == error);
        put(text, found.map_or(std::ptr::null(), |(_, name)| name.as_ptr()))?;
        found.map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}
