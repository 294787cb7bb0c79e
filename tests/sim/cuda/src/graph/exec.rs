//! Executable graphs: their steps, and launching them.
//!
//! The steps of a launch go to the launch stream's queue one after another, dependencies first.

use super::kind::Kind;
use super::memory::{self, Allocation};
use super::plan::{self, Effect};
use super::{CUgraph, CUgraphNode, Graph, Node};
use crate::abi::{exports, exports_both, get, put, put_if, put_text};
use crate::capture;
use crate::context::current;
use crate::driver::{Device, driver, lock};
use crate::errors::Result;
use crate::handle::{Header, Recycler, enliven, handle, kill, object, resolve};
use crate::stream::{Stream, stream};
use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::{Arc, Mutex};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_GRAPH_INSTANTIATE_PARAMS as Params,
    CUgraphExec, CUstream,
};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
pub(crate) const AUTO_FREE_ON_LAUNCH: u64 = 1;

#[repr(C)]
pub(crate) struct Exec {
    header: Header,
    state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    /// For [`memory`].
    number: u64,
    /// The graph it was made of, and that graph's id then.
    graph: Option<(&'static Graph, u32)>,
    /// As given, without upload.
    pub flags: u64,
    /// In order of execution.
    pub steps: Vec<Step>,
}

#[derive(Clone)]
pub(crate) struct Step {
    /// The node it was made of.
    pub serial: u64,
    /// The same as a handle, if the node still exists.
    pub node: &'static Node,
    pub kind: Kind,
    pub after: Vec<usize>,
}

object!(Exec, 0x4745_5845);

static DEAD: Recycler<Exec> = Recycler::new();

/// The steps of `graph` behind those in `steps`. The steps of a child graph follow its node's, and
/// what depends on the node depends on all of them.
pub(crate) fn flatten(graph: &Graph, steps: &mut Vec<Step>, behind: Option<usize>) {
    let nodes = graph.nodes();
    // A node depends on nodes added before it alone, so that their order is one of execution.
    let mut spans = BTreeMap::<usize, std::ops::Range<usize>>::new();
    for node in nodes {
        let (kind, serial, after) = {
            let state = node.lock();
            (state.kind.clone(), state.serial, state.after.clone())
        };
        let mut from = Vec::<usize>::new();
        for before in after {
            from.extend(spans.get(&(handle(before) as usize)).cloned().unwrap_or_default());
        }
        from.extend(behind);
        let first = steps.len();
        let inner = match &kind {
            Kind::Child(graph) => Some(*graph),
            Kind::Conditional(conditional) => conditional.chosen(),
            _ => None,
        };
        steps.push(Step { serial, node, kind, after: from });
        if let Some(inner) = inner {
            flatten(inner, steps, Some(first));
        }
        spans.insert(handle(node) as usize, first..steps.len());
    }
}

impl State {
    /// Allocations that live on behind a launch.
    fn lasting(&self) -> Vec<Arc<Allocation>> {
        let freed = |at: u64| {
            self.steps.iter().any(|step| matches!(&step.kind, Kind::MemFree(a) if a.at == at))
        };
        let allocations = self.steps.iter().filter_map(|step| match &step.kind {
            Kind::MemAlloc(a) if !freed(a.at) => Some(Arc::clone(a)),
            _ => None,
        });
        allocations.collect()
    }

    fn allocates(&self, at: u64) -> bool {
        self.steps.iter().any(|step| matches!(&step.kind, Kind::MemAlloc(a) if a.at == at))
    }

    /// Bytes of physical memory that a launch needs, by device.
    fn footprints(&self) -> Vec<(&'static Device, u64)> {
        let mut devices = Vec::<&'static Device>::new();
        for step in &self.steps {
            if let Kind::MemAlloc(a) = &step.kind
                && !devices.iter().any(|d| std::ptr::eq(*d, a.device))
            {
                devices.push(a.device);
            }
        }
        let after: Vec<_> = self.steps.iter().map(|step| step.after.clone()).collect();
        let bytes_on = |device: &'static Device| {
            let effects: Vec<_> = self
                .steps
                .iter()
                .map(|step| match &step.kind {
                    Kind::MemAlloc(a) if std::ptr::eq(a.device, device) => {
                        Effect::Alloc(a.at, memory::footprint(a.size))
                    }
                    Kind::MemFree(a) => Effect::Free(a.at),
                    _ => Effect::None,
                })
                .collect();
            plan::footprint(&effects, &after)
        };
        devices.into_iter().map(|device| (device, bytes_on(device))).collect()
    }

