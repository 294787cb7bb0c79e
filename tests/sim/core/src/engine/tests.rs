//! The model against hand-computed cases and its invariants.

use super::{Op, Params, Queues, State};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

const US: u64 = 1_000;
const PARAMS: Params = Params { slice_ns: 2_000 * US, switch_ns: 50 * US, cold_ns: 0 };
const COLD: Params = Params { cold_ns: 100 * US, ..PARAMS };

#[derive(Default, Clone)]
struct Plain {
    ops: HashMap<u32, Vec<(u64, usize, Op)>>,
    host: HashSet<(u32, u64)>,
    done: HashMap<(u32, u64), u64>,
    switches: std::collections::BTreeMap<(u32, u32), super::Handover>,
}

impl Plain {
    fn push(&mut self, channel: u32, at: u64, op: Op) -> u64 {
        self.push_to(channel, 0, at, op)
    }
    fn push_to(&mut self, channel: u32, queue: usize, at: u64, op: Op) -> u64 {
        let ops = self.ops.entry(channel).or_default();
        ops.push((at, queue, op));
        ops.len() as u64 - 1
    }
    fn finish(&self, channel: u32, seq: u64) -> Option<u64> {
        self.done.get(&(channel, seq)).copied()
    }
}

impl Queues for Plain {
    fn submitted(&self, channel: u32) -> u64 {
        self.ops.get(&channel).map_or(0, |o| o.len() as u64)
    }
    fn op(&self, channel: u32, seq: u64) -> (u64, Op) {
        let (at, _, op) = self.ops[&channel][usize::try_from(seq).unwrap()];
        (at, op)
    }
    fn queue(&self, channel: u32, seq: u64) -> usize {
        self.ops[&channel].get(usize::try_from(seq).unwrap()).map_or(0, |op| op.1)
    }
    fn host_done(&self, channel: u32, seq: u64) -> bool {
        self.host.contains(&(channel, seq))
    }
    fn waits(&self, channel: u32) -> u64 {
        let ops = self.ops.get(&channel).map_or(&[][..], |o| o);
        let other = |op| matches!(op, Op::Wait { channel: other, .. } if other != channel);
        ops.iter().filter(|op| other(op.2)).count() as u64
    }
    fn completed(&mut self, channel: u32, seq: u64, at: u64) {
        assert!(self.done.insert((channel, seq), at).is_none(), "completed twice");
    }
    fn switched(&mut self, gpu: u32, number: u32, handover: super::Handover) {
        assert!(self.switches.insert((gpu, number), handover).is_none(), "numbered twice");
    }
}

fn two_channels(gpus: [u32; 2]) -> Box<State> {
    let mut s = State::new(2, 0);
    for (at, gpu) in gpus.into_iter().enumerate() {
        s.open_channel(gpu, u32::try_from(at).unwrap(), 0, 0, at).unwrap();
    }
    s
}

#[test]
fn two_backlogged_processes_share_by_slices() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    for _ in 0..100 {
        q.push(0, 0, Op::Compute(1_000 * US));
        q.push(1, 0, Op::Compute(1_000 * US));
    }
    s.advance(&mut q, &PARAMS, 50_000 * US);
    let (a, b) = (s.channels[0].busy.ns, s.channels[1].busy.ns);
    assert!(a.abs_diff(b) <= PARAMS.slice_ns, "{a} {b}");
    let lost = u64::from(s.gpus[0].switches) * PARAMS.switch_ns;
    assert!(a + b + lost + PARAMS.switch_ns >= 50_000 * US && a + b + lost <= 50_050 * US);
}

#[test]
fn a_long_kernel_is_preempted_and_resumes() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    q.push(0, 0, Op::Compute(3_000 * US));
    q.push(1, 100 * US, Op::Compute(10 * US));
    s.advance(&mut q, &PARAMS, 10_000 * US);
    assert_eq!(q.finish(1, 0), Some(2_060 * US), "waits for the slice, then the switch");
    assert_eq!(q.finish(0, 0), Some(2_060 * US + 50 * US + 1_000 * US));
}

