//! Advancing the model from event to event.

use super::{Handover, Head, NONE, Op, Params, QUEUES, Queue, Queues, State, WHOLE};
use crate::layout::MAX_CHANNELS;

/// A GPU that is moved on, and how.
struct Turn<'a> {
    gpu: u32,
    params: &'a Params,
    waits: Waits,
    ids: [u32; MAX_CHANNELS],
    len: usize,
}

/// Whether an operation that waits for another GPU may be released: not while some GPUs have
/// reached a moment that others have not.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    Release,
    Hold,
}

impl<'a> Turn<'a> {
    fn of(state: &State, gpu: u32, params: &'a Params, waits: Waits) -> Self {
        let mut turn = Turn { gpu, params, waits, ids: [0; MAX_CHANNELS], len: 0 };
        for (id, c) in (0u32..).zip(&state.channels[..state.channels_used as usize]) {
            if c.gpu == gpu {
                turn.ids[turn.len] = id;
                turn.len += 1;
            }
        }
        turn
    }

    fn channels(&self) -> impl Iterator<Item = u32> + '_ {
        self.ids[..self.len].iter().copied()
    }
}

/// Queues that are looked at only, and one operation's completion.
struct Watch<'a, Q> {
    queues: &'a Q,
    channel: u32,
    seq: u64,
    at: Option<u64>,
}

impl<Q: Queues> Queues for Watch<'_, Q> {
    fn submitted(&self, channel: u32) -> u64 {
        self.queues.submitted(channel)
    }
    fn op(&self, channel: u32, seq: u64) -> (u64, Op) {
        self.queues.op(channel, seq)
    }
    fn queue(&self, channel: u32, seq: u64) -> usize {
        self.queues.queue(channel, seq)
    }
    fn host_done(&self, channel: u32, seq: u64) -> bool {
        self.queues.host_done(channel, seq)
    }
    fn waits(&self, channel: u32) -> u64 {
        self.queues.waits(channel)
    }
    fn completed(&mut self, channel: u32, seq: u64, at: u64) {
        if (channel, seq) == (self.channel, self.seq) {
            self.at = Some(at);
        }
    }
    fn switched(&mut self, _: u32, _: u32, _: Handover) {}
}

/// What one GPU does next.
struct Plan {
    /// The next moment at which anything changes, the running operation's end left out.
    limit: u64,
    running: bool,
}

impl State {
    /// Moves every GPU to time `to`; a GPU that is already later stays.
    pub fn advance<Q: Queues>(&mut self, queues: &mut Q, params: &Params, to: u64) {
        let crossing = (0..self.channels_used).any(|id| {
            let c = &self.channels[id as usize];
            c.gpu != NONE && queues.waits(id) != c.waits_done
        });
        if crossing {
            self.advance_together(queues, params, to);
        } else {
            for gpu in 0..self.gpu_count {
                let turn = Turn::of(self, gpu, params, Waits::Release);
                while self.step(queues, &turn, to) {}
            }
        }
    }

    /// As [`State::advance`], in one order over all GPUs, for operations that wait across them.
    fn advance_together<Q: Queues>(&mut self, queues: &mut Q, params: &Params, to: u64) {
        loop {
            let mut next = to;
            for gpu in 0..self.gpu_count {
                let turn = Turn::of(self, gpu, params, Waits::Hold);
                next = next.min(self.next_event(queues, &turn, to));
            }
            for gpu in 0..self.gpu_count {
                let turn = Turn::of(self, gpu, params, Waits::Hold);
                while self.step(queues, &turn, next) {}
            }
            // An operation that completed on one GPU may release one on another, now.
            let mut released = true;
            while released {
                released = false;
                for gpu in 0..self.gpu_count {
                    let turn = Turn::of(self, gpu, params, Waits::Release);
                    let now = self.gpus[gpu as usize].now;
                    for id in turn.channels() {
                        released |= self.settle(queues, id, now, Waits::Release);
                    }
                }
            }
            if next >= to {
                return;
            }
        }
    }

    /// When operation `seq` of `channel` will be complete if nothing more is submitted, or
    /// `horizon` if that is sooner; `None` if it waits for something outside its GPU. Moves this
    /// copy of the state on, and tells `queues` nothing.
    pub fn predict<Q: Queues>(
        &mut self,
        queues: &Q,
        params: &Params,
        channel: u32,
        seq: u64,
        horizon: u64,
    ) -> Option<u64> {
        let gpu = self.channels.get(channel as usize).map(|c| c.gpu).filter(|&g| g != NONE)?;
        let turn = Turn::of(self, gpu, params, Waits::Release);
        let mut watch = Watch { queues, channel, seq, at: None };
        if self.is_complete(queues, channel, seq) {
            return Some(self.gpus[gpu as usize].now);
        }
        while watch.at.is_none() && self.step(&mut watch, &turn, horizon) {}
        let outside = |q: &Queue| match q.head {
            Head::Wait => q.dependency != channel,
            Head::Host => true,
            _ => q.until,
        };
        let waits = self.channels[channel as usize].queues.iter().any(outside);
        watch.at.or((!waits).then_some(horizon))
    }

