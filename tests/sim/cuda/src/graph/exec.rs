//! Executable graphs: their steps, and launching them.
//!
//! The steps of a launch go to the launch stream's queue one after another, dependencies first.

use super::add::{kernel, settable};
use super::memory::{self, Allocation, Effect};
use super::{Graph, Kind, Node};
use crate::abi::{
    Header, Recycler, Result, enliven, exports, exports_both, get, handle, kill, object, put,
    put_if, resolve,
};
use crate::capture;
use crate::driver::{Device, lock};
use crate::stream::{Stream, stream};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::sync::{Arc, Mutex};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_GRAPH_INSTANTIATE_PARAMS as Params,
    CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v1, CUgraph, CUgraphExec,
    CUgraphExecUpdateResultInfo as Info, CUgraphNode, CUgraphNodeParams, CUresult, CUstream,
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
            memory::launch_footprint(&effects, &after)
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
                Kind::Memcpy(copy) => copy.run(s, false)?,
                Kind::Memset(fill) => fill.run(s)?,
                Kind::Host(host) => crate::work::run(host.function, host.data, s)?,
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
                Kind::MemOp(op) => op.run(s)?,
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
        resolve::<Exec>(exec)?.destroy();
        Ok(())
    }
}

exports_both! {
    fn cuGraphLaunch, cuGraphLaunch_ptsz(exec: CUgraphExec, s: CUstream) |s| {
        let exec: &'static Exec = resolve(exec)?;
        if s.is_capturing() {
            return capture::add(s, |_| exec.lock().as_child()).map(|_| ());
        }
        exec.lock().launch(s)
    }
    fn cuGraphUpload, cuGraphUpload_ptsz(exec: CUgraphExec, s: CUstream) |s| {
        let exec: &'static Exec = resolve(exec)?;
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

fn instantiate(graph: CUgraph, flags: u64) -> Result<&'static Exec> {
    let graph: &'static Graph = resolve(graph)?;
    if flags & !flag::ALL != 0 || flags & flag::EXCLUSIVE == flag::EXCLUSIVE {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Exec::create(graph, flags & !flag::UPLOAD).ok_or(CUDA_ERROR_INVALID_VALUE)
}

exports! {
    fn cuGraphInstantiate, cuGraphInstantiate_v2(graph: CUgraph, error: *mut CUgraphNode, _log: *mut c_char, _len: usize) -> CUgraphExec {
        put_if(error, std::ptr::null_mut());
        instantiate(graph, 0).map(handle)
    }
    fn cuGraphInstantiateWithFlags(graph: CUgraph, flags: u64) -> CUgraphExec {
        // "Only supported by cuGraphInstantiateWithParams."
        if flags & flag::UPLOAD != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        instantiate(graph, flags).map(handle)
    }
}

exports_both! {
    fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(graph: CUgraph, params: *mut Params) -> CUgraphExec |params, flavour| {
        let p = get(params)?;
        let mut made = instantiate(graph, p.flags);
        if let (Ok(exec), true) = (made, p.flags & flag::UPLOAD != 0)
            && let Err(code) = stream(p.hUploadStream, flavour).and_then(|s| exec.upload(s))
        {
            exec.destroy();
            made = Err(code);
        }
        // CUDA_GRAPH_INSTANTIATE_SUCCESS, …_ERROR.
        let result_out = i32::from(made.is_err());
        put(params, Params { result_out, hErrNode_out: std::ptr::null_mut(), ..p })?;
        made.map(handle)
    }
}

// Changing executable graphs: `cuGraphExecUpdate`, `cuGraphExec…SetParams`.

const CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE: CUresult = 910;

/// `CU_GRAPH_EXEC_UPDATE_*`.
mod outcome {
    use std::ffi::c_int;
    pub(super) const TOPOLOGY_CHANGED: c_int = 2;
    pub(super) const NODE_TYPE_CHANGED: c_int = 3;
    pub(super) const PARAMETERS_CHANGED: c_int = 5;
}

/// Why an update can't be: a result, the node, and the one it depends on.
type Refused = (c_int, Option<&'static Node>, Option<&'static Node>);

fn compare(old: &[Step], new: &[Step]) -> std::result::Result<(), Refused> {
    if old.len() != new.len() {
        return Err((outcome::TOPOLOGY_CHANGED, None, None));
    }
    for (was, is) in old.iter().zip(new) {
        if was.after.len() != is.after.len() {
            return Err((outcome::TOPOLOGY_CHANGED, Some(is.node), None));
        }
        if let Some((_, &from)) = was.after.iter().zip(&is.after).find(|(a, b)| a != b) {
            return Err((outcome::TOPOLOGY_CHANGED, Some(is.node), Some(new[from].node)));
        }
        if was.kind.number() != is.kind.number() {
            return Err((outcome::NODE_TYPE_CHANGED, Some(is.node), None));
        }
        if !changeable(&was.kind, &is.kind) {
            return Err((outcome::PARAMETERS_CHANGED, Some(is.node), None));
        }
    }
    Ok(())
}

/// Whether a node of an executable graph may become this.
fn changeable(was: &Kind, is: &Kind) -> bool {
    match (was, is) {
        // "For 2d memsets, only address and assigned value may be updated."
        (Kind::Memset(a), Kind::Memset(b)) => {
            (a.height <= 1 && b.height <= 1)
                || (a.height, a.width, a.element, a.pitch)
                    == (b.height, b.width, b.element, b.pitch)
        }
        (Kind::Memcpy(a), Kind::Memcpy(b)) => a.same_kinds(b),
        // The same allocation, or one that needs as much.
        (Kind::MemAlloc(a), Kind::MemAlloc(b)) => a.size == b.size,
        _ => was.number() == is.number(),
    }
}

fn update(exec: CUgraphExec, graph: CUgraph) -> Result<Option<Refused>> {
    let exec: &'static Exec = resolve(exec)?;
    let graph: &Graph = resolve(graph)?;
    if graph.lock().owned {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut new = Vec::new();
    flatten(graph, &mut new, None);
    let mut state = exec.lock();
    if let Err(refused) = compare(&state.steps, &new) {
        return Ok(Some(refused));
    }
    for (step, from) in state.steps.iter_mut().zip(new) {
        // Memory nodes keep what this graph allocates.
        if !matches!(step.kind, Kind::MemAlloc(_) | Kind::MemFree(_)) {
            step.kind = from.kind;
        }
    }
    Ok(None)
}

fn set(exec: CUgraphExec, node: CUgraphNode, kind: impl FnOnce() -> Result<Kind>) -> Result<()> {
    let exec: &'static Exec = resolve(exec)?;
    let kind = kind()?;
    let serial = resolve::<Node>(node)?.lock().serial;
    let mut state = exec.lock();
    let step = state.steps.iter_mut().find(|step| step.serial == serial);
    let step = step.filter(|step| changeable(&step.kind, &kind)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    step.kind = kind;
    Ok(())
}

exports! {
    fn cuGraphExecUpdate(exec: CUgraphExec, graph: CUgraph, node: *mut CUgraphNode, result: *mut c_int) {
        put_if(node, std::ptr::null_mut());
        match update(exec, graph)? {
            None => put(result, 0),
            Some((why, at, _)) => {
                put_if(node, at.map_or(std::ptr::null_mut(), handle));
                put(result, why)?;
                Err(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
            }
        }
    }
    fn cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, info: *mut Info) {
        let null = std::ptr::null_mut();
        match update(exec, graph)? {
            None => put(info, Info { result: 0, errorNode: null, errorFromNode: null }),
            Some((result, node, from)) => {
                let (node, from) = (node.map_or(null, handle), from.map_or(null, handle));
                put(info, Info { result, errorNode: node, errorFromNode: from })?;
                Err(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)
            }
        }
    }
    fn cuGraphExecKernelNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS_v1) {
        set(exec, node, || kernel(get(params)?.into()))
    }
    fn cuGraphExecKernelNodeSetParams_v2(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS) {
        set(exec, node, || kernel(get(params)?))
    }
    fn cuGraphExecNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *mut CUgraphNodeParams) {
        set(exec, node, || settable(params.cast()))
    }
}
