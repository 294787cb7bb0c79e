//! Clocks that are wrong for a while: nearly all of what was recorded before stays.

use std::collections::HashSet;
use std::path::Path;

use tessera_history::{History, Options};
use tessera_view::history::Query;
use tessera_view::status::Status;

use crate::{HOUR, T0, now, options, pods};

const DAY: i64 = 24 * HOUR;

/// A node with one tenant. Its clock is what it is set to.
struct Node {
    options: Options,
    history: History,
    /// Seconds that have passed, and by how much its clock is wrong.
    passed: i64,
    wrong: i64,
}

impl Node {
    fn new(dir: &Path) -> Self {
        let options = options(&dir.join("history.redb"), 8 << 20);
        Node { history: History::new(options.clone()), options, passed: 0, wrong: 0 }
    }

    /// Looks for so long, and stores as the plugin does.
    fn live(&mut self, seconds: i64, step: usize) {
        for _ in (0..seconds).step_by(step) {
            self.passed += i64::try_from(step).unwrap();
            let status = Status {
                at_unix_ms: (T0 + self.passed + self.wrong) * 1000,
                allocations: pods(self.passed, 1),
                ..Status::default()
            };
            self.history.look(&status, &HashSet::new(), self.passed.cast_unsigned() * 1000);
            if self.passed % 60 == 0 {
                self.history.flush(false).unwrap();
            }
        }
    }

    fn restart(&mut self) {
        self.history.close().unwrap();
        self.history = History::new(self.options.clone());
        self.history.flush(false).unwrap();
    }

    /// Seconds that each level knows of until `until`.
    fn known(&self, until: i64) -> [f64; 3] {
        [10, 300, 3600].map(|step_seconds| {
            let until_unix_ms = (T0 + until) * 1000;
            let query = Query { step_seconds, until_unix_ms, ..Query::default() };
            let answer = self.history.answer(&query, &now(until)).unwrap();
            let points = answer.tenants.iter().flat_map(|series| &series.points);
            points.map(|point| point.seconds).sum()
        })
    }
}

#[test]
fn a_clock_that_is_wrong_for_an_hour_takes_little() {
    for (wrong, restarts) in [(365 * DAY, true), (60 * DAY, false), (-365 * DAY, true)] {
        let dir = tempfile::tempdir().unwrap();
        let mut node = Node::new(dir.path());
        node.live(9 * DAY, 600);
        node.live(6 * HOUR, 10);
        let until = node.passed - 60;
        let before = node.known(until);
        let [fine, middle, coarse] = before.map(|seconds| seconds / 3600.0);
        assert!(fine >= 5.9 && middle >= 168.0 && coarse >= 221.0, "{before:?}");
        node.wrong = wrong;
        for _ in 0..6 {
            node.live(HOUR / 6, 10);
            if restarts {
                node.restart();
            }
        }
        node.wrong = 0;
        node.live(120, 10);
        let after = node.known(until);
        // Two chunks go as one begins: of five minutes, an hour and twelve hours.
        let most = [2.5, 4.5, 48.5].map(|hours| hours * 3600.0);
        for (level, (before, after)) in before.into_iter().zip(after).enumerate() {
            let lost = before - after;
            assert!(lost <= most[level], "{wrong} s, level {level}: {before}, {after}");
        }
    }
}

#[test]
fn what_is_older_than_is_kept_goes_as_new_comes() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = Node::new(dir.path());
    node.live(8 * HOUR, 60);
    let until = node.passed;
    // The node was off for so long.
    node.wrong = 100 * DAY;
    node.live(5 * HOUR, 60);
    assert_eq!(node.known(until)[..2], [0.0; 2]);
    node.live(8 * HOUR, 60);
    assert_eq!(node.known(until), [0.0; 3]);
}