    /// The next moment, at most `to`, at which anything changes on the GPU.
    fn next_event<Q: Queues>(&mut self, queues: &mut Q, turn: &Turn<'_>, to: u64) -> u64 {
        let plan = self.plan(queues, turn, to);
        let g = &self.gpus[turn.gpu as usize];
        if !plan.running {
            return plan.limit;
        }
        let c = &self.channels[g.current as usize];
        let Some(left) = c.running().map(|k| c.queues[k].left).min() else { return plan.limit };
        plan.limit.min(g.end(turn.params.cold_ns, g.now.max(g.run_from), left))
    }

    /// One event: false when the GPU reached `to`.
    fn step<Q: Queues>(&mut self, queues: &mut Q, turn: &Turn<'_>, to: u64) -> bool {
        let plan = self.plan(queues, turn, to);
        let g = turn.gpu as usize;
        if self.gpus[g].now >= to {
            return false;
        }
        if plan.running {
            self.run_current(queues, turn.params, g, plan.limit);
        } else {
            self.gpus[g].now = plan.limit;
        }
        true
    }

    /// Settles what is complete now, chooses what runs, and finds the next event of the others.
    fn plan<Q: Queues>(&mut self, queues: &mut Q, turn: &Turn<'_>, to: u64) -> Plan {
        let plan = self.plan_channel(queues, turn, to);
        if plan.running {
            self.choose(self.gpus[turn.gpu as usize].current);
        }
        plan
    }

    /// Chooses the queues of a channel that run: an event or a marker alone, else what ran before, and what was submitted
    /// first of the rest, as long as there is room. Nothing overtakes a kernel that has none.
    fn choose(&mut self, id: u32) {
        let c = &mut self.channels[id as usize];
        let first = |of: &dyn Fn(usize, &Queue) -> bool| {
            let all = c.queues.iter().enumerate().filter(|(k, q)| q.is_timed() && of(*k, q));
            all.min_by_key(|(_, q)| q.seq).map(|(k, q)| (k, q.width))
        };
        if let Some((k, _)) = first(&|_, q| q.marking) {
            c.running = 1 << k;
            return;
        }
        let (mut chosen, mut taken) = (0, 0);
        for is_next in [true, false] {
            let ran = |k: usize| !is_next || c.running >> k & 1 == 1;
            while let Some((k, width)) = first(&|k, _| chosen >> k & 1 == 0 && ran(k)) {
                if taken + width > WHOLE {
                    break;
                }
                (chosen, taken) = (chosen | 1 << k, taken + width);
            }
        }
        c.running = chosen;
    }

    /// The same without the choice among a channel's queues.
    fn plan_channel<Q: Queues>(&mut self, queues: &mut Q, turn: &Turn<'_>, to: u64) -> Plan {
        let (g, params) = (turn.gpu as usize, turn.params);
        let now = self.gpus[g].now;
        let mut limit = to.max(now);
        for id in turn.channels() {
            self.settle(queues, id, now, turn.waits);
            for q in &self.channels[id as usize].queues {
                match q.head {
                    // Its own next one: `settle` looked at all others.
                    Head::Empty if queues.submitted(id) > q.read => {
                        limit = limit.min(queues.op(id, q.read).0.max(now));
                    }
                    Head::Delay => limit = limit.min(q.left),
                    _ => {}
                }
            }
        }
        let current = self.gpus[g].current;
        let runnable = |id: u32| self.channels[id as usize].is_runnable();
        // Round robin: the first runnable channel after the current one, wrapping.
        let other = turn
            .channels()
            .filter(|&id| id != current && runnable(id))
            .min_by_key(|&id| (id <= current && current != NONE, id));
        let current_runs = current != NONE && runnable(current);
        let state = &mut self.gpus[g];
        // Nobody waited when the slice ended, or there would have been an event: new ones began.
        if current_runs && now > state.slice_end {
            let slices = (now - state.slice_end).div_ceil(params.slice_ns);
            state.slice_end += slices * params.slice_ns;
        }
        match (current_runs, other) {
            (false, None) => return Plan { limit, running: false },
            (true, None) => {}
            (true, Some(_)) if now < state.slice_end => limit = limit.min(state.slice_end),
            (_, Some(next)) => {
                let cost = if current == NONE { 0 } else { params.switch_ns };
                state.run_from = now + cost;
                if current != NONE {
                    let slot = |id: u32| self.channels[id as usize].slot;
                    let handover = Handover {
                        from: slot(current),
                        to: slot(next),
                        idle_from_ns: state.ran_until.min(now),
                        at_ns: now,
                    };
                    queues.switched(turn.gpu, state.switches, handover);
                    state.switches = state.switches.wrapping_add(1);
                    state.cold_from = state.run_from;
                }
                state.current = next;
                state.slice_end = state.run_from + params.slice_ns;
                // Somebody waits still: the one that was preempted, or a third.
                let waiting = current_runs
                    || turn
                        .channels()
                        .any(|id| id != next && self.channels[id as usize].is_runnable());
                if waiting {
                    limit = limit.min(self.gpus[g].slice_end);
                }
            }
        }
        Plan { limit, running: true }
    }

