//! Stream capture: CUDA Driver API, "Stream Management"; CUDA Programming Guide, "Stream Capture".
//!
//! Work submitted to a capturing stream becomes nodes of the sequence's graph. [`sequence`] is the
//! state of all captures and how work, forks and joins change it; below is whom a capture prohibits
//! what; [`calls`] are the exports. Programs that never capture pay one load of a flag per call.

pub(crate) mod calls;
pub(crate) mod sequence;

use crate::context::Context;
use crate::driver::driver;
use crate::errors::Result;
pub(crate) use sequence::{add, alloc, fail, forget_event, free, is_captured, record, wait};
use sequence::{any, captures};
use std::cell::Cell;
use tessera_cuda::types::CUresult;

/// "The operation is not permitted when the stream is capturing."
pub(crate) const UNSUPPORTED: CUresult = 900;
const INVALIDATED: CUresult = 901;
const MERGE: CUresult = 902;
const UNMATCHED: CUresult = 903;
const UNJOINED: CUresult = 904;
const ISOLATION: CUresult = 905;
const IMPLICIT: CUresult = 906;
const CAPTURED_EVENT: CUresult = 907;
const WRONG_THREAD: CUresult = 908;
const ILLEGAL_STATE: CUresult = 401;

/// `CU_STREAM_CAPTURE_MODE_*`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nobody but relaxed threads may make unsafe calls.
    Global = 0,
    /// This thread may not.
    ThreadLocal = 1,
    /// Everybody may.
    Relaxed = 2,
}

impl Mode {
    fn of(number: i32) -> Option<Mode> {
        [Mode::Global, Mode::ThreadLocal, Mode::Relaxed].into_iter().find(|m| *m as i32 == number)
    }
}

// What a capture prohibits: CUDA Programming Guide, "Prohibited and Unhandled Operations".

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

fn exchange(mode: Mode) -> Mode {
    MODE.try_with(|own| own.replace(mode)).unwrap_or(Mode::Global)
}

/// Refuses "potentially unsafe API calls" where a capture and the thread's mode prohibit them.
fn permit_unsafe() -> Result<()> {
    let mode = MODE.try_with(Cell::get).unwrap_or(Mode::Global);
    if mode == Mode::Relaxed {
        return Ok(());
    }
    let this = std::thread::current().id();
    let mut all = captures();
    let prohibits = |mode_of: Mode, thread| {
        if thread == this {
            mode_of != Mode::Relaxed
        } else {
            mode == Mode::Global && mode_of == Mode::Global
        }
    };
    let by = all.sequences.iter().filter(|(_, s)| prohibits(s.mode, s.thread));
    let by: Vec<u64> = by.map(|(id, _)| *id).collect();
    if by.is_empty() {
        return Ok(());
    }
    by.into_iter().for_each(|id| all.invalidate(id));
    Err(UNSUPPORTED)
}

/// Refuses to synchronise "a broader handle which encompasses an active stream capture".
pub(crate) fn permit_context(context: &'static Context) -> Result<()> {
    if !any() {
        return Ok(());
    }
    permit(Call::Context)?;
    let mut all = captures();
    let within = all.streams.values().filter(|p| p.stream.context().is_within(context));
    let within: Vec<u64> = within.map(|p| p.sequence).collect();
    if within.is_empty() {
        return Ok(());
    }
    within.into_iter().for_each(|id| all.invalidate(id));
    Err(UNSUPPORTED)
}

/// Refuses the legacy stream while a blocking stream of its context captures; the capture is
/// invalidated unless the caller only asks.
#[inline]
pub(crate) fn permit_legacy(context: &'static Context, asks_only: bool) -> Result<()> {
    if any() { decide_legacy(context, asks_only) } else { Ok(()) }
}

#[cold]
fn decide_legacy(context: &'static Context, asks_only: bool) -> Result<()> {
    let mut all = captures();
    let blocking =
        |s: &'static crate::stream::Stream| std::ptr::eq(s.context(), context) && s.is_blocking();
    let by = all.streams.values().filter(|p| blocking(p.stream));
    let by: Vec<u64> = by.map(|p| p.sequence).collect();
    if by.is_empty() {
        return Ok(());
    }
    if !asks_only {
        by.into_iter().for_each(|id| all.invalidate(id));
    }
    Err(IMPLICIT)
}

// Which calls are "potentially unsafe" beside a capture (`cuThreadExchangeStreamCaptureMode`), as a
// table. The manual names `cudaMalloc` and the query of an event; the rest is what libraries that
// guard their calls report of real drivers.

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
    /// `cuCtxSynchronize`; see also [`permit_context`].
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
    if any() { decide(call) } else { Ok(()) }
}

#[cold]
fn decide(call: Call) -> Result<()> {
    let refused = match RULES[call as usize].1 {
        Rule::Always => true,
        Rule::Never => false,
        Rule::Before(version) => driver()?.session.config().cuda_version < version,
    };
    if refused { permit_unsafe() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert!(RULES.iter().enumerate().all(|(i, (call, _))| *call as usize == i));
    }
}
