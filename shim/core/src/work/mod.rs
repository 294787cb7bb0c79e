//! Work other than launches that takes the GPU's time: fills, which run as kernels, and copies that
//! stay on the GPU. They pass the gate as launches do.
//!
//! A copy that touches host memory on either side is not gated: it waits for the bus, not for the
//! SMs. Which it is ([`Transfer`]) is asked when the gate is not SOLO, and always of what may take
//! long: a copy of pageable memory is over when the call is, and no closing is to wait for it.
//!
//! There are a hundred such exports, and one body would do for all of them but for their arguments.
//! So there is one body ([`trampoline`]): every export says which it is and jumps there, and the
//! arguments, which are all passed in registers, are put aside while the gate is asked.

mod trampoline;

use crate::gate::{self, Pass, Stream};
use crate::real::{self, Symbol};
use crate::state;
use crate::thread::{Answer, Call};
use core::ffi::c_ulonglong;
use core::ptr;
use tessera_cuda::types::*;
pub use trampoline::trampoline;

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
                    && sample(first)
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

// What the gate asks of a fill or copy, worked out from the table when the shim is compiled.

/// How to tell whether a call is the gate's affair, from its arguments.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It always is: a fill, or a copy whose name says that it stays on the GPU.
    OnDevice,
    /// The first two arguments are addresses that tell.
    Addresses,
    /// The first argument points to a `CUDA_MEMCPY2D`.
    Described2d,
    /// To a `CUDA_MEMCPY2D_v1`.
    Described2dV1,
    /// To a `CUDA_MEMCPY3D`, or one between peers.
    Described3d,
    /// To a `CUDA_MEMCPY3D_v1`.
    Described3dV1,
    /// To a `CUDA_MEMCPY3D_BATCH_OP`.
    Operation,
    /// The first argument counts the `CUDA_MEMCPY3D_BATCH_OP`s that the second points to.
    Operations,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    pub(crate) kind: Kind,
    /// The argument that is the stream, or [`NO_STREAM`].
    pub(crate) stream: u8,
    /// Whether stream 0, and no stream, is the thread's own.
    pub(crate) per_thread: bool,
}

/// Most arguments of what goes the way of [`trampoline`]: those that are passed in registers.
pub const ARGUMENTS: usize = 6;
/// Past the arguments.
pub(crate) const NO_STREAM: u8 = 6;

impl Work {
    /// Of what does not go that way.
    pub(crate) const NONE: Self =
        Self { kind: Kind::OnDevice, stream: NO_STREAM, per_thread: false };
}

/// Of a row of the table: its body, the export's flavour, and the arguments.
macro_rules! work_of {
    ($body:ident $flavour:ident $arguments:tt) => {
        $crate::work::Work {
            kind: work_of!(@kind $body $arguments),
            stream: work_of!(@stream 0; $arguments),
            per_thread: work_of!(@per_thread $flavour),
        }
    };
    (@per_thread legacy) => { false };
    (@per_thread $flavour:ident) => { true };
    (@stream $at:expr; ()) => { $crate::work::NO_STREAM };
    (@stream $at:expr; (stream: $ty:ty)) => { $at };
    (@stream $at:expr; ($argument:ident : $ty:ty $(, $($rest:tt)*)?)) => {
        work_of!(@stream $at + 1; ($($($rest)*)?))
    };
    (@kind $body:ident (copy: *const CUDA_MEMCPY2D $($rest:tt)*)) => { Kind::Described2d };
    (@kind $body:ident (copy: *const CUDA_MEMCPY2D_v1 $($rest:tt)*)) => { Kind::Described2dV1 };
    (@kind $body:ident (copy: *const CUDA_MEMCPY3D $($rest:tt)*)) => { Kind::Described3d };
    (@kind $body:ident (copy: *const CUDA_MEMCPY3D_PEER $($rest:tt)*)) => { Kind::Described3d };
    (@kind $body:ident (copy: *const CUDA_MEMCPY3D_v1 $($rest:tt)*)) => { Kind::Described3dV1 };
    (@kind $body:ident (op: $($rest:tt)*)) => { Kind::Operation };
    (@kind $body:ident (count: usize, ops: *mut CUDA_MEMCPY3D_BATCH_OP $($rest:tt)*)) => {
        Kind::Operations
    };
    (@kind cuMemcpy $arguments:tt) => { Kind::Addresses };
    (@kind cuMemcpyAsync $arguments:tt) => { Kind::Addresses };
    (@kind cuMemcpyWithAttributesAsync $arguments:tt) => { Kind::Addresses };
    (@kind $body:ident $arguments:tt) => { Kind::OnDevice };
}
pub(crate) use work_of;

