//! What a capture prohibits: CUDA Programming Guide, "Prohibited and Unhandled Operations";
//! `cuThreadExchangeStreamCaptureMode`.

use super::sequence::{any, captures};
use super::unsafe_calls::{Call, permit};
use super::{IMPLICIT, Mode, UNSUPPORTED};
use crate::context::Context;
use crate::errors::Result;
use std::cell::Cell;

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// The calling thread's mode, and what it was.
pub(crate) fn exchange(mode: Mode) -> Mode {
    MODE.try_with(|own| own.replace(mode)).unwrap_or(Mode::Global)
}

/// Refuses "potentially unsafe API calls" where a capture and the thread's mode prohibit them.
pub(super) fn permit_unsafe() -> Result<()> {
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
