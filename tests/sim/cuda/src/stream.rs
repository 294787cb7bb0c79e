//! Streams.
//!
//! The streams of a process on one GPU share some queues, as they share the connections of hardware: work
//! of streams in different queues is in no order but that of events, and of the legacy default stream
//! (CUDA Driver API, "Stream synchronization behavior"), which waits in its queue for all blocking ones.

use crate::abi::{
    Header, Recycler, Result, enliven, exports, exports_both, handle, kill, object, put, resolve,
};
use crate::capture;
use crate::context::{Context, current};
use crate::driver::{Device, driver, lock};
use crate::event::Event;
use crate::pool;
use crate::work::each;
use simgpu::clock;
use simgpu::engine::{Op, QUEUES};
use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY, CUcontext, CUevent,
    CUstream,
};

/// Which stream handle 0 means: `_ptsz` and `_ptds` entry points mean the thread's own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flavour {
    Legacy,
    PerThread,
}

const CU_STREAM_LEGACY: usize = 1;
const CU_STREAM_PER_THREAD: usize = 2;
const CU_STREAM_NON_BLOCKING: u32 = 1;
/// Priorities, which change nothing here: 0 is lowest, −5 highest, as on Hopper.
pub(crate) const HIGHEST_PRIORITY: i32 = -5;

/// How many queues a process has to a GPU.
fn queues() -> u64 {
    static QUEUES: OnceLock<u64> = OnceLock::new();
    *QUEUES.get_or_init(|| {
        let configured = driver().map_or(1, |d| u64::from(d.session.config().driver.queues));
        let chosen = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().and_then(|n| n.parse().ok());
        chosen.map_or(configured, |chosen: u64| chosen.clamp(1, configured))
    })
}

#[repr(C)]
pub(crate) struct Stream {
    header: Header,
    context: AtomicPtr<Context>,
    flags: AtomicU32,
    id: AtomicU64,
    /// One more than its last operation; 0: none.
    last: AtomicU64,
    queue: AtomicU32,
    /// Up to which operation of the legacy default stream it waits already.
    behind: AtomicU64,
    /// Its last kernel, if that lets the next one begin before it ends.
    primary: Mutex<Option<Primary>>,
    capturing: AtomicBool,
}

/// A kernel that the next one need not wait for: CUDA Programming Guide, "Programmatic Dependent Launch and
/// Synchronization".
#[derive(Clone, Copy)]
struct Primary {
    /// One more than the stream's last operation, which it is.
    end: u64,
    /// What it waited for: one more than the operation before it; 0: none.
    begin: u64,
}

object!(Stream, 0x5354_524d);

static DEAD: Recycler<Stream> = Recycler::new();
static NEXT_ID: AtomicU64 = AtomicU64::new(3);