// Whether a copy stays on the GPU. Only such copies pass the gate: between host and device
// the copy engines and the bus are shared, not the SMs.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Host memory, as the caller says, or nothing that there is: the driver will refuse the copy.
    Host,
    /// Memory of a GPU, or an array.
    Device,
    /// An address of either; the driver knows.
    Address(CUdeviceptr),
}

impl Side {
    fn described(kind: CUmemorytype, address: c_ulonglong) -> Self {
        match kind {
            CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_ARRAY => Self::Device,
            CU_MEMORYTYPE_UNIFIED => Self::Address(address),
            _ => Self::Host,
        }
    }

    fn operand(operand: &CUmemcpy3DOperand) -> Self {
        match operand.r#type {
            CU_MEMCPY_OPERAND_TYPE_POINTER => Self::Address(operand.op[0]),
            CU_MEMCPY_OPERAND_TYPE_ARRAY => Self::Device,
            _ => Self::Host,
        }
    }
}

/// Members of a batch that are asked about, at most.
const SAMPLE: usize = 16;

/// Which of `count` members stand for all: the first, the last, and others evenly between. A batch of KV
/// offload has 4,096 to 12,288, all of one direction; to ask about each costs the driver 0.1 to 0.5 µs
/// and its context's lock (vllm-project/vllm#48434).
pub fn sample(count: usize) -> impl Iterator<Item = usize> {
    let asked = count.min(SAMPLE);
    (0..asked).map(move |i| i.saturating_mul(count - 1) / (asked - 1).max(1))
}

pub trait Transfer: Copy {
    /// Destination and source.
    fn sides(&self) -> [Side; 2];

    /// Whether neither side is host memory. `memory_type` is asked only what nothing else tells.
    fn is_on_device(&self, mut memory_type: impl FnMut(CUdeviceptr) -> CUmemorytype) -> bool {
        let sides = self.sides();
        let is_device = |side: Side| match side {
            // Managed memory counts as a GPU's, wherever its pages are.
            Side::Address(at) => memory_type(at) != CU_MEMORYTYPE_HOST,
            side => side == Side::Device,
        };
        !sides.contains(&Side::Host) && sides.into_iter().all(is_device)
    }
}

/// Destination and source of a copy between any two addresses.
impl Transfer for [CUdeviceptr; 2] {
    fn sides(&self) -> [Side; 2] {
        self.map(Side::Address)
    }
}

impl Transfer for CUDA_MEMCPY3D_BATCH_OP {
    fn sides(&self) -> [Side; 2] {
        [Side::operand(&self.dst), Side::operand(&self.src)]
    }
}

macro_rules! descriptors {
    ($($descriptor:ty),+) => {
        $(impl Transfer for $descriptor {
            fn sides(&self) -> [Side; 2] {
                [
                    Side::described(self.dstMemoryType, self.dstDevice.into()),
                    Side::described(self.srcMemoryType, self.srcDevice.into()),
                ]
            }
        })+
    };
}
descriptors!(CUDA_MEMCPY2D, CUDA_MEMCPY2D_v1, CUDA_MEMCPY3D, CUDA_MEMCPY3D_v1);

// Batches of copies between addresses, whose arguments do not fit in registers.

/// Whether some copy of a batch stays on the GPU, by a sample of them.
unsafe fn any_on_device(
    dsts: *const CUdeviceptr,
    srcs: *const CUdeviceptr,
    count: usize,
    mut memory_type: impl FnMut(CUdeviceptr) -> CUmemorytype,
) -> bool {
    !dsts.is_null()
        && !srcs.is_null()
        && sample(count).any(|i| {
            // SAFETY: below `count`; the caller promises `count` addresses in each.
            let ends =
                unsafe { [ptr::read_unaligned(dsts.add(i)), ptr::read_unaligned(srcs.add(i))] };
            ends.is_on_device(&mut memory_type)
        })
}

