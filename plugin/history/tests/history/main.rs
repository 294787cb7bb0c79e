//! A history as the plugin uses it: its file, clocks, names, and months of use.

mod adversity;
mod clocks;
mod damage;
mod month;
mod names;

use std::collections::HashSet;
use std::path::Path;

use tessera_history::{History, Options, QueryError};
use tessera_view::history::{Answer, Query};
use tessera_view::node::Node;
use tessera_view::status::{Allocation, Holder, Status};
use tessera_view::tenant::{Compute, Use};

const T0: i64 = 1_750_032_000;
const HOUR: i64 = 3600;
const KEEP: [u32; 3] = [6 * 3600, 7 * 86400, 35 * 86400];

fn options(path: &Path, bound: u64) -> Options {
    Options { path: path.to_owned(), bound, keep: KEEP, sync: false }
}

fn history(path: &Path) -> History {
    History::new(options(path, 4 << 20))
}

/// A pod with a quarter of a GPU, of which it has used nothing yet.
fn pod(id: &str, name: &str) -> Allocation {
    let used = Use {
        gpu_uuid: "GPU-a".into(),
        memory_limit_bytes: 1 << 30,
        cores_millis: 250,
        ..Use::default()
    };
    let holder = Holder { namespace: "ns".into(), pod: name.into(), container: "main".into() };
    Allocation {
        id: id.into(),
        generation: 1,
        holder: Some(holder).filter(|_| !name.is_empty()),
        gpus: vec![used],
        compute: Some(Compute::default()),
        ..Allocation::default()
    }
}

/// So many pods that do the same all the time.
fn pods(second: i64, count: u64) -> Vec<Allocation> {
    let second = second.cast_unsigned();
    let pod = |n: u64| {
        let mut one = pod(&format!("{n:032x}"), &format!("pod-{n}"));
        one.gpus[0].memory_used_bytes = (second * 7919 % 997 + n) << 20;
        let us = second * 200_000;
        one.compute =
            Some(Compute { leased_us: us, used_us: us, measured_us: us, ..Compute::default() });
        one.launches = second * 10;
        one
    };
    (0..count).map(pod).collect()
}

/// Looks at these allocations so many seconds later, by both clocks.
fn look(history: &History, second: i64, allocations: Vec<Allocation>) {
    let at_unix_ms = (T0 + second) * 1000;
    let status = Status { at_unix_ms, allocations, ..Status::default() };
    history.look(&status, &HashSet::new(), second.cast_unsigned() * 1000);
}

/// The node so many seconds later, on which nothing is.
fn now(second: i64) -> Node {
    Node { at_unix_ms: (T0 + second) * 1000, ..Node::default() }
}

fn ask(history: &History, query: &Query) -> Result<Answer, QueryError> {
    history.answer(query, &now(24 * HOUR))
}