#[test]
fn behind_a_switch_kernels_run_at_half_speed_until_caches_are_warm() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    q.push(0, 1_000 * US, Op::Compute(100 * US));
    for _ in 0..3 {
        q.push(1, 1_000 * US, Op::Compute(30 * US));
    }
    s.advance(&mut q, &COLD, 2_000 * US);
    assert_eq!(q.finish(0, 0), Some(1_100 * US), "nothing ran before");
    assert_eq!([0, 1, 2].map(|i| q.finish(1, i)), [1_210, 1_260, 1_290].map(|t| Some(t * US)));
    assert_eq!(s.channels[1].busy.ns, 140 * US, "the time is its own");
}

#[test]
fn a_switch_tells_for_how_long_the_gpu_was_idle_before_it() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    q.push(0, 0, Op::Compute(100 * US));
    q.push(0, 0, Op::Mark(US));
    q.push(1, 131 * US, Op::Compute(10 * US));
    s.advance(&mut q, &PARAMS, 1_000 * US);
    let handover = super::Handover { from: 0, to: 1, idle_from_ns: 101 * US, at_ns: 131 * US };
    assert_eq!(q.switches.into_iter().collect::<Vec<_>>(), [((0, 0), handover)]);
    assert_eq!(q.done[&(1, 0)], 191 * US, "behind the switch");
    assert_eq!(s.gpus[0].switches, 1);
}

#[test]
fn events_and_markers_are_accounted_apart_from_work() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    for _ in 0..3 {
        q.push(0, 0, Op::Compute(20 * US));
        q.push(0, 0, Op::Delay(US));
        q.push(0, 0, Op::Mark(2 * US));
    }
    s.advance(&mut q, &PARAMS, 1_000 * US);
    let c = &s.channels[0];
    assert_eq!((c.kernels, c.marks, c.completed), (3, 3, 9));
    assert_eq!((c.busy.ns, c.mark_ns), (66 * US, 6 * US));
}

#[test]
fn a_queue_does_not_hold_another_of_its_channel() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    q.push_to(0, 1, 0, Op::Delay(500 * US));
    let behind = q.push_to(0, 1, 0, Op::Compute(10 * US));
    q.push_to(0, 2, 0, Op::Host);
    let until = q.push_to(0, 3, 0, Op::Until);
    let kernels = [4, 4, 5].map(|queue| q.push_to(0, queue, 0, Op::Compute(30 * US)));
    let mark = q.push_to(0, 6, 40 * US, Op::Mark(US));
    s.advance(&mut q, &PARAMS, 1_000 * US);
    assert_eq!(q.finish(0, behind), Some(510 * US));
    assert_eq!(kernels.map(|k| q.finish(0, k)), [30, 61, 91].map(|t| Some(t * US)), "one by one");
    assert_eq!(q.finish(0, mark), Some(41 * US), "beside a kernel");
    assert_eq!((q.finish(0, until), s.channels[0].busy.ns), (None, 1_000 * US));
    assert!(s.is_complete(&q, 0, mark) && !s.is_complete(&q, 0, until));
    assert_eq!(s.channels[0].completed, 2, "all before the host function");
    let after = q.push_to(0, 5, 1_000 * US, Op::Wait { channel: 0, seq: until });
    let last = q.push_to(0, 5, 1_000 * US, Op::Compute(US));
    s.advance(&mut q, &PARAMS, 2_000 * US);
    assert!(!s.is_complete(&q, 0, after));
    q.host.insert((0, until));
    s.advance(&mut q, &PARAMS, 3_000 * US);
    assert_eq!(q.finish(0, last), Some(2_001 * US));
}

