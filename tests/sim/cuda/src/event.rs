//! Events: CUDA Driver API, "Event Management".

use crate::abi::{
    Header, Recycler, Result, enliven, exports, exports_both, handle, kill, object, resolve,
};
use crate::capture;
use crate::context::{Context, current};
use crate::driver::{Device, driver, lock};
use crate::pool;
use crate::stream::Stream;
use simgpu::engine::Op;
use simgpu::memory::ObjectId;
use std::ffi::c_uint;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY,
    CUDA_ERROR_OUT_OF_MEMORY, CUevent, CUstream,
};

pub(crate) const CU_EVENT_DISABLE_TIMING: u32 = 2;
pub(crate) const CU_EVENT_INTERPROCESS: u32 = 4;
const CU_EVENT_ALL_FLAGS: u32 = 7;

#[repr(C)]
pub(crate) struct Event {
    header: Header,
    flags: AtomicU32,
    record: Mutex<Option<Record>>,
    /// Of an interprocess event.
    common: Mutex<Option<Common>>,
}

/// What an interprocess event is to all its processes.
#[derive(Clone, Copy)]
pub(crate) struct Common {
    pub id: ObjectId,
    /// The GPU of the context that it was made in.
    pub home: &'static Device,
    pub imported: bool,
}

#[derive(Clone, Copy)]
pub(crate) struct Recorded {
    pub channel: u32,
    pub seq: u64,
    /// The GPU of the channel if it is this process's.
    pub own: Option<&'static Device>,
    /// The queue, where it is known.
    pub queue: Option<usize>,
    /// The GPU to ask whether it is lost.
    home: &'static Device,
}

impl Recorded {
    fn is_complete(&self) -> Result<bool> {
        match self.own {
            Some(device) => device.is_complete(self.seq),
            None => Ok(driver()?.session.is_complete(self.channel, self.seq)),
        }
    }

    fn wait(&self) -> Result<()> {
        match self.own {
            Some(device) => device.wait(self.seq),
            None => {
                driver()?.session.wait(self.channel, self.seq);
                self.home.check()
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Record {
    device: &'static Device,
    queue: usize,
    context: &'static Context,
    seq: u64,
    finish_ns: Option<u64>,
}

object!(Event, 0x4556_4e54);

static DEAD: Recycler<Event> = Recycler::new();

impl Event {
    pub(crate) fn create(flags: u32, common: Option<Common>) -> &'static Event {
        let event = DEAD.take(|| Event {
            header: Header::new(),
            flags: AtomicU32::default(),
            record: Mutex::default(),
            common: Mutex::default(),
        });
        event.flags.store(flags, Ordering::Relaxed);
        *lock(&event.common) = common;
        enliven(event)
    }

    pub(crate) fn recorded(&self) -> Option<Recorded> {
        let Some(Common { id, home, .. }) = self.common() else {
            return lock(&self.record).map(|r| {
                let (channel, seq) = (r.device.lane.channel(), r.seq);
                let queue = Some(r.queue);
                Recorded { channel, seq, own: Some(r.device), queue, home: r.device }
            });
        };
        let driver = driver().ok()?;
        let (channel, seq) = driver.session.recorded_event(id)?;
        let own = driver.devices.iter().find(|d| d.lane.channel() == channel);
        Some(Recorded { channel, seq, own, queue: None, home })
    }

    /// The context of the last record, if it is this process's.
    fn context(&self) -> Option<&'static Context> {
        lock(&self.record).map(|r| r.context)
    }

    pub(crate) fn common(&self) -> Option<Common> {
        let interprocess = self.flags.load(Ordering::Relaxed) & CU_EVENT_INTERPROCESS != 0;
        if interprocess { *lock(&self.common) } else { None }
    }

    /// Fetches the time of record `seq` before the queue forgets it.
    pub(crate) fn fetch(&self, seq: u64) {
        if let Some(record) = lock(&self.record).as_mut().filter(|r| r.seq == seq) {
            record.fetch();
        }
    }

    fn finish_ns(&self) -> Result<u64> {
        let mut record = lock(&self.record);
        let record = record.as_mut().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        if !record.device.is_complete(record.seq)? {
            return Err(CUDA_ERROR_NOT_READY);
        }
        record.fetch();
        record.finish_ns.ok_or(CUDA_ERROR_NOT_READY)
    }
}

impl Record {
    fn fetch(&mut self) {
        if self.finish_ns.is_none()
            && let Ok(driver) = driver()
        {
            self.finish_ns = driver.session.finish_ns(self.device.lane.channel(), self.seq);
        }
    }
}

/// Records an event in a stream, in a call that takes `least_ns`.
pub(crate) fn record_in(event: &'static Event, s: &'static Stream, least_ns: u64) -> Result<()> {
    let cost = driver()?.session.config().costs.event_ns;
    let seq = s.submit_for(Op::Mark(cost), Some(event), least_ns)?;
    *lock(&event.record) = Some(Record {
        device: s.device(),
        queue: s.queue(),
        context: s.context().owner(),
        seq,
        finish_ns: None,
    });
    if let Some(common) = event.common() {
        driver()?.session.record_event(common.id, s.device().lane.channel(), seq);
    }
    pool::recorded(std::ptr::from_ref(event).addr(), s, seq);
    Ok(())
}

/// An event to ask about or wait for, which captures restrict.
fn asked(event: CUevent) -> Result<&'static Event> {
    let event = resolve(event)?;
    capture::is_captured(event)?;
    capture::permit()?;
    Ok(event)
}

fn elapsed_ms(start: CUevent, end: CUevent) -> Result<f32> {
    let (start, end) = (asked(start)?, asked(end)?);
    let timed = |e: &Event| e.flags.load(Ordering::Relaxed) & CU_EVENT_DISABLE_TIMING == 0;
    if !timed(start) || !timed(end) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    let (from, to) = (start.finish_ns()?, end.finish_ns()?);
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "milliseconds")]
    let ms = (i128::from(to) - i128::from(from)) as f64 / 1e6;
    #[allow(clippy::cast_possible_truncation, reason = "the manual's type")]
    Ok(ms as f32)
}

