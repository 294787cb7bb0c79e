//! How much may be in flight while the gate is open: enough that the GPU has work, and so little that a
//! lease can end soon.
//!
//! Markers give the duration of an operation. A marker that was waited for shows when its operations were
//! complete; the one before it, or their launch, shows when they can have begun. What was only found
//! complete bounds the duration from above, what began later than known from below. An estimate that is too
//! long costs markers, one that is too short lets too much into flight: it rises at once by much, and falls
//! slowly.
//!
//! Graphs and single operations have an estimate each: a graph takes the time of hundreds of kernels, and
//! the two come mixed.

/// Most operations under one marker.
const BATCH: u32 = 16;
/// Where nobody has seen an operation end yet.
const UNKNOWN_NS: u32 = u32::MAX;
/// The whole window, in the parts that operations take of it.
const WHOLE: u32 = 1 << 20;

/// What is known of the durations of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Estimate {
    /// Of a kernel, a fill, a copy; nanoseconds.
    single_ns: u32,
    /// Of a graph; nanoseconds.
    graph_ns: u32,
    /// What a single operation, and a graph, usually takes, microseconds: one that waits for long hardly
    /// counts.
    usual_single_us: u32,
    usual_graph_us: u32,
    /// When the last marker was known to be complete, microseconds.
    last_us: u32,
}

/// What may be in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// How much of [`WHOLE`] a single operation takes, and a graph.
    pub(crate) single: u32,
    pub(crate) graph: u32,
    /// So many operations may be in flight whatever they take.
    pub(crate) least: u32,
    /// Single operations under one marker.
    pub(crate) batch: u32,
}

impl Limits {
    /// Before anything is known: one operation.
    pub(crate) const NARROWEST: Self = Self { single: WHOLE, graph: WHOLE, least: 1, batch: 1 };

    /// Whether one more may be let into flight.
    pub(crate) fn have_room(self, singles: u32, graphs: u32, is_graph: bool) -> bool {
        let part = |count: u32, each: u32| u64::from(count) * u64::from(each);
        let own = if is_graph { self.graph } else { self.single };
        let taken = part(singles, self.single) + part(graphs, self.graph) + u64::from(own);
        singles + graphs < self.least || taken <= u64::from(WHOLE)
    }
}

/// What an observer of a marker knows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sighting {
    pub(crate) operations: u32,
    /// Those of them that are graphs.
    pub(crate) graphs: u32,
    /// Not before this can the first of them have been handed over.
    pub(crate) since_us: u32,
    pub(crate) now_us: u32,
    /// It was seen incomplete just before.
    pub(crate) awaited: bool,
}

impl Estimate {
    pub(crate) const fn new() -> Self {
        Self {
            single_ns: UNKNOWN_NS,
            graph_ns: UNKNOWN_NS,
            usual_single_us: 0,
            usual_graph_us: 0,
            last_us: 0,
        }
    }

    /// A marker is complete. Times wrap, and are compared over less than an hour.
    pub(crate) fn learn(&mut self, seen: Sighting) {
        let Sighting { operations, graphs, since_us, now_us, awaited } = seen;
        // They ran one after the other.
        let begun_us = later(self.last_us, since_us);
        let span_ns = now_us.wrapping_sub(begun_us).min(4_000_000) * 1_000;
        self.last_us = now_us;
        let singles = operations.saturating_sub(graphs);
        if graphs == 0 {
            get_used(&mut self.usual_single_us, span_ns / singles.max(1));
            fold(&mut self.single_ns, span_ns / singles.max(1), awaited);
        } else if singles == 0 {
            get_used(&mut self.usual_graph_us, span_ns / graphs);
            fold(&mut self.graph_ns, span_ns / graphs, awaited);
        } else if self.single_ns == UNKNOWN_NS || self.graph_ns == UNKNOWN_NS {
            // What is not known to be the others' is the graphs'.
            let others_ns = if self.single_ns == UNKNOWN_NS { 0 } else { self.single_ns };
            let rest_ns = span_ns.saturating_sub(others_ns.saturating_mul(singles));
            fold(&mut self.graph_ns, (rest_ns / graphs).max(1), awaited);
        } else {
            // Both took longer, or shorter, than expected: by the same factor, as far as is known.
            let part = |count: u32, each_ns: u32| u64::from(count) * u64::from(each_ns);
            let expected = part(singles, self.single_ns) + part(graphs, self.graph_ns);
            for each_ns in [&mut self.single_ns, &mut self.graph_ns] {
                let seen_ns = u64::from(*each_ns) * u64::from(span_ns) / expected.max(1);
                fold(each_ns, u32::try_from(seen_ns).unwrap_or(UNKNOWN_NS - 1), awaited);
            }
        }
    }