    /// `launching`: nothing trims it before [`memory::launched`].
    fn map(&self, s: &Stream, launching: bool) -> Result<Vec<&'static Device>> {
        let mut mapped = Vec::new();
        let all = self.lasting();
        for (device, bytes) in self.footprints() {
            let there = all.iter().filter(|a| std::ptr::eq(a.device, device));
            let lasting: u64 = there.map(|a| memory::footprint(a.size)).sum();
            let bytes = (bytes, lasting.min(bytes));
            if let Err(error) = memory::map(self.number, device, s.number(), bytes, launching) {
                mapped.into_iter().for_each(|device| memory::launched(self.number, device, 0));
                return Err(error);
            }
            mapped.push(device);
        }
        Ok(mapped)
    }

    /// A child graph node that does what a launch does.
    fn as_child(&self) -> Result<Kind> {
        let graph = Graph::create_owned();
        let mut nodes = Vec::<&'static Node>::with_capacity(self.steps.len());
        for step in &self.steps {
            let kind = match &step.kind {
                // "memory allocation/free nodes can't be present in the child graph"
                Kind::MemAlloc(_) | Kind::MemFree(_) => return Err(CUDA_ERROR_NOT_SUPPORTED),
                // Their own nodes follow.
                Kind::Child(_) | Kind::Conditional(_) => Kind::Empty,
                other => other.clone(),
            };
            let after = step.after.iter().map(|&from| nodes[from]).collect();
            nodes.push(graph.add(kind, after)?);
        }
        Ok(Kind::Child(graph))
    }

    fn launch(&self, s: &'static Stream) -> Result<()> {
        s.device().check()?;
        s.context().check_alive()?;
        let lasting = self.lasting();
        if lasting.iter().any(|a| memory::is_live(a.at)) {
            // "the launch will fail with CUDA_ERROR_INVALID_VALUE"
            if self.flags & AUTO_FREE_ON_LAUNCH == 0 {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            lasting.iter().for_each(|a| drop(memory::free(a.at)));
        }
        let unknown = |step: &Step| match &step.kind {
            Kind::MemFree(a) => !self.allocates(a.at) && !memory::is_live(a.at),
            _ => false,
        };
        if self.steps.iter().any(unknown) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let devices = self.map(s, true)?;
        let submitted = self.submit(s, &lasting);
        let last = s.last_operation();
        for device in devices {
            memory::launched(self.number, device, last);
        }
        submitted
    }

    fn submit(&self, s: &'static Stream, lasting: &[Arc<Allocation>]) -> Result<()> {
        for step in &self.steps {
            match &step.kind {
                Kind::Kernel(kernel) => crate::launch::run_kernel(kernel, s)?,
                Kind::Memcpy(copy) => crate::copy::run(copy, s)?,
                Kind::Memset(fill) => fill.run(s)?,
                Kind::Host(host) => crate::host_function::run(host.function, host.data, s)?,
                Kind::EventWait(event) => s.wait_for(event)?,
                Kind::EventRecord(event) => crate::event::record_in(event, s, 0)?,
                Kind::MemAlloc(a) => {
                    if lasting.iter().any(|other| other.at == a.at) {
                        memory::enliven(self.number, a);
                    }
                }
                Kind::MemFree(a) => {
                    if !self.allocates(a.at) {
                        drop(memory::free(a.at));
                    }
                }
                Kind::MemOps(ops) => crate::stream_memory::run(ops, s)?,
                Kind::Empty | Kind::Child(_) | Kind::Conditional(_) => {}
            }
        }
        Ok(())
    }
}

