//! Markers that are words of memory: the GPU writes into a lane of the flight page
//! ([`tessera_region::flight`]) how many operations of a stream are complete. Whoever wants to know reads the
//! word: no driver call, no lock of a context.
//!
//! A lane is one stream's until that has ended and its last value has landed. It goes on counting with the next
//! stream. Every context registers 4096 bytes of the page with the driver when it is marked first. Where that is
//! refused, or the device has no stream memory operations of 64 bits, or there are no more lanes, the marker is an
//! event.

use super::Stream;
use super::events;
use crate::own;
use crate::pages::List;
use crate::pages::Zeroed;
use crate::pools::ask::Uncaptured;
use crate::real;
use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use tessera_cuda::types::*;
use tessera_region::flight::{CONTEXTS, FlightPage, TURN};

/// Complete when all that was in a stream before it is: a value of a lane, or an event of ours. All zero: not put yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Signal {
    word: Option<&'static AtomicU64>,
    value: u64,
    event: usize,
}

// SAFETY: integers, and a reference that zero makes `None`.
unsafe impl Zeroed for Signal {}

impl Signal {
    pub(super) const NONE: Self = Self { word: None, value: 0, event: 0 };

    pub(super) const fn event(event: usize) -> Self {
        Self { event, ..Self::NONE }
    }

    pub(super) fn is_put(&self) -> bool {
        self.word.is_some() || self.event != 0
    }

    /// The event, 0 where it is none.
    pub(super) fn as_event(&self) -> usize {
        self.event
    }

    /// Whether nothing is to be waited for any more: complete, or the context is broken.
    pub(super) fn is_over(&self) -> bool {
        match self.word {
            // Acquire: what the stream did before is to be seen.
            Some(word) => word.load(Ordering::Acquire).wrapping_sub(self.value).cast_signed() >= 0,
            None => self.event == 0 || events::is_over(self.event),
        }
    }

    /// Whether the GPU writes it to memory, where others see it, too.
    pub(super) fn is_word(&self) -> bool {
        self.word.is_some()
    }

    /// What becomes of it when its context ends: it is over, and who sees words has been told.
    pub(super) fn ended(self) -> Self {
        static ENDED: AtomicU64 = AtomicU64::new(0);
        Self { word: self.word.map(|_| &ENDED), ..Self::NONE }
    }

    pub(super) fn destroy(self) {
        if self.event != 0 {
            events::destroy(self.event);
        }
    }
}

/// A context with lanes.
#[derive(Clone, Copy, Debug, Default)]
struct Context {
    /// 0: nobody's.
    ctx: usize,
    /// Where the device has its lanes; 0: it can have none.
    address: CUdeviceptr,
    /// Lanes that count operations, the first ones; and those that only order, the last ones.
    counting: usize,
    ordering: usize,
    /// An event that is never recorded: asking about it fails where the context is broken.
    probe: usize,
}

/// A stream's lane.
#[derive(Clone, Copy, Debug)]
struct Lane {
    /// Where it is in the page.
    context: usize,
    at: usize,
    /// 0: the stream has ended.
    stream: usize,
    /// Whose default stream it is, where each thread has one.
    owner: usize,
    /// What was to be written there last.
    value: u64,
    /// 1 where values are numbers of operations.
    counts: usize,
}

// SAFETY: integers.
unsafe impl Zeroed for Lane {}

/// Under the lock of the streams.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    page: Option<&'static FlightPage>,
    contexts: [Context; CONTEXTS],
    lanes: List<Lane>,
}

impl Lanes {
    /// From now on markers are words of `page`.
    pub(super) fn begin(&mut self, page: &'static FlightPage) {
        self.page = Some(page);
    }

    /// Has `stream`, of the current context `ctx`, write that so many more of its operations are complete; with none
    /// that what is in it now is. `None` where it cannot be done.
    pub(super) fn put(&mut self, stream: Stream, ctx: usize, operations: u32) -> Option<Signal> {
        let page = self.page?;
        let write = real::cuStreamWriteValue64_v2.get()?;
        let context = self.context(page, ctx)?;
        let lane = self.lane(page, context, stream, operations != 0)?;
        let Lane { at, value, .. } = self.lanes[lane];
        let value = value.wrapping_add(u64::from(operations.max(1)));
        let address = self.contexts[context].address + (at * size_of::<u64>()) as CUdeviceptr;
        // SAFETY: a living stream, and a word of memory that its context has registered and that is never unmapped.
        let status = unsafe { write(stream.handle(), address, value, 0) };
        if status != CUDA_SUCCESS {
            if status == CUDA_ERROR_NOT_SUPPORTED {
                self.contexts[context].address = 0;
            }
            return None;
        }
        self.lanes[lane].value = value;
        page.marked.fetch_add(operations.into(), Ordering::Relaxed);
        Some(Signal { word: Some(&page.lanes[context][at]), value, event: 0 })
    }

    /// Where the device sees the turn of the current context, `ctx`, and which it is.
    pub(super) fn turn(&mut self, ctx: usize) -> Option<(CUdeviceptr, u64)> {
        let page = self.page?;
        let at = self.context(page, ctx)?;
        // Before a wait is put: whoever moves the gate is to end it.
        page.ahead.fetch_or(1 << at, Ordering::SeqCst);
        let address = self.contexts[at].address + (TURN * size_of::<u64>()) as CUdeviceptr;
        // Acquire: pairs with the Release in `FlightPage::release`.
        Some((address, page.lanes[at][TURN].load(Ordering::Acquire)))
    }

