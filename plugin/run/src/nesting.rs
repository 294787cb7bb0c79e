//! A quota within a quota. A process is held by the pages that it finds first, and by no others: a run within
//! a run would take its command out of the outer quota, and several of them together would hold more
//! than that allows. Within a container the container's pages count, so that the run's own would not.

use std::collections::BTreeSet;
use std::path::Path;

use tessera_region::layout::{CONTAINER_PAGES_DIR, PAGES_DIR_ENV};
use tessera_region::quota::QuotaReader;

use super::pages::is_in_use;
use super::root::Root;

/// Ancestors that are looked at: a tree of processes is not deeper.
const DEEPEST: usize = 4096;

/// Refuses to run within a quota.
///
/// # Errors
/// There is one around this process: what to do instead.
pub(super) fn refuse(root: &Root) -> anyhow::Result<()> {
    anyhow::ensure!(
        Path::new(CONTAINER_PAGES_DIR).symlink_metadata().is_err(),
        "this container has a quota already ({CONTAINER_PAGES_DIR}), which holds every command in it, \
         and a smaller one within it would not be held: leave `tessera run` out, or ask for a smaller \
         share in the pod"
    );
    anyhow::ensure!(
        !is_named(std::env::var_os(PAGES_DIR_ENV).as_deref().map(Path::new))
            && !is_within_run(root),
        "this is within another `tessera run`, whose quota would not hold what this one starts: leave \
         the inner `tessera run` out, or start both side by side, each with a part of the memory"
    );
    Ok(())
}

/// Whether the environment names pages of a run that lives.
fn is_named(dir: Option<&Path>) -> bool {
    dir.is_some_and(|dir| QuotaReader::attach(dir).is_ok() && is_in_use(dir))
}

/// Whether an ancestor is one of this user's runs: an environment may have been cleared on the way.
fn is_within_run(root: &Root) -> bool {
    let runners: BTreeSet<u32> = root
        .runs()
        .iter()
        .filter(|dir| is_in_use(dir))
        .filter_map(|dir| runner(QuotaReader::attach(dir).ok()?.allocation()?))
        .collect();
    !runners.is_empty() && ancestors().any(|pid| runners.contains(&pid))
}

/// The pid in the name of a run's allocation: `run-<pid>-<time>`.
fn runner(allocation: &str) -> Option<u32> {
    allocation.strip_prefix("run-")?.split('-').next()?.parse().ok()
}

fn ancestors() -> impl Iterator<Item = u32> {
    let parent = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // Behind the name, which may hold anything: state and parent (proc(5)).
        let parent: u32 = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
        (parent != 0).then_some(parent)
    };
    std::iter::successors(parent(std::process::id()), move |pid| parent(*pid)).take(DEEPEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_end_with_the_first_process() {
        let all: Vec<u32> = ancestors().collect();
        assert_eq!(all.first(), Some(&std::os::unix::process::parent_id()));
        assert!(!all.contains(&std::process::id()));
    }

    #[test]
    fn a_runner_is_read_from_its_allocation() {
        assert_eq!(runner("run-123-5f"), Some(123));
        for other in ["run-", "run-x-1", "0123456789abcdef", ""] {
            assert_eq!(runner(other), None, "{other}");
        }
        assert!(!is_named(None) && !is_named(Some(Path::new("/nonexistent"))));
    }
}
