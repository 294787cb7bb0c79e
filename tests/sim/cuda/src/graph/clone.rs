//! Copies of graphs: clones, and the graphs that child graph nodes own.

use super::kind::Kind;
use super::{CUgraph, CUgraphNode, Graph, Node};
use crate::abi::{exports, put};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{handle, resolve};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};

/// Copies all nodes and edges of `original` into `copy`, "child graph nodes … recursively".
fn copy_into(copy: &'static Graph, original: &Graph) -> Result<()> {
    let nodes = original.nodes();
    let mut pairs = Vec::<(&'static Node, &'static Node)>::with_capacity(nodes.len());
    for node in nodes {
        let kind = match node.kind() {
            Kind::Child(inner) => {
                let own = Graph::create_owned();
                copy_into(own, inner)?;
                Kind::Child(own)
            }
            other => other,
        };
        pairs.push((node, copy.add(kind, Vec::new())?));
    }
    // Edges afterwards: they may point to nodes that were added later.
    let clones: std::collections::BTreeMap<usize, &'static Node> =
        pairs.iter().map(|(node, clone)| (handle(*node) as usize, *clone)).collect();
    for (node, clone) in pairs {
        let after = node.after().into_iter();
        clone.lock().after = after
            .filter_map(|(from, edge)| Some((*clones.get(&(handle(from) as usize))?, edge)))
            .collect();
    }
    copy.lock().originals = clones;
    Ok(())
}

/// The work of a child graph node of `parent` over `of`: a clone of it, or itself if moved.
pub(crate) fn child(parent: &'static Graph, of: CUgraph, ownership: i32) -> Result<Kind> {
    let of: &'static Graph = resolve(of)?;
    if std::ptr::eq(of, parent) || of.has_conditional_nodes() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match ownership {
        // "memory allocation/free nodes can't be present in the child graph"
        0 if of.has_memory_nodes() => Err(CUDA_ERROR_NOT_SUPPORTED),
        0 => {
            let own = Graph::create_owned();
            copy_into(own, of)?;
            Ok(Kind::Child(own))
        }
        1 => {
            let mut state = of.lock();
            if state.owned {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            state.owned = true;
            Ok(Kind::Child(of))
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

exports! {
    // "Cloning is not supported for graphs which contain memory allocation nodes, memory free
    // nodes, or conditional nodes."
    fn cuGraphClone(out: *mut CUgraph, original: CUgraph) {
        driver()?;
        let original: &Graph = resolve(original)?;
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if original.has_memory_nodes() || original.has_conditional_nodes() {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let copy = Graph::create();
        copy_into(copy, original)?;
        put(out, handle(copy))
    }
    fn cuGraphNodeFindInClone(out: *mut CUgraphNode, original: CUgraphNode, graph: CUgraph) {
        driver()?;
        resolve::<Node>(original)?;
        let found = resolve::<Graph>(graph)?.lock().originals.get(&(original as usize)).copied();
        put(out, handle(found.ok_or(CUDA_ERROR_INVALID_VALUE)?))
    }
    fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph) {
        driver()?;
        match resolve::<Node>(node)?.kind() {
            Kind::Child(own) => put(graph, handle(own)),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}
