//! A graph as text: CUDA Driver API, `cuGraphDebugDotPrint`.

use super::kind::Kind;
use super::{CUgraph, Graph};
use crate::abi::{cstr, exports};
use crate::driver::driver;
use crate::handle::resolve;
use std::ffi::{c_char, c_uint};
use std::fmt::Write;
use tessera_cuda::types::CUresult;

const CUDA_ERROR_OPERATING_SYSTEM: CUresult = 304;

fn label(kind: &Kind) -> String {
    match kind {
        Kind::Kernel(kernel) => format!("KERNEL\\n{}", kernel.function.name_text()),
        Kind::Memcpy(_) => "MEMCPY".into(),
        Kind::Memset(_) => "MEMSET".into(),
        Kind::Host(_) => "HOST".into(),
        Kind::Child(_) => "CHILD GRAPH".into(),
        Kind::Empty => "EMPTY".into(),
        Kind::EventWait(_) => "EVENT WAIT".into(),
        Kind::EventRecord(_) => "EVENT RECORD".into(),
        Kind::MemAlloc(_) => "MEM ALLOC".into(),
        Kind::MemFree(_) => "MEM FREE".into(),
        Kind::MemOps(_) => "BATCH MEM OP".into(),
        Kind::Conditional(_) => "CONDITIONAL".into(),
    }
}

/// Writes a graph and the graphs that its nodes own; each is a cluster with a number of its own.
fn describe(graph: &'static Graph, number: &mut u32, out: &mut String) {
    let mine = *number;
    *number += 1;
    let nodes = graph.nodes();
    let name = |i: usize| format!("graph_{mine}_node_{i}");
    let _ = writeln!(
        out,
        "subgraph cluster_{mine} {{\nlabel=\"graph_{mine}\" graph[style=\"dashed\"];"
    );
    let mut owned = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        let kind = node.kind();
        let _ =
            writeln!(out, "\"{}\"[shape=\"record\" label=\"{i}\\n{}\"];", name(i), label(&kind));
        match kind {
            Kind::Child(child) => owned.push(child),
            Kind::Conditional(c) => owned.extend(c.bodies.iter().copied()),
            _ => {}
        }
    }
    for (i, node) in nodes.iter().enumerate() {
        for (from, _) in node.after() {
            if let Some(at) = nodes.iter().position(|n| std::ptr::eq(*n, from)) {
                let _ = writeln!(out, "\"{}\" -> \"{}\";", name(at), name(i));
            }
        }
    }
    out.push_str("}\n");
    for graph in owned {
        describe(graph, number, out);
    }
}

exports! {
    fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, _flags: c_uint) {
        driver()?;
        let graph: &'static Graph = resolve(graph)?;
        let path = cstr(path)?;
        let mut text = String::from("digraph dot {\n");
        describe(graph, &mut 1, &mut text);
        text.push_str("}\n");
        std::fs::write(path, text).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)
    }
}
