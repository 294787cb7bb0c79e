//! What a pointer is: CUDA Driver API, "Unified Addressing".

use crate::abi::{exports, get, put};
use crate::context::current;
use crate::driver::{driver, spend};
use crate::errors::Result;
use crate::handle::{Object, handle};
use crate::memory::Kind;
use std::ffi::{c_int, c_uint, c_void};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUdeviceptr};

/// An attribute's value, as wide as the manual has it: what says "boolean" or is an enumeration is an
/// `int`.
#[derive(Clone, Copy)]
enum Value {
    Int(i32),
    Long(u64),
    /// `CUDA_POINTER_ATTRIBUTE_P2P_TOKENS`.
    Tokens,
}

impl Value {
    fn put(self, to: *mut c_void) -> Result<()> {
        match self {
            Value::Int(n) => put(to.cast(), n),
            Value::Long(n) => put(to.cast(), n),
            Value::Tokens => put(to.cast(), [0u64; 2]),
        }
    }

    fn boolean(yes: bool) -> Value {
        Value::Int(yes.into())
    }

    fn object<T: Object>(object: Option<&'static T>) -> Value {
        Value::Long(object.map_or(0, |o| handle(o) as u64))
    }
}

/// What `cuPointerGetAttributes` answers where there is nothing to answer, and the driver's version
/// that knows the attribute.
fn nothing(which: c_int) -> Option<(Value, u32)> {
    Some(match which {
        2 | 6 | 8 | 10 | 13 | 15 | 16 => (Value::Int(0), 0),
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 17 => (Value::Long(0), 0),
        5 => (Value::Tokens, 0),
        // CU_DEVICE_INVALID.
        9 => (Value::Int(-2), 0),
        18..=20 => (Value::Long(0), 11_070),
        21 => (Value::Int(0), 12_080),
        22 => (Value::Int(-1), 13_030),
        _ => return None,
    })
}

/// Whether this driver knows an attribute; what it is without a value.
fn known(which: c_int) -> Result<Value> {
    let version = driver()?.session.config().cuda_version;
    let known = nothing(which).filter(|(_, since)| version >= *since);
    known.map(|(value, _)| value).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// `CU_POINTER_ATTRIBUTE_*`, and `CU_MEMORYTYPE_*` as the answer to the second.
fn attribute(which: c_int, address: u64) -> Result<Value> {
    known(which)?;
    let memory = driver()?.memory();
    let (start, a) =
        memory.find(address, 0).map(|(s, a)| (s, *a)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    // The state of mappings is locked before the memory's.
    drop(memory);
    let device = a.kind.is_device();
    let mapped = matches!(a.kind, Kind::Mapped | Kind::MappedHost);
    let reserved = || mapped.then(|| crate::vmm::reserved_at(address)).flatten();
    Ok(match which {
        1 if mapped => Value::Long(0),
        1 => Value::object(Some(a.context)),
        2 => Value::Int(if device { 2 } else { 1 }),
        3 => Value::Long(address),
        4 if !device || a.kind == Kind::Managed => Value::Long(address),
        // The host can't reach device memory; and nothing is registered with nv-p2p.
        4 | 5 => return Err(CUDA_ERROR_INVALID_VALUE),
        // Synchronous memory operations; GPUDirect.
        6 | 15 => Value::Int(0),
        7 | 20 => Value::Long(a.id),
        8 => Value::boolean(a.kind == Kind::Managed),
        9 => Value::Int(a.context.device.ordinal),
        // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE.
        10 => Value::boolean(a.kind == Kind::Device),
        // "not necessarily the address of the mapped region, but the address of the mappable address
        // range".
        11 => Value::Long(reserved().map_or(start, |r| r.0)),
        12 => Value::Long(reserved().map_or(a.size, |r| r.1)),
        13 => Value::Int(1),
        14 if mapped => Value::Long(crate::vmm::handle_types_at(address)),
        14 => Value::Long(0),
        // CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE.
        16 => Value::Int(3),
        17 => Value::object(a.pool),
        18 => Value::Long(a.size),
        19 => Value::Long(start),
        21 => Value::Int(0),
        _ => Value::Int(-1),
    })
}

/// What a question costs, whatever it asks: a look-up under the lock of the context that has the address.
fn ask(address: u64) -> Result<()> {
    let driver = driver()?;
    let owner = driver.memory().find(address, 0).map(|(_, a)| a.context);
    let context = owner.or_else(|| current().ok()).map(|c| c.owner());
    let _shared = context.and_then(|c| c.calls.shared());
    spend(simgpu::clock::now_ns(), driver.session.config().costs.pointer_query_cpu_ns);
    Ok(())
}

exports! {
    fn cuPointerGetAttribute(value: *mut c_void, which: c_int, address: CUdeviceptr) {
        if value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        ask(address)?;
        attribute(which, address)?.put(value)
    }

    // "Unlike cuPointerGetAttribute, this function will not return an error when the ptr
    // encountered is not a valid CUDA pointer": such attributes are null.
    fn cuPointerGetAttributes(count: c_uint, which: *mut c_int, values: *mut *mut c_void, address: CUdeviceptr) {
        ask(address)?;
        for i in 0..count as usize {
            let (w, value) = (get(which.wrapping_add(i))?, get(values.wrapping_add(i))?);
            let value_now = match attribute(w, address) {
                Ok(found) => found,
                Err(_) => known(w)?,
            };
            value_now.put(value)?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute(_value: *const c_void, which: c_int, address: CUdeviceptr) {
        // Only CU_POINTER_ATTRIBUTE_SYNC_MEMOPS can be set.
        let memory = driver()?.memory();
        memory.find(address, 0).filter(|_| which == 6).map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    // Managed memory is device memory, and nothing is advised or prefetched of it.
    fn cuMemRangeGetAttribute(out: *mut c_int, size: usize, which: c_int, address: CUdeviceptr, len: usize) {
        const CU_DEVICE_INVALID: c_int = -2;
        let memory = driver()?.memory();
        let found = memory.find(address, len as u64).filter(|(_, a)| a.kind == Kind::Managed);
        match which {
            _ if found.is_none() || len == 0 || size != 4 => Err(CUDA_ERROR_INVALID_VALUE),
            // Preferred location, accessed by, last prefetched to.
            2..=4 => put(out, CU_DEVICE_INVALID),
            1 | 5..=8 => put(out, 0),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}
