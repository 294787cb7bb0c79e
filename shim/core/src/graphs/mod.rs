//! Graph memory: what allocation nodes take when an executable graph is uploaded or launched.
//!
//! Such memory is the device's, kept for graphs until it is trimmed, so it is one more pool per GPU
//! ([`crate::pools`]), charged what the driver reserves (`CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`).
//! "CUDA cannot allocate or map physical memory during graph instantiation because the stream in
//! which the graph will execute is unknown. Mapping is done instead during graph launch" (CUDA
//! Programming Guide, "Graph Memory Nodes"), or by `cuGraphUpload`. So:
//!
//! - instantiation looks through the graph ([`walk`]) and remembers what its nodes may take; frames of
//!   kernels are charged then;
//! - uploads and launches of a graph that is remembered reserve that and settle ([`run`]);
//! - all others cost one load: no graph of this process has such nodes.

pub(crate) mod hooks;
pub(crate) mod run;
mod walk;

use crate::pages::{Table, Zeroed};
use crate::spin::Spin;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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
    /// Bytes by the page's GPUs.
    pub bytes: [u64; MAX_GPUS],
    /// Bytes on GPUs that the page does not name.
    pub unlisted: u64,
}

impl Needs {
    /// Whether there is no allocation node.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// The GPUs concerned, and the bytes.
    fn each(&self) -> impl Iterator<Item = (u8, u64)> {
        (0u8..).zip(self.bytes).filter(|&(_, bytes)| bytes > 0)
    }
}

/// A remembered executable graph; `exec` 0 is an unused cell.
#[derive(Clone, Copy, Debug)]
struct Cell {
    exec: usize,
    needs: Needs,
    /// [`Graphs::trims`] when its memory was mapped last, plus one; 0 is never.
    mapped: u64,
}

// SAFETY: integers only.
unsafe impl Zeroed for Cell {}

/// In the place of the handle of a graph that the driver is destroying: no handle.
const LEAVING: usize = usize::MAX;

/// An executable graph that the driver is asked to destroy.
#[derive(Debug)]
#[must_use = "its end is to be noted"]
pub(crate) struct Leaving {
    exec: usize,
    at: usize,
}

/// Cells of the first table.
const FIRST: usize = 32;

/// The executable graphs of this process that have allocation nodes.
#[derive(Debug)]
pub struct Graphs {
    cells: Spin<Option<Table<Cell>>>,
    /// Times that graph memory was trimmed, which unmaps what is not running.
    trims: AtomicU64,
}

impl Default for Graphs {
    fn default() -> Self {
        Self::new()
    }
}

impl Graphs {
    /// None yet.
    pub const fn new() -> Self {
        Self { cells: Spin::new(None), trims: AtomicU64::new(0) }
    }

    /// What `exec` may take, if that is anything, and whether it has taken it already.
    pub fn find(&self, exec: usize) -> Option<(Needs, bool)> {
        let cells = self.cells.lock();
        let cells = cells.as_ref()?.as_slice();
        let cell = cells.iter().find(|cell| cell.exec == exec && exec != 0)?;
        Some((cell.needs, cell.mapped == self.trims.load(Ordering::Relaxed) + 1))
    }

    /// The memory of `exec` has been mapped.
    pub fn mapped(&self, exec: usize) {
        let mut cells = self.cells.lock();
        let Some(cells) = cells.as_mut() else { return };
        let cell = cells.as_mut_slice().iter_mut().find(|cell| cell.exec == exec && exec != 0);
        if let Some(cell) = cell {
            cell.mapped = self.trims.load(Ordering::Relaxed) + 1;
        }
    }

    /// Graph memory was trimmed.
    pub fn trimmed(&self) {
        self.trims.fetch_add(1, Ordering::Relaxed);
    }