#[test]
fn kernels_of_a_channel_run_at_once_as_far_as_there_is_room() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    let part = |us: u64, width| Op::Part { ns: us * US, width };
    let first = [(1, 100, 400), (2, 50, 400)].map(|(k, us, w)| q.push_to(0, k, 0, part(us, w)));
    let wide = q.push_to(0, 3, 0, part(30, 600));
    let small = q.push_to(0, 4, 0, part(30, 100));
    s.advance(&mut q, &PARAMS, 60 * US);
    assert_eq!(first.map(|k| q.finish(0, k)), [None, Some(50 * US)]);
    s.advance(&mut q, &PARAMS, 1_000 * US);
    assert_eq!(q.finish(0, first[0]), Some(100 * US));
    assert_eq!(q.finish(0, wide), Some(80 * US), "from when there is room");
    assert_eq!(q.finish(0, small), Some(110 * US), "nothing overtakes what waits for room");
    assert_eq!((s.channels[0].busy.ns, s.channels[0].kernels), (110 * US, 4));
    let all = [5, 6].map(|k| q.push_to(0, k, 1_000 * US, Op::Compute(10 * US)));
    s.advance(&mut q, &PARAMS, 2_000 * US);
    assert_eq!(all.map(|k| q.finish(0, k)), [1_010, 1_020].map(|t| Some(t * US)));
}

#[test]
fn a_kernel_without_an_end_of_its_own_takes_its_turns_until_it_is_over() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    let until = q.push(0, 0, Op::Until);
    q.push(0, 0, Op::Compute(10 * US));
    s.advance(&mut q, &PARAMS, 100 * US);
    assert_eq!((q.finish(0, until), s.channels[0].busy.ns), (None, 100 * US), "it needs the GPU");
    // Beside another it has slices like any kernel.
    q.push(1, 100 * US, Op::Compute(3_000 * US));
    s.advance(&mut q, &PARAMS, 50_000 * US);
    assert!(q.finish(1, 0).is_some() && q.finish(0, until).is_none());
    q.host.insert((0, until));
    s.advance(&mut q, &PARAMS, 50_100 * US);
    assert_eq!(q.finish(0, until), Some(50_000 * US));
    assert_eq!(q.finish(0, 1), Some(50_010 * US));
    assert_eq!(s.channels[0].kernels, 2);
}

#[test]
fn closing_a_channel_frees_the_gpu_for_the_others() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    q.push(0, 0, Op::Compute(1_000_000 * US));
    q.push(1, 0, Op::Compute(3_000 * US));
    s.advance(&mut q, &PARAMS, 100 * US);
    s.close_channel(0);
    s.advance(&mut q, &PARAMS, 4_000 * US);
    assert_eq!(q.finish(1, 0), Some(3_100 * US));
    assert!(s.is_complete(&q, 0, 0), "nobody waits for the dead");
}

#[test]
fn utilisation_is_busy_time_over_the_window() {
    let (mut s, mut q) = (two_channels([0, 0]), Plain::default());
    for i in 0..10 {
        q.push(0, i * 100_000 * US, Op::Compute(25_000 * US));
    }
    s.advance(&mut q, &PARAMS, 1_000_000 * US);
    assert_eq!(s.gpus[0].busy.percent(s.gpus[0].now, 10), 25);
    s.advance(&mut q, &PARAMS, 9_000_000 * US);
    assert_eq!(s.gpus[0].busy.percent(s.gpus[0].now, 10), 0);
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u64..5_000).prop_map(|us| Op::Compute(us * US)),
        (0u64..5_000, 1u16..=1000).prop_map(|(us, width)| Op::Part { ns: us * US, width }),
        (0u64..5).prop_map(|us| Op::Mark(us * US)),
        (0u64..500).prop_map(|us| Op::Delay(us * US)),
    ]
}

