//! Graphs: CUDA Driver API, "Graph Management"; CUDA Programming Guide, "CUDA Graphs".
//!
//! - [`add`]: making nodes, and asking about them.
//! - [`exec`]: executable graphs.
//! - [`memory`]: device memory of allocation nodes.
//!
//! "Graph objects are not threadsafe" (Driver API, "Graph object thread safety"), but the
//! simulator keeps its own state whole whatever threads do.

pub(crate) mod add;
pub(crate) mod exec;
pub(crate) mod memory;

use crate::abi::{Header, Recycler, Result, enliven, exports, handle, kill, object, resolve};
use crate::copy::Copy3d;
use crate::driver::lock;
use crate::event::Event;
use crate::launch::Shape;
use crate::module::Function;
use crate::stream_memory::MemOp;
use crate::work::HostFn;
use memory::Allocation;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUcontext, CUdeviceptr, CUgraph};

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
        crate::capture::graph_is_gone(self);
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

exports! {
    fn cuGraphCreate(flags: c_uint) -> CUgraph {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(handle(Graph::create()))
    }
    fn cuGraphDestroy(graph: CUgraph) {
        let graph: &'static Graph = resolve(graph)?;
        if graph.lock().owned {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        graph.destroy();
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
    fn cuUserObjectCreate(data: *mut c_void, destroy: Option<HostFn>, count: c_uint, flags: c_uint) -> CUuserObject {
        // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC is required.
        let destroy = destroy.filter(|_| flags == 1 && count > 0).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let object = UserObject {
            header: Header::new(),
            count: AtomicU32::new(count),
            destroy,
            data: data as usize,
        };
        Ok(handle(enliven(Box::leak(Box::new(object)))))
    }
    fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint) {
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

/// What a node does. Cheap to copy: large parts are shared and never change.
#[derive(Clone, Default)]
pub(crate) enum Kind {
    Kernel(Kernel),
    Memcpy(Arc<Copy3d>),
    Memset(Memset),
    Host(HostNode),
    Child(&'static Graph),
    #[default]
    Empty,
    EventWait(&'static Event),
    EventRecord(&'static Event),
    MemAlloc(Arc<Allocation>),
    MemFree(Arc<Allocation>),
    MemOp(MemOp),
    Conditional(Arc<Conditional>),
}

impl Kind {
    /// `CUgraphNodeType`.
    pub(crate) fn number(&self) -> c_int {
        match self {
            Kind::Kernel(_) => 0,
            Kind::Memcpy(_) => 1,
            Kind::Memset(_) => 2,
            Kind::Host(_) => 3,
            Kind::Child(_) => 4,
            Kind::Empty => 5,
            Kind::EventWait(_) => 6,
            Kind::EventRecord(_) => 7,
            Kind::MemAlloc(_) => 10,
            Kind::MemFree(_) => 11,
            Kind::MemOp(_) => 12,
            Kind::Conditional(_) => 13,
        }
    }
}

/// A kernel, with its parameters as far as they matter: how long it runs.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub function: &'static Function,
    pub shape: Shape,
    /// Dynamic shared memory, bytes of a block.
    pub shared: c_uint,
    /// GPU time.
    pub ns: u64,
}

#[derive(Clone, Copy)]
pub(crate) struct HostNode {
    pub function: HostFn,
    pub data: usize,
}

/// `CUDA_MEMSET_NODE_PARAMS` v1; v2 appends a context.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Memset {
    pub dst: CUdeviceptr,
    pub pitch: usize,
    pub value: c_uint,
    pub element: c_uint,
    pub width: usize,
    pub height: usize,
}
const _: () = assert!(size_of::<Memset>() == 40);

// Conditional nodes: CUDA Programming Guide, "Conditional Graph Nodes". Kernels compute nothing, so the condition is the
// handle's default value, 0 without one; a `while` whose condition is not zero runs its body once.

const IF: c_int = 0;
const WHILE: c_int = 1;
const SWITCH: c_int = 2;
const CU_GRAPH_COND_ASSIGN_DEFAULT: c_uint = 1;

pub(crate) struct Conditional {
    pub bodies: Vec<&'static Graph>,
    /// The same as handles: "CUDA-owned array … valid for the lifetime of the conditional node".
    list: Box<[usize]>,
    /// `CU_GRAPH_COND_TYPE_*`.
    pub kind: c_int,
    value: c_uint,
}

/// Conditions' default values, by handle.
static HANDLES: Mutex<BTreeMap<u64, c_uint>> = Mutex::new(BTreeMap::new());

impl Conditional {
    pub(crate) fn create(condition: u64, kind: c_int, size: c_uint) -> Result<Arc<Conditional>> {
        let fits = match kind {
            IF => matches!(size, 1 | 2),
            WHILE => size == 1,
            SWITCH => (1..=1 << 16).contains(&size),
            _ => false,
        };
        let value = lock(&HANDLES).get(&condition).copied();
        let value = value.filter(|_| fits).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let bodies: Vec<_> = (0..size).map(|_| Graph::create_owned()).collect();
        let list = bodies.iter().map(|body| handle(*body) as usize).collect();
        Ok(Arc::new(Conditional { bodies, list, kind, value }))
    }

    /// Its bodies, as an array of handles.
    pub(crate) fn handles(&self) -> *mut CUgraph {
        self.list.as_ptr().cast_mut().cast()
    }

    pub(crate) fn chosen(&self) -> Option<&'static Graph> {
        let index = match (self.kind, self.value) {
            (IF, 0) => 1,
            (WHILE, 0) => return None,
            (IF | WHILE, _) => 0,
            (_, value) => value as usize,
        };
        self.bodies.get(index).copied()
    }
}

exports! {
    fn cuGraphConditionalHandleCreate(graph: CUgraph, _ctx: CUcontext, value: c_uint, flags: c_uint) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        resolve::<Graph>(graph)?;
        if flags & !CU_GRAPH_COND_ASSIGN_DEFAULT != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let condition = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(&HANDLES).insert(condition, if flags == 0 { 0 } else { value });
        Ok(condition)
    }
}
