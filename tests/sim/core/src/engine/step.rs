//! Advancing the model from event to event.

use super::{Head, NONE, Op, Params, Queues, State, Switch};
use crate::layout::MAX_CHANNELS;

/// Channels of one GPU.
struct Members {
    gpu: u32,
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

impl Members {
    fn of(state: &State, gpu: u32) -> Members {
        let mut m = Members { gpu, ids: [0; MAX_CHANNELS], len: 0 };
        for (id, c) in (0u32..).zip(&state.channels[..state.channels_used as usize]) {
            if c.gpu == gpu {
                m.ids[m.len] = id;
                m.len += 1;
            }
        }
        m
    }

    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
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
    fn host_done(&self, channel: u32) -> u64 {
        self.queues.host_done(channel)
    }
    fn waits(&self, channel: u32) -> u64 {
        self.queues.waits(channel)
    }
    fn completed(&mut self, channel: u32, seq: u64, at: u64) {
        if (channel, seq) == (self.channel, self.seq) {
            self.at = Some(at);
        }
    }
    fn switched(&mut self, _: u32, _: u32, _: Switch) {}
}

/// What one GPU does next.
struct Plan {
    /// The next moment at which anything changes, the running operation's end left out.
    limit: u64,
    /// Whether `current` runs.
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
                let members = Members::of(self, gpu);
                while self.step(queues, params, &members, to, Waits::Release) {}
            }
        }
    }

    /// As [`State::advance`], in one order over all GPUs, for operations that wait across them.
    fn advance_together<Q: Queues>(&mut self, queues: &mut Q, params: &Params, to: u64) {
        loop {
            let mut next = to;
            for gpu in 0..self.gpu_count {
                let members = Members::of(self, gpu);
                next = next.min(self.next_event(queues, params, &members, to, Waits::Hold));
            }
            for gpu in 0..self.gpu_count {
                let members = Members::of(self, gpu);
                while self.step(queues, params, &members, next, Waits::Hold) {}
            }
            // An operation that completed on one GPU may release one on another, now.
            let mut released = true;
            while released {
                released = false;
                for gpu in 0..self.gpu_count {
                    let members = Members::of(self, gpu);
                    for id in members.iter() {
                        released |=
                            self.settle(queues, id, self.gpus[gpu as usize].now, Waits::Release);
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
        let members = Members::of(self, gpu);
        let mut watch = Watch { queues, channel, seq, at: None };
        if self.is_complete(channel, seq) {
            return Some(self.gpus[gpu as usize].now);
        }
        while watch.at.is_none() && self.step(&mut watch, params, &members, horizon, Waits::Release)
        {
        }
        let c = &self.channels[channel as usize];
        let waits = c.until || matches!(c.head, Head::Wait | Head::Host);
        watch.at.or((!waits).then_some(horizon))
    }

    /// The next moment, at most `to`, at which anything changes on the GPU.
    fn next_event<Q: Queues>(
        &mut self,
        queues: &mut Q,
        params: &Params,
        members: &Members,
        to: u64,
        waits: Waits,
    ) -> u64 {
        let plan = self.plan(queues, params, members, to, waits);
        let g = &self.gpus[members.gpu as usize];
        if !plan.running {
            return plan.limit;
        }
        let left = self.channels[g.current as usize].left;
        plan.limit.min(g.end(params.cold_ns, g.now.max(g.run_from), left))
    }

    /// One event: false when the GPU reached `to`.
    fn step<Q: Queues>(
        &mut self,
        queues: &mut Q,
        params: &Params,
        members: &Members,
        to: u64,
        waits: Waits,
    ) -> bool {
        let plan = self.plan(queues, params, members, to, waits);
        let g = members.gpu as usize;
        if self.gpus[g].now >= to {
            return false;
        }
        if plan.running {
            self.run_current(queues, params, g, plan.limit);
        } else {
            self.gpus[g].now = plan.limit;
        }
        true
    }

    /// Settles what is complete now, chooses who runs, and finds the next event of the others.
    fn plan<Q: Queues>(
        &mut self,
        queues: &mut Q,
        params: &Params,
        members: &Members,
        to: u64,
        waits: Waits,
    ) -> Plan {
        let g = members.gpu as usize;
        let now = self.gpus[g].now;
        let mut limit = to.max(now);
        for id in members.iter() {
            self.settle(queues, id, now, waits);
            let c = &self.channels[id as usize];
            match c.head {
                Head::Empty if queues.submitted(id) > c.read => {
                    limit = limit.min(queues.op(id, c.read).0.max(now));
                }
                Head::Delay => limit = limit.min(c.left),
                _ => {}
            }
        }
        let current = self.gpus[g].current;
        let runnable = |id: u32| self.channels[id as usize].head == Head::Compute;
        // Round robin: the first runnable channel after the current one, wrapping.
        let other = members
            .iter()
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
                    let switch = Switch {
                        from: slot(current),
                        to: slot(next),
                        idle_from: state.ran_until.min(now),
                        at: now,
                        run_from: state.run_from,
                    };
                    queues.switched(members.gpu, state.switches, switch);
                    state.switches = state.switches.wrapping_add(1);
                    state.cold_from = state.run_from;
                }
                state.current = next;
                state.slice_end = state.run_from + params.slice_ns;
                // Somebody waits still: the one that was preempted, or a third.
                let waiting = current_runs
                    || members
                        .iter()
                        .any(|id| id != next && self.channels[id as usize].head == Head::Compute);
                if waiting {
                    limit = limit.min(self.gpus[g].slice_end);
                }
            }
        }
        Plan { limit, running: true }
    }

    /// Runs the current channel's kernels back to back until `limit`.
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
            let end = state.end(params.cold_ns, start, c.left).min(limit);
            c.left -= state.done(params.cold_ns, end) - state.done(params.cold_ns, start);
            c.busy.add(start, end);
            if c.marking {
                c.mark_ns += end - start;
            }
            state.busy.add(start, end);
            state.now = end;
            state.ran_until = end;
            if c.left > 0 {
                return;
            }
            self.complete(queues, id, end);
            self.settle(queues, id, end, Waits::Hold);
            if end >= limit || self.channels[id as usize].head != Head::Compute {
                return;
            }
        }
    }

    /// Loads what has arrived and completes what needs no more time; true if anything completed.
    fn settle<Q: Queues>(&mut self, queues: &mut Q, id: u32, now: u64, waits: Waits) -> bool {
        let mut any = false;
        loop {
            let c = self.channels[id as usize];
            let done = match c.head {
                Head::Empty => {
                    if queues.submitted(id) <= c.read {
                        return any;
                    }
                    let (arrival, op) = queues.op(id, c.read);
                    if arrival > now {
                        return any;
                    }
                    let c = &mut self.channels[id as usize];
                    c.read += 1;
                    c.marking = matches!(op, Op::Mark(_));
                    c.until = op == Op::Until;
                    (c.head, c.left) = match op {
                        Op::Compute(ns) | Op::Mark(ns) => (Head::Compute, ns),
                        Op::Delay(ns) => (Head::Delay, now.saturating_add(ns)),
                        Op::Wait { channel, seq } => {
                            c.dependency = channel;
                            (Head::Wait, seq)
                        }
                        Op::Host => (Head::Host, 0),
                        Op::Until => (Head::Compute, u64::MAX),
                    };
                    continue;
                }
                Head::Compute => c.left == 0 || c.until && queues.host_done(id) >= c.read,
                Head::Delay => c.left <= now,
                Head::Wait => waits == Waits::Release && self.is_complete(c.dependency, c.left),
                Head::Host => queues.host_done(id) >= c.read,
            };
            if !done {
                return any;
            }
            self.complete(queues, id, now);
            any = true;
        }
    }

    fn complete<Q: Queues>(&mut self, queues: &mut Q, id: u32, at: u64) {
        let c = &mut self.channels[id as usize];
        match c.head {
            Head::Wait => c.waits_done += 1,
            Head::Compute if c.marking => c.marks += 1,
            Head::Compute => c.kernels += 1,
            _ => {}
        }
        c.head = Head::Empty;
        c.left = 0;
        let seq = c.completed;
        c.completed += 1;
        queues.completed(id, seq, at);
    }
}
