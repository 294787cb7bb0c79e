//! Stream capture: CUDA Driver API, "Stream Management"; CUDA Programming Guide, "Stream Capture".
//!
//! Work submitted to a capturing stream becomes nodes of the sequence's graph. First comes whom a capture prohibits what,
//! then the state of all captures and how work, forks and joins change it, last the exports. Programs that never capture
//! pay one load of a flag per call.

use crate::abi::{Result, exports, exports_both, get, handle, put, put_if, resolve};
use crate::context::Context;
use crate::driver::{Device, lock};
use crate::event::Event;
use crate::graph::add::nodes;
use crate::graph::{Graph, Kind, Node};
use crate::stream::{Flavour, Stream, peek};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUgraph, CUgraphEdgeData, CUgraphNode, CUresult, CUstream,
};

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

/// Refuses a "potentially unsafe API call" (`cuThreadExchangeStreamCaptureMode`) where a capture and the thread's mode
/// prohibit it. The manual names `cudaMalloc` and the query of an event; the others are what libraries that guard their
/// calls report of real drivers. Safe are `cuMemCreate`, with which PyTorch's expandable segments grow in a capture,
/// and which pool is a device's (NVIDIA's libcu++).
#[inline]
pub(crate) fn permit() -> Result<()> {
    if any() { permit_unsafe() } else { Ok(()) }
}

#[cold]
fn permit_unsafe() -> Result<()> {
    let mode = MODE.try_with(Cell::get).unwrap_or(Mode::Global);
    if mode == Mode::Relaxed {
        return Ok(());
    }
    let this = std::thread::current().id();
    let mut all = captures();
    let prohibits = |of: &Sequence| {
        if of.thread == this {
            of.mode != Mode::Relaxed
        } else {
            mode == Mode::Global && of.mode == Mode::Global
        }
    };
    let by = all.sequences.iter().filter(|(_, s)| prohibits(s)).map(|(id, _)| *id).collect();
    all.refuse(by, UNSUPPORTED)
}

/// Refuses to synchronise "a broader handle which encompasses an active stream capture".
pub(crate) fn permit_context(context: &'static Context) -> Result<()> {
    if !any() {
        return Ok(());
    }
    permit_unsafe()?;
    let mut all = captures();
    let within = all.streams.values().filter(|p| p.stream.context().is_within(context));
    let within = within.map(|p| p.sequence).collect();
    all.refuse(within, UNSUPPORTED)
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
    let blocking = |s: &'static Stream| std::ptr::eq(s.context(), context) && s.is_blocking();
    let by = all.streams.values().filter(|p| blocking(p.stream));
    let by: Vec<u64> = by.map(|p| p.sequence).collect();
    match asks_only && !by.is_empty() {
        true => Err(IMPLICIT),
        false => all.refuse(by, IMPLICIT),
    }
}

// The capture sequences of the process: which streams take part, and what was recorded last.

/// The nodes that the next one depends on.
type Tips = Vec<&'static Node>;

/// One `cuStreamBeginCapture` … `cuStreamEndCapture`.
struct Sequence {
    graph: &'static Graph,
    /// The caller made the graph, and keeps it.
    existing: bool,
    /// The stream that it began in: its address.
    origin: usize,
    mode: Mode,
    thread: std::thread::ThreadId,
    invalid: bool,
}

struct Participant {
    stream: &'static Stream,
    sequence: u64,
    tips: Tips,
    /// The same for `cuStreamGetCaptureInfo`, whose caller is given a pointer to it.
    list: (Box<[usize]>, Box<[CUgraphEdgeData]>),
}

#[derive(Default)]
struct Captures {
    next: u64,
    /// By number.
    sequences: BTreeMap<u64, Sequence>,
    /// By the stream's address.
    streams: BTreeMap<usize, Participant>,
    /// Events last recorded in a capture, by address: the sequence and what they stand for.
    events: BTreeMap<usize, (u64, Tips)>,
}

static CAPTURES: Mutex<Captures> = Mutex::new(Captures {
    next: 1,
    sequences: BTreeMap::new(),
    streams: BTreeMap::new(),
    events: BTreeMap::new(),
});
/// How many sequences there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// How many events were last recorded in a capture.
static EVENTS: AtomicUsize = AtomicUsize::new(0);

#[inline]
fn any() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

fn captures() -> MutexGuard<'static, Captures> {
    lock(&CAPTURES)
}

