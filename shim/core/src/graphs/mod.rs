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

pub mod hooks;
pub(crate) mod run;
mod walk;

use crate::list::{Full, List};
use crate::pages::Zeroed;
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

    /// Forgets `exec`, which the driver is about to destroy, and keeps its place.
    pub(crate) fn leaving(&self, exec: usize) -> Option<Remembered> {
        self.list.lock().lend(|known| known.exec == exec)
    }

    /// The driver's answer: it is destroyed, or stays.
    pub(crate) fn left(&self, leaving: Remembered, is_gone: bool) {
        self.list.lock().redeem((!is_gone).then_some(leaving));
        if is_gone {
            WITH_MEMORY.fetch_sub(1, Ordering::Relaxed);
        }
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

    #[test]
    fn a_trim_unmaps() {
        let graphs = Graphs::default();
        assert_eq!(graphs.insert(0x10, needs(1)), Ok(()));
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
