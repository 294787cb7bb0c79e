//! Logs: CUDA Driver API, "Error Log Management Functions". Each call that fails is a line, but those
//! that only say "not ready", kept while the driver's memory for them lasts.

use crate::abi::{exports, get, put, put_if};
use crate::driver::{driver, lock};
use crate::errors::{Result, name_of};
use std::collections::VecDeque;
use std::ffi::{c_char, c_uint};
use std::sync::Mutex;
use tessera_cuda::types::{
    CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_INITIALIZED,
    CUDA_ERROR_NOT_READY, CUresult,
};

/// "The maximum size of the buffer is 25600 bytes."
const MOST_BYTES: usize = 25_600;
const TRUNCATED: &str = "[CUDA][W] Older messages were lost\n";

struct Logs {
    lines: VecDeque<String>,
    bytes: usize,
    /// The number of the first line that is kept.
    first: u32,
}

static LOGS: Mutex<Logs> = Mutex::new(Logs { lines: VecDeque::new(), bytes: 0, first: 0 });

impl Logs {
    fn end(&self) -> u32 {
        self.first.wrapping_add(u32::try_from(self.lines.len()).unwrap_or(0))
    }

    /// The lines from number `from` on, and whether older ones were asked for that are lost.
    fn since(&self, from: Option<u32>) -> (Vec<String>, bool) {
        let from = from.unwrap_or(0);
        let skip = from.saturating_sub(self.first) as usize;
        (self.lines.iter().skip(skip).cloned().collect(), from < self.first)
    }
}

/// A call failed.
#[cold]
pub(crate) fn note(call: &str, code: CUresult) {
    if matches!(code, CUDA_ERROR_NOT_READY | CUDA_ERROR_NOT_INITIALIZED | CUDA_ERROR_DEINITIALIZED)
        || driver().is_err()
    {
        return;
    }
    let line = format!("[CUDA][E] Returning {code} ({}) from {call}\n", name_of(code));
    let mut logs = lock(&LOGS);
    logs.bytes += line.len();
    logs.lines.push_back(line);
    while logs.bytes > MOST_BYTES
        && let Some(lost) = logs.lines.pop_front()
    {
        logs.bytes -= lost.len();
        logs.first = logs.first.wrapping_add(1);
    }
}

/// The lines from an iterator on, which moves to the end.
fn take(iterator: *mut c_uint, flags: c_uint) -> Result<(Vec<String>, bool)> {
    if flags != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let from = if iterator.is_null() { None } else { Some(get(iterator)?) };
    let logs = lock(&LOGS);
    put_if(iterator, logs.end());
    Ok(logs.since(from))
}

exports! {
    fn cuLogsCurrent(out: *mut c_uint, flags: c_uint) {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let end = lock(&LOGS).end();
        put(out, end)
    }
    // "The final message in buffer will always be the most recent log message".
    fn cuLogsDumpToMemory(iterator: *mut c_uint, buffer: *mut c_char, size: *mut usize, flags: c_uint) {
        let room = get(size)?;
        if buffer.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let (lines, lost) = take(iterator, flags)?;
        put(size, 0)?;
        let Some(room) = room.checked_sub(1) else { return Err(CUDA_ERROR_INVALID_VALUE) };
        put(buffer, 0)?;
        if lines.is_empty() {
            return Ok(());
        }
        let whole: usize = lines.iter().map(String::len).sum();
        let head = if lost || whole > room { TRUNCATED } else { "" };
        let mut text: Vec<&str> = Vec::new();
        let mut left = room.saturating_sub(head.len());
        for line in lines.iter().rev() {
            let Some(rest) = left.checked_sub(line.len()) else { break };
            left = rest;
            text.push(line);
        }
        if text.is_empty() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        text.push(head);
        let text: String = text.into_iter().rev().collect();
        crate::abi::put_text(buffer, i32::try_from(room + 1).unwrap_or(i32::MAX), &text)?;
        put(size, text.len())
    }
}