    /// Remembers what `exec` may take, in the place of what was known of that handle. False when
    /// there is no memory for the table.
    pub fn insert(&self, exec: usize, needs: Needs) -> bool {
        let mut table = self.cells.lock();
        let old = table.as_ref().map_or(&[][..], |table| table.as_slice());
        let known = old.iter().position(|cell| cell.exec == exec);
        let at = match known.or_else(|| old.iter().position(|cell| cell.exec == 0)) {
            Some(at) => at,
            None => {
                let Some(mut grown) = Table::<Cell>::new((old.len() * 2).max(FIRST)) else {
                    return false;
                };
                let at = old.len();
                grown.as_mut_slice()[..at].copy_from_slice(old);
                *table = Some(grown);
                at
            }
        };
        if let Some(table) = table.as_mut() {
            table.as_mut_slice()[at] = Cell { exec, needs, mapped: 0 };
        }
        if known.is_none() {
            WITH_MEMORY.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// Forgets `exec`, which the driver is about to destroy, and keeps its cell.
    pub(crate) fn leaving(&self, exec: usize) -> Option<Leaving> {
        let mut table = self.cells.lock();
        let cells = table.as_mut()?.as_mut_slice();
        let at = cells.iter().position(|cell| cell.exec == exec && exec != 0)?;
        cells[at].exec = LEAVING;
        Some(Leaving { exec, at })
    }

    /// The driver's answer: it is destroyed, or stays.
    pub(crate) fn left(&self, leaving: Leaving, is_gone: bool) {
        let mut table = self.cells.lock();
        let cells = table.as_mut().map_or(&mut [][..], Table::as_mut_slice);
        if let Some(cell) = cells.get_mut(leaving.at) {
            cell.exec = if is_gone { 0 } else { leaving.exec };
        }
        if is_gone {
            WITH_MEMORY.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Forgets `exec`.
    pub fn remove(&self, exec: usize) -> Option<Needs> {
        let mut table = self.cells.lock();
        let cells = table.as_mut()?.as_mut_slice();
        let cell = cells.iter_mut().find(|cell| cell.exec == exec && exec != 0)?;
        cell.exec = 0;
        WITH_MEMORY.fetch_sub(1, Ordering::Relaxed);
        Some(cell.needs)
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
        let graphs = Graphs::new();
        assert_eq!(graphs.find(0x10), None);
        for exec in 1..=100 {
            assert!(graphs.insert(exec, needs(exec as u64)));
        }
        assert!(any_with_memory());
        assert!((1..=100).all(|exec| graphs.find(exec) == Some((needs(exec as u64), false))));
        assert_eq!(graphs.remove(7), Some(needs(7)));
        assert_eq!((graphs.find(7), graphs.remove(7)), (None, None));
        assert!(graphs.insert(8, needs(800)), "a handle made again");
        assert_eq!(graphs.find(8), Some((needs(800), false)));
        assert_eq!((graphs.find(0), graphs.remove(0)), (None, None));
    }

    #[test]
    fn a_graph_that_stays_is_remembered_whatever_came_meanwhile() {
        let graphs = Graphs::new();
        for exec in 1..=FIRST {
            assert!(graphs.insert(exec, needs(exec as u64)));
        }
        let leaving = graphs.leaving(7).expect("known");
        assert_eq!(graphs.find(7), None);
        crate::pages::failing_from_now_on(|| assert!(!graphs.insert(100, needs(1))));
        graphs.left(leaving, false);
        assert_eq!(graphs.find(7), Some((needs(7), false)));
        let leaving = graphs.leaving(7).expect("known");
        graphs.left(leaving, true);
        crate::pages::failing_from_now_on(|| assert!(graphs.insert(100, needs(1))));
    }

    #[test]
    fn a_trim_unmaps() {
        let graphs = Graphs::new();
        assert!(graphs.insert(0x10, needs(1)));
        graphs.mapped(0x10);
        assert_eq!(graphs.find(0x10), Some((needs(1), true)));
        graphs.trimmed();
        assert_eq!(graphs.find(0x10), Some((needs(1), false)));
    }

    #[test]
    fn needs_name_the_gpus_concerned() {
        assert!(Needs::default().is_nothing());
        assert_eq!(needs(5).each().collect::<Vec<_>>(), [(1, 5)]);
        assert!(!Needs { unlisted: 1, ..Needs::default() }.is_nothing());
    }
}
