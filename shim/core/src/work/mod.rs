//! Work other than launches that takes the GPU's time: fills, which run as kernels, and copies that
//! stay on the GPU. They pass the gate as launches do.
//!
//! A copy that touches host memory on either side is not gated: it waits for the bus, not for the
//! SMs. Which it is ([`direction`]) is asked when the gate is not SOLO, and always of what may take
//! long: a copy of pageable memory is over when the call is, and no closing is to wait for it.
//!
//! There are a hundred such exports, and one body would do for all of them but for their arguments.
//! So there is one body ([`trampoline`]): every export says which it is and jumps there, and the
//! arguments, which are all passed in registers, are put aside while the gate is asked.

mod batch;
mod direction;
pub(crate) mod kind;
mod trampoline;

pub use batch::batch;
pub use trampoline::trampoline;

use crate::gate::{self, Pass, Stream};
use crate::real::{self, Symbol};
use crate::state;
use core::ptr;
use direction::Transfer;
pub use kind::ARGUMENTS;
use kind::{Kind, Work};
use tessera_cuda::types::*;

/// Bytes from which on a copy is always asked about: so many are some 10 µs of a bus.
const LONG: usize = 64 << 10;

/// Waits until the gate lets this call pass. `arguments` are the caller's own.
#[inline(always)]
unsafe fn admit(symbol: &Symbol, arguments: &[usize; ARGUMENTS]) -> Result<Pass, CUresult> {
    let Work { stream, per_thread, .. } = symbol.work;
    let handle = arguments.get(usize::from(stream)).copied().unwrap_or(0);
    let handle = ptr::with_exposed_provenance_mut(handle);
    let stream = Stream::new(handle, per_thread);
    let at_once = match may_be_long(symbol.work.kind, arguments) {
        true => None,
        false => gate::admit_at_once(stream, false),
    };
    match at_once {
        Some(busy) => Ok(Pass::Flag(busy)),
        // SAFETY: the caller's promise.
        None => unsafe { ask(symbol, stream, arguments) },
    }
}

/// Whether a call may hold its thread up for longer than a closing should wait, if it is none of the
/// gate's affair.
#[inline(always)]
fn may_be_long(kind: Kind, arguments: &[usize; ARGUMENTS]) -> bool {
    match kind {
        Kind::OnDevice => false,
        // Destination, source, bytes.
        Kind::Addresses => arguments[2] >= LONG,
        // To read a descriptor is cheaper than to tell how long the copy is.
        _ => true,
    }
}

/// Where the gate is not SOLO, the copy may be a long one, or this is the thread's first call.
#[cold]
#[inline(never)]
unsafe fn ask(
    symbol: &Symbol,
    stream: Stream,
    arguments: &[usize; ARGUMENTS],
) -> Result<Pass, CUresult> {
    // SAFETY: the arguments are those of this function.
    if state::passes() || !unsafe { is_on_device(symbol.work.kind, arguments) } {
        if may_be_long(symbol.work.kind, arguments) {
            gate::passing(stream);
        }
        return Ok(Pass::Free);
    }
    gate::admit_work(stream)
}

/// Whether a call is the gate's affair.
///
/// # Safety
/// The arguments must be those of a function of this kind, as the driver wants them.
unsafe fn is_on_device(kind: Kind, arguments: &[usize; ARGUMENTS]) -> bool {
    /// The caller's descriptor; NULL is the driver's to refuse.
    ///
    /// # Safety
    /// It must be one, or NULL.
    unsafe fn described<T: Transfer>(address: usize) -> bool {
        let transfer = ptr::with_exposed_provenance::<T>(address);
        // SAFETY: not NULL, so the caller's, for the driver to read.
        !transfer.is_null() && unsafe { ptr::read_unaligned(transfer) }.is_on_device(memory_type)
    }
    let [first, second, ..] = *arguments;
    // SAFETY: the first argument is what the kind says.
    unsafe {
        match kind {
            Kind::OnDevice => true,
            Kind::Addresses => [first as u64, second as u64].is_on_device(memory_type),
            Kind::Described2d => described::<CUDA_MEMCPY2D>(first),
            Kind::Described2dV1 => described::<CUDA_MEMCPY2D_v1>(first),
            Kind::Described3d => described::<CUDA_MEMCPY3D>(first),
            Kind::Described3dV1 => described::<CUDA_MEMCPY3D_v1>(first),
            Kind::Operation => described::<CUDA_MEMCPY3D_BATCH_OP>(first),
            Kind::Operations => {
                const BYTES: usize = size_of::<CUDA_MEMCPY3D_BATCH_OP>();
                second != 0
                    && direction::sample(first)
                        .any(|i| described::<CUDA_MEMCPY3D_BATCH_OP>(second + i * BYTES))
            }
        }
    }
}

/// `CUmemorytype` of an address. What the driver does not know is the host's: memory that was never
/// registered.
fn memory_type(at: CUdeviceptr) -> CUmemorytype {
    // SAFETY: room for the attribute's type.
    let asked = real::cuPointerGetAttribute.ask(CU_MEMORYTYPE_HOST, |ask, kind| unsafe {
        ask(kind.cast(), CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at)
    });
    asked.unwrap_or(CU_MEMORYTYPE_HOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_short_or_the_gates_own_is_let_pass_unasked() {
        let bytes = |bytes| [0x7000, 0x1000, bytes, 0, 0, 0];
        assert!(!may_be_long(Kind::Addresses, &bytes(4)));
        assert!(!may_be_long(Kind::Addresses, &bytes(LONG - 1)));
        assert!(may_be_long(Kind::Addresses, &bytes(1 << 30)), "of pageable memory, perhaps");
        assert!(may_be_long(Kind::Described3d, &bytes(4)));
        // A fill of any length waits at the gate, and is to be seen by who closes it.
        assert!(!may_be_long(Kind::OnDevice, &bytes(1 << 30)));
    }
}
