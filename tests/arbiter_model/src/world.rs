//! The simulation: an event queue, and GPUs that work between events.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::ops::RangeInclusive;

use crate::op::{Op, Turn};
use crate::{Change, Figures, LateWakes, Load, Scenario, TenantFigures};
use fastrand::Rng;
use tessera_arbiter::policy::Policy;
use tessera_arbiter::policy::{GateState, Pace, TenantId};

/// Work in flight of a holder while another tenant may be woken, nanoseconds.
const NARROW: u64 = 250_000;
/// Of a thread that waits for room: its shortest and longest sleep, nanoseconds; by how much the longest that ended late
/// fades with each, as a divisor; and how many windows may last for one.
const ROOM: (u64, u64) = (10_000, 1_000_000);
const FADES: u64 = 32;
const LASTS_MOST: u64 = 4_000_000;
/// Operations in flight while SOLO, in windows.
const SOLO_WINDOWS: usize = 4;
const SECOND: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    Begin(usize),
    /// A command arrives.
    /// Of what epoch, and how the lease is to be used.
    Gate(usize, u64, GateState, Pace),
    Want(usize),
    Drained(usize, u64),
    Idle(usize, u64),
    /// The helper looks at what is in flight after this closing.
    Look(usize, u64),
    /// It says whether the GPU works for the tenant.
    Works(usize, u64, bool),
    /// Looks whether it has been idle since this [`Player::stamp`].
    IdleCheck(usize, u64, u64),
    /// The pause is over.
    Resume(usize),
    Change(usize),
    /// A tenant's threads lose their CPU, and get it back.
    Preempted(usize),
    Runs(usize),
    /// A thread that waits since this epoch is woken.
    Roused(usize, u64),
    /// One that waits for room is.
    Rested(usize),
    /// The arbiter reads words. Only the last one set counts.
    Read(u64),
    /// Only the last one set counts.
    Tick(u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Player {
    pub(crate) load: Load,
    pub(crate) there: bool,
    pub(crate) alive: bool,
    pub(crate) stopped: bool,
    /// Its threads have no CPU.
    pub(crate) preempted: bool,
    pub(crate) thinking: bool,
    /// Its thread sleeps until there is room; for how long it has overslept of late, nanoseconds.
    pub(crate) sleeps: bool,
    pub(crate) overslept: u64,
    /// The gate as it sees it, and as the policy said last.
    pub(crate) gate: GateState,
    pub(crate) pace: Pace,
    pub(crate) seen: u64,
    pub(crate) said: u64,
    /// Remaining nanoseconds of what is in flight.
    pub(crate) flight: VecDeque<Op>,
    /// What waits on the GPU for the gate to open.
    pub(crate) ahead: VecDeque<Op>,
    /// Whether its last report was that the GPU works for it.
    pub(crate) works_said: Option<bool>,
    /// Whether the policy has heard that the GPU does not work for it.
    pub(crate) waits: bool,
    pub(crate) left: u32,
    /// When it had its batch to do.
    pub(crate) resumed_at: u64,
    pub(crate) launches: u64,
    pub(crate) completed: u64,
    pub(crate) want_said: bool,
    pub(crate) drained_said: bool,
    pub(crate) wanted_at: Option<u64>,
    /// When the policy said CLOSED; `None` while it holds.
    pub(crate) closed_at: Option<u64>,
    /// Whether it may have something in flight, as far as the policy knows.
    pub(crate) possesses: bool,
    pub(crate) last_served: u64,
    /// What is left of the change to its work, or from one of its processes to the next.
    switching: f64,
    turn: Turn,
    /// When something was first and last in flight, since it was open.
    pub(crate) flown: Option<(u64, u64)>,
    /// Until when its thread polls at the closed gate.
    pub(crate) polls_until: u64,
    /// It is woken at the gate of this epoch as soon as it has a CPU.
    pub(crate) roused: Option<u64>,
    /// Since when it has nothing in flight.
    pub(crate) emptied_at: u64,
    /// Its launches when it was first read to have nothing in flight, and when that was.
    pub(crate) quiet: Option<(u64, u64)>,
}

/// See [`super::simulate`].
pub struct World {
    /// The policy under test.
    pub policy: Policy,
    pub(crate) now: u64,
    pub(crate) queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pub(crate) order: u64,
    pub(crate) players: Vec<Player>,
    pub(crate) changes: Vec<(u64, Change)>,
    pub(crate) random: Rng,
    delay: (u64, u64),
    late_wakes: Option<LateWakes>,
    switch: u64,
    /// Per GPU: the tenant whose work ran last.
    ran: Vec<Option<usize>>,
    pub(crate) until: u64,
    pub(crate) drain_least: u64,
    pub(crate) tick: (Option<u64>, u64),
    pub(crate) bare: bool,
    /// When the arbiter read words last, and when it is to do so next.
    pub(crate) read_at: u64,
    pub(crate) reading: (Option<u64>, u64),
    /// Per GPU: for how long nothing has run although a tenant waited.
    idle_run: Vec<u64>,
    pub(crate) figures: Figures,
}

impl World {
    /// Builds the beginning of a scenario.
    #[must_use]
    pub fn new(scenario: &Scenario) -> Self {
        let gpus = scenario.loads.iter().flat_map(|load| load.gpus.iter().copied());
        let gpus = gpus.max().map_or(0, |gpu| usize::from(gpu) + 1);
        let mut world = Self {
            policy: Policy::new(scenario.settings.clone()),
            now: 0,
            queue: BinaryHeap::new(),
            order: 0,
            players: scenario.loads.iter().cloned().map(Player::new).collect(),
            changes: scenario.changes.clone(),
            random: Rng::with_seed(scenario.seed),
            delay: scenario.delay,
            late_wakes: scenario.late_wakes,
            switch: scenario.switch,
            ran: vec![None; gpus],
            until: scenario.until,
            drain_least: scenario.settings.drain_least,
            tick: (None, 0),
            bare: scenario.bare,
            read_at: 0,
            reading: (None, 0),
            idle_run: vec![0; gpus],
            figures: Figures {
                tenants: vec![TenantFigures::default(); scenario.loads.len()],
                idle_wanted_ns: vec![0; gpus],
                busy_ns: vec![0; gpus],
                ..Figures::default()
            },
        };
        for (i, load) in scenario.loads.iter().enumerate() {
            world.at(load.begin, Event::Begin(i));
        }
        for i in 0..world.changes.len() {
            world.at(world.changes[i].0, Event::Change(i));
        }
        world
    }

    /// Runs to the end.
    pub fn run(&mut self) {
        loop {
            let next = self.queue.peek().map_or(self.until, |Reverse((at, ..))| *at);
            let done = self.next_completion();
            let to = next.min(done).min(self.until);
            self.serve(to);
            if to >= self.until {
                return;
            }
            if done <= next {
                self.complete();
            } else if let Some(Reverse((_, _, event))) = self.queue.pop() {
                self.handle(event);
            }
        }
    }

    /// The results.
    #[must_use]
    pub fn figures(mut self) -> Figures {
        self.figures.elapsed_ns = self.now;
        // Whole seconds only.
        let seconds = usize::try_from(self.now / SECOND).unwrap_or(0);
        for figures in &mut self.figures.tenants {
            figures.used_by_second.resize(seconds, 0);
        }
        for i in 0..self.players.len() {
            self.note_starvation(i);
            let view = self.policy.tenant(self.now, id(i));
            let figures = &mut self.figures.tenants[i];
            figures.share = Some(self.players[i].load.share);
            if let Some(view) = view {
                figures.charged_ns = view.totals.leased_ns;
                figures.leases = view.totals.leases;
                figures.overlaps = view.totals.overlaps;
            }
        }
        self.figures
    }

    pub(crate) fn at(&mut self, at: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order, event)));
    }

    pub(crate) fn later(&mut self, event: Event) {
        let delay = self.wake();
        self.at(self.now + delay, event);
    }

    /// How long it takes until a thread acts on a message, a command or a timer, nanoseconds.
    pub(crate) fn wake(&mut self) -> u64 {
        let delay = self.random.u64(within(self.delay));
        let is_late = |late: &LateWakes, n: u64| n.is_multiple_of(late.one_in.max(1));
        match self.late_wakes {
            Some(late) if is_late(&late, self.random.u64(..)) => {
                delay + self.random.u64(within(late.ns))
            }
            _ => delay,
        }
    }

    /// The speed of a player's first operation: the fullest of its GPUs decides.
    fn rate(&self, i: usize) -> f64 {
        let player = &self.players[i];
        if player.flight.front().is_some_and(|op| op.on_host) {
            return 1.0;
        }
        let own = player.load.slices();
        let on = |gpu: &u8| {
            let busy = |player: &&Player| player.busy() && player.load.gpus.contains(gpu);
            let slices = self.players.iter().filter(busy).map(|player| player.load.slices());
            f64::from(own) / f64::from(slices.sum::<u32>().max(1))
        };
        player.load.gpus.iter().map(on).fold(1.0, f64::min)
    }

    fn next_completion(&self) -> u64 {
        let end = |i: usize| {
            if self.players[i].is_stuck() {
                return None;
            }
            let left = self.players[i].flight.front()?.left + self.players[i].switching;
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not far")]
            Some(self.now + (left / self.rate(i)).ceil().max(0.0) as u64)
        };
        (0..self.players.len()).filter_map(end).min().unwrap_or(u64::MAX)
    }

    /// Lets the GPUs work up to `to`.
    fn serve(&mut self, to: u64) {
        while self.now < to {
            // Whole seconds apart, for the account.
            let step = to.min((self.now / SECOND + 1) * SECOND);
            self.serve_step(step);
        }
    }

    fn serve_step(&mut self, to: u64) {
        let passed = to - self.now;
        let mut busy: u128 = 0;
        let mut wanted: u128 = 0;
        let rates: Vec<f64> = (0..self.players.len()).map(|i| self.rate(i)).collect();
        for (i, rate) in rates.into_iter().enumerate() {
            let player = &mut self.players[i];
            let own = player.load.gpus.iter().fold(0_u128, |mask, gpu| mask | 1 << gpu);
            if player.blocked() {
                wanted |= own;
            }
            if player.is_stuck() {
                continue;
            }
            let Some(op) = player.flight.front_mut() else { continue };
            #[allow(clippy::cast_precision_loss, reason = "short")]
            let progress = passed as f64 * rate;
            if op.on_host {
                op.left -= progress;
                continue;
            }
            busy |= own;
            let switching = player.switching.min(progress);
            player.switching -= switching;
            op.left -= progress - switching;
            player.turn.serve(progress - switching);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive")]
            let used = (progress - switching) as u64;
            let figures = &mut self.figures.tenants[i];
            figures.used_ns += used;
            let second = usize::try_from(self.now / SECOND).unwrap_or(0);
            figures.used_by_second.resize(figures.used_by_second.len().max(second + 1), 0);
            figures.used_by_second[second] += used;
        }
        for gpu in 0..self.figures.busy_ns.len() {
            if busy >> gpu & 1 == 0 && wanted >> gpu & 1 == 1 {
                self.figures.idle_wanted_ns[gpu] += passed;
                self.idle_run[gpu] += passed;
                continue;
            }
            self.figures.busy_ns[gpu] += if busy >> gpu & 1 == 1 { passed } else { 0 };
            if self.idle_run[gpu] > 0 {
                self.figures.idle_runs.push(std::mem::take(&mut self.idle_run[gpu]));
            }
        }
        self.now = to;
    }

    /// Removes what is done.
    fn complete(&mut self) {
        for i in 0..self.players.len() {
            while !self.players[i].is_stuck()
                && self.players[i].flight.front().is_some_and(|op| op.left < 0.5)
            {
                self.players[i].completed += 1;
                let on_host = self.players[i].flight.pop_front().is_some_and(|op| op.on_host);
                self.players[i].emptied_at = self.now;
                self.pass_turn(i);
                if !on_host {
                    let begun = self.players[i].flown.map_or(self.now, |(begun, _)| begun);
                    self.players[i].flown = Some((begun, self.now));
                }
                self.note_starvation(i);
                self.after_completion(i);
                self.look(i, false);
                if self.players[i].waits_for_host() {
                    self.watch_idle(i);
                }
            }
        }
    }

    /// The next operation is served, which may be another process's.
    fn pass_turn(&mut self, i: usize) {
        let player = &mut self.players[i];
        if player.load.slices() > 1 && player.turn.pass(&mut player.flight) {
            #[allow(clippy::cast_precision_loss, reason = "short")]
            let switch = self.switch as f64;
            player.switching += switch;
        }
    }

    fn note_starvation(&mut self, i: usize) {
        let player = &mut self.players[i];
        let since = self.now.saturating_sub(player.last_served);
        if player.there && player.alive && !player.stands() && !player.thinking {
            let worst = &mut self.figures.tenants[i].starved_ns;
            *worst = (*worst).max(since);
        }
        player.last_served = self.now;
    }

    fn after_completion(&mut self, i: usize) {
        let player = &mut self.players[i];
        if player.flight.is_empty() && player.load.batch > 0 && player.left == 0 && player.alive {
            player.thinking = true;
            player.left = player.load.batch;
            let took = self.now - player.resumed_at;
            self.figures.tenants[i].batches.push(took);
            let think = self.random.u64(within(self.players[i].load.think));
            self.at(self.now + think, Event::Resume(i));
            self.watch_idle(i);
        }
        self.act(i);
    }

    pub(crate) fn watch_idle(&mut self, i: usize) {
        let player = &self.players[i];
        if player.gate == GateState::Yield && (player.flight.is_empty() || player.waits_for_host())
        {
            let check = Event::IdleCheck(i, player.stamp(), player.seen);
            self.at(self.now.saturating_add(player.pace.idle_ns), check);
        }
    }

    /// What the tenant does by itself now: launch, want, drain.
    pub(crate) fn act(&mut self, i: usize) {
        let player = &self.players[i];
        if player.stands() || !player.alive || !player.there {
            return;
        }
        match player.gate {
            GateState::Closed => {
                if player.has_work() && !player.want_said && !player.sleeps {
                    self.players[i].want_said = true;
                    self.players[i].wanted_at.get_or_insert(self.now);
                    self.begin_to_poll(i);
                    self.later(Event::Want(i));
                }
                let player = &mut self.players[i];
                if player.flight.is_empty() && !player.drained_said && !player.load.never_drains {
                    player.drained_said = true;
                    let epoch = player.seen;
                    self.later(Event::Drained(i, epoch));
                }
                self.queue_ahead(i);
            }
            GateState::Solo | GateState::Open | GateState::Yield => self.launch(i),
        }
    }

    /// On a host that wakes threads late: sleeps until half of what is in flight is complete.
    fn rest(&mut self, i: usize, queued: f64) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "short")]
        let rest = (queued as u64 / 2).clamp(ROOM.0, ROOM.1);
        let late = self.wake();
        let player = &mut self.players[i];
        player.sleeps = true;
        player.overslept = (player.overslept - player.overslept / FADES).max(late);
        self.at(self.now + rest + late, Event::Rested(i));
    }

    fn launch(&mut self, i: usize) {
        // The word in shared memory says so before the thread is told.
        if self.players[i].closed_at.is_some() || self.players[i].sleeps {
            return;
        }
        loop {
            let player = &self.players[i];
            let (full, queued) = player.is_full(&player.flight);
            // An operation that waits for this very launch makes no room for it.
            let full = full && !player.is_stuck();
            if full && self.late_wakes.is_some() {
                return self.rest(i, queued);
            }
            if full || !player.has_work() {
                return;
            }
            if player.flight.is_empty() {
                self.begin(i);
            }
            let ops = self.next_ops(i);
            self.players[i].flight.extend(ops);
        }
    }

    /// The GPU begins its work.
    fn begin(&mut self, i: usize) {
        let player = &mut self.players[i];
        player.flown.get_or_insert((self.now, self.now));
        let gpus = player.load.gpus.iter().map(|&gpu| usize::from(gpu));
        let other = gpus
            .fold(false, |other, gpu| other | self.ran[gpu].replace(i).is_some_and(|ran| ran != i));
        #[allow(clippy::cast_precision_loss, reason = "short")]
        let switching = if other { self.switch as f64 } else { player.switching };
        player.switching = switching;
    }

    /// Launches once: the operation, and a host function where one follows.
    fn next_ops(&mut self, i: usize) -> Vec<Op> {
        let player = &mut self.players[i];
        let length = self.random.u64(within(player.load.op));
        #[allow(clippy::cast_precision_loss, reason = "short")]
        let left = length.max(1) as f64;
        let process = player.least_busy();
        let mut ops = vec![Op { left, on_host: false, process }];
        player.launches += 1;
        if let Some(host) = player.load.host
            && player.launches.is_multiple_of(host.every.max(1))
        {
            let length = self.random.u64(within(host.ns));
            #[allow(clippy::cast_precision_loss, reason = "short")]
            ops.push(Op { left: length.max(1) as f64, on_host: true, process });
        }
        player.left = player.left.saturating_sub(1);
        ops
    }

    /// At a closed gate with nothing in flight, as the policy knows: launches a window that waits on the GPU.
    pub(crate) fn queue_ahead(&mut self, i: usize) {
        loop {
            let player = &self.players[i];
            let is_invited = player.gate == GateState::Closed
                && player.seen == player.said
                && !player.possesses
                && player.flight.is_empty()
                && !player.load.never_drains;
            if !is_invited || !player.has_work() || player.sleeps || player.is_full(&player.ahead).0
            {
                return;
            }
            let ops = self.next_ops(i);
            self.players[i].ahead.extend(ops);
        }
    }

    /// The gate has opened: what waits on the GPU begins.
    pub(crate) fn begin_ahead(&mut self, i: usize) {
        let ahead = std::mem::take(&mut self.players[i].ahead);
        if !ahead.is_empty() {
            self.begin(i);
            self.players[i].flight.extend(ahead);
        }
    }
}

