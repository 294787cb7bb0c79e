//! Texture and surface objects: CUDA Driver API, "Texture Object Management", "Surface Object
//! Management". They can be made and asked; kernels compute nothing, so nothing is sampled.

use super::{Array, Mipmap};
use crate::abi::{exports, get, put};
use crate::context::current;
use crate::driver::{driver, lock};
use crate::errors::Result;
use crate::handle::resolve;
use std::collections::BTreeMap;
use std::sync::Mutex;
use tessera_cuda::types::CUDA_ERROR_INVALID_VALUE;

/// `CUDA_RESOURCE_DESC`.
#[derive(Clone, Copy)]
#[repr(C)]
#[allow(missing_docs, reason = "cuda.h's structure")]
pub struct Resource {
    kind: u32,
    /// A handle or an address, then what describes it.
    what: [u64; 16],
    flags: u32,
}
const _: () = assert!(size_of::<Resource>() == 144);

/// `CUDA_TEXTURE_DESC`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Texture([u32; 26]);

/// `CUDA_RESOURCE_VIEW_DESC`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ResourceView([u64; 14]);

#[derive(Clone, Copy)]
struct Made {
    resource: Resource,
    texture: Option<Texture>,
    view: Option<ResourceView>,
}

static MADE: Mutex<(u64, BTreeMap<u64, Made>)> = Mutex::new((0, BTreeMap::new()));

fn check(r: &Resource) -> Result<()> {
    let handle = r.what[0] as *mut std::ffi::c_void;
    if r.flags != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match r.kind {
        0 => resolve::<Array>(handle).map(|_| ()),
        1 => resolve::<Mipmap>(handle).map(|_| ()),
        2 | 3 => {
            let memory = driver()?.memory();
            memory.find(r.what[0], 1).map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn make(out: *mut u64, made: Made) -> Result<()> {
    current()?;
    check(&made.resource)?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut all = lock(&MADE);
    all.0 += 1;
    let id = all.0;
    all.1.insert(id, made);
    put(out, id)
}

fn made(id: u64) -> Result<Made> {
    driver()?;
    lock(&MADE).1.get(&id).copied().ok_or(CUDA_ERROR_INVALID_VALUE)
}

fn destroy(id: u64) -> Result<()> {
    driver()?;
    lock(&MADE).1.remove(&id).map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
}

exports! {
    fn cuTexObjectCreate(out: *mut u64, resource: *const Resource, texture: *const Texture, view: *const ResourceView) {
        driver()?;
        let view = if view.is_null() { None } else { Some(get(view)?) };
        make(out, Made { resource: get(resource)?, texture: Some(get(texture)?), view })
    }
    fn cuTexObjectDestroy(object: u64) { destroy(object) }
    fn cuTexObjectGetResourceDesc(out: *mut Resource, object: u64) {
        put(out, made(object)?.resource)
    }
    fn cuTexObjectGetTextureDesc(out: *mut Texture, object: u64) {
        put(out, made(object)?.texture.ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }
    fn cuTexObjectGetResourceViewDesc(out: *mut ResourceView, object: u64) {
        put(out, made(object)?.view.ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }
    fn cuSurfObjectCreate(out: *mut u64, resource: *const Resource) {
        driver()?;
        let resource = get(resource)?;
        // "resType must be set to CU_RESOURCE_TYPE_ARRAY".
        if resource.kind != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        make(out, Made { resource, texture: None, view: None })
    }
    fn cuSurfObjectDestroy(object: u64) { destroy(object) }
    fn cuSurfObjectGetResourceDesc(out: *mut Resource, object: u64) {
        put(out, made(object)?.resource)
    }
}