/// A batch of copies of either version (CUDA Driver API, "Memory Management").
pub unsafe fn batch(
    call: Call<'_>,
    dsts: *const CUdeviceptr,
    srcs: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
    stream: Stream,
) -> Answer {
    let may_be_long = !sizes.is_null()
        // SAFETY: the caller promises `count` sizes.
        && (0..count).any(|i| unsafe { ptr::read_unaligned(sizes.add(i)) } >= LONG);
    let at_once = if may_be_long { None } else { gate::admit_at_once(stream, false) };
    // SAFETY: the caller's own arguments.
    let is_gates = || !state::passes() && unsafe { any_on_device(dsts, srcs, count, memory_type) };
    let _pass = match at_once {
        Some(busy) => Pass::Flag(busy),
        None if is_gates() => gate::admit_work(stream)?,
        None => {
            if may_be_long {
                gate::passing(stream);
            }
            Pass::Free
        }
    };
    call()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::real;

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

    #[test]
    fn the_table_says_what_the_gate_asks() {
        let of = |kind, stream, per_thread| Work { kind, stream, per_thread };
        let cases = [
            (real::cuMemsetD8_v2.symbol(), of(Kind::OnDevice, 6, false)),
            (real::cuMemsetD2D32Async_ptsz.symbol(), of(Kind::OnDevice, 5, true)),
            (real::cuMemcpy_ptds.symbol(), of(Kind::Addresses, 6, true)),
            (real::cuMemcpyAsync.symbol(), of(Kind::Addresses, 3, false)),
            (real::cuMemcpyWithAttributesAsync.symbol(), of(Kind::Addresses, 4, false)),
            (real::cuMemcpyDtoDAsync_v2.symbol(), of(Kind::OnDevice, 3, false)),
            (real::cuMemcpyDtoA.symbol(), of(Kind::OnDevice, 6, false)),
            (real::cuMemcpyPeerAsync.symbol(), of(Kind::OnDevice, 5, false)),
            (real::cuMemcpy2D_v2.symbol(), of(Kind::Described2d, 6, false)),
            (real::cuMemcpy2DAsync.symbol(), of(Kind::Described2dV1, 1, false)),
            (real::cuMemcpy3D_v2_ptds.symbol(), of(Kind::Described3d, 6, true)),
            (real::cuMemcpy3DPeerAsync.symbol(), of(Kind::Described3d, 1, false)),
            (real::cuMemcpy3D.symbol(), of(Kind::Described3dV1, 6, false)),
            (real::cuMemcpy3DWithAttributesAsync.symbol(), of(Kind::Operation, 2, false)),
            (real::cuMemcpy3DBatchAsync_ptsz.symbol(), of(Kind::Operations, 4, true)),
            (real::cuFabricCpyBatchAsync.symbol(), of(Kind::OnDevice, 3, false)),
            (real::cuMemBatchDecompressAsync.symbol(), of(Kind::OnDevice, 4, false)),
        ];
        for (symbol, work) in cases {
            assert_eq!(symbol.work, work, "{:?}", symbol.name());
        }
    }

    const DEVICE: CUdeviceptr = 0x7000_0000_0000;
    const HOST: CUdeviceptr = 0x1000;

    fn memory_type(at: CUdeviceptr) -> CUmemorytype {
        if at >= DEVICE { CU_MEMORYTYPE_DEVICE } else { CU_MEMORYTYPE_HOST }
    }

    fn descriptor(dst: (CUmemorytype, u64), src: (CUmemorytype, u64)) -> CUDA_MEMCPY3D {
        // SAFETY: numbers and pointers, for which zero is a value.
        let zero: CUDA_MEMCPY3D = unsafe { core::mem::zeroed() };
        CUDA_MEMCPY3D {
            dstMemoryType: dst.0,
            dstDevice: dst.1,
            srcMemoryType: src.0,
            srcDevice: src.1,
            ..zero
        }
    }

    #[test]
    fn a_copy_between_addresses_is_the_gates_if_both_are_a_gpus() {
        let on_device = |dst, src| [dst, src].is_on_device(memory_type);
        assert!(on_device(DEVICE, DEVICE + 64));
        assert!(!on_device(DEVICE, HOST));
        assert!(!on_device(HOST, DEVICE));
        assert!(!on_device(HOST, HOST));
    }

    #[test]
    fn a_descriptors_types_decide_and_addresses_are_asked_for_only_where_they_do_not() {
        let types = [
            (CU_MEMORYTYPE_HOST, false),
            (CU_MEMORYTYPE_DEVICE, true),
            (CU_MEMORYTYPE_ARRAY, true),
            (0, false),
            (77, false),
        ];
        let nobody = |_| -> CUmemorytype { panic!("the type says it") };
        for (dst, dst_on_device) in types {
            for (src, src_on_device) in types {
                // The address says the opposite of what counts.
                let copy = descriptor((dst, HOST), (src, HOST));
                assert_eq!(
                    copy.is_on_device(nobody),
                    dst_on_device && src_on_device,
                    "{dst} {src}"
                );
            }
        }
        let unified = |dst, src| {
            descriptor((CU_MEMORYTYPE_UNIFIED, dst), (CU_MEMORYTYPE_UNIFIED, src))
                .is_on_device(memory_type)
        };
        assert!(unified(DEVICE, DEVICE) && !unified(DEVICE, HOST) && !unified(HOST, DEVICE));
        let half = descriptor((CU_MEMORYTYPE_UNIFIED, DEVICE), (CU_MEMORYTYPE_HOST, 0));
        assert!(!half.is_on_device(nobody), "the other side is the host's anyway");
        let half = descriptor((CU_MEMORYTYPE_ARRAY, 0), (CU_MEMORYTYPE_UNIFIED, DEVICE));
        assert!(half.is_on_device(memory_type));
    }

    #[test]
    fn old_descriptors_are_read_at_their_own_offsets() {
        // SAFETY: as above.
        let zero: CUDA_MEMCPY2D_v1 = unsafe { core::mem::zeroed() };
        let both = CUDA_MEMCPY2D_v1 {
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            srcMemoryType: CU_MEMORYTYPE_ARRAY,
            ..zero
        };
        assert_eq!(both.sides(), [Side::Device, Side::Device]);
        let up = CUDA_MEMCPY2D_v1 { srcMemoryType: CU_MEMORYTYPE_HOST, ..both };
        assert_eq!(up.sides(), [Side::Device, Side::Host]);
        assert_eq!(core::mem::offset_of!(CUDA_MEMCPY2D_v1, srcHost), 16);
        assert_eq!(core::mem::offset_of!(CUDA_MEMCPY2D_v1, dstMemoryType), 52);
        assert_eq!(core::mem::offset_of!(CUDA_MEMCPY3D_v1, dstMemoryType), 80);
    }

    #[test]
    fn a_batchs_members_are_arrays_or_addresses() {
        let pointer =
            |at| CUmemcpy3DOperand { r#type: CU_MEMCPY_OPERAND_TYPE_POINTER, op: [at, 0, 0, 0] };
        let array = CUmemcpy3DOperand { r#type: CU_MEMCPY_OPERAND_TYPE_ARRAY, op: [HOST, 0, 0, 0] };
        let on_device = |dst, src| {
            let op =
                CUDA_MEMCPY3D_BATCH_OP { src, dst, extent: [1; 3], srcAccessOrder: 1, flags: 0 };
            op.is_on_device(memory_type)
        };
        assert!(on_device(pointer(DEVICE), array));
        assert!(on_device(array, array));
        assert!(!on_device(pointer(HOST), array));
        let nothing = CUmemcpy3DOperand { r#type: 9, op: [DEVICE, 0, 0, 0] };
        assert!(!on_device(nothing, array));
    }

    /// A pinned pool on the host, and caches on the device.
    fn asked(dsts: &[CUdeviceptr], srcs: &[CUdeviceptr]) -> (bool, usize) {
        const DEVICE: CUdeviceptr = 1 << 40;
        let mut questions = 0;
        let memory_type = |at: CUdeviceptr| {
            questions += 1;
            if at < DEVICE { CU_MEMORYTYPE_HOST } else { CU_MEMORYTYPE_DEVICE }
        };
        // SAFETY: as many of each as that.
        let on_device =
            unsafe { any_on_device(dsts.as_ptr(), srcs.as_ptr(), dsts.len(), memory_type) };
        (on_device, questions)
    }

    #[test]
    fn a_batch_of_8192_costs_a_few_questions_in_either_direction() {
        for count in [1, 2, 17, 8192] {
            let host: Vec<CUdeviceptr> = (0..count).map(|i| i << 16).collect();
            let device: Vec<CUdeviceptr> = (0..count).map(|i| (1 << 40) + (i << 16)).collect();
            for (dsts, srcs) in [(&device, &host), (&host, &device)] {
                let (on_device, questions) = asked(dsts, srcs);
                assert!(!on_device && questions <= 32, "{count}: {questions}");
            }
            assert_eq!(asked(&device, &device), (true, 2), "{count}");
        }
        assert_eq!(asked(&[], &[]), (false, 0));
    }

    #[test]
    fn a_batch_whose_end_or_every_second_copy_stays_on_the_gpu_is_seen() {
        let host: Vec<CUdeviceptr> = (0..8192).map(|i| i << 16).collect();
        let device: Vec<CUdeviceptr> = host.iter().map(|at| at + (1 << 40)).collect();
        let mut last = host.clone();
        last[8191] = device[8191];
        assert!(asked(&device, &last).0);
        let mixed: Vec<_> =
            (0..8192).map(|i| if i % 2 == 0 { host[i] } else { device[i] }).collect();
        assert!(asked(&device, &mixed).0);
    }
}
