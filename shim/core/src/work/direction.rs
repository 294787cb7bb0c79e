//! Whether a copy stays on the GPU. Only such copies pass the gate: between host and device
//! the copy engines and the bus are shared, not the SMs.

use core::ffi::c_ulonglong;
use tessera_cuda::types::*;

/// One side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Host memory, as the caller says.
    Host,
    /// Memory of a GPU, or an array.
    Device,
    /// An address of either; the driver knows.
    Address(CUdeviceptr),
    /// Nothing that there is: the driver will refuse the copy.
    Unknown,
}

impl Side {
    /// One side of a descriptor.
    fn described(kind: CUmemorytype, address: c_ulonglong) -> Self {
        match kind {
            CU_MEMORYTYPE_HOST => Self::Host,
            CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_ARRAY => Self::Device,
            CU_MEMORYTYPE_UNIFIED => Self::Address(address),
            _ => Self::Unknown,
        }
    }

    /// One side of a member of a batch.
    fn operand(operand: &CUmemcpy3DOperand) -> Self {
        match operand.r#type {
            CU_MEMCPY_OPERAND_TYPE_POINTER => Self::Address(operand.op[0]),
            CU_MEMCPY_OPERAND_TYPE_ARRAY => Self::Device,
            _ => Self::Unknown,
        }
    }

    fn is_device(self, memory_type: &mut impl FnMut(CUdeviceptr) -> CUmemorytype) -> bool {
        match self {
            Self::Host | Self::Unknown => false,
            Self::Device => true,
            // Managed memory counts as a GPU's, wherever its pages are.
            Self::Address(at) => memory_type(at) != CU_MEMORYTYPE_HOST,
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

/// What says from where to where.
pub trait Transfer: Copy {
    /// Destination and source.
    fn sides(&self) -> [Side; 2];

    /// Whether neither side is host memory. `memory_type` is asked only what nothing else tells.
    fn is_on_device(&self, mut memory_type: impl FnMut(CUdeviceptr) -> CUmemorytype) -> bool {
        let sides = self.sides();
        let excluded = |side: &Side| matches!(side, Side::Host | Side::Unknown);
        !sides.iter().any(excluded)
            && sides.into_iter().all(|side| side.is_device(&mut memory_type))
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
