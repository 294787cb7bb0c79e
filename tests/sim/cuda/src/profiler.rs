//! Profiler control: CUDA Driver API, the section of that name. No profiler runs beside.

use crate::abi::exports;
use crate::context::current;
use crate::driver::driver;
use std::ffi::{c_char, c_int};
use tessera_cuda::types::CUDA_ERROR_NOT_SUPPORTED;

exports! {
    // "Deprecated": since CUDA 11 no driver initialises a profiler so.
    fn cuProfilerInitialize(_config: *const c_char, _output: *const c_char, _mode: c_int) {
        driver()?;
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuProfilerStart() { current().map(|_| ()) }
    fn cuProfilerStop() { current().map(|_| ()) }
}