proptest! {
    /// However time is cut into advances, the same happens at the same times; work is conserved;
    /// each queue is FIFO.
    #[test]
    fn advancing_in_pieces_changes_nothing(
        work in prop::collection::vec((0u32..3, 0u64..20_000, any_op(), 0usize..3), 1..60),
        cuts in prop::collection::vec(1u64..400_000_000, 0..20),
        cold in any::<bool>(),
    ) {
        let mut s = State::new(2, 0);
        for (at, gpu) in [0, 0, 1].into_iter().enumerate() {
            s.open_channel(gpu, 0, 0, 0, at).unwrap();
        }
        let mut q = Plain::default();
        for ops in [0, 1, 2].map(|c| {
            let mut mine: Vec<_> = work.iter().filter(|w| w.0 == c).copied().collect();
            mine.sort_by_key(|w| w.1);
            mine
        }) {
            for (c, at, op, queue) in ops {
                q.push_to(c, queue, at * US, op);
            }
        }
        let end = 2_000_000 * US;
        let (mut once, mut once_q) = (s.clone(), q.clone());
        let params = if cold { COLD } else { PARAMS };
        once.advance(&mut once_q, &params, end);
        let mut cuts = cuts;
        cuts.sort_unstable();
        for cut in cuts {
            s.advance(&mut q, &params, cut);
            prop_assert!(s.is_valid());
        }
        s.advance(&mut q, &params, end);
        prop_assert_eq!(&once_q.done, &q.done);
        prop_assert_eq!(&once_q.switches, &q.switches);
        let compute: u64 = work.iter().filter_map(|w| match w.2 { Op::Compute(ns) | Op::Part { ns, .. } | Op::Mark(ns) => Some(ns), _ => None }).sum();
        let at_once = work.iter().any(|w| matches!(w.2, Op::Part { .. }));
        let busy = s.gpus[0].busy.ns + s.gpus[1].busy.ns;
        prop_assert!(busy == compute || cold && busy > compute || at_once && busy < compute);
        for c in 0..3 {
            for seq in 0..q.submitted(c) {
                let (arrival, _) = q.op(c, seq);
                let at = q.finish(c, seq);
                prop_assert!(at.is_some_and(|t| t >= arrival));
                let earlier = (0..seq).filter(|s| q.queue(c, *s) == q.queue(c, seq));
                prop_assert!(earlier.max().is_none_or(|before| at >= q.finish(c, before)));
            }
        }
    }

    /// A prediction is what happens if nothing more is submitted.
    #[test]
    fn prediction_comes_true(
        work in prop::collection::vec((0u32..2, any_op(), 0usize..3), 1..40),
        which in any::<prop::sample::Index>(),
    ) {
        let mut s = two_channels([0, 0]);
        let mut q = Plain::default();
        for (c, op, queue) in work {
            q.push_to(c, queue, 0, op);
        }
        let submitted = usize::try_from(q.submitted(0)).unwrap();
        prop_assume!(submitted > 0);
        let seq = which.index(submitted) as u64;
        let predicted = s.clone().predict(&q, &PARAMS, 0, seq, u64::MAX);
        s.advance(&mut q, &PARAMS, 1_000_000_000 * US);
        prop_assert_eq!(predicted, q.finish(0, seq));
    }
}

#[test]
fn prediction_stops_at_its_horizon_and_knows_what_it_cannot_know() {
    let mut s = two_channels([0, 0]);
    let mut q = Plain::default();
    let long = q.push(0, 0, Op::Compute(1_000_000 * US));
    q.push(1, 0, Op::Host);
    let after = q.push(1, 0, Op::Delay(US));
    assert_eq!(s.clone().predict(&q, &PARAMS, 0, long, 300 * US), Some(300 * US));
    assert_eq!(s.predict(&q, &PARAMS, 1, after, 300 * US), None);
}

#[test]
fn a_wait_ends_at_its_dependencys_end_however_time_is_cut() {
    for cuts in [vec![], vec![100, 200, 300, 400, 501, 502], vec![250]] {
        let (mut s, mut q) = (two_channels([0, 1]), Plain::default());
        q.push(0, 0, Op::Compute(500 * US));
        let dep = q.push(0, 0, Op::Compute(US));
        q.push(1, 0, Op::Wait { channel: 0, seq: dep });
        let after = q.push(1, 0, Op::Compute(US));
        for cut in cuts {
            s.advance(&mut q, &PARAMS, cut * US);
        }
        s.advance(&mut q, &PARAMS, 2_000 * US);
        assert_eq!((q.finish(0, dep), q.finish(1, after)), (Some(501 * US), Some(502 * US)));
    }
}
