//! Graphs: CUDA Driver API, "Graph Management"; CUDA Programming Guide, "CUDA Graphs".
//!
//! - [`add`]: nodes, and what they do; [`kind`] is what cuda.h says of them.
//! - [`exec`], [`update`]: executable graphs; [`plan`] is their pure part.
//! - [`memory`]: device memory of allocation nodes.
//! - [`conditional`]: nodes that choose among graphs.
//!
//! "Graph objects are not threadsafe" (Driver API, "Graph object thread safety"), but the
//! simulator keeps its own state whole whatever threads do.

pub(crate) mod add;
pub(crate) mod conditional;
pub(crate) mod exec;
pub(crate) mod kind;
pub(crate) mod memory;
pub(crate) mod plan;
pub(crate) mod update;

use crate::abi::{exports, put};
use crate::driver::{driver, lock};
use crate::errors::Result;
use crate::handle::{Header, Recycler, enliven, handle, kill, object, resolve};
use crate::host_function::HostFn;
use kind::Kind;
use std::ffi::{c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use tessera_cuda::types::CUDA_ERROR_INVALID_VALUE;

pub(crate) type CUgraph = *mut c_void;
pub(crate) type CUgraphNode = *mut c_void;

#[repr(C)]
pub(crate) struct Graph {
    header: Header,
    state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    /// In order of creation.
    pub nodes: Vec<&'static Node>,
    /// Never another graph's.
    pub id: u32,
    /// It belongs to a child or conditional node, which ends it.
    pub owned: bool,
    pub capturing: bool,
    /// Executable graphs of it that exist, counted if it has memory nodes.
    pub execs: u32,
    /// User objects and how many references of each the graph holds.
    pub objects: Vec<(&'static UserObject, u32)>,
}

object!(Graph, 0x4752_5048);

#[repr(C)]
pub(crate) struct Node {
    header: Header,
    state: Mutex<NodeState>,
}

#[derive(Default)]
pub(crate) struct NodeState {
    graph: Option<&'static Graph>,
    /// Never another node's.
    pub serial: u64,
    pub kind: Kind,
    /// What it depends on: nodes added before it.
    pub after: Vec<&'static Node>,
}

object!(Node, 0x474e_4f44);

static DEAD_GRAPHS: Recycler<Graph> = Recycler::new();
static DEAD_NODES: Recycler<Node> = Recycler::new();

impl Graph {
    pub(crate) fn create() -> &'static Graph {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let graph = DEAD_GRAPHS.take(|| Graph { header: Header::new(), state: Mutex::default() });
        *lock(&graph.state) =
            State { id: NEXT.fetch_add(1, Ordering::Relaxed), ..State::default() };
        enliven(graph)
    }

    pub(crate) fn create_owned() -> &'static Graph {
        let graph = Graph::create();
        lock(&graph.state).owned = true;
        graph
    }

    /// Its state, locked. Nobody locks a graph while it holds a node.
    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn nodes(&self) -> Vec<&'static Node> {
        self.lock().nodes.clone()
    }

    /// Adds a node behind `after`, which are nodes of this graph without duplicates.
    pub(crate) fn add(
        &'static self,
        kind: Kind,
        after: Vec<&'static Node>,
    ) -> Result<&'static Node> {
        for (i, node) in after.iter().enumerate() {
            let duplicate = after[..i].iter().any(|other| std::ptr::eq(*other, *node));
            if duplicate || !node.is_in(self) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
        }
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let node = DEAD_NODES.take(|| Node { header: Header::new(), state: Mutex::default() });
        let mut state = self.lock();
        *lock(&node.state) = NodeState {
            graph: Some(self),
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            kind,
            after,
        };
        state.nodes.push(node);
        Ok(enliven(node))
    }

    /// "graphs which contain allocation and/or memory free nodes", child graphs included.
    pub(crate) fn has_memory_nodes(&self) -> bool {
        self.nodes().iter().any(|node| match node.kind() {
            Kind::MemAlloc(_) | Kind::MemFree(_) => true,
            Kind::Child(graph) => graph.has_memory_nodes(),
            _ => false,
        })
    }

    pub(crate) fn has_conditional_nodes(&self) -> bool {
        self.nodes().iter().any(|node| matches!(node.kind(), Kind::Conditional(_)))
    }

    /// Ends it with its nodes and what they own.
    pub(crate) fn destroy(&'static self) {
        if !kill(self) {
            return;
        }
        crate::capture::sequence::graph_is_gone(self);
        let state = std::mem::take(&mut *self.lock());
        for node in state.nodes {
            node.destroy();
        }
        for (object, count) in state.objects {
            let _ = object.release(count);
        }
        DEAD_GRAPHS.give(self);
    }
}