fn key<T>(object: &'static T) -> usize {
    std::ptr::from_ref(object) as usize
}

fn join(tips: &mut Tips, more: &[&'static Node]) {
    for tip in more {
        if !tips.iter().any(|node| std::ptr::eq(*node, *tip)) {
            tips.push(tip);
        }
    }
}

impl Captures {
    /// A stream's participation, unless its sequence is invalid.
    fn active(&mut self, s: &'static Stream) -> Result<(&mut Participant, &Sequence)> {
        let participant = self.streams.get_mut(&key(s)).ok_or(ILLEGAL_STATE)?;
        let sequence = self.sequences.get(&participant.sequence).ok_or(ILLEGAL_STATE)?;
        if sequence.invalid { Err(INVALIDATED) } else { Ok((participant, sequence)) }
    }

    fn of(&self, s: &'static Stream) -> Option<(u64, &Sequence)> {
        let id = self.streams.get(&key(s))?.sequence;
        self.sequences.get(&id).map(|sequence| (id, sequence))
    }

    /// Ends a sequence's use until `cuStreamEndCapture`.
    fn invalidate(&mut self, id: u64) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.invalid = true;
        }
    }

    /// Invalidates the sequences that prohibit a call; without any it is permitted.
    fn refuse(&mut self, by: Vec<u64>, code: CUresult) -> Result<()> {
        let refused = !by.is_empty();
        by.into_iter().for_each(|id| self.invalidate(id));
        if refused { Err(code) } else { Ok(()) }
    }

    fn fail<T>(&mut self, id: u64, code: CUresult) -> Result<T> {
        self.invalidate(id);
        Err(code)
    }

    fn enter(&mut self, s: &'static Stream, sequence: u64, tips: Tips) {
        s.set_capturing(true);
        let list = (Box::default(), Box::default());
        self.streams.insert(key(s), Participant { stream: s, sequence, tips, list });
    }

    fn end(&mut self, id: u64) -> Option<Sequence> {
        self.streams.retain(|_, participant| {
            if participant.sequence == id {
                participant.stream.set_capturing(false);
            }
            participant.sequence != id
        });
        let sequence = self.sequences.remove(&id)?;
        sequence.graph.lock().capturing = false;
        COUNT.fetch_sub(1, Ordering::Relaxed);
        Some(sequence)
    }

    /// Whether all work of the sequence's other streams is behind `tips`.
    fn is_joined(&self, id: u64, tips: &Tips) -> bool {
        let mut seen = BTreeSet::new();
        let mut look = tips.clone();
        while let Some(node) = look.pop() {
            if seen.insert(key(node)) {
                look.extend(node.after());
            }
        }
        let others = self.streams.values().filter(|participant| participant.sequence == id);
        others.flat_map(|p| &p.tips).all(|node| seen.contains(&key(*node)))
    }
}

