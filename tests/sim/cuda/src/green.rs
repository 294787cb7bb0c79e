//! Green contexts: CUDA Driver API, the section of that name.
//!
//! A green context retains its device's primary context and is current as a view of it: memory and
//! code that are obtained in it belong to the primary context, streams made in it are its own and run
//! on as many multiprocessors as it was given. Partitions are numbers only: two of them do not run at
//! one time, as nothing of one process does here.

use crate::abi::{
    Header, Result, enliven, exports, get, handle, kill, object, put, put_if, resolve,
};
use crate::capture;
use crate::context::{Context, release_primary, retain_primary};
use crate::driver::{Device, driver};
use crate::stream::{Stream, peek};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUcontext,
    CUdevice, CUresult, CUstream,
};

const CUDA_ERROR_INVALID_RESOURCE_TYPE: CUresult = 914;
const CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: CUresult = 915;
/// `CU_DEV_RESOURCE_TYPE_*`.
const SM: c_int = 1;
/// `CU_DEV_SM_RESOURCE_SPLIT_*`.
const IGNORE_COSCHEDULING: c_uint = 1;
const SPLIT_FLAGS: c_uint = 3;
const MAGIC: u64 = u64::from_le_bytes(*b"SIMGPUSM");

/// `CUdevResource`: a type, padding that is the driver's own, a union of 40 bytes, and a link.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Resource {
    kind: c_int,
    pad: c_int,
    /// What made it: where it comes from.
    magic: u64,
    device: c_int,
    align: u32,
    /// The split that made it; 0: none did.
    split: u64,
    rest: [u64; 8],
    /// Multiprocessors, the least of a partition, alignment, flags, locality.
    value: [u32; 10],
    next: u64,
}
const _: () = assert!(size_of::<Resource>() == 144 && std::mem::offset_of!(Resource, value) == 96);

impl Resource {
    fn sms(device: &Device, count: u32, split: u64, align: u32) -> Resource {
        let mut value = [0; 10];
        value[..3].copy_from_slice(&[count, least(device), align]);
        Resource {
            kind: SM,
            magic: MAGIC,
            device: device.ordinal,
            align,
            split,
            value,
            ..Resource::default()
        }
    }

