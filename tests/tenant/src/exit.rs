//! Exit codes, so that a test or a pod's status says what happened.

use tessera_cuda::types::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};

/// All went as asked.
pub const OK: i32 = 0;
/// Out of memory where none was expected.
pub const OUT_OF_MEMORY: i32 = 2;
/// Any other driver error.
pub const DRIVER: i32 = 3;
/// Data came back changed.
pub const CORRUPTED: i32 = 4;
/// `libcuda.so.1` is missing.
pub const NO_DRIVER: i32 = 5;
/// More memory was granted than `--at-most`.
pub const EXCEEDED: i32 = 6;
/// `EX_USAGE` of sysexits.h.
pub const USAGE: i32 = 64;

#[derive(Debug)]
pub struct Exit {
    /// One of this module's constants, or 128 + signal.
    pub code: i32,
    /// One line for standard error; empty where the JSON said all.
    pub message: String,
}

impl Exit {
    pub fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct CudaError {
    pub call: &'static str,
    pub code: CUresult,
}

impl CudaError {
    /// Whether the driver, or the shim in its place, said `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn is_out_of_memory(self) -> bool {
        self.code == CUDA_ERROR_OUT_OF_MEMORY
    }
}

impl From<CudaError> for Exit {
    fn from(error: CudaError) -> Self {
        let code = if error.is_out_of_memory() { OUT_OF_MEMORY } else { DRIVER };
        Self::new(code, format!("{} returned {}", error.call, error.code))
    }
}