/// Begins a capture in `s`, into a new graph or behind nodes of the caller's.
fn begin(s: &'static Stream, mode: Mode, into: Option<(&'static Graph, Tips)>) -> Result<()> {
    if s.is_legacy() {
        return Err(UNSUPPORTED);
    }
    let mut all = captures();
    if all.streams.contains_key(&key(s)) {
        return Err(ILLEGAL_STATE);
    }
    let (graph, existing, tips) = match into {
        None => (Graph::create(), false, Vec::new()),
        Some((graph, tips)) if tips.iter().all(|node| node.is_in(graph)) => (graph, true, tips),
        Some(_) => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    graph.lock().capturing = true;
    let id = all.next;
    all.next += 1;
    let thread = std::thread::current().id();
    let sequence = Sequence { graph, existing, origin: key(s), mode, thread, invalid: false };
    all.sequences.insert(id, sequence);
    COUNT.fetch_add(1, Ordering::Relaxed);
    all.enter(s, id, tips);
    Ok(())
}

/// Ends the capture that began in `s`; its graph.
fn end(s: &'static Stream) -> Result<&'static Graph> {
    let mut all = captures();
    let (id, sequence) = all.of(s).ok_or(ILLEGAL_STATE)?;
    if sequence.mode != Mode::Relaxed && sequence.thread != std::thread::current().id() {
        return Err(WRONG_THREAD);
    }
    if sequence.origin != key(s) {
        return all.fail(id, UNMATCHED);
    }
    let invalid = sequence.invalid;
    let tips = all.streams.get(&key(s)).map(|p| p.tips.clone()).unwrap_or_default();
    let joined = all.is_joined(id, &tips);
    let sequence = all.end(id).ok_or(ILLEGAL_STATE)?;
    drop(all);
    let code = match (invalid, joined) {
        (false, true) => return Ok(sequence.graph),
        (true, _) => INVALIDATED,
        (false, false) => UNJOINED,
    };
    if !sequence.existing {
        sequence.graph.destroy();
    }
    Err(code)
}

/// Captures work submitted to `s`; the new node.
pub(crate) fn add(
    s: &'static Stream,
    kind: impl FnOnce(&'static Graph) -> Result<Kind>,
) -> Result<&'static Node> {
    let mut all = captures();
    let (id, _) = all.of(s).ok_or(ILLEGAL_STATE)?;
    let (participant, sequence) = all.active(s)?;
    let added =
        kind(sequence.graph).and_then(|kind| sequence.graph.add(kind, participant.tips.clone()));
    match added {
        Ok(node) => {
            participant.tips = vec![node];
            Ok(node)
        }
        Err(code) => all.fail(id, code),
    }
}

/// Refuses an operation that a capturing stream does not support, and invalidates its capture.
pub(crate) fn fail<T>(s: &'static Stream) -> Result<T> {
    let mut all = captures();
    let id = all.of(s).map(|(id, _)| id).ok_or(ILLEGAL_STATE)?;
    match all.active(s) {
        Ok(_) => all.fail(id, UNSUPPORTED),
        Err(code) => Err(code),
    }
}

/// `cuMemAllocAsync` in a capturing stream: an allocation node, whatever the pool.
pub(crate) fn alloc(s: &'static Stream, device: &'static Device, bytes: u64) -> Result<u64> {
    let mut at = 0;
    add(s, |graph| {
        let allocation = crate::graph::add::allocate_on(graph, device.ordinal, bytes)?;
        at = allocation.at;
        Ok(Kind::MemAlloc(allocation))
    })?;
    Ok(at)
}

/// `cuMemFreeAsync` in a capturing stream: a free node.
pub(crate) fn free(s: &'static Stream, at: u64) -> Result<()> {
    add(s, |graph| crate::graph::add::free(graph, at)).map(|_| ())
}

/// Records an event in a stream: in a capture it stands for what the stream's next node would
/// depend on, else it stands for no captured work any more. Whether it was captured.
pub(crate) fn record(event: &'static Event, s: &'static Stream) -> Result<bool> {
    if !s.is_capturing() {
        forget_event(event);
        return Ok(false);
    }
    let mut all = captures();
    let (participant, _) = all.active(s)?;
    let recorded = (participant.sequence, participant.tips.clone());
    if all.events.insert(key(event), recorded).is_none() {
        EVENTS.fetch_add(1, Ordering::Relaxed);
    }
    Ok(true)
}

/// An event is recorded outside of a capture, or gone.
#[inline]
pub(crate) fn forget_event(event: &'static Event) {
    if EVENTS.load(Ordering::Relaxed) > 0 && captures().events.remove(&key(event)).is_some() {
        EVENTS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Refuses what can't be asked of an event last recorded in a capture.
#[inline]
pub(crate) fn is_captured(event: &'static Event) -> Result<()> {
    if EVENTS.load(Ordering::Relaxed) == 0 {
        return Ok(());
    }
    let mut all = captures();
    match all.events.get(&key(event)).map(|recorded| recorded.0) {
        Some(id) => all.fail(id, CAPTURED_EVENT),
        None => Ok(()),
    }
}

/// Makes a stream wait for an event within a capture, or into one (a fork); false outside of any, where the event's last
/// record is to be waited for.
pub(crate) fn wait(s: &'static Stream, event: &'static Event) -> Result<bool> {
    if !any() && EVENTS.load(Ordering::Relaxed) == 0 {
        return Ok(false);
    }
    let mut all = captures();
    let own = all.of(s).map(|(id, _)| id);
    let recorded = all.events.get(&key(event)).cloned();
    match (own, recorded) {
        (None, None) => Ok(false),
        // A fork.
        (None, Some((id, tips))) => match all.sequences.get(&id).map(|sequence| sequence.invalid) {
            Some(false) if s.is_legacy() => all.fail(id, IMPLICIT),
            Some(false) => {
                all.enter(s, id, tips);
                Ok(true)
            }
            Some(true) => Err(INVALIDATED),
            None => Err(CAPTURED_EVENT),
        },
        (Some(own), Some((id, tips))) => {
            let (participant, _) = all.active(s)?;
            if own == id {
                join(&mut participant.tips, &tips);
                return Ok(true);
            }
            let code = if all.sequences.contains_key(&id) { MERGE } else { ISOLATION };
            all.invalidate(id);
            all.fail(own, code)
        }
        (Some(own), None) => {
            all.active(s)?;
            // Never recorded: "a functional no-op".
            if event.recorded().is_none() { Ok(true) } else { all.fail(own, ISOLATION) }
        }
    }
}

pub(crate) fn leave(s: &'static Stream) {
    if !s.is_capturing() {
        return;
    }
    let mut all = captures();
    if let Some((id, _)) = all.of(s) {
        let origin = all.sequences.get(&id).is_some_and(|sequence| sequence.origin == key(s));
        if origin {
            // Nobody can end it any more.
            let ended = all.end(id).filter(|sequence| !sequence.existing);
            drop(all);
            if let Some(sequence) = ended {
                sequence.graph.destroy();
            }
        } else {
            // Its unjoined work stays, and the stream can't join it.
            all.invalidate(id);
            all.streams.remove(&key(s));
            s.set_capturing(false);
        }
    }
}

/// A graph is destroyed while it is captured into.
pub(crate) fn graph_is_gone(graph: &'static Graph) {
    if any() {
        let mut all = captures();
        let ids = all.sequences.iter().filter(|(_, s)| handle(s.graph) == handle(graph));
        let ids = ids.map(|(id, _)| *id).collect();
        let _ = all.refuse(ids, INVALIDATED);
    }
}

// The exports of stream capture.

const ACTIVE: c_int = 1;
const INVALID: c_int = 2;

fn start(
    s: CUstream,
    flavour: Flavour,
    mode: c_int,
    into: Option<(&'static Graph, Tips)>,
) -> Result<()> {
    let mode = Mode::of(mode).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    begin(peek(s, flavour)?, mode, into)
}

/// The stream of a question about captures.
fn asked(s: CUstream, flavour: Flavour) -> Result<&'static Stream> {
    let s = peek(s, flavour)?;
    if s.is_legacy() {
        permit_legacy(s.context(), true)?;
    }
    Ok(s)
}

exports! {
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        let new = Mode::of(get(mode)?).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        put(mode, exchange(new) as c_int)
    }
}

exports_both! {
    fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz(s: CUstream) |s, flavour| {
        start(s, flavour, Mode::Global as c_int, None)
    }
    fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(s: CUstream, mode: c_int) |s, flavour| {
        start(s, flavour, mode, None)
    }
    fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(s: CUstream, graph: CUgraph, deps: *const CUgraphNode, _data: *const CUgraphEdgeData, count: usize, mode: c_int) |s, flavour| {
        start(s, flavour, mode, Some((resolve(graph)?, nodes(deps, count)?)))
    }
    fn cuStreamEndCapture, cuStreamEndCapture_ptsz(s: CUstream, out: *mut CUgraph) |s, flavour| {
        put(out, std::ptr::null_mut())?;
        put(out, handle(end(peek(s, flavour)?)?))
    }
    fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz(s: CUstream, out: *mut c_int) |s, flavour| {
        let s = asked(s, flavour)?;
        put(out, captures().of(s).map_or(0, |(_, c)| if c.invalid { INVALID } else { ACTIVE }))
    }
    fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(s: CUstream, status: *mut c_int, id: *mut u64, graph: *mut CUgraph, nodes: *mut *const CUgraphNode, edges: *mut *const CUgraphEdgeData, count: *mut usize) |s, flavour| {
        let s = asked(s, flavour)?;
        if status.is_null() || (nodes.is_null() && !edges.is_null()) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut all = captures();
        let Some((own, sequence)) = all.of(s) else { return put(status, 0) };
        if sequence.invalid {
            return put(status, INVALID);
        }
        put_if(id, own);
        put_if(graph, handle(sequence.graph));
        let (participant, _) = all.active(s)?;
        let tips = participant.tips.iter().map(|tip| handle(*tip) as usize).collect();
        participant.list = (tips, vec![<CUgraphEdgeData>::default(); participant.tips.len()].into());
        put_if(nodes, participant.list.0.as_ptr().cast());
        put_if(edges, participant.list.1.as_ptr());
        put_if(count, participant.tips.len());
        put(status, ACTIVE)
    }
}
