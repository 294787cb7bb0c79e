//! The events of the simulation.

use crate::Change;
use crate::words::POLLED;
use crate::world::{Event, World, id, within};
use tessera_arbiter::policy::Policy;
use tessera_arbiter::policy::{Command, GateState, Pace, TenantId};

/// Time between two repeated reports of a helper, nanoseconds.
const LOOK_EVERY: u64 = 10_000_000;

impl World {
    pub(crate) fn handle(&mut self, event: Event) {
        match event {
            Event::Begin(i) => {
                self.players[i].there = true;
                self.players[i].last_served = self.now;
                if self.bare {
                    self.players[i].gate = GateState::Solo;
                    self.players[i].closed_at = None;
                } else {
                    let load = self.players[i].load.clone();
                    self.tell(|policy, now| policy.join(now, id(i), &load.gpus, load.share));
                }
                self.act(i);
                self.runs(i);
            }
            Event::Preempted(i) => {
                if let Some(cpu) = self.players[i].load.cpu {
                    self.players[i].preempted = true;
                    let stands = self.random.u64(within(cpu.stands));
                    self.at(self.now + stands, Event::Runs(i));
                }
            }
            Event::Runs(i) => {
                self.players[i].preempted = false;
                self.runs(i);
                self.go_on(i);
            }
            Event::Gate(i, epoch, word, pace) => self.gate(i, epoch, word, pace),
            Event::Want(i) if self.speaks(i) => {
                self.tell(|policy, now| policy.want(now, id(i)));
                if self.is_ready(i) {
                    self.tell(|policy, now| policy.awake(now, id(i)));
                }
            }
            Event::Drained(i, epoch) if self.speaks(i) && epoch == self.players[i].said => {
                let used = self.take_back(i);
                self.tell(|policy, now| policy.drained(now, id(i), Some(used)));
            }
            Event::Idle(i, epoch) if self.speaks(i) && epoch == self.players[i].said => {
                self.tell(|policy, now| policy.idle(now, id(i)));
            }
            Event::Look(i, epoch) if epoch == self.players[i].seen => {
                self.look(i, true);
                self.at(self.now + LOOK_EVERY, Event::Look(i, epoch));
            }
            Event::Works(i, epoch, works) if self.speaks(i) && epoch == self.players[i].said => {
                self.players[i].waits = !works;
                self.tell(|policy, now| policy.works(now, id(i), works));
            }
            Event::IdleCheck(i, stamp, epoch) => {
                let player = &self.players[i];
                let idle = !player.busy() && player.stamp() == stamp;
                if idle
                    && player.seen == epoch
                    && player.gate == GateState::Yield
                    && !player.stands()
                {
                    self.later(Event::Idle(i, epoch));
                }
            }
            Event::Resume(i) => {
                self.players[i].thinking = false;
                self.players[i].last_served = self.now;
                self.players[i].resumed_at = self.now;
                self.act(i);
            }
            Event::Change(at) => self.change(self.changes[at].1),
            Event::Tick(set) if set == self.tick.1 => {
                self.tick.0 = None;
                self.tell(Policy::tick);
            }
            Event::Roused(i, epoch) => self.wake_waiter(i, epoch),
            Event::Rested(i) => {
                self.players[i].sleeps = false;
                self.act(i);
            }
            Event::Read(set) if set == self.reading.1 => self.read_words(),
            Event::Want(_)
            | Event::Read(_)
            | Event::Drained(..)
            | Event::Idle(..)
            | Event::Tick(_)
            | Event::Look(..)
            | Event::Works(..) => {}
        }
    }

    /// Its threads have a CPU for a while.
    fn runs(&mut self, i: usize) {
        if let Some(cpu) = self.players[i].load.cpu {
            let runs = self.random.u64(within(cpu.runs));
            self.at(self.now + runs, Event::Preempted(i));
        }
    }

    /// A process that stood still goes on.
    fn go_on(&mut self, i: usize) {
        if !self.players[i].stands() {
            self.players[i].last_served = self.now;
            self.act(i);
            self.watch_idle(i);
            if let Some(epoch) = self.players[i].roused.take() {
                self.wake_waiter(i, epoch);
            }
        }
    }

    pub(crate) fn speaks(&self, i: usize) -> bool {
        self.players[i].there && self.players[i].alive
    }

    fn gate(&mut self, i: usize, epoch: u64, word: GateState, pace: Pace) {
        let player = &mut self.players[i];
        // Two changes may overtake each other on their way; the word in memory is the later one.
        if epoch <= player.seen || !player.alive {
            return;
        }
        player.seen = epoch;
        player.gate = word;
        player.pace = pace;
        if word == GateState::Closed {
            player.want_said = false;
            player.drained_said = false;
            player.works_said = None;
            let again = self.now + LOOK_EVERY;
            self.at(again, Event::Look(i, epoch));
            self.look(i, false);
        } else if let Some(since) = self.players[i].wanted_at.take() {
            self.figures.tenants[i].waits.push(self.now - since);
        }
        self.act(i);
        self.watch_idle(i);
    }