impl Exec {
    /// Makes an executable graph of `graph`; `None` if it is another's, is captured into, or may
    /// have no other executable graph.
    pub(crate) fn create(graph: &'static Graph, flags: u64) -> Option<&'static Exec> {
        let mut steps = Vec::new();
        flatten(graph, &mut steps, None);
        // "there can be at most one executable graph in existence for that graph at a time"
        let single = graph.has_memory_nodes() || graph.has_conditional_nodes();
        let mut original = graph.lock();
        if original.owned || original.capturing || (single && original.execs > 0) {
            return None;
        }
        if single {
            original.execs += 1;
        }
        let origin = single.then_some((graph, original.id));
        drop(original);
        let exec = DEAD.take(|| Exec { header: Header::new(), state: Mutex::default() });
        *exec.lock() = State { number: memory::next_exec(), graph: origin, flags, steps };
        Some(enliven(exec))
    }

    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn upload(&self, s: &'static Stream) -> Result<()> {
        self.lock().map(s, false).map(|_| ())
    }

    /// Ends it. What it allocated lives on; its memory is kept for other graphs.
    pub(crate) fn destroy(&'static self) {
        if !kill(self) {
            return;
        }
        let state = std::mem::take(&mut *self.lock());
        memory::unmap(state.number);
        if let Some((graph, id)) = state.graph {
            let mut original = graph.lock();
            if original.id == id {
                original.execs = original.execs.saturating_sub(1);
            }
        }
        DEAD.give(self);
    }
}

exports! {
    fn cuGraphExecDestroy(exec: CUgraphExec) {
        driver()?;
        resolve::<Exec>(exec)?.destroy();
        Ok(())
    }
}

exports_both! {
    fn cuGraphLaunch, cuGraphLaunch_ptsz(exec: CUgraphExec, s: CUstream) |flavour| {
        driver()?;
        let exec: &'static Exec = resolve(exec)?;
        let s = stream(s, flavour)?;
        if s.is_capturing() {
            return capture::add(s, |_| exec.lock().as_child()).map(|_| ());
        }
        exec.lock().launch(s)
    }
    fn cuGraphUpload, cuGraphUpload_ptsz(exec: CUgraphExec, s: CUstream) |flavour| {
        current()?;
        let exec: &'static Exec = resolve(exec)?;
        let s = stream(s, flavour)?;
        if s.is_capturing() { capture::fail(s) } else { exec.upload(s) }
    }
}

// The ways to make an executable graph.

/// `CUDA_GRAPH_INSTANTIATE_FLAG_*`.
mod flag {
    pub(super) const UPLOAD: u64 = 2;
    /// Automatic free and device launch, which exclude each other.
    pub(super) const EXCLUSIVE: u64 = 1 | 4;
    pub(super) const ALL: u64 = 15;
}

/// `cuGraphInstantiateWithFlags`.
fn with_flags(out: *mut CUgraphExec, graph: CUgraph, flags: u64) -> Result<()> {
    driver()?;
    let graph: &'static Graph = resolve(graph)?;
    if out.is_null() || flags & !flag::ALL != 0 || flags & flag::EXCLUSIVE == flag::EXCLUSIVE {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let exec = Exec::create(graph, flags & !flag::UPLOAD).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    put(out, handle(exec))
}

exports! {
    fn cuGraphInstantiate, cuGraphInstantiate_v2(out: *mut CUgraphExec, graph: CUgraph, error: *mut CUgraphNode, log: *mut c_char, len: usize) {
        put_if(error, std::ptr::null_mut());
        let made = with_flags(out, graph, 0);
        if made.is_err() && !log.is_null() && len > 0 {
            let len = i32::try_from(len).unwrap_or(i32::MAX);
            put_text(log, len, "the graph has an executable graph already, or is no graph to launch")?;
        }
        made
    }
    fn cuGraphInstantiateWithFlags(out: *mut CUgraphExec, graph: CUgraph, flags: u64) {
        // "Only supported by cuGraphInstantiateWithParams."
        if flags & flag::UPLOAD != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        with_flags(out, graph, flags)
    }
}

exports_both! {
    fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(out: *mut CUgraphExec, graph: CUgraph, params: *mut Params) |flavour| {
        let p = get(params)?;
        let mut made = with_flags(out, graph, p.flags);
        if made.is_ok() && p.flags & flag::UPLOAD != 0 {
            let exec: &'static Exec = resolve(get(out)?)?;
            made = stream(p.hUploadStream, flavour).and_then(|s| exec.upload(s));
            if made.is_err() {
                exec.destroy();
            }
        }
        // CUDA_GRAPH_INSTANTIATE_SUCCESS, …_ERROR.
        let result_out = i32::from(made.is_err());
        put(params, Params { result_out, hErrNode_out: std::ptr::null_mut(), ..p })?;
        made
    }
}
