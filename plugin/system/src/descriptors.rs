//! Shares of the process's descriptors, so that no listener can take them from another, and none from what
//! kubelet's calls need.
//!
//! Two rules. A listener has at most [`ListenerKind::max_connections`] connections. And the highest numbers are kept free, in
//! steps: what a container may connect to ends first, then metrics and the admin socket; the last steps are
//! left to kubelet, and to what the plugin opens itself for Allocate: pages, the ledger, sockets. The kernel
//! gives each new descriptor the lowest free number (open(2)), so a connection with a high number says that
//! all numbers below it are taken, whatever took them: nothing has to be counted.

use std::os::fd::{AsFd, AsRawFd};

use nix::sys::resource::{Resource, getrlimit};

/// What listens, the first to be refused first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ListenerKind {
    Pages,
    /// Metrics and probes over TCP.
    Metrics,
    Api,
    Admin,
}

pub fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft)
}

impl ListenerKind {
    pub fn max_connections(self) -> usize {
        self.max_connections_of(limit())
    }

    fn max_connections_of(self, limit: u64) -> usize {
        let (part, least, most) = match self {
            // Each of its allocations has a share: `session::tenant`.
            ListenerKind::Pages => (1, 8, u64::MAX),
            ListenerKind::Metrics => (4, 16, 256),
            ListenerKind::Api => (8, 8, 256),
            ListenerKind::Admin => (16, 8, 64),
        };
        usize::try_from((limit / part).clamp(least, most)).unwrap_or(usize::MAX)
    }

    /// Whether this descriptor, which was just opened, is one of those that are kept for others.
    pub fn is_reserved(self, fd: impl AsFd) -> bool {
        let number = u64::try_from(fd.as_fd().as_raw_fd()).unwrap_or(0);
        number >= self.end(limit())
    }

    /// The first number that is not for this listener.
    fn end(self, limit: u64) -> u64 {
        let kept = (limit / 4).clamp(16, 256).min(limit / 2);
        let steps = match self {
            // What containers hold is held while allocations come, and each takes descriptors of its own.
            ListenerKind::Pages => return limit - (limit / 2).min(256),
            // What people look at ends with what machines do.
            ListenerKind::Metrics | ListenerKind::Api => 3,
            ListenerKind::Admin => 2,
        };
        limit - kept / 4 * steps
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LISTENERS: [ListenerKind; 3] =
        [ListenerKind::Pages, ListenerKind::Metrics, ListenerKind::Admin];

    #[test]
    fn what_was_opened_last_is_kept_only_when_all_below_is_taken() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(!ListenerKind::Pages.is_reserved(&file), "a test has few files open");
        assert!(ListenerKind::Admin.end(128) <= 112 && ListenerKind::Pages.end(128) == 64);
    }

    proptest! {
        #[test]
        fn each_listener_leaves_some_to_those_after_it(limit in 64u64..2_000_000) {
            let ends = LISTENERS.map(|kind| kind.end(limit));
            for pair in ends.windows(2) {
                prop_assert!(pair[0] + 4 <= pair[1], "{ends:?} of {limit}");
            }
            prop_assert!(ends[2] + 8 <= limit && ends[0] >= limit / 2);
        }

        #[test]
        fn containers_that_take_all_they_may_leave_metrics_room_beside_a_dozen_allocations(limit in 128u64..2_000_000) {
            // Two sockets and the usage page.
            let each = 3;
            let room = ListenerKind::Metrics.end(limit) - ListenerKind::Pages.end(limit);
            prop_assert!(room >= 12 * each, "{room} of {limit}");
        }

        #[test]
        fn what_is_no_containers_takes_less_than_a_half(limit in 128u64..2_000_000) {
            let kinds = LISTENERS[1..].iter().chain([&ListenerKind::Api]);
            let sum: usize = kinds.map(|kind| kind.max_connections_of(limit)).sum();
            prop_assert!(sum as u64 <= limit / 2, "{sum} of {limit}");
        }
    }
}