impl Player {
    fn new(load: Load) -> Self {
        Self {
            left: load.batch,
            resumed_at: load.begin,
            load,
            there: false,
            alive: true,
            stopped: false,
            preempted: false,
            thinking: false,
            sleeps: false,
            overslept: 0,
            gate: GateState::Closed,
            pace: Pace { idle_ns: u64::MAX, is_narrow: false },
            seen: 0,
            said: 0,
            flight: VecDeque::new(),
            ahead: VecDeque::new(),
            launches: 0,
            completed: 0,
            want_said: false,
            drained_said: true,
            wanted_at: None,
            closed_at: Some(0),
            possesses: false,
            last_served: 0,
            switching: 0.0,
            turn: Turn::default(),
            works_said: None,
            waits: false,
            flown: None,
            polls_until: 0,
            roused: None,
            emptied_at: 0,
            quiet: None,
        }
    }

    /// Whether the window has no room beside what is `queued`, and for how long that lasts, nanoseconds.
    fn is_full(&self, queued: &VecDeque<Op>) -> (bool, f64) {
        let window_ns = match self.pace.is_narrow {
            true => self.load.window_ns.min(NARROW),
            false => self.load.window_ns,
        };
        let lasts_ns = window_ns.max(self.overslept.min(LASTS_MOST));
        let windows = usize::try_from(lasts_ns.div_ceil(window_ns.max(1))).unwrap_or(1);
        let room = if self.gate == GateState::Solo { SOLO_WINDOWS } else { 1 };
        let processes = usize::try_from(self.load.slices()).unwrap_or(1);
        let most = self.load.window.max(1) * windows.max(room) * processes;
        #[allow(clippy::cast_precision_loss, reason = "short")]
        let most_ns = (lasts_ns.max(window_ns * room as u64) * processes as u64) as f64;
        let ns = lasts(queued);
        (queued.len() >= most || (queued.len() >= 2 * processes && ns >= most_ns), ns)
    }

