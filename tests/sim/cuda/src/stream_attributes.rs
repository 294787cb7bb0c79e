//! Attributes of streams: CUDA Driver API, `cuStreamSetAttribute`. They are kept; none changes how long
//! anything takes.

use crate::abi::{exports_both, get, put};
use crate::driver::lock;
use crate::errors::Result;
use crate::stream::{HIGHEST_PRIORITY, Stream, peek};
use std::ffi::{c_int, c_void};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUstream};

/// `CUaccessPolicyWindow`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Window {
    base: u64,
    bytes: usize,
    hit_ratio: f32,
    hit: c_int,
    miss: c_int,
}
const _: () = assert!(size_of::<Window>() == 32);

/// What a stream has besides its priority.
#[derive(Clone, Copy)]
pub(crate) struct Attributes {
    window: Window,
    synchronization: c_int,
    /// `CUlaunchMemSyncDomainMap`: default, remote.
    domains: [u8; 2],
    domain: c_int,
}

impl Attributes {
    /// What a stream begins with: `CU_SYNC_POLICY_AUTO`, no window, "the default domain is 0 and the
    /// remote domain is 1".
    pub(crate) const DEFAULT: Attributes = Attributes {
        window: Window { base: 0, bytes: 0, hit_ratio: 0.0, hit: 0, miss: 0 },
        synchronization: 1,
        domains: [0, 1],
        domain: 0,
    };
}

/// `CU_STREAM_ATTRIBUTE_*`.
mod id {
    pub(super) const WINDOW: i32 = 1;
    pub(super) const SYNCHRONIZATION: i32 = 3;
    pub(super) const PRIORITY: i32 = 8;
    pub(super) const DOMAIN_MAP: i32 = 9;
    pub(super) const DOMAIN: i32 = 10;
}

/// Writes an attribute as wide as its member of `CUstreamAttrValue` is.
fn read(s: &Stream, which: c_int, out: *mut c_void) -> Result<()> {
    let now = *lock(s.attributes());
    match which {
        id::WINDOW => put(out.cast(), now.window),
        id::SYNCHRONIZATION => put(out.cast(), now.synchronization),
        id::PRIORITY => put(out.cast(), s.chosen_priority()),
        id::DOMAIN_MAP => put(out.cast(), now.domains),
        id::DOMAIN => put(out.cast(), now.domain),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn write(s: &Stream, which: c_int, value: *const c_void) -> Result<()> {
    let mut now = lock(s.attributes());
    match which {
        id::WINDOW => {
            let window: Window = get(value.cast())?;
            // Normal, streaming, persisting; "must be either CU_ACCESS_PROPERTY_NORMAL or …_STREAMING".
            let wrong = !(0..=2).contains(&window.hit) || !(0..=1).contains(&window.miss);
            if wrong || !(0.0..=1.0).contains(&window.hit_ratio) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            now.window = window;
        }
        id::SYNCHRONIZATION => {
            let policy: c_int = get(value.cast())?;
            if !(1..=4).contains(&policy) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            now.synchronization = policy;
        }
        id::PRIORITY => {
            let priority: c_int = get(value.cast())?;
            if !(HIGHEST_PRIORITY..=0).contains(&priority) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            s.set_priority(priority);
        }
        id::DOMAIN_MAP => now.domains = get(value.cast())?,
        id::DOMAIN => {
            let domain: c_int = get(value.cast())?;
            if !(0..=1).contains(&domain) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            now.domain = domain;
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    Ok(())
}

exports_both! {
    fn cuStreamGetAttribute, cuStreamGetAttribute_ptsz(s: CUstream, which: c_int, out: *mut c_void) |flavour| {
        read(peek(s, flavour)?, which, out)
    }
    fn cuStreamSetAttribute, cuStreamSetAttribute_ptsz(s: CUstream, which: c_int, value: *const c_void) |flavour| {
        write(peek(s, flavour)?, which, value)
    }
    // "Both streams must have the same context."
    fn cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz(dst: CUstream, src: CUstream) |flavour| {
        let (dst, src) = (peek(dst, flavour)?, peek(src, flavour)?);
        if !std::ptr::eq(dst.context(), src.context()) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let copied = *lock(src.attributes());
        *lock(dst.attributes()) = copied;
        dst.set_priority(src.chosen_priority());
        Ok(())
    }
}
