//! Graph memory: what allocation nodes take when an executable graph is uploaded or launched.
//!
//! Such memory is the device's, kept for graphs until it is trimmed, so it is one more pool per GPU
//! ([`crate::pools`]), charged what the driver reserves (`CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`).
//! "CUDA cannot allocate or map physical memory during graph instantiation because the stream in
//! which the graph will execute is unknown. Mapping is done instead during graph launch" (CUDA
//! Programming Guide, "Graph Memory Nodes"), or by `cuGraphUpload`. So:
//!
//! - instantiation looks through the graph ([`needs_of`]) and remembers what its nodes may take; frames of
//!   kernels are charged then;
//! - uploads and launches of a graph that is remembered reserve that and settle ([`hooks`]);
//! - all others cost one load: no graph of this process has such nodes.

pub mod hooks;

use crate::pages::{Full, List, Table, Zeroed};
use crate::pools::books::pages;
use crate::pools::home_of;
use crate::pools::pool::Home;
use crate::spin::Spin;
use crate::state::Process;
use crate::thread::Answer;
use crate::{limits, quota, real};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use core::{mem, ptr};
use tessera_cuda::types::*;
use tessera_region::layout::MAX_GPUS;

/// Executable graphs with memory, for launches to look at before anything else. A forked child
/// inherits it, and then finds nothing in its own table.
static WITH_MEMORY: AtomicUsize = AtomicUsize::new(0);

/// Whether any executable graph has allocation nodes.
#[inline(always)]
pub(crate) fn any_with_memory() -> bool {
    WITH_MEMORY.load(Ordering::Relaxed) != 0
}

/// What the allocation nodes of a graph may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    pub bytes: [u64; MAX_GPUS],
    /// Bytes on GPUs that the page does not name.
    pub unlisted: u64,
}