thread_local! {
    static OWN: RefCell<Vec<(*const Context, &'static Stream)>> = const { RefCell::new(Vec::new()) };
}

impl Stream {
    pub(crate) fn create(context: &'static Context, flags: u32) -> &'static Stream {
        let stream = DEAD.take(|| Stream {
            header: Header::new(),
            context: AtomicPtr::default(),
            flags: AtomicU32::default(),
            id: AtomicU64::default(),
            last: AtomicU64::default(),
            queue: AtomicU32::default(),
            behind: AtomicU64::default(),
            primary: Mutex::default(),
            capturing: AtomicBool::default(),
        });
        stream.context.store(std::ptr::from_ref(context).cast_mut(), Ordering::Relaxed);
        stream.flags.store(flags, Ordering::Relaxed);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        stream.id.store(id, Ordering::Relaxed);
        let others = queues().saturating_sub(1);
        let queue = if others == 0 { 0 } else { 1 + u32::try_from(id % others).unwrap_or(0) };
        stream.queue.store(queue, Ordering::Relaxed);
        stream.behind.store(0, Ordering::Relaxed);
        stream.last.store(0, Ordering::Relaxed);
        *lock(&stream.primary) = None;
        enliven(stream)
    }

    /// A context's legacy default stream: its queue is its own.
    pub(crate) fn create_legacy(context: &'static Context) -> &'static Stream {
        let stream = Stream::create(context, 0);
        stream.queue.store(0, Ordering::Relaxed);
        stream
    }

    #[inline]
    pub(crate) fn queue(&self) -> usize {
        self.queue.load(Ordering::Relaxed) as usize
    }

    /// Ends the handle; its work goes on.
    pub(crate) fn destroy(&'static self) {
        if kill(self) {
            capture::leave(self);
            DEAD.give(self);
        }
    }

    #[inline]
    pub(crate) fn context(&self) -> &'static Context {
        // SAFETY: set at creation to a context, which is never freed.
        unsafe { &*self.context.load(Ordering::Relaxed) }
    }

    #[inline]
    pub(crate) fn device(&self) -> &'static Device {
        self.context().device
    }

    /// Its number, never another stream's.
    pub(crate) fn number(&self) -> u64 {
        self.id.load(Ordering::Relaxed)
    }

    /// One more than its last operation; 0: none.
    pub(crate) fn last_operation(&self) -> u64 {
        self.last.load(Ordering::Relaxed)
    }

    /// Makes later operations wait for an event's last record.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        match event.recorded() {
            // The queue's order makes later work wait; synchronising must as well.
            Some(last)
                if last.queue == Some(self.queue())
                    && last.own.is_some_and(|device| std::ptr::eq(device, self.device())) =>
            {
                self.note(last.seq);
            }
            Some(last) => {
                self.submit(Op::Wait { channel: last.channel, seq: last.seq })?;
                // What another process's work comes after is not known here.
                if last.own.is_none() {
                    return Ok(());
                }
            }
            // Never recorded: nothing to wait for.
            None => {}
        }
        pool::waited(std::ptr::from_ref(event).addr(), self);
        Ok(())
    }

    /// Whether what is submitted to it becomes nodes of a graph.
    #[inline]
    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }

    pub(crate) fn set_capturing(&self, capturing: bool) {
        self.capturing.store(capturing, Ordering::Relaxed);
    }

    pub(crate) fn is_legacy(&self) -> bool {
        std::ptr::eq(self, self.context().legacy())
    }

    /// Refuses to wait for or ask about work that is captured rather than scheduled.
    fn permit(&'static self) -> Result<()> {
        if self.is_capturing() { capture::fail(self) } else { capture::permit() }
    }

    /// Whether it waits for the legacy default stream, and that for it.
    pub(crate) fn is_blocking(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & CU_STREAM_NON_BLOCKING == 0
    }

    /// Submits an operation; its number.
    #[inline]
    pub(crate) fn submit(&self, op: Op) -> Result<u64> {
        self.submit_for(op, None, 0)
    }

    /// Submits an operation that records `event`, in a call that takes `least_ns`. The context's calls
    /// wait for it, for room in the queue, too (openucx/ucx#11705).
    pub(crate) fn submit_for(
        &self,
        op: Op,
        event: Option<&'static Event>,
        least_ns: u64,
    ) -> Result<u64> {
        let _alone = self.context().owner().calls.alone();
        let since = clock::now_ns();
        let (seq, _) = self.submit_held(op, event)?;
        clock::burn_until(since + least_ns);
        Ok(seq)
    }

    /// As [`Stream::submit`]; the number, and that of the operation before it in its queue.
    pub(crate) fn submit_behind(&self, op: Op) -> Result<(u64, Option<u64>)> {
        let _alone = self.context().owner().calls.alone();
        self.submit_held(op, None)
    }

    /// Makes what follows wait as the legacy default stream's order demands: that stream for all
    /// blocking ones, they for it ("Stream synchronization behavior").
    fn submit_barrier(&self) -> Result<()> {
        if queues() == 1 {
            return Ok(());
        }
        let (context, device) = (self.context(), self.device());
        let channel = device.lane.channel();
        let wait = |last: u64, behind: &AtomicU64| {
            let is_new = behind.fetch_max(last, Ordering::Relaxed) < last;
            match last.checked_sub(1).filter(|_| is_new) {
                Some(seq) if !driver()?.session.is_settled(channel, seq) => {
                    let op = Op::Wait { channel, seq };
                    device.submit_with(self.queue(), op, None).map(|_| ())
                }
                _ => Ok(()),
            }
        };
        if self.is_legacy() {
            let queues = context.tails.blocking.iter().zip(&context.tails.joined).skip(1);
            for (last, joined) in queues {
                wait(last.load(Ordering::Relaxed), joined)?;
            }
        } else if self.is_blocking() {
            wait(context.tails.legacy.load(Ordering::Relaxed), &self.behind)?;
        }
        Ok(())
    }

    /// As [`Stream::submit_behind`], by a caller that holds the lock of the context's calls.
    pub(crate) fn submit_held(
        &self,
        op: Op,
        event: Option<&'static Event>,
    ) -> Result<(u64, Option<u64>)> {
        let context = self.context();
        context.check_alive()?;
        self.submit_barrier()?;
        let (seq, before) = context.device.submit_with(self.queue(), op, event)?;
        self.note(seq);
        Ok((seq, before))
    }

    /// Submits a kernel. One that is chained begins with the kernel before it, if nothing is between the two and that
    /// one lets it: in another queue, whose end the stream's own then waits for.
    pub(crate) fn submit_kernel(&self, op: Op, lets_go: bool, is_chained: bool) -> Result<()> {
        let _alone = self.context().owner().calls.alone();
        let mut primary = lock(&self.primary);
        let own = self.queue();
        let before = self.last_operation();
        let chain = primary.filter(|p| is_chained && p.end == before && own > 0 && queues() > 2);
        let op = match chain {
            None => op,
            Some(chain) => {
                let channel = self.device().lane.channel();
                let others = usize::try_from(queues() - 1).unwrap_or(QUEUES);
                let other = 1 + own % others;
                let submit = |op: Op| -> Result<u64> {
                    let (seq, _) = self.device().submit_with(other, op, None)?;
                    self.context().note(other, seq, self.is_blocking());
                    Ok(seq)
                };
                if let Some(seq) = chain.begin.checked_sub(1) {
                    submit(Op::Wait { channel, seq })?;
                }
                Op::Wait { channel, seq: submit(op)? }
            }
        };
        self.submit_held(op, None)?;
        // The next one begins when this one does, and the one before it is over.
        *primary = lets_go.then(|| Primary { end: self.last_operation(), begin: before });
        Ok(())
    }

    /// Synchronising this stream, or what it blocks, now waits for operation `seq` of its GPU. A
    /// maximum: other threads may have noted later ones.
    fn note(&self, seq: u64) {
        self.last.fetch_max(seq + 1, Ordering::Relaxed);
        self.context().note(self.queue(), seq, self.is_blocking());
        if self.is_legacy() {
            self.context().note_legacy(seq);
        }
    }

    /// The operations that synchronising this stream waits for.
    fn awaited(&self) -> impl Iterator<Item = u64> {
        let context = self.context();
        // The legacy stream waits for all blocking streams.
        let blocking = self.is_legacy().then(|| each(&context.tails.blocking));
        let own = blocking.is_none().then(|| self.last.load(Ordering::Relaxed).checked_sub(1));
        blocking.into_iter().flatten().chain(own.flatten())
    }

    /// The place that its submissions have reached, as one operation; `None`: nothing to wait for.
    pub(crate) fn place(&self) -> Option<u64> {
        if self.is_legacy() && self.awaited().next().is_some() && queues() > 1 {
            return self.submit(Op::Delay(0)).ok();
        }
        self.awaited().max()
    }

    /// Waits for everything submitted so far.
    pub(crate) fn synchronize(&'static self) -> Result<()> {
        self.context().check_alive()?;
        self.permit()?;
        drop(self.context().owner().calls.shared());
        self.awaited().try_for_each(|seq| self.device().wait(seq))?;
        self.device().check()
    }
}

