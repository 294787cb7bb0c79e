//! The capture sequences of the process: which streams take part, and what was recorded last.

use super::{
    CAPTURED_EVENT, ILLEGAL_STATE, IMPLICIT, INVALIDATED, ISOLATION, MERGE, Mode, UNJOINED,
    UNMATCHED, UNSUPPORTED, WRONG_THREAD,
};
use crate::driver::{Device, lock};
use crate::errors::Result;
use crate::event::Event;
use crate::graph::kind::{Edge, Kind};
use crate::graph::{Graph, Node};
use crate::handle::handle;
use crate::stream::Stream;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUresult};

/// The nodes that the next one depends on.
pub(crate) type Tips = Vec<&'static Node>;

/// One `cuStreamBeginCapture` … `cuStreamEndCapture`.
pub(crate) struct Sequence {
    pub graph: &'static Graph,
    /// The caller made the graph, and keeps it.
    existing: bool,
    /// The stream that it began in: its address.
    origin: usize,
    pub mode: Mode,
    pub thread: std::thread::ThreadId,
    pub invalid: bool,
}

pub(crate) struct Participant {
    pub stream: &'static Stream,
    pub sequence: u64,
    pub tips: Tips,
    /// The same for `cuStreamGetCaptureInfo`, whose caller is given a pointer to it.
    pub list: (Box<[usize]>, Box<[Edge]>),
}

#[derive(Default)]
pub(crate) struct Captures {
    next: u64,
    /// By number.
    pub sequences: BTreeMap<u64, Sequence>,
    /// By the stream's address.
    pub streams: BTreeMap<usize, Participant>,
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
static ACTIVE: AtomicUsize = AtomicUsize::new(0);
/// How many events were last recorded in a capture.
static EVENTS: AtomicUsize = AtomicUsize::new(0);

#[inline]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Relaxed) > 0
}

pub(crate) fn captures() -> MutexGuard<'static, Captures> {
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
    pub(crate) fn active(&mut self, s: &'static Stream) -> Result<(&mut Participant, &Sequence)> {
        let participant = self.streams.get_mut(&key(s)).ok_or(ILLEGAL_STATE)?;
        let sequence = self.sequences.get(&participant.sequence).ok_or(ILLEGAL_STATE)?;
        if sequence.invalid { Err(INVALIDATED) } else { Ok((participant, sequence)) }
    }

    pub(crate) fn of(&self, s: &'static Stream) -> Option<(u64, &Sequence)> {
        let id = self.streams.get(&key(s))?.sequence;
        self.sequences.get(&id).map(|sequence| (id, sequence))
    }

    /// Ends a sequence's use until `cuStreamEndCapture`.
    pub(crate) fn invalidate(&mut self, id: u64) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.invalid = true;
        }
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
        ACTIVE.fetch_sub(1, Ordering::Relaxed);
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
pub(crate) fn begin(
    s: &'static Stream,
    mode: Mode,
    into: Option<(&'static Graph, Tips)>,
) -> Result<()> {
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
    ACTIVE.fetch_add(1, Ordering::Relaxed);
    all.enter(s, id, tips);
    Ok(())
}

/// Ends the capture that began in `s`; its graph.
pub(crate) fn end(s: &'static Stream) -> Result<&'static Graph> {
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
pub(crate) fn alloc(
    s: &'static Stream,
    device: &'static Device,
    out: *mut u64,
    bytes: usize,
) -> Result<()> {
    let mut at = 0;
    if out.is_null() || bytes == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    add(s, |graph| {
        let kind = crate::graph::add::allocate_on(graph, device.ordinal, bytes as u64)?;
        if let Kind::MemAlloc(allocation) = &kind {
            at = allocation.at;
        }
        Ok(kind)
    })?;
    crate::abi::put(out, at)
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

/// What `cuStreamWaitEvent` means.
pub(crate) enum Wait {
    /// It was captured: nothing is to be done.
    Captured,
    /// Nothing captures: wait for the event's last record.
    Recorded,
}

/// Makes a stream wait for an event: within a capture, into one (a fork), or outside of any.
pub(crate) fn wait(s: &'static Stream, event: &'static Event, external: bool) -> Result<Wait> {
    if !any() && EVENTS.load(Ordering::Relaxed) == 0 {
        return if external { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(Wait::Recorded) };
    }
    let mut all = captures();
    let own = all.of(s).map(|(id, _)| id);
    let recorded = all.events.get(&key(event)).cloned();
    match (own, recorded) {
        (None, _) if external => Err(CUDA_ERROR_INVALID_VALUE),
        (None, None) => Ok(Wait::Recorded),
        // A fork.
        (None, Some((id, tips))) => match all.sequences.get(&id).map(|sequence| sequence.invalid) {
            Some(false) if s.is_legacy() => all.fail(id, IMPLICIT),
            Some(false) => {
                all.enter(s, id, tips);
                Ok(Wait::Captured)
            }
            Some(true) => Err(INVALIDATED),
            None => Err(CAPTURED_EVENT),
        },
        (Some(id), _) if external => {
            let (participant, sequence) = all.active(s)?;
            let node = sequence.graph.add(Kind::EventWait(event), participant.tips.clone());
            match node {
                Ok(node) => {
                    participant.tips = vec![node];
                    Ok(Wait::Captured)
                }
                Err(code) => all.fail(id, code),
            }
        }
        (Some(own), Some((id, tips))) => {
            let (participant, _) = all.active(s)?;
            if own == id {
                join(&mut participant.tips, &tips);
                return Ok(Wait::Captured);
            }
            let code = if all.sequences.contains_key(&id) { MERGE } else { ISOLATION };
            all.invalidate(id);
            all.fail(own, code)
        }
        (Some(own), None) => {
            all.active(s)?;
            // Never recorded: "a functional no-op".
            if event.recorded().is_none() { Ok(Wait::Captured) } else { all.fail(own, ISOLATION) }
        }
    }
}

/// A stream is destroyed.
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
        let ids: Vec<u64> = ids.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| all.invalidate(id));
    }
}