impl Needs {
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// The GPUs concerned, and the bytes.
    fn each(&self) -> impl Iterator<Item = (u8, u64)> {
        (0u8..).zip(self.bytes).filter(|&(_, bytes)| bytes > 0)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Remembered {
    exec: usize,
    needs: Needs,
    /// [`Graphs::trims`] when its memory was mapped last, plus one; 0 is never.
    mapped: u64,
}

// SAFETY: integers only.
unsafe impl Zeroed for Remembered {}

/// The executable graphs of this process that have allocation nodes.
#[derive(Debug, Default)]
pub struct Graphs {
    list: Spin<List<Remembered>>,
    /// Times that graph memory was trimmed, which unmaps what is not running.
    trims: AtomicU64,
}

impl Graphs {
    /// What `exec` may take, if that is anything, and whether it has taken it already.
    pub(crate) fn find(&self, exec: usize) -> Option<(Needs, bool)> {
        let list = self.list.lock();
        let known = list.iter().find(|known| known.exec == exec)?;
        Some((known.needs, known.mapped == self.trims.load(Ordering::Relaxed) + 1))
    }

    pub(crate) fn mapped(&self, exec: usize) {
        if let Some(known) = self.list.lock().iter_mut().find(|known| known.exec == exec) {
            known.mapped = self.trims.load(Ordering::Relaxed) + 1;
        }
    }

    pub(crate) fn trimmed(&self) {
        self.trims.fetch_add(1, Ordering::Relaxed);
    }

    /// Remembers what `exec` may take, in the place of what was known of that handle.
    ///
    /// # Errors
    /// [`Full`] when there is no memory for the table, and nothing was known.
    pub(crate) fn insert(&self, exec: usize, needs: Needs) -> Result<(), Full> {
        let new = Remembered { exec, needs, mapped: 0 };
        let mut list = self.list.lock();
        if let Some(known) = list.iter_mut().find(|known| known.exec == exec) {
            *known = new;
            return Ok(());
        }
        list.push(new)?;
        WITH_MEMORY.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets `exec`, which the driver is about to destroy.
    pub(crate) fn leaving(&self, exec: usize) -> Option<Remembered> {
        self.list.lock().take(|known| known.exec == exec)
    }

    /// The driver's answer: it is destroyed, or stays.
    pub(crate) fn left(&self, leaving: Remembered, is_gone: bool) {
        if is_gone {
            WITH_MEMORY.fetch_sub(1, Ordering::Relaxed);
        } else {
            // There is the room that it left.
            let _ = self.list.lock().push(leaving);
        }
    }
}

// Looks through a graph for allocation nodes, and for kernels whose frames are to be charged.

/// Graphs within graphs that are looked into; deeper ones nobody builds.
const DEEPEST: u32 = 64;

#[derive(Clone, Copy)]
struct Place(CUgraphNode);

// SAFETY: a pointer, which may be null, and is only ever handed to the driver.
unsafe impl Zeroed for Place {}

/// What the allocation nodes of `graph` and of the graphs in it may take. Bodies of conditional
/// nodes have none: "Allowed node types are kernel nodes, empty nodes, child graphs, memsets,
/// memcopies, and conditionals. This applies recursively" (`CUDA_CONDITIONAL_NODE_PARAMS`).
///
/// Frames of kernels are charged on the way ([`crate::limits`]).
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` when a frame does not fit, or the kernel has no memory to look through the
/// graph: then it may need anything. `name` is the call that is refused.
fn needs_of(
    process: &'static Process,
    name: &'static str,
    graph: CUgraph,
) -> Result<Needs, CUresult> {
    let mut needs = Needs::default();
    if !graph.is_null() {
        add(process, name, graph, &mut needs, DEEPEST)?;
    }
    Ok(needs)
}

fn add(
    process: &'static Process,
    name: &'static str,
    graph: CUgraph,
    needs: &mut Needs,
    depth: u32,
) -> Answer {
    let get_nodes = |place: *mut CUgraphNode, count: usize| {
        // SAFETY: the caller's graph, and room for `count` nodes; a null array asks for the count.
        real::cuGraphGetNodes.ask(count, |ask, count| unsafe { ask(graph, place, count) })
    };
    let Ok(count @ 1..) = get_nodes(ptr::null_mut(), 0) else { return Ok(()) };
    let mut nodes = Table::<Place>::new(count).ok_or_else(|| quota::refuse_unnoted(name))?;
    let place = nodes.as_mut_slice().as_mut_ptr().cast::<CUgraphNode>();
    let Ok(count) = get_nodes(place, count) else { return Ok(()) };
    for &Place(node) in nodes.as_slice().iter().take(count) {
        // SAFETY: a node of the graph, and a place for its type.
        match real::cuGraphNodeGetType.ask(-1, |ask, kind| unsafe { ask(node, kind) }) {
            Ok(CU_GRAPH_NODE_TYPE_KERNEL) if limits::any_unpaid() => charge_node(node)?,
            Ok(CU_GRAPH_NODE_TYPE_MEM_ALLOC) => add_node(process, node, needs),
            Ok(CU_GRAPH_NODE_TYPE_GRAPH) if depth > 0 => {
                // SAFETY: a child graph node, and a place for the graph.
                let child = real::cuGraphChildGraphNodeGetGraph
                    .ask(ptr::null_mut(), |ask, child| unsafe { ask(node, child) });
                if let Ok(child) = child
                    && !child.is_null()
                {
                    add(process, name, child, needs, depth - 1)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn charge_node(node: CUgraphNode) -> Answer {
    let (new, old) = (&real::cuGraphKernelNodeGetParams_v2, &real::cuGraphKernelNodeGetParams);
    // SAFETY: numbers and pointers, for which zero is a value.
    let nothing: CUDA_KERNEL_NODE_PARAMS = unsafe { mem::zeroed() };
    // SAFETY: a kernel node, and a place for its parameters, of which those of before CUDA 12 are a part.
    let params = [new, old][usize::from(new.get().is_none())]
        .ask(nothing, |ask, params| unsafe { ask(node, params) });
    params.map_or(Ok(()), |params| limits::node(&params))
}

fn add_node(process: &'static Process, node: CUgraphNode, needs: &mut Needs) {
    // SAFETY: numbers and pointers, for which zero is a value.
    let nothing: CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { mem::zeroed() };
    // SAFETY: an allocation node, and a place for its parameters.
    let params =
        real::cuGraphMemAllocNodeGetParams.ask(nothing, |ask, params| unsafe { ask(node, params) });
    let Ok(params) = params else { return };
    let (props, bytes) = (params.poolProps, pages(params.bytesize as u64));
    match home_of(process, props.location, props.allocType, None) {
        Some(Home::Gpu(gpu)) => {
            if let Some(sum) = needs.bytes.get_mut(usize::from(gpu)) {
                *sum = sum.saturating_add(bytes);
            }
        }
        Some(Home::Unlisted) => needs.unlisted = needs.unlisted.saturating_add(bytes),
        Some(Home::Free) | None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(bytes: u64) -> Needs {
        let mut needs = Needs::default();
        needs.bytes[1] = bytes;
        needs
    }

    #[test]
    fn graphs_are_remembered_until_they_are_destroyed() {
        let graphs = Graphs::default();
        assert_eq!(graphs.find(0x10), None);
        for exec in 1..=100 {
            assert_eq!(graphs.insert(exec, needs(exec as u64)), Ok(()));
        }
        assert!(any_with_memory());
        assert!((1..=100).all(|exec| graphs.find(exec) == Some((needs(exec as u64), false))));
        for is_gone in [false, true] {
            let leaving = graphs.leaving(7).expect("known");
            assert_eq!(graphs.find(7), None);
            graphs.left(leaving, is_gone);
            assert_eq!(graphs.find(7).is_none(), is_gone);
        }
        assert_eq!(graphs.insert(8, needs(800)), Ok(()), "a handle made again");
        assert_eq!(graphs.find(8), Some((needs(800), false)));
    }
}