    /// The process with the least in flight.
    fn least_busy(&self) -> u32 {
        let all = || self.flight.iter().chain(&self.ahead);
        let flying = |process| all().filter(|op| op.process == process).count();
        (0..self.load.slices()).min_by_key(|&process| flying(process)).unwrap_or(0)
    }

    /// The host has work before the GPU has.
    pub(crate) fn waits_for_host(&self) -> bool {
        self.flight.front().is_some_and(|op| op.on_host)
    }

    /// Updates when the GPU had work.
    pub(crate) fn stamp(&self) -> u64 {
        if self.flight.is_empty() { self.launches } else { self.completed }
    }

    /// The GPU has work of it.
    pub(crate) fn busy(&self) -> bool {
        self.flight.front().is_some_and(|op| !op.on_host) && !self.is_stuck()
    }

    /// Whether the first operation in flight waits for one that is not launched yet.
    pub(crate) fn is_stuck(&self) -> bool {
        let group = u64::from(self.load.group.max(1));
        let first = self.launches - self.flight.iter().filter(|op| !op.on_host).count() as u64;
        let is_operation = self.flight.front().is_some_and(|op| !op.on_host);
        is_operation && self.launches < (first / group + 1) * group
    }

    /// Its threads do not run.
    pub(crate) fn stands(&self) -> bool {
        self.stopped || self.preempted
    }

    /// It would launch if it could.
    fn has_work(&self) -> bool {
        self.there
            && self.alive
            && !self.stands()
            && !self.thinking
            && (self.load.batch == 0 || self.left > 0)
    }

    fn blocked(&self) -> bool {
        self.gate == GateState::Closed && self.has_work()
    }
}

/// How long the GPU works for these, nanoseconds.
pub(crate) fn lasts(queued: &VecDeque<Op>) -> f64 {
    queued.iter().filter(|op| !op.on_host).map(|op| op.left).sum()
}

/// Any of these, both ends included.
pub(crate) fn within((from, to): (u64, u64)) -> RangeInclusive<u64> {
    from..=to.max(from)
}

pub(crate) fn id(i: usize) -> TenantId {
    TenantId(u32::try_from(i).unwrap_or(u32::MAX))
}