exports! {
    fn cuEventCreate(flags: c_uint) -> CUevent {
        let context = current()?;
        let interprocess = flags & CU_EVENT_INTERPROCESS != 0;
        // "CU_EVENT_INTERPROCESS must be specified along with CU_EVENT_DISABLE_TIMING."
        if flags & !CU_EVENT_ALL_FLAGS != 0
            || interprocess && flags & CU_EVENT_DISABLE_TIMING == 0
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let home = context.device;
        let common = if interprocess {
            let id = driver()?.session.create_event(home.gpu).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            Some(Common { id, home, imported: false })
        } else {
            None
        };
        Ok(handle(Event::create(flags, common)))
    }

    fn cuEventDestroy, cuEventDestroy_v2(event: CUevent) {
        let event: &'static Event = resolve(event)?;
        if kill(event) {
            capture::forget_event(event);
            *lock(&event.record) = None;
            if let Some(common) = lock(&event.common).take().filter(|common| !common.imported) {
                driver()?.session.let_go(common.id);
            }
            DEAD.give(event);
        }
        Ok(())
    }

    fn cuEventQuery(event: CUevent) {
        let costs = &driver()?.session.config().costs;
        let event = asked(event)?;
        let context = event.context();
        let _shared = context.and_then(|c| c.calls.shared());
        simgpu::clock::burn(costs.query_cpu_ns);
        match event.recorded() {
            Some(last) if !last.is_complete()? => Err(CUDA_ERROR_NOT_READY),
            Some(last) => last.home.check(),
            // Never recorded: nothing was captured, which is complete.
            None => Ok(()),
        }
    }

    fn cuEventSynchronize(event: CUevent) {
        let event = asked(event)?;
        drop(event.context().and_then(|c| c.calls.shared()));
        if let Some(last) = event.recorded() {
            last.wait()?;
        }
        pool::synchronized();
        Ok(())
    }

    fn cuEventElapsedTime, cuEventElapsedTime_v2(start: CUevent, end: CUevent) -> f32 {
        elapsed_ms(start, end)
    }
}

exports_both! {
    fn cuEventRecord, cuEventRecord_ptsz(event: CUevent, s: CUstream) |s| {
        let event: &'static Event = resolve(event)?;
        if capture::record(event, s)? {
            return Ok(());
        }
        record_in(event, s, driver()?.session.config().costs.record_cpu_ns)
    }
}