/// The stream behind a handle, default streams included.
#[inline]
pub(crate) fn stream(handle: CUstream, flavour: Flavour) -> Result<&'static Stream> {
    match (handle as usize, flavour) {
        (0, Flavour::Legacy) | (CU_STREAM_LEGACY, _) => {
            let context = current()?;
            capture::permit_legacy(context, false)?;
            Ok(context.legacy())
        }
        (0, Flavour::PerThread) | (CU_STREAM_PER_THREAD, _) => per_thread(current()?),
        _ => resolve(handle),
    }
}

/// As [`stream`], for calls that neither submit, wait nor ask for progress.
pub(crate) fn peek(handle: CUstream, flavour: Flavour) -> Result<&'static Stream> {
    match (handle as usize, flavour) {
        (0, Flavour::Legacy) | (CU_STREAM_LEGACY, _) => Ok(current()?.legacy()),
        _ => stream(handle, flavour),
    }
}

fn per_thread(context: &'static Context) -> Result<&'static Stream> {
    OWN.try_with(|own| {
        let mut own = own.try_borrow_mut().map_err(|_| CUDA_ERROR_INVALID_HANDLE)?;
        if let Some((_, stream)) = own.iter().find(|(c, _)| std::ptr::eq(*c, context)) {
            return Ok(*stream);
        }
        let stream = Stream::create(context, 0);
        own.push((context, stream));
        Ok(stream)
    })
    // The thread is ending: the legacy stream is as good.
    .unwrap_or(Ok(context.legacy()))
}

fn create(flags: c_uint) -> Result<CUstream> {
    if flags > CU_STREAM_NON_BLOCKING {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let context = current()?;
    let _alone = context.owner().calls.alone();
    Ok(handle(Stream::create(context, flags)))
}

exports! {
    fn cuStreamCreate(flags: c_uint) -> CUstream { create(flags) }
    fn cuStreamCreateWithPriority(flags: c_uint, _priority: c_int) -> CUstream { create(flags) }

    fn cuStreamDestroy, cuStreamDestroy_v2(s: CUstream) {
        // Default streams can't be destroyed.
        resolve::<Stream>(s)?.destroy();
        Ok(())
    }
}

exports_both! {
    fn cuStreamSynchronize, cuStreamSynchronize_ptsz(s: CUstream) |s| {
        s.synchronize()?;
        pool::synchronized();
        Ok(())
    }

    fn cuStreamQuery, cuStreamQuery_ptsz(s: CUstream) |s| {
        s.device().check()?;
        s.permit()?;
        let _shared = s.context().owner().calls.shared();
        clock::burn(driver()?.session.config().costs.query_cpu_ns);
        for seq in s.awaited() {
            if !s.device().is_complete(seq)? {
                return Err(CUDA_ERROR_NOT_READY);
            }
        }
        Ok(())
    }

    fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz(s: CUstream, event: CUevent, _flags: c_uint) |s| {
        let event: &'static Event = resolve(event)?;
        if capture::wait(s, event)? { Ok(()) } else { s.wait_for(event) }
    }

    fn cuStreamGetCtx, cuStreamGetCtx_ptsz(s: CUstream, ctx: *mut CUcontext) |s, flavour| {
        put(ctx, handle(peek(s, flavour)?.context()))
    }

}