    /// The resource that a caller hands in, with its device and multiprocessors.
    fn given(from: *const Resource) -> Result<(Resource, &'static Device, u32)> {
        let resource = get(from)?;
        if resource.kind != SM {
            return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
        }
        let device = driver()?.device(resource.device).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        if resource.magic != MAGIC || resource.value[0] > device.config.sm_count {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok((resource, device, resource.value[0]))
    }
}

/// The least partition, which is also its alignment: 8 on compute capability 9.0 and above, else 2.
fn least(device: &Device) -> u32 {
    if device.config.compute_capability.0 >= 9 { 8 } else { 2 }
}

fn next_split() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// `cuDevSmResourceSplitByCount`: equal groups, and what remains.
fn split_by_count(
    out: *mut Resource,
    groups: *mut c_uint,
    input: *const Resource,
    remainder: *mut Resource,
    flags: c_uint,
    least_wanted: u32,
) -> Result<()> {
    let (resource, device, total) = Resource::given(input)?;
    let wanted = get(groups)?;
    if flags & !SPLIT_FLAGS != 0 || least_wanted > total {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // "the output results cannot be split again without first creating … a green context".
    if resource.split != 0 {
        return Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    }
    let align = if flags & IGNORE_COSCHEDULING != 0 { 2 } else { least(device) };
    let size = least_wanted.max(align).next_multiple_of(align);
    let most = total / size;
    if out.is_null() {
        return put(groups, most);
    }
    let count = wanted.min(most);
    if count == 0 {
        return Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    }
    let split = next_split();
    for i in 0..count as usize {
        put(out.wrapping_add(i), Resource::sms(device, size, split, align))?;
    }
    put_if(
        remainder,
        match total - count * size {
            0 => Resource::default(),
            rest => Resource::sms(device, rest, split, align),
        },
    );
    put(groups, count)
}

/// A resource descriptor. "… will remain valid for the lifetime of the process."
#[repr(C)]
struct Descriptor {
    header: Header,
    device: &'static Device,
    sms: u32,
}

object!(Descriptor, 0x4752_4453, CUDA_ERROR_INVALID_VALUE);

fn describe(resources: *const Resource, count: c_uint) -> Result<&'static Descriptor> {
    if count == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut found: Option<(Resource, &'static Device)> = None;
    let mut sms = 0;
    for i in 0..count as usize {
        let at = resources.wrapping_add(i);
        let (resource, device, own) = Resource::given(at)?;
        // "must be outputs … from the same split … and have the same smCoscheduledAlignment".
        let fits = found.is_none_or(|(first, of)| {
            std::ptr::eq(of, device)
                && first.split == resource.split
                && resource.split != 0
                && first.align == resource.align
        });
        sms += own;
        if !fits || sms > device.config.sm_count {
            return Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
        }
        found = found.or(Some((resource, device)));
    }
    let (_, device) = found.ok_or(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)?;
    let header = Header::new();
    Ok(enliven(Box::leak(Box::new(Descriptor { header, device, sms }))))
}

#[repr(C)]
pub(crate) struct Green {
    header: Header,
    view: &'static Context,
}

object!(Green, 0x4752_434e, CUDA_ERROR_INVALID_CONTEXT);

fn create(descriptor: *mut c_void, dev: CUdevice, flags: c_uint) -> Result<&'static Green> {
    let device = driver()?.device(dev)?;
    let descriptor: &'static Descriptor = resolve(descriptor)?;
    // CU_GREEN_CTX_DEFAULT_STREAM.
    if flags > 1 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if !std::ptr::eq(descriptor.device, device) {
        return Err(CUDA_ERROR_INVALID_DEVICE);
    }
    let primary = retain_primary(device)?;
    let view = Context::view(primary, descriptor.sms);
    let green = enliven(Box::leak(Box::new(Green { header: Header::new(), view })));
    view.set_green(handle(green));
    Ok(green)
}

fn destroy(green: *mut c_void) -> Result<()> {
    driver()?;
    let green: &'static Green = resolve(green)?;
    if !kill(green) {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    // "the API will invalidate all active captures on these streams"; work in flight goes on.
    let _ = capture::permit_context(green.view);
    let device = green.view.device;
    green.view.end_view();
    release_primary(device)
}

exports! {
    fn cuDeviceGetDevResource(dev: CUdevice, out: *mut Resource, kind: c_int) {
        let device = driver()?.device(dev)?;
        // Workqueues are not simulated.
        if kind != SM {
            return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
        }
        put(out, Resource::sms(device, device.config.sm_count, 0, least(device)))
    }
    fn cuDevSmResourceSplitByCount(out: *mut Resource, groups: *mut c_uint, input: *const Resource, remainder: *mut Resource, flags: c_uint, least: c_uint) {
        split_by_count(out, groups, input, remainder, flags, least)
    }
    fn cuDevResourceGenerateDesc(resources: *const Resource, count: c_uint) -> *mut c_void {
        Ok(handle(describe(resources, count)?))
    }
    fn cuGreenCtxCreate(descriptor: *mut c_void, dev: CUdevice, flags: c_uint) -> *mut c_void {
        Ok(handle(create(descriptor, dev, flags)?))
    }
    fn cuGreenCtxDestroy(green: *mut c_void) { destroy(green) }
    fn cuCtxFromGreenCtx(green: *mut c_void) -> CUcontext {
        Ok(handle(resolve::<Green>(green)?.view))
    }
    // "CU_STREAM_NON_BLOCKING: This must be specified."
    fn cuGreenCtxStreamCreate(green: *mut c_void, flags: c_uint, _priority: c_int) -> CUstream {
        let view = resolve::<Green>(green)?.view;
        if flags != 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(handle(Stream::create(view, flags)))
    }
    fn cuStreamGetGreenCtx(s: CUstream, out: *mut *mut c_void) {
        put(out, peek(s, crate::stream::Flavour::Legacy)?.context().green())
    }
}