    /// The helper's look at a closed gate: it reports at once that its work waits for the host, and from
    /// time to time that the GPU still works.
    pub(crate) fn look(&mut self, i: usize, timed: bool) {
        let player = &self.players[i];
        let closed = player.gate == GateState::Closed && !player.drained_said;
        let dumb = player.stands() || player.load.never_drains || !self.speaks(i);
        if !closed || dumb || player.flight.is_empty() {
            return;
        }
        let (works, epoch) = (player.busy(), player.seen);
        // Most drains are short: that the GPU works is reported from the first timed look on.
        let is_news = player.works_said.is_none_or(|said| said != works);
        if timed && works || is_news && (timed || !works || player.works_said.is_some()) {
            self.players[i].works_said = Some(works);
            self.later(Event::Works(i, epoch, works));
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Share(i, share) => {
                self.players[i].load.share = share;
                self.tell(|policy, now| policy.set_share(now, id(i), share));
            }
            Change::Kill(i) => {
                let player = &mut self.players[i];
                (player.alive, player.possesses) = (false, false);
                player.flight.clear();
                player.ahead.clear();
                self.tell(|policy, now| policy.gone(now, id(i)));
            }
            Change::Leave(i) => {
                let player = &mut self.players[i];
                (player.there, player.possesses) = (false, false);
                player.flight.clear();
                player.ahead.clear();
                self.tell(|policy, now| policy.leave(now, id(i)));
            }
            Change::Stop(i) => self.players[i].stopped = true,
            Change::Continue(i) => {
                self.players[i].stopped = false;
                self.go_on(i);
            }
        }
    }

    /// Passes an event to the policy and carries its commands out.
    pub(crate) fn tell(&mut self, event: impl FnOnce(&mut Policy, u64)) {
        event(&mut self.policy, self.now);
        loop {
            let commands: Vec<Command> = self.policy.commands().collect();
            let rouses: Vec<TenantId> = self.policy.rouses().collect();
            if commands.is_empty() && rouses.is_empty() {
                break;
            }
            commands.into_iter().for_each(|command| self.carry_out(command));
            rouses.into_iter().for_each(|id| self.rouse(id));
        }
        self.plan_reading();
        let deadline = self.policy.deadline();
        if deadline == self.tick.0 {
            return;
        }
        self.tick = (deadline, self.tick.1 + 1);
        if let Some(at) = deadline {
            // Timers are late, like messages.
            let late = self.wake();
            self.at(at.max(self.now) + late, Event::Tick(self.tick.1));
        }
    }

    /// Has a thread woken. One that nobody can read counts as awake.
    fn rouse(&mut self, id: TenantId) {
        let Ok(i) = usize::try_from(id.0) else { return };
        if self.players[i].load.never_drains || self.is_ready(i) {
            self.policy.awake(self.now, id);
        }
        self.later(Event::Roused(i, self.players[i].said));
    }

    fn carry_out(&mut self, command: Command) {
        let Ok(i) = usize::try_from(command.tenant.0) else { return };
        let polled = self.polls(i);
        let word = command.state;
        if word == GateState::Closed {
            self.players[i].closed_at = Some(self.now);
            self.players[i].want_said = false;
            self.players[i].waits = false;
            self.read_landed(i);
        } else {
            if let Some(closed_at) = self.players[i].closed_at.take() {
                self.judge_grant(i, closed_at);
            }
            self.players[i].possesses = true;
            self.begin_ahead(i);
        }
        self.players[i].said += 1;
        let epoch = self.players[i].said;
        let gate = Event::Gate(i, epoch, word, command.pace);
        match word == GateState::Closed || polled {
            true => self.at(self.now + POLLED, gate),
            false => self.later(gate),
        }
    }

    /// No other tenant may have the GPU, unless its time to drain is over; nor may one that was closed at
    /// `closed_at` get it back before it has drained or had that time.
    fn judge_grant(&mut self, i: usize, closed_at: u64) {
        let early = self.now < closed_at + self.drain_least && !self.players[i].waits;
        self.figures.double_grants += u64::from(self.players[i].possesses && early);
        for (k, other) in self.players.iter().enumerate() {
            let shares = other.load.gpus.iter().any(|gpu| self.players[i].load.gpus.contains(gpu));
            let late =
                other.closed_at.is_some_and(|at| self.now >= at + self.drain_least) || other.waits;
            if k != i && shares && other.possesses && !late {
                self.figures.double_grants += 1;
            }
        }
    }
}
