//! System queries and error strings: NVML API Reference, "System Queries", "Error reporting".

use crate::abi::{exports, put, put_text};
use crate::state::session;
use std::ffi::{CStr, c_char, c_int, c_uint};
use tessera_cuda::nvml::{NVML_ERROR_NOT_FOUND, nvmlReturn_t};

const ERRORS: &[(nvmlReturn_t, &CStr)] = &[
    (0, c"Success"),
    (1, c"Uninitialized"),
    (2, c"Invalid Argument"),
    (3, c"Not Supported"),
    (4, c"Insufficient Permissions"),
    (5, c"Already Initialized"),
    (6, c"Not Found"),
    (7, c"Insufficient Size"),
    (8, c"Insufficient External Power"),
    (9, c"Driver Not Loaded"),
    (10, c"Timeout"),
    (11, c"Interrupt Request Issue"),
    (12, c"NVML Shared Library Not Found"),
    (13, c"Function Not Found"),
    (14, c"Corrupted infoROM"),
    (15, c"GPU is lost"),
    (16, c"GPU requires reset"),
    (17, c"GPU access blocked by the operating system"),
    (18, c"Driver/library version mismatch"),
    (19, c"In use by another client"),
    (20, c"Insufficient Memory"),
    (21, c"No data"),
    (22, c"VGPU ECC not supported"),
    (23, c"Insufficient resources"),
    (24, c"Frequency not supported"),
    (25, c"Argument version mismatch"),
    (26, c"Deprecated"),
    (27, c"Not ready"),
    (28, c"GPU not found"),
    (29, c"Invalid state"),
];

/// The text of an error; as the real one, never null.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "NVML's own name")]
pub extern "C" fn nvmlErrorString(error: nvmlReturn_t) -> *const c_char {
    let found = ERRORS.binary_search_by_key(&error, |e| e.0);
    found.map_or(c"Unknown Error", |i| ERRORS[i].1).as_ptr()
}

exports! {
    fn nvmlSystemGetDriverVersion(text: *mut c_char, len: c_uint) {
        put_text(text, len, &session()?.config().driver_version)
    }
    fn nvmlSystemGetNVMLVersion(text: *mut c_char, len: c_uint) {
        let config = session()?.config();
        put_text(text, len, &format!("{}.{}", config.cuda_version / 1000, config.driver_version))
    }
    fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) {
        put(version, c_int::try_from(session()?.config().cuda_version).unwrap_or(c_int::MAX))
    }
    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) {
        put(version, c_int::try_from(session()?.config().cuda_version).unwrap_or(c_int::MAX))
    }
    fn nvmlSystemGetProcessName(pid: c_uint, text: *mut c_char, len: c_uint) {
        session()?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NVML_ERROR_NOT_FOUND)?;
        let name = String::from_utf8_lossy(line.split(|b| *b == 0).next().unwrap_or(&[])).into_owned();
        // "… the name is truncated" to what fits with its terminator.
        let room = (len as usize).saturating_sub(1).min(name.len());
        let cut = (0..=room).rev().find(|&n| name.is_char_boundary(n)).unwrap_or(0);
        put_text(text, len, &name[..cut])
    }
    fn nvmlUnitGetCount(count: *mut c_uint) {
        session()?;
        put(count, 0)
    }
}
