//! Dependencies between nodes.

use super::kind::{Edge, same};
use super::{CUgraph, CUgraphNode, Graph, Node, put_list};
use crate::abi::{exports, get, put};
use crate::driver::driver;
use crate::errors::Result;
use crate::handle::{handle, resolve};
use tessera_cuda::types::{CUDA_ERROR_INVALID_VALUE, CUresult};

const CUDA_ERROR_LOSSY_QUERY: CUresult = 402;
const PLAIN: Edge = [0; 8];

/// A caller's list of nodes, with what it says of each edge.
pub(crate) fn nodes_with_data(
    nodes: *const CUgraphNode,
    data: *const Edge,
    count: usize,
) -> Result<Vec<(&'static Node, Edge)>> {
    (0..count)
        .map(|i| {
            let node = resolve(get(nodes.wrapping_add(i))?)?;
            let edge = if data.is_null() { PLAIN } else { get(data.wrapping_add(i))? };
            // Nodes have one input, and reserved bytes are zero.
            if edge[1] != 0 || edge[3..] != [0; 5] {
                Err(CUDA_ERROR_INVALID_VALUE)
            } else {
                Ok((node, edge))
            }
        })
        .collect()
}

/// Every edge, from, to and data, in order of the dependent nodes.
fn edges(graph: &Graph) -> Vec<(&'static Node, &'static Node, Edge)> {
    let of = |to: &'static Node| to.after().into_iter().map(move |(from, edge)| (from, to, edge));
    graph.nodes().into_iter().flat_map(of).collect()
}

/// Writes edge data, or makes sure that nothing is lost without them.
fn put_edges(all: &[Edge], out: *mut Edge, room: usize) -> Result<()> {
    if out.is_null() {
        let lossless = all.iter().all(|edge| *edge == PLAIN);
        return if lossless { Ok(()) } else { Err(CUDA_ERROR_LOSSY_QUERY) };
    }
    for (i, edge) in all.iter().take(room).enumerate() {
        put(out.wrapping_add(i), *edge)?;
    }
    Ok(())
}

fn get_edges(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    data: *mut Edge,
    count: *mut usize,
) -> Result<()> {
    driver()?;
    let all = edges(resolve(graph)?);
    if from.is_null() != to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if from.is_null() {
        return put(count, all.len());
    }
    let room = get(count)?;
    put_edges(&all.iter().map(|e| e.2).collect::<Vec<_>>(), data, room)?;
    put_list(&all.iter().map(|e| handle(e.1)).collect::<Vec<_>>(), to, count)?;
    put(count, room)?;
    put_list(&all.iter().map(|e| handle(e.0)).collect::<Vec<_>>(), from, count)
}

fn get_neighbours(
    all: &[(&'static Node, Edge)],
    nodes: *mut CUgraphNode,
    data: *mut Edge,
    count: *mut usize,
) -> Result<()> {
    if nodes.is_null() && !data.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if !nodes.is_null() {
        let edges: Vec<_> = all.iter().map(|(_, edge)| *edge).collect();
        put_edges(&edges, data, get(count)?)?;
    }
    put_list(&all.iter().map(|(node, _)| handle(*node)).collect::<Vec<_>>(), nodes, count)
}

fn dependencies(
    node: CUgraphNode,
    nodes: *mut CUgraphNode,
    data: *mut Edge,
    count: *mut usize,
) -> Result<()> {
    driver()?;
    get_neighbours(&resolve::<Node>(node)?.after(), nodes, data, count)
}

fn dependents(
    node: CUgraphNode,
    nodes: *mut CUgraphNode,
    data: *mut Edge,
    count: *mut usize,
) -> Result<()> {
    driver()?;
    let node: &Node = resolve(node)?;
    let graph = node.graph().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let after: Vec<_> = edges(graph)
        .into_iter()
        .filter(|(from, _, _)| same(from, node))
        .map(|(_, to, edge)| (to, edge))
        .collect();
    get_neighbours(&after, nodes, data, count)
}

/// The pairs that a caller names, of nodes of `graph`.
fn pairs(
    graph: &Graph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const Edge,
    count: usize,
) -> Result<Vec<(&'static Node, &'static Node, Edge)>> {
    let from = nodes_with_data(from, data, count)?;
    let to = nodes_with_data(to, std::ptr::null(), count)?;
    let all: Vec<_> = from.into_iter().zip(to).map(|((f, e), (t, _))| (f, t, e)).collect();
    let own = all.iter().all(|(f, t, _)| f.is_in(graph) && t.is_in(graph));
    if own { Ok(all) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

fn add(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const Edge,
    count: usize,
) -> Result<()> {
    driver()?;
    for (from, to, edge) in pairs(resolve(graph)?, from, to, data, count)? {
        // "Specifying an existing dependency will return an error."
        if same(from, to) || to.after().iter().any(|(other, _)| same(other, from)) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        to.lock().after.push((from, edge));
    }
    Ok(())
}

fn remove(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const Edge,
    count: usize,
) -> Result<()> {
    driver()?;
    let graph: &Graph = resolve(graph)?;
    // "Dependencies cannot be removed from graphs which contain allocation or free nodes."
    if graph.has_memory_nodes() && count > 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for (from, to, edge) in pairs(graph, from, to, data, count)? {
        let mut state = to.lock();
        let at = state.after.iter().position(|(node, data)| same(node, from) && *data == edge);
        state.after.remove(at.ok_or(CUDA_ERROR_INVALID_VALUE)?);
    }
    Ok(())
}

const NO_DATA: *mut Edge = std::ptr::null_mut();

exports! {
    fn cuGraphGetEdges(graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, count: *mut usize) {
        get_edges(graph, from, to, NO_DATA, count)
    }
    fn cuGraphGetEdges_v2(graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, data: *mut Edge, count: *mut usize) {
        get_edges(graph, from, to, data, count)
    }
    fn cuGraphNodeGetDependencies(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) {
        dependencies(node, nodes, NO_DATA, count)
    }
    fn cuGraphNodeGetDependencies_v2(node: CUgraphNode, nodes: *mut CUgraphNode, data: *mut Edge, count: *mut usize) {
        dependencies(node, nodes, data, count)
    }
    fn cuGraphNodeGetDependentNodes(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) {
        dependents(node, nodes, NO_DATA, count)
    }
    fn cuGraphNodeGetDependentNodes_v2(node: CUgraphNode, nodes: *mut CUgraphNode, data: *mut Edge, count: *mut usize) {
        dependents(node, nodes, data, count)
    }
    fn cuGraphAddDependencies(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, count: usize) {
        add(graph, from, to, NO_DATA, count)
    }
    fn cuGraphAddDependencies_v2(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, data: *const Edge, count: usize) {
        add(graph, from, to, data, count)
    }
    fn cuGraphRemoveDependencies(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, count: usize) {
        remove(graph, from, to, NO_DATA, count)
    }
    fn cuGraphRemoveDependencies_v2(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, data: *const Edge, count: usize) {
        remove(graph, from, to, data, count)
    }
}