impl Node {
    pub(crate) fn kind(&self) -> Kind {
        lock(&self.state).kind.clone()
    }

    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, NodeState> {
        lock(&self.state)
    }

    pub(crate) fn after(&self) -> Vec<&'static Node> {
        lock(&self.state).after.clone()
    }

    pub(crate) fn graph(&self) -> Option<&'static Graph> {
        lock(&self.state).graph
    }

    pub(crate) fn is_in(&self, graph: &Graph) -> bool {
        self.graph().is_some_and(|own| std::ptr::eq(own, graph))
    }

    fn destroy(&'static self) {
        if !kill(self) {
            return;
        }
        let state = std::mem::take(&mut *self.lock());
        match state.kind {
            Kind::Child(graph) => graph.destroy(),
            Kind::Conditional(c) => c.bodies.iter().for_each(|body| body.destroy()),
            _ => {}
        }
        DEAD_NODES.give(self);
    }
}

/// A graph that a caller may change and end.
fn destroyable(graph: CUgraph) -> Result<&'static Graph> {
    let graph: &'static Graph = resolve(graph)?;
    if graph.lock().owned { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(graph) }
}

exports! {
    fn cuGraphCreate(out: *mut CUgraph, flags: c_uint) {
        driver()?;
        if flags != 0 || out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put(out, handle(Graph::create()))
    }
    fn cuGraphDestroy(graph: CUgraph) {
        driver()?;
        destroyable(graph)?.destroy();
        Ok(())
    }
}

// User objects: CUDA Programming Guide, "CUDA User Objects": a count, and what to call at its end.

#[repr(C)]
pub(crate) struct UserObject {
    header: Header,
    count: AtomicU32,
    destroy: HostFn,
    data: usize,
}

object!(UserObject, 0x554f_424a);

type CUuserObject = *mut c_void;

impl UserObject {
    fn retain(&self, count: u32) -> Result<()> {
        if count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.count.fetch_add(count, Ordering::AcqRel);
        Ok(())
    }

    /// Gives references back; the last one ends the object.
    pub(crate) fn release(&'static self, count: u32) -> Result<()> {
        let less = |now: u32| if count == 0 { None } else { now.checked_sub(count) };
        let before = self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        if before.map_err(|_| CUDA_ERROR_INVALID_VALUE)? == count && kill(self) {
            // SAFETY: the creator promised a function that may be called once with this argument.
            unsafe { (self.destroy)(self.data as *mut c_void) };
        }
        Ok(())
    }
}

exports! {
    fn cuUserObjectCreate(out: *mut CUuserObject, data: *mut c_void, destroy: Option<HostFn>, count: c_uint, flags: c_uint) {
        driver()?;
        // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC is required.
        let destroy = destroy.filter(|_| flags == 1 && count > 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let object = UserObject {
            header: Header::new(),
            count: AtomicU32::new(count),
            destroy,
            data: data as usize,
        };
        put(out, handle(enliven(Box::leak(Box::new(object)))))
    }
    fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint) {
        driver()?;
        let graph: &Graph = resolve(graph)?;
        let object: &'static UserObject = resolve(object)?;
        // CU_GRAPH_USER_OBJECT_MOVE: the caller's references become the graph's.
        match flags {
            0 => object.retain(count)?,
            1 if count > 0 => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        graph.lock().objects.push((object, count));
        Ok(())
    }
    fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint) {
        driver()?;
        let graph: &Graph = resolve(graph)?;
        let object: &'static UserObject = resolve(object)?;
        let mut state = graph.lock();
        let held: u32 = state.objects.iter().filter(|(o, _)| std::ptr::eq(*o, object)).map(|o| o.1).sum();
        let left = held.checked_sub(count).filter(|_| count > 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        state.objects.retain(|(o, _)| !std::ptr::eq(*o, object));
        if left > 0 {
            state.objects.push((object, left));
        }
        drop(state);
        object.release(count)
    }
}
