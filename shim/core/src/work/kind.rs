//! What the gate asks of a fill or copy, worked out from the table when the shim is compiled.

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

/// What is known of one export.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    pub(crate) kind: Kind,
    /// The argument that is the stream, or [`NO_STREAM`].
    pub(crate) stream: u8,
    /// Whether stream 0, and no stream, is the thread's own.
    pub(crate) per_thread: bool,
}

/// Most arguments of what goes the way of [`super::trampoline`]: those that are passed in registers.
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
        $crate::work::kind::Work {
            kind: work_of!(@kind $body $arguments),
            stream: work_of!(@stream 0; $arguments),
            per_thread: work_of!(@per_thread $flavour),
        }
    };
    (@per_thread legacy) => { false };
    (@per_thread $flavour:ident) => { true };
    (@stream $at:expr; ()) => { $crate::work::kind::NO_STREAM };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::real;

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
}
