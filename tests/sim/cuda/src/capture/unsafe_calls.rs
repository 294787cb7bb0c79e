//! Which calls are "potentially unsafe" beside a capture (`cuThreadExchangeStreamCaptureMode`), as a
//! table. The manual names `cudaMalloc` and the query of an event; the rest is what libraries that
//! guard their calls report of real drivers.

use crate::driver::driver;
use crate::errors::Result;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Call {
    /// `cuMemAlloc`, `cuMemAllocPitch`, `cuMemAllocManaged`: named by the manual.
    Allocate,
    /// `cuMemFree`: waits for the work that may use the memory.
    Free,
    /// `cuMemAllocHost`, `cuMemHostAlloc`, `cuMemHostRegister`.
    Host,
    /// `cuArrayCreate` and its kin.
    Array,
    /// `cuMemCreate`: does not wait for anything. PyTorch's expandable segments grow in a capture.
    Physical,
    /// `cuModuleLoad…`, `cuLibraryLoad…`: since CUDA 12.3 code is loaded during captures (NVIDIA Warp's
    /// manual, `capture_begin`).
    Code,
    /// `cuMemPoolGetAttribute`, `cuMemPoolSetAttribute`, but not which pool is a device's (NVIDIA's
    /// libcu++).
    PoolAttribute,
    /// `cuEventQuery`, `cuEventSynchronize`, `cuEventElapsedTime`.
    Event,
    /// `cuStreamQuery`, `cuStreamSynchronize` of a stream that does not capture.
    Stream,
    /// `cuCtxSynchronize`; see also [`super::permit_context`].
    Context,
    /// Copies and fills that return when they are done.
    Synchronous,
}

#[derive(Clone, Copy)]
enum Rule {
    Always,
    Never,
    /// By drivers before this CUDA version.
    Before(u32),
}

const RULES: [(Call, Rule); 11] = [
    (Call::Allocate, Rule::Always),
    (Call::Free, Rule::Always),
    (Call::Host, Rule::Always),
    (Call::Array, Rule::Always),
    (Call::Physical, Rule::Never),
    (Call::Code, Rule::Before(12_030)),
    (Call::PoolAttribute, Rule::Always),
    (Call::Event, Rule::Always),
    (Call::Stream, Rule::Always),
    (Call::Context, Rule::Always),
    (Call::Synchronous, Rule::Always),
];

/// Refuses a call where it is unsafe and a capture and the thread's mode prohibit such calls.
#[inline]
pub(crate) fn permit(call: Call) -> Result<()> {
    if super::sequence::any() { decide(call) } else { Ok(()) }
}

#[cold]
fn decide(call: Call) -> Result<()> {
    let refused = match RULES[call as usize].1 {
        Rule::Always => true,
        Rule::Never => false,
        Rule::Before(version) => driver()?.session.config().cuda_version < version,
    };
    if refused { super::permit_unsafe() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert!(RULES.iter().enumerate().all(|(i, (call, _))| *call as usize == i));
    }
}