    /// A marker is complete whose operations waited for the gate: it tells only when the next began.
    pub(crate) fn skip(&mut self, now_us: u32) {
        self.last_us = now_us;
    }

    /// What an operation usually takes, graph or not, microseconds; 0 before anything is known.
    pub(crate) fn usual_us(self) -> u32 {
        self.usual_single_us.max(self.usual_graph_us)
    }

    /// How long so many operations still take, one after the other, of which the first was handed over
    /// at `since_us` and all are still in flight; microseconds. `None` where nobody knows.
    pub(crate) fn left_us(
        self,
        operations: u32,
        graphs: u32,
        since_us: u32,
        now_us: u32,
    ) -> Option<u32> {
        let part = |count: u32, each_ns: u32| match each_ns {
            _ if count == 0 => Some(0),
            UNKNOWN_NS => None,
            each_ns => Some(u64::from(count) * u64::from(each_ns)),
        };
        let singles = operations.saturating_sub(graphs);
        let all_ns = part(singles, self.single_ns)? + part(graphs, self.graph_ns)?;
        let gone_us = now_us.wrapping_sub(later(self.last_us, since_us));
        let all_us = u32::try_from(all_ns / 1_000).unwrap_or(u32::MAX);
        Some(all_us.saturating_sub(gone_us))
    }

    /// What may be in flight with the page's `window` and `window_us`, which are meant for each of
    /// `gpus` GPUs: what they do at the same time takes no longer than what one does. One for each, and
    /// `spare` more, may be in flight whatever they take.
    pub(crate) fn limits(self, window: u32, window_us: u32, gpus: u32, spare: u32) -> Limits {
        let gpus = gpus.max(1);
        let window = window.max(1).saturating_mul(gpus);
        let window_ns = (u64::from(window_us) * u64::from(gpus) * 1_000).max(1);
        let part = |each_ns: u32| {
            let by_time = match each_ns {
                UNKNOWN_NS => WHOLE / 2,
                each_ns => {
                    let part = u64::from(each_ns) * u64::from(WHOLE) / window_ns;
                    u32::try_from(part).unwrap_or(WHOLE).min(WHOLE)
                }
            };
            by_time.max(WHOLE / window).max(1)
        };
        let (single, least) = (part(self.single_ns), window.min(gpus + spare));
        let operations = (WHOLE / single).max(least);
        let batch = (operations / 2).clamp(1, BATCH);
        Limits { single, graph: part(self.graph_ns), least, batch }
    }
}

/// The later of two times that wrap.
fn later(one_us: u32, other_us: u32) -> u32 {
    if one_us.wrapping_sub(other_us) < u32::MAX / 2 { one_us } else { other_us }
}

/// Brings an estimate nearer to what was seen.
fn fold(estimate_ns: &mut u32, each_ns: u32, awaited: bool) {
    let before = *estimate_ns;
    if each_ns < before {
        *estimate_ns = match before {
            UNKNOWN_NS => each_ns,
            before => before - (before - each_ns) / 4,
        };
    } else if awaited {
        // Within a factor of two it may be that the look came late.
        let more = each_ns - before;
        *estimate_ns += if more > before { more } else { more / 4 };
    }
}

