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
pub(crate) const ARGUMENTS: usize = 6;
/// Past the arguments.
const NO_STREAM: u8 = 6;

impl Work {
    /// Of what is none, or does not go that way.
    pub(crate) const fn none(flavour: &str) -> Self {
        let per_thread = !is(flavour, "legacy");
        Self { kind: Kind::OnDevice, stream: NO_STREAM, per_thread }
    }

    /// Of a row of the table: its body, the export's flavour, and names and types of the arguments.
    pub(crate) const fn of(body: &str, flavour: &str, arguments: &[(&str, &str)]) -> Self {
        assert!(arguments.len() <= ARGUMENTS, "arguments on the stack: not for the trampoline");
        let (mut stream, mut at) = (NO_STREAM, 0u8);
        while (at as usize) < arguments.len() {
            if is(arguments[at as usize].0, "stream") {
                stream = at;
            }
            at += 1;
        }
        let by_address = is(body, "cuMemcpy")
            || is(body, "cuMemcpyAsync")
            || is(body, "cuMemcpyWithAttributesAsync");
        let pointee = last_word(arguments[0].1);
        let kind = if is_word(pointee, "CUDA_MEMCPY2D") {
            Kind::Described2d
        } else if is_word(pointee, "CUDA_MEMCPY2D_v1") {
            Kind::Described2dV1
        } else if is_word(pointee, "CUDA_MEMCPY3D") || is_word(pointee, "CUDA_MEMCPY3D_PEER") {
            Kind::Described3d
        } else if is_word(pointee, "CUDA_MEMCPY3D_v1") {
            Kind::Described3dV1
        } else if is_word(pointee, "CUDA_MEMCPY3D_BATCH_OP") {
            Kind::Operation
        } else if is_word(last_word(arguments[1].1), "CUDA_MEMCPY3D_BATCH_OP") {
            Kind::Operations
        } else if by_address {
            Kind::Addresses
        } else {
            Kind::OnDevice
        };
        Self { kind, stream, per_thread: !is(flavour, "legacy") }
    }
}

/// Equality, when compiling.
const fn is(a: &str, b: &str) -> bool {
    is_word(a.as_bytes(), b)
}

const fn is_word(a: &[u8], b: &str) -> bool {
    let b = b.as_bytes();
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// `CUDA_MEMCPY2D` of `*const CUDA_MEMCPY2D`, however the compiler spaces it.
const fn last_word(text: &str) -> &[u8] {
    let mut text = text.as_bytes();
    while let [rest @ .., b' '] = text {
        text = rest;
    }
    let mut from = text.len();
    while from > 0 && (text[from - 1].is_ascii_alphanumeric() || text[from - 1] == b'_') {
        from -= 1;
    }
    text.split_at(from).1
}

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