    /// Runs the current channel until `limit`, or until anything else is to be planned.
    fn run_current<Q: Queues>(&mut self, queues: &mut Q, params: &Params, g: usize, limit: u64) {
        let id = self.gpus[g].current;
        loop {
            let state = &mut self.gpus[g];
            let start = state.now.max(state.run_from);
            if start >= limit {
                state.now = limit;
                return;
            }
            let c = &mut self.channels[id as usize];
            let left = c.running().map(|k| c.queues[k].left).min();
            let end = left.map_or(limit, |left| state.end(params.cold_ns, start, left).min(limit));
            c.busy.add(start, end);
            state.busy.add(start, end);
            state.now = end;
            state.ran_until = end;
            let done = state.done(params.cold_ns, end) - state.done(params.cold_ns, start);
            for k in c.running() {
                let q = &mut c.queues[k];
                q.left -= done;
                if q.marking {
                    c.mark_ns += end - start;
                }
            }
            let ended = |k: &usize| c.queues[*k].left == 0;
            let ended: u32 = c.running().filter(ended).map(|k| 1 << k).sum();
            if ended == 0 {
                return;
            }
            for k in (0..QUEUES).filter(|k| ended >> k & 1 == 1) {
                self.complete(queues, id, k, end);
            }
            self.settle(queues, id, end, Waits::Hold);
            let c = &self.channels[id as usize];
            let idle = |q: &Queue| q.head == Head::Empty && queues.submitted(id) <= q.read;
            // The same queue goes on, and no other has anything to choose.
            let alone = c.queues.iter().enumerate().all(|(k, q)| c.running == 1 << k || idle(q));
            let goes_on = c.running().any(|k| c.queues[k].is_timed());
            if end >= limit || !alone || !goes_on {
                return;
            }
        }
    }

    /// Loads what has arrived and completes what needs no more time; true if anything completed.
    fn settle<Q: Queues>(&mut self, queues: &mut Q, id: u32, now: u64, waits: Waits) -> bool {
        let mut any = false;
        loop {
            // One queue may wait for another.
            let mut again = false;
            for k in 0..QUEUES {
                again |= self.settle_queue(queues, id, k, now, waits);
            }
            if !again {
                break;
            }
            any = true;
        }
        let c = &mut self.channels[id as usize];
        c.completed = c.queues.iter().map(Queue::pending).min().unwrap_or(c.completed);
        any
    }

    fn settle_queue<Q: Queues>(
        &mut self,
        queues: &mut Q,
        id: u32,
        k: usize,
        now: u64,
        waits: Waits,
    ) -> bool {
        let mut any = false;
        loop {
            let q = self.channels[id as usize].queues[k];
            let done = match q.head {
                Head::Empty => {
                    let submitted = queues.submitted(id);
                    let others = |seq: &u64| queues.queue(id, *seq) != k;
                    let read = (q.read..submitted).find(|seq| !others(seq)).unwrap_or(submitted);
                    let q = &mut self.channels[id as usize].queues[k];
                    q.read = read.max(q.read);
                    if read >= submitted {
                        return any;
                    }
                    let (arrival, op) = queues.op(id, read);
                    if arrival > now {
                        return any;
                    }
                    (q.seq, q.read) = (read, read + 1);
                    q.marking = matches!(op, Op::Mark(_));
                    q.width =
                        if let Op::Part { width, .. } = op { width.min(WHOLE) } else { WHOLE };
                    q.until = op == Op::Until;
                    (q.head, q.left) = match op {
                        Op::Compute(ns) | Op::Part { ns, .. } | Op::Mark(ns) => (Head::Compute, ns),
                        Op::Delay(ns) => (Head::Delay, now.saturating_add(ns)),
                        Op::Wait { channel, seq } => {
                            q.dependency = channel;
                            (Head::Wait, seq)
                        }
                        Op::Host => (Head::Host, 0),
                        Op::Until => (Head::Compute, u64::MAX),
                    };
                    continue;
                }
                Head::Compute => q.left == 0 || q.until && queues.host_done(id, q.seq),
                Head::Delay => q.left <= now,
                Head::Wait => {
                    (waits == Waits::Release || q.dependency == id)
                        && self.is_complete(queues, q.dependency, q.left)
                }
                Head::Host => queues.host_done(id, q.seq),
            };
            if !done {
                return any;
            }
            self.complete(queues, id, k, now);
            any = true;
        }
    }

    fn complete<Q: Queues>(&mut self, queues: &mut Q, id: u32, k: usize, at: u64) {
        let c = &mut self.channels[id as usize];
        let q = &mut c.queues[k];
        match q.head {
            Head::Wait => c.waits_done += u64::from(q.dependency != id),
            Head::Compute if q.marking => c.marks += 1,
            Head::Compute => c.kernels += 1,
            _ => {}
        }
        q.head = Head::Empty;
        q.left = 0;
        q.until = false;
        queues.completed(id, q.seq, at);
    }
}