    /// Which of the contexts the current one is, if it can have lanes.
    fn context(&mut self, page: &'static FlightPage, ctx: usize) -> Option<usize> {
        let known = self.contexts.iter().position(|context| context.ctx == ctx);
        let at = match known {
            Some(at) => at,
            None => {
                let at = self.contexts.iter().position(|context| context.ctx == 0)?;
                let address = register(&page.lanes[at]).unwrap_or(0);
                let probe = if address == 0 { 0 } else { events::create().unwrap_or(0) };
                self.contexts[at] = Context { ctx, address, probe, ..Context::default() };
                at
            }
        };
        (self.contexts[at].address != 0).then_some(at)
    }

    /// The stream's lane, perhaps a new one.
    fn lane(
        &mut self,
        page: &'static FlightPage,
        context: usize,
        stream: Stream,
        counts: bool,
    ) -> Option<usize> {
        let counts = usize::from(counts);
        let owner = if stream == Stream::PER_THREAD { own_stream()? } else { 0 };
        let is_same = |lane: &&Lane| (lane.context, lane.counts) == (context, counts);
        let own = |lane: &Lane| (lane.stream, lane.owner) == (stream.0, owner);
        let has_landed =
            |lane: &Lane| page.lanes[lane.context][lane.at].load(Ordering::Acquire) == lane.value;
        let is_free = |lane: &Lane| lane.stream == 0 && has_landed(lane);
        let position = |wanted: &dyn Fn(&Lane) -> bool| {
            self.lanes.iter().position(|lane| is_same(&lane) && wanted(lane))
        };
        if let Some(lane) = position(&own) {
            return Some(lane);
        }
        if let Some(lane) = position(&is_free) {
            (self.lanes[lane].stream, self.lanes[lane].owner) = (stream.0, owner);
            return Some(lane);
        }
        let Context { counting, ordering, .. } = self.contexts[context];
        if counting + ordering >= TURN {
            return None;
        }
        let at = if counts == 1 { counting } else { TURN - 1 - ordering };
        let lane = Lane { context, at, stream: stream.0, owner, value: 0, counts };
        self.lanes.push(lane).ok()?;
        if counts == 1 {
            self.contexts[context].counting += 1;
            // Before anything is written there: who reads fewer lanes takes more to be in flight.
            let used = u32::try_from(counting + 1).unwrap_or(0);
            page.used_lanes[context].store(used, Ordering::Release);
        } else {
            self.contexts[context].ordering += 1;
        }
        Some(self.lanes.len() - 1)
    }

    /// `stream` is no more.
    pub(super) fn stream_ended(&mut self, stream: Stream) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.stream == stream.0) {
            lane.stream = 0;
        }
    }

    /// `ctx` is no more, and its registration ended with it.
    pub(super) fn context_ended(&mut self, ctx: usize) {
        let (Some(page), Some(at)) =
            (self.page, self.contexts.iter().position(|context| context.ctx == ctx && ctx != 0))
        else {
            return;
        };
        let mut queued = 0u64;
        while let Some(lane) = self.lanes.take(|lane| lane.context == at) {
            if lane.counts == 1 {
                queued = queued.wrapping_add(lane.value);
            }
        }
        page.leave_context(at, queued);
        self.contexts[at] = Context::default();
    }

    /// Where nothing has landed for long: what a broken context was to do is over.
    pub(super) fn drop_broken(&mut self) {
        let Some(page) = self.page else { return };
        let _uncaptured = Uncaptured::enter();
        for (at, context) in self.contexts.iter().enumerate() {
            if context.probe == 0 || !events::is_broken(context.probe) {
                continue;
            }
            for lane in self.lanes.iter().filter(|lane| lane.context == at) {
                // The GPU writes here no more.
                page.lanes[at][lane.at].store(lane.value, Ordering::Release);
            }
        }
    }
}

/// What distinguishes the calling thread's own default stream from other threads'. `None` where the thread launches
/// nothing.
fn own_stream() -> Option<usize> {
    // SAFETY: records are never unmapped.
    let record = unsafe { own::record().as_ref() }?;
    // A record is given to another thread when its own has ended.
    Some(ptr::from_ref(record).addr() ^ record.tid() as usize)
}

/// Registers a context's lanes with the current one; where the device has them.
fn register(lanes: &'static [AtomicU64]) -> Option<CUdeviceptr> {
    /// `CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS`
    const CAN_USE_64_BIT: c_int = 122;
    /// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`
    const MAPPED: u32 = 1 | 2;
    let (mut device, mut can) = (0, 0);
    let (bytes, lanes) = (size_of_val(lanes), lanes.as_ptr().cast_mut());
    let mut address = 0;
    // SAFETY: valid places for answers; whole pages of this process, aligned, which are never unmapped.
    unsafe {
        let is_able = real::cuCtxGetDevice.get()?(&raw mut device) == CUDA_SUCCESS
            && real::cuDeviceGetAttribute.get()?(&raw mut can, CAN_USE_64_BIT, device)
                == CUDA_SUCCESS
            && can != 0;
        let is_there = is_able
            && real::cuMemHostRegister_v2.get()?(lanes.cast(), bytes, MAPPED) == CUDA_SUCCESS
            && real::cuMemHostGetDevicePointer_v2.get()?(&raw mut address, lanes.cast(), 0)
                == CUDA_SUCCESS;
        is_there.then_some(address)
    }
}
