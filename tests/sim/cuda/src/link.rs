//! Linking: CUDA Driver API, "Module Management" (`cuLink…`).
//!
//! Nothing is compiled: PTX is put together as it is, and has the entries and variables of all
//! parts; with anything else among the parts the result is opaque, as any cubin is here.

use crate::abi::{exports, get, put, put_if};
use crate::context::current;
use crate::driver::{driver, lock};
use crate::errors::Result;
use crate::handle::{Header, enliven, handle, kill, object, resolve};
use crate::ptx::{self, ELF};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use tessera_cuda::types::{CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_VALUE};

/// `CU_JIT_INPUT_PTX`, and the greatest of `CU_JIT_INPUT_*`.
const PTX: c_int = 1;
const LAST_INPUT: c_int = 5;
/// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`, `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`: "on output, contains
/// the amount of log buffer filled".
const LOG_SIZES: [c_int; 2] = [4, 6];

#[repr(C)]
pub(crate) struct Link {
    header: Header,
    parts: Mutex<Parts>,
}

#[derive(Default)]
struct Parts {
    text: Vec<u8>,
    opaque: bool,
    /// "owned by the CUlinkState", until it is destroyed.
    complete: Option<Box<[u8]>>,
}

object!(Link, 0x4c49_4e4b);

type CUlinkState = *mut c_void;

fn add(link: CUlinkState, kind: c_int, bytes: &[u8]) -> Result<()> {
    let link: &Link = resolve(link)?;
    let mut parts = lock(&link.parts);
    if parts.complete.is_some() || !(0..=LAST_INPUT).contains(&kind) || bytes.is_empty() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if kind != PTX {
        parts.opaque = true;
        return Ok(());
    }
    if ptx::Image::of(bytes).is_none() {
        return Err(CUDA_ERROR_INVALID_IMAGE);
    }
    parts.text.extend_from_slice(bytes.strip_suffix(b"\0").unwrap_or(bytes));
    parts.text.push(b'\n');
    Ok(())
}

exports! {
    fn cuLinkCreate, cuLinkCreate_v2(count: c_uint, options: *const c_int, values: *mut usize, out: *mut CUlinkState) {
        current()?;
        for i in 0..count as usize {
            if LOG_SIZES.contains(&get(options.wrapping_add(i))?) {
                put(values.wrapping_add(i), 0)?;
            }
        }
        let link = Link { header: Header::new(), parts: Mutex::default() };
        put(out, handle(enliven(Box::leak(Box::new(link)))))
    }
    fn cuLinkAddData, cuLinkAddData_v2(link: CUlinkState, kind: c_int, data: *const c_void, size: usize, _name: *const c_char, _count: c_uint, _options: *const c_int, _values: *mut usize) {
        driver()?;
        if data.is_null() || size == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller promises `size` readable bytes.
        add(link, kind, unsafe { std::slice::from_raw_parts(data.cast(), size) })
    }
    fn cuLinkComplete(link: CUlinkState, image: *mut *const c_void, size: *mut usize) {
        driver()?;
        let link: &Link = resolve(link)?;
        let mut parts = lock(&link.parts);
        if parts.text.is_empty() && !parts.opaque {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let bytes = if parts.opaque {
            let mut cubin = vec![0u8; 64];
            cubin[..4].copy_from_slice(&ELF);
            cubin
        } else {
            let mut text = std::mem::take(&mut parts.text);
            text.push(0);
            text
        };
        let complete = parts.complete.get_or_insert(bytes.into_boxed_slice());
        put(image, complete.as_ptr().cast())?;
        put_if(size, complete.len());
        Ok(())
    }
    fn cuLinkDestroy(link: CUlinkState) {
        driver()?;
        let link: &'static Link = resolve(link)?;
        if kill(link) {
            *lock(&link.parts) = Parts::default();
        }
        Ok(())
    }
}
