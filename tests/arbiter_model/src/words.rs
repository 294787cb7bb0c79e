//! What the arbiter reads in shared memory of what its tenants do, and how their threads show that they poll.

use tessera_arbiter::policy::{GateState, TenantId, Used, Watch};

use crate::world::{Event, World, id, lasts};

/// A thread that comes to wait polls for so long, and one that is woken, nanoseconds.
const POLLS: u64 = 300_000;
const ROUSED_POLLS: u64 = 600_000;
/// Nobody marks what a process without a CPU has launched: it counts as complete so long after it is, nanoseconds.
const STANDS_STILL: u64 = 1_000_000;
/// So long a thread may take to find out that there is room for its launch, nanoseconds.
const WAKES: u64 = 200_000;
/// How long an opening takes to reach a thread that polls, nanoseconds.
pub(crate) const POLLED: u64 = 2_000;

impl World {
    /// A launch begins to wait.
    pub(crate) fn begin_to_poll(&mut self, i: usize) {
        self.players[i].polls_until = self.now + POLLS;
    }

    /// A thread that waits is woken, or will be as soon as it has a CPU.
    pub(crate) fn wake_waiter(&mut self, i: usize, epoch: u64) {
        let now = self.now;
        let player = &mut self.players[i];
        if player.seen != epoch || player.gate != GateState::Closed || !player.want_said {
            return;
        }
        player.roused = player.stands().then_some(epoch);
        if player.roused.is_none() {
            player.polls_until = now + ROUSED_POLLS;
            self.queue_ahead(i);
        }
    }

    /// It launches as soon as its gate opens: a thread polls there, or the launches wait on the GPU.
    pub(crate) fn is_ready(&self, i: usize) -> bool {
        self.polls(i) || !self.players[i].ahead.is_empty()
    }

    /// A thread of it polls at the gate as it is.
    pub(crate) fn polls(&self, i: usize) -> bool {
        let player = &self.players[i];
        let closed = player.gate == GateState::Closed && player.seen == player.said;
        let waits = closed && player.want_said && player.alive;
        waits && !player.stands() && self.now < player.polls_until
    }

    /// When words are read next.
    pub(crate) fn plan_reading(&mut self) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "short")]
        let of = |id: TenantId| lasts(&self.players[id.0 as usize].flight) as u64;
        let due = self.policy.look_after(of).map(|after| self.read_at + after);
        if due == self.reading.0 {
            return;
        }
        self.reading = (due, self.reading.1 + 1);
        if let Some(at) = due {
            let late = self.wake();
            self.at(at.max(self.now) + late, Event::Read(self.reading.1));
        }
    }

    /// Reads the words that the policy asks for.
    pub(crate) fn read_words(&mut self) {
        self.reading.0 = None;
        self.read_at = self.now;
        let watches: Vec<(TenantId, Watch)> = self.policy.watches().collect();
        for (id, watch) in watches {
            let Ok(i) = usize::try_from(id.0) else { continue };
            if !self.speaks(i) || self.players[i].load.never_drains {
                continue;
            }
            match watch {
                Watch::Drained => self.read_landed(i),
                Watch::Quiet | Watch::Pauses => {
                    if let Some(since) = self.quiet_since(i) {
                        self.tell(|policy, now| policy.quiet(now, id, since));
                    }
                }
                Watch::Awake if self.is_ready(i) => self.tell(|policy, now| policy.awake(now, id)),
                Watch::Awake => self.tell(|policy, now| policy.asleep(now, id)),
            }
            let player = &self.players[i];
            if player.closed_at.is_some() && player.want_said && !self.policy.wants(id) {
                self.tell(|policy, now| policy.want(now, id));
            }
        }
        self.tell(|_, _| ());
    }

    /// Reads whether all has landed since its gate was closed.
    pub(crate) fn read_landed(&mut self, i: usize) {
        if self.speaks(i) && !self.players[i].load.never_drains && self.has_landed(i) {
            let used = self.take_back(i);
            self.policy.drained(self.now, id(i), Some(used));
        }
    }

    /// Nothing of it is in flight any more since its gate was closed; what it reports of its lease.
    pub(crate) fn take_back(&mut self, i: usize) -> Used {
        // One thread that waits is woken, to queue work ahead.
        self.later(Event::Roused(i, self.players[i].said));
        let player = &mut self.players[i];
        player.possesses = false;
        let used = player.flown.take().map_or(0, |(begun, ended)| ended - begun);
        let ns = if player.load.lies { 0 } else { used };
        Used { ns, processes: player.load.processes }
    }

    fn has_landed(&self, i: usize) -> bool {
        let player = &self.players[i];
        let patience = if player.stands() { STANDS_STILL } else { 0 };
        player.closed_at.is_some()
            && player.flight.is_empty()
            && self.now >= player.emptied_at + patience
    }

    /// Since when it has nothing in flight at its open gate, as far as it was read.
    fn quiet_since(&mut self, i: usize) -> Option<u64> {
        let now = self.now;
        let player = &mut self.players[i];
        if player.closed_at.is_some() || !player.flight.is_empty() {
            player.quiet = None;
            return None;
        }
        let launches = player.launches;
        let (_, since) = *player.quiet.get_or_insert((launches, now));
        if player.quiet.is_some_and(|(then, _)| then != launches) {
            player.quiet = Some((launches, now));
            return None;
        }
        let waits_for_room = (player.stands() || player.sleeps) && !player.thinking;
        (!waits_for_room || now - since >= WAKES).then_some(since)
    }
}
