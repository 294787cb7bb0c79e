//! What a pointer is: CUDA Driver API, "Unified Addressing".

use crate::abi::{exports, put};
use crate::context::current;
use crate::driver::{driver, spend};
use crate::errors::Result;
use crate::handle::{Object, handle};
use crate::memory::Kind;
use std::ffi::{c_int, c_void};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUdeviceptr};

/// An attribute's value, as wide as the manual has it: what says "boolean" or is an enumeration is an
/// `int`.
#[derive(Clone, Copy)]
enum Value {
    Int(i32),
    Long(u64),
}

impl Value {
    fn put(self, to: *mut c_void) -> Result<()> {
        match self {
            Value::Int(n) => put(to.cast(), n),
            Value::Long(n) => put(to.cast(), n),
        }
    }

    fn boolean(yes: bool) -> Value {
        Value::Int(yes.into())
    }

    fn object<T: Object>(object: Option<&'static T>) -> Value {
        Value::Long(object.map_or(0, |o| handle(o) as u64))
    }
}

/// `CU_POINTER_ATTRIBUTE_*`, and `CU_MEMORYTYPE_*` as the answer to the second.
fn attribute(which: c_int, address: u64) -> Result<Value> {
    // The driver's version that knows it.
    let since = match which {
        1..=17 => 0,
        18..=20 => 11_070,
        21 => 12_080,
        22 => 13_030,
        _ => u32::MAX,
    };
    if driver()?.session.config().cuda_version < since {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
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
}