/// Brings what is usual nearer to what was seen: up by a quarter at most, from a millisecond on.
fn get_used(usual_us: &mut u32, each_ns: u32) {
    const FIRST_US: u32 = 1_000;
    let each_us = each_ns / 1_000;
    let before = *usual_us;
    *usual_us = match each_us.checked_sub(before) {
        Some(_) if before == 0 => each_us.min(FIRST_US),
        Some(more) => before + more.min(before).div_ceil(4),
        None => before - (before - each_us) / 4,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `rounds` markers of `operations`, each of them `each_us` long, watched until complete.
    fn after(estimate: &mut Estimate, rounds: u32, operations: u32, each_us: u32) {
        for _ in 0..rounds {
            see(estimate, operations, 0, operations * each_us);
        }
    }

    /// A marker that was watched until it was complete, `span_us` after the one before.
    fn see(estimate: &mut Estimate, operations: u32, graphs: u32, span_us: u32) {
        let now_us = estimate.last_us + span_us;
        let since_us = estimate.last_us.saturating_sub(100);
        estimate.learn(Sighting { operations, graphs, since_us, now_us, awaited: true });
    }

    /// How many single operations may be in flight beside `graphs`, and how many go under a marker.
    fn room(limits: Limits, graphs: u32) -> (u32, u32) {
        let full = (0..).find(|&singles| !limits.have_room(singles, graphs, false));
        (full.expect("an end"), limits.batch)
    }

    #[test]
    fn begins_with_a_marker_for_each_and_grows_when_they_prove_short() {
        let mut estimate = Estimate::new();
        assert_eq!(room(estimate.limits(64, 500, 1, 1), 0), (2, 1));
        after(&mut estimate, 20, 1, 10);
        assert_eq!(room(estimate.limits(64, 500, 1, 1), 0), (50, 16));
        assert_eq!(room(estimate.limits(8, 500, 1, 1), 0), (8, 4));
    }

    #[test]
    fn two_operations_may_always_be_in_flight_unless_the_window_is_one() {
        let mut estimate = Estimate::new();
        after(&mut estimate, 20, 1, 8_000);
        assert_eq!(room(estimate.limits(64, 500, 1, 1), 0), (2, 1));
        assert_eq!(room(estimate.limits(64, 500, 1, 0), 0), (1, 1), "other processes have more");
        assert_eq!(room(estimate.limits(1, 500, 1, 1), 0), (1, 1));
        assert_eq!(room(estimate.limits(0, 0, 1, 1), 0), (1, 1));
        assert_eq!(room(Limits::NARROWEST, 0), (1, 1));
    }

    #[test]
    fn one_long_operation_narrows_the_window_at_once_and_short_ones_widen_it_again() {
        let mut estimate = Estimate::new();
        after(&mut estimate, 20, 4, 10);
        assert!(room(estimate.limits(64, 500, 1, 1), 0).0 >= 50);
        after(&mut estimate, 1, 1, 5_000);
        assert_eq!(room(estimate.limits(64, 500, 1, 1), 0).0, 2);
        after(&mut estimate, 30, 1, 10);
        assert!(room(estimate.limits(64, 500, 1, 1), 0).0 >= 40);
    }

    #[test]
    fn graphs_among_short_kernels_do_not_narrow_the_kernels_window() {
        let mut estimate = Estimate::new();
        for _ in 0..20 {
            after(&mut estimate, 4, 16, 10);
            see(&mut estimate, 1, 1, 8_000);
        }
        let limits = estimate.limits(64, 500, 1, 1);
        assert_eq!(room(limits, 0), (50, 16));
        // While one flies, its time is what the window has, and one operation may follow.
        assert_eq!(room(limits, 1).0, 1);
        assert!(limits.have_room(1, 0, true) && !limits.have_room(2, 0, true));
        // Nor where a look finds several markers complete at once.
        for _ in 0..20 {
            see(&mut estimate, 33, 1, 8_320);
        }
        let limits = estimate.limits(64, 500, 1, 1);
        assert!(room(limits, 0).0 >= 48, "{limits:?}");
        assert_eq!(room(limits, 1).0, 1);
    }

    #[test]
    fn short_graphs_fit_the_window_by_their_number_and_their_time() {
        let mut estimate = Estimate::new();
        let most = |limits: Limits| (0..).find(|&graphs| !limits.have_room(0, graphs, true));
        assert_eq!(most(estimate.limits(64, 500, 1, 1)), Some(2), "nobody knows them");
        (0..40).for_each(|_| see(&mut estimate, 1, 1, 100));
        assert_eq!(most(estimate.limits(64, 500, 1, 1)), Some(5));
        assert_eq!(most(estimate.limits(3, 500, 1, 1)), Some(3));
        // Two graphs leave room for three fifths of the window.
        after(&mut estimate, 20, 1, 10);
        assert_eq!(room(estimate.limits(64, 500, 1, 1), 2).0, 30);
    }

    #[test]
    fn a_graph_that_nobody_has_seen_alone_is_what_the_kernels_leave() {
        let mut estimate = Estimate::new();
        after(&mut estimate, 20, 16, 10);
        see(&mut estimate, 17, 1, 8_160);
        assert_eq!((estimate.single_ns, estimate.graph_ns), (10_000, 8_000_000));
        // And without any knowledge all of it.
        let mut estimate = Estimate::new();
        see(&mut estimate, 17, 1, 8_160);
        assert_eq!((estimate.single_ns, estimate.graph_ns), (UNKNOWN_NS, 8_160_000));
    }

    #[test]
    fn what_is_only_found_complete_never_raises_the_estimate() {
        let mut estimate = Estimate::new();
        after(&mut estimate, 20, 4, 10);
        let before = estimate.limits(64, 500, 1, 1);
        // The host launched one, slept a second, and looked.
        let now_us = estimate.last_us + 1_000_000;
        let since_us = estimate.last_us + 50;
        let seen = Sighting { operations: 1, graphs: 0, since_us, now_us, awaited: false };
        estimate.learn(seen);
        assert_eq!(estimate.limits(64, 500, 1, 1), before);
    }

    #[test]
    fn times_wrap() {
        let mut estimate = Estimate {
            single_ns: 10_000,
            graph_ns: UNKNOWN_NS,
            last_us: u32::MAX - 5,
            ..Estimate::new()
        };
        let since_us = u32::MAX - 100;
        let seen = Sighting { operations: 1, graphs: 0, since_us, now_us: 4, awaited: true };
        estimate.learn(seen);
        assert_eq!(estimate.single_ns, 10_000);
    }

    #[test]
    fn what_is_left_is_what_they_take_less_what_is_over() {
        let mut estimate = Estimate::new();
        assert_eq!(estimate.left_us(1, 0, 0, 0), None, "nobody knows");
        after(&mut estimate, 40, 1, 200);
        let last_us = estimate.last_us;
        assert_eq!(estimate.left_us(3, 0, last_us - 100, last_us + 50), Some(550));
        assert_eq!(estimate.left_us(3, 0, last_us + 40, last_us + 50), Some(590), "none before");
        assert_eq!(estimate.left_us(1, 0, last_us, last_us + 900), Some(0), "longer than others");
        assert_eq!(estimate.left_us(2, 1, last_us, last_us), None, "a graph nobody knows");
    }

    #[test]
    fn what_waits_for_long_now_and_then_is_not_usual() {
        let mut estimate = Estimate::new();
        for _ in 0..20 {
            after(&mut estimate, 9, 1, 200);
            after(&mut estimate, 1, 1, 900_000);
        }
        assert!(estimate.usual_us() < 400, "{}", estimate.usual_us());
        after(&mut estimate, 30, 1, 8_000);
        assert!(estimate.usual_us() > 7_000, "{}", estimate.usual_us());
    }
}
