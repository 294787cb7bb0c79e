//! Shares of the process's descriptors, so that no listener can take them from another, and none from what
//! kubelet's calls need.
//!
//! Two rules. A listener has at most [`Door::most`] connections. And the highest numbers are kept free, in
//! steps: what a container may connect to ends first, then metrics, the admin socket, and kubelet's sockets;
//! the last step is left to what the plugin opens itself for Allocate: pages, the ledger, sockets. The kernel
//! gives each new descriptor the lowest free number (open(2)), so a connection with a high number says that
//! all numbers below it are taken, whatever took them: nothing has to be counted.

use std::os::fd::{AsFd, AsRawFd};

use nix::sys::resource::{Resource, getrlimit};

/// What listens, the first to be refused first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Door {
    /// The sockets in the pages of an allocation.
    Pages,
    /// Metrics and probes over TCP.
    Metrics,
    /// `paths.admin`.
    Admin,
    /// A resource's socket in kubelet's directory.
    Kubelet,
}

/// Descriptors that this process may have open.
pub fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft)
}

impl Door {
    /// Connections that may be open at a time.
    pub fn most(self) -> usize {
        self.most_of(limit())
    }

    fn most_of(self, limit: u64) -> usize {
        let (part, least, most) = match self {
            // Each of its allocations has a share: `session::tenant`.
            Door::Pages => (1, 8, u64::MAX),
            Door::Metrics => (4, 16, 2048),
            Door::Admin | Door::Kubelet => (16, 8, 64),
        };
        usize::try_from((limit / part).clamp(least, most)).unwrap_or(usize::MAX)
    }

    /// Whether this descriptor, which was just opened, is one of those that are kept for others.
    pub fn is_kept(self, fd: impl AsFd) -> bool {
        let number = u64::try_from(fd.as_fd().as_raw_fd()).unwrap_or(0);
        number >= self.end(limit())
    }

    /// The first number that is not for this listener.
    fn end(self, limit: u64) -> u64 {
        let kept = (limit / 4).clamp(16, 256).min(limit / 2);
        let steps = match self {
            Door::Pages => 4,
            Door::Metrics => 3,
            Door::Admin => 2,
            Door::Kubelet => 1,
        };
        limit - kept / 4 * steps
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DOORS: [Door; 4] = [Door::Pages, Door::Metrics, Door::Admin, Door::Kubelet];

    #[test]
    fn what_was_opened_last_is_kept_only_when_all_below_is_taken() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(!Door::Pages.is_kept(&file), "a test has few files open");
        assert!(Door::Kubelet.end(128) <= 120 && Door::Pages.end(128) == 96);
    }

    proptest! {
        #[test]
        fn each_listener_leaves_some_to_those_after_it(limit in 64u64..2_000_000) {
            let ends = DOORS.map(|door| door.end(limit));
            for pair in ends.windows(2) {
                prop_assert!(pair[0] + 4 <= pair[1], "{ends:?} of {limit}");
            }
            prop_assert!(ends[3] + 4 <= limit && ends[0] >= limit / 2);
        }

        #[test]
        fn what_is_no_containers_takes_less_than_a_half(limit in 128u64..2_000_000) {
            let sum: usize = DOORS[1..].iter().map(|door| door.most_of(limit)).sum();
            prop_assert!(sum as u64 <= limit / 2, "{sum} of {limit}");
        }
    }
}
