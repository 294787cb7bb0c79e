//! The arbiter's thread: receives messages, feeds the policy, and writes its answers into the gates.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

use tessera_region::layout::ARBITER_GONE;
use tessera_region::session::Message;
use tracing::{debug, warn};

use super::bound::{Drain, Still};
use super::cycle::{self, Part};
use super::lane::{Heard, Lane};
use super::latency::Latencies;
use super::policy::{GpuIndex, MAX_GPUS, Pace, Policy, State, TenantId};
use super::reactor::{Reactor, Ready, Token};
use super::seat::{Opened, Seat};
use super::view::{GpuShare, TenantShare, View};
use tessera_config::Leases;
use tessera_model::clock::monotonic_ns;

/// How often pages say that the arbiter lives, while processes are bound and while there are none: a
/// node without work should not be noticed, and a process that comes must not find an old time.
const BEAT_NS: u64 = 20_000_000;
const IDLE_BEAT_NS: u64 = 400_000_000;

/// What others want of the thread.
#[derive(Debug)]
pub(super) enum Order {
    /// Takes a tenant on, or looks at its page again.
    Admit(Box<Opened>),
    /// The allocation is no more.
    Release(String),
    /// Goes on with other settings.
    Configure(Leases),
    /// Tells how it stands.
    View(SyncSender<View>),
    /// Ends; tenants are told.
    Stop,
    /// Ends; another takes its place.
    Abandon,
}

/// Whether it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Going {
    On,
    Stopped,
    Abandoned,
}

/// When something happens, by both clocks.
#[derive(Clone, Copy)]
struct Now {
    instant: Instant,
    ns: u64,
}

impl Now {
    fn read() -> Self {
        Now { instant: Instant::now(), ns: monotonic_ns() }
    }

    fn ns_of(self, at: Instant) -> u64 {
        let ahead = at.saturating_duration_since(self.instant).as_nanos();
        self.ns.saturating_add(u64::try_from(ahead).unwrap_or(u64::MAX))
    }
}

pub(super) struct Thread {
    reactor: Reactor,
    orders: Receiver<Order>,
    leases: Leases,
    /// Connections that a tenant may have.
    most: usize,
    policy: Policy,
    seats: BTreeMap<u32, Seat>,
    next_seat: u32,
    /// The GPUs' UUIDs by their index in the policy; free ones are `None`.
    gpus: Vec<Option<String>>,
    next_beat_ns: u64,
    heard: Vec<Heard>,
    turns: Latencies,
    commands: u64,
}

impl Thread {
    pub fn new(reactor: Reactor, orders: Receiver<Order>, leases: Leases, most: usize) -> Self {
        Thread {
            reactor,
            orders,
            policy: Policy::new(super::settings(&leases)),
            leases,
            most,
            seats: BTreeMap::new(),
            next_seat: 0,
            gpus: Vec::new(),
            next_beat_ns: 0,
            heard: Vec::with_capacity(16),
            turns: Latencies::default(),
            commands: 0,
        }
    }

    /// Until it is told to stop, or nobody can tell it anything any more.
    pub fn run(mut self) {
        let mut ready = Ready::new();
        let mut going_on = Going::On;
        while going_on == Going::On {
            let at = self.next_due();
            self.reactor.arm(at);
            if let Err(error) = self.reactor.wait(&mut ready) {
                warn!(%error, "the arbiter cannot wait; tenants ration themselves from now on");
                break;
            }
            for token in &ready.tokens {
                let now = Now::read();
                let before = self.commands;
                match *token {
                    Token::Wake => going_on = self.obey(now),
                    Token::Timer => {}
                    Token::Listener(seat) => {
                        if let Some(seat) = self.seats.get_mut(&seat) {
                            seat.lane.accept(&self.reactor, now.instant);
                        }
                    }
                    Token::Peer(key, peer) => {
                        if let Some(seat) = self.seats.get_mut(&key) {
                            seat.lane.hear(peer, &self.reactor, now.instant, &mut self.heard);
                            self.take_in(key, now);
                        }
                    }
                    Token::Death(key, peer) => {
                        if let Some(seat) = self.seats.get_mut(&key) {
                            seat.lane.died(peer, &self.reactor, &mut self.heard);
                            self.take_in(key, now);
                        }
                    }
                }
                if self.commands != before {
                    self.turns.add(monotonic_ns().saturating_sub(now.ns));
                }
            }
            self.keep_time(Now::read());
        }
        if going_on != Going::Abandoned {
            self.seats.values().for_each(|seat| seat.beat(ARBITER_GONE));
        }
    }

    fn next_due(&self) -> Option<u64> {
        let now = Now::read();
        let lanes = self.seats.values().filter_map(|seat| {
            let waits = [seat.lane.due(), seat.strangers_until()];
            waits.into_iter().flatten().min().map(|at| now.ns_of(at))
        });
        let beat = (!self.seats.is_empty()).then_some(self.next_beat_ns);
        lanes.chain(self.policy.deadline()).chain(beat).min()
    }

    /// What is due.
    fn keep_time(&mut self, now: Now) {
        let due = |seat: &Seat| {
            [seat.lane.due(), seat.strangers_until()]
                .into_iter()
                .flatten()
                .any(|at| at <= now.instant)
        };
        let keys: Vec<u32> =
            self.seats.iter().filter(|(_, seat)| due(seat)).map(|(key, _)| *key).collect();
        for key in keys {
            let Some(seat) = self.seats.get_mut(&key) else { continue };
            seat.lane.resume(&self.reactor, now.instant, &mut self.heard);
            self.take_in(key, now);
        }
        if self.policy.deadline().is_some_and(|at| at <= now.ns) {
            self.policy.tick(now.ns);
            self.carry_out(now);
        }
        if now.ns >= self.next_beat_ns {
            self.beat(now);
        }
    }

    fn beat(&mut self, now: Now) {
        let busy = self.seats.values().any(|seat| seat.bound.len() > 0);
        self.next_beat_ns = now.ns + if busy { BEAT_NS } else { IDLE_BEAT_NS };
        for (key, seat) in &mut self.seats {
            seat.beat(now.ns);
            // What a tenant without processes got does not change.
            if seat.bound.len() > 0
                && seat.wants_sample(now.ns)
                && let Some(view) = self.policy.tenant(now.ns, id(*key))
            {
                seat.sample(now.ns, view.leased_ns);
            }
        }
    }

    /// Tells the policy what has been heard of a tenant.
    fn take_in(&mut self, key: u32, now: Now) {
        let Some(seat) = self.seats.get_mut(&key) else { return self.heard.clear() };
        let processes = seat.bound.len();
        let (mut is_near, mut is_idle) = (false, false);
        for heard in self.heard.drain(..) {
            match heard {
                Heard::Came(process) => {
                    seat.bound.bind(process);
                    // From now on it looks at the time, and so does this thread.
                    seat.beat(now.ns);
                    self.next_beat_ns = self.next_beat_ns.min(now.ns + BEAT_NS);
                }
                Heard::Gone(process) => {
                    seat.bound.unbind(process);
                    if seat.bound.len() == 0 {
                        self.policy.gone(now.ns, id(key));
                    }
                }
                Heard::Said(_, Message::Want { .. }) => {
                    // One that crossed the opening has been answered by it.
                    if seat.state == State::Closed {
                        self.policy.want(now.ns, id(key));
                    }
                }
                Heard::Said(process, Message::Drained { epoch, used_ns, .. }) => {
                    let drain = seat.bound.drained(process, epoch, used_ns);
                    seat.ignored += u64::from(drain == Drain::Ignored);
                }
                Heard::Said(process, Message::Idle { epoch, .. }) => match seat.state {
                    State::Closed if seat.bound.stands_still(process, epoch) == Still::Drained => {
                        self.policy.helped(id(key));
                    }
                    State::Yield if seat.bound.idle(process, epoch) => {
                        self.policy.idle(now.ns, id(key));
                        is_idle = true;
                    }
                    _ => {}
                },
                Heard::Said(process, Message::Late { epoch, works, .. }) => {
                    if let Some(works) = seat.bound.late(process, epoch, works) {
                        self.policy.works(now.ns, id(key), works);
                        is_near |= works && seat.bound.owing() == 1;
                    }
                }
                // Nothing that a gate hears.
                Heard::Said(..) => seat.ignored += 1,
            }
        }
        seat.forget_strangers(now.instant);
        // What one process has in flight may wait for a launch that waits in another.
        if seat.state == State::Closed
            && seat.bound.len() > 1
            && seat.bound.is_stuck()
            && self.policy.wants(id(key))
        {
            seat.close_again();
            self.policy.helped(id(key));
        }
        let is_new = processes == 0 && seat.bound.len() > 0;
        if seat.has_settled() {
            self.policy.drained(now.ns, id(key), seat.bound.used());
        }
        self.carry_out(now);
        // An idle one has nothing to drain.
        if is_near || is_idle {
            self.rouse_after(key);
        }
        if is_new {
            self.place(key);
        }
    }

    /// Wakes who is next where a tenant is about to drain, once in each closing.
    fn rouse_after(&mut self, key: u32) {
        let Some(next) = self.policy.successor(id(key)) else { return };
        if !self.seats.get_mut(&key).is_some_and(Seat::is_first_word) {
            return;
        }
        if let Some(next) = u32::try_from(next.0).ok().and_then(|next| self.seats.get(&next)) {
            next.rouse();
        }
    }

    /// Writes what the policy says, until it has nothing more to say.
    fn carry_out(&mut self, now: Now) {
        let mut commands: VecDeque<_> = self.policy.commands().collect();
        while let Some(command) = commands.pop_front() {
            let key = u32::try_from(command.tenant.0).unwrap_or(u32::MAX);
            let Some(seat) = self.seats.get_mut(&key) else { continue };
            if command.state != State::Closed {
                seat.set_pace(&self.leases, command.pace);
            }
            seat.set(command.state);
            self.commands += 1;
            // Where nobody is bound, closing is draining.
            if seat.has_settled() {
                self.policy.drained(now.ns, command.tenant, seat.bound.used());
                commands.extend(self.policy.commands());
            }
        }
    }

    /// What others want.
    fn obey(&mut self, now: Now) -> Going {
        loop {
            match self.orders.try_recv() {
                Ok(Order::Admit(opened)) => self.admit(*opened, now),
                Ok(Order::Release(allocation)) => {
                    if let Some(key) = self.key(&allocation) {
                        self.release(key, now);
                    }
                }
                Ok(Order::Configure(leases)) => self.configure(leases),
                // Whoever asked may have given up.
                Ok(Order::View(answer)) => drop(answer.try_send(self.view(now))),
                Ok(Order::Stop) | Err(TryRecvError::Disconnected) => return Going::Stopped,
                Ok(Order::Abandon) => return Going::Abandoned,
                Err(TryRecvError::Empty) => return Going::On,
            }
        }
    }

    /// Windows follow with the next lease of each.
    fn configure(&mut self, leases: Leases) {
        self.policy.configure(super::settings(&leases));
        self.leases = leases;
    }

    fn key(&self, allocation: &str) -> Option<u32> {
        self.seats.iter().find(|(_, seat)| seat.id == allocation).map(|(key, _)| *key)
    }

    fn admit(&mut self, mut opened: Opened, now: Now) {
        let known = self.key(&opened.id);
        let Some(share) = opened.share else {
            return match known {
                Some(key) => self.release(key, now),
                None => Seat::free(&opened.page),
            };
        };
        if let Some(key) = known {
            let seat = self.seats.get_mut(&key).filter(|seat| seat.file == opened.file);
            if let Some(seat) = seat {
                let listening = opened.listening.take();
                if let Some(Err(error)) =
                    listening.map(|new| seat.lane.listen_anew(new, &self.reactor))
                {
                    warn!(allocation = opened.id, %error, "gate.sock");
                }
                if seat.share != share {
                    seat.share = share;
                    self.policy.set_share(now.ns, id(key), share);
                    self.carry_out(now);
                    self.place(key);
                }
                return;
            }
            // Another page: another tenant, whatever its name.
            self.release(key, now);
        }
        let Some(listening) = opened.listening.take() else {
            return warn!(allocation = opened.id, "no gate.sock; its compute is not limited");
        };
        let key = self.next_seat;
        self.next_seat = self.next_seat.wrapping_add(1);
        let gpus: Vec<GpuIndex> = opened.uuids.iter().filter_map(|u| self.gpu(u)).collect();
        let lane = match Lane::open(listening, key, self.most, &self.reactor, now.instant) {
            Ok(lane) if !gpus.is_empty() => lane,
            Ok(_) => return warn!(allocation = opened.id, "more than {MAX_GPUS} GPUs"),
            Err(error) => return warn!(allocation = opened.id, %error, "gate.sock"),
        };
        debug!(allocation = opened.id, ?gpus, ?share, "arbitrated");
        let adopted = opened.in_use > 0;
        let mut seat = Seat::new(opened, gpus.clone(), share, lane, now.instant);
        let idle_ns = self.policy.settings().idle;
        seat.set_pace(&self.leases, Pace { idle_ns, is_narrow: false });
        seat.beat(now.ns);
        self.seats.insert(key, seat);
        self.policy.join(now.ns, id(key), &gpus, share);
        if adopted {
            self.policy.adopt(now.ns, id(key));
        }
        self.carry_out(now);
    }

    fn release(&mut self, key: u32, now: Now) {
        let Some(mut seat) = self.seats.remove(&key) else { return };
        self.policy.leave(now.ns, id(key));
        seat.lane.close(&self.reactor);
        seat.set_free();
        for (index, uuid) in self.gpus.iter_mut().enumerate() {
            let used = |seat: &Seat| seat.gpus.iter().any(|gpu| usize::from(*gpu) == index);
            if !self.seats.values().any(used) {
                *uuid = None;
            }
        }
        self.carry_out(now);
    }

    /// The number of a GPU in the policy, a new one if need be.
    fn gpu(&mut self, uuid: &str) -> Option<GpuIndex> {
        let known = self.gpus.iter().position(|gpu| gpu.as_deref() == Some(uuid));
        let index = known.or_else(|| self.gpus.iter().position(Option::is_none));
        let index = index.unwrap_or(self.gpus.len());
        if index >= MAX_GPUS {
            return None;
        }
        if index == self.gpus.len() {
            self.gpus.push(None);
        }
        self.gpus[index] = Some(uuid.to_owned());
        GpuIndex::try_from(index).ok()
    }

    /// Gives a tenant, and those that share GPUs with it, parts of the cycle, for when there is no
    /// arbiter. Those without processes need none.
    fn place(&mut self, key: u32) {
        let mut near = vec![key];
        let mut gpus: Vec<GpuIndex> =
            self.seats.get(&key).map(|seat| seat.gpus.clone()).unwrap_or_default();
        // Gangs are neighbours of all neighbours of their GPUs.
        loop {
            let reached = near.len();
            for (other, seat) in self.seats.iter().filter(|(_, seat)| seat.bound.len() > 0) {
                if !near.contains(other) && seat.gpus.iter().any(|gpu| gpus.contains(gpu)) {
                    near.push(*other);
                    gpus.extend(&seat.gpus);
                }
            }
            if near.len() == reached {
                break;
            }
        }
        near.sort_unstable();
        let parts: Vec<Part<'_>> = near
            .iter()
            .filter_map(|key| self.seats.get(key))
            .map(|seat| Part { gpus: &seat.gpus, millis: seat.share.millis, phase: seat.phase })
            .collect();
        let phases = cycle::place(&parts);
        for (key, phase) in near.iter().zip(phases) {
            if let Some(seat) = self.seats.get_mut(key).filter(|seat| seat.phase != phase) {
                seat.set_phase(phase);
            }
        }
    }

    fn view(&self, now: Now) -> View {
        let name = |id: TenantId| {
            let key = u32::try_from(id.0).unwrap_or(u32::MAX);
            self.seats.get(&key).map(|seat| seat.id.clone())
        };
        let gpu = |(index, uuid): (usize, &Option<String>)| {
            let view = self.policy.gpu(now.ns, GpuIndex::try_from(index).ok()?)?;
            Some(GpuShare {
                uuid: uuid.clone()?,
                holder: view.holder.and_then(name),
                late: view.late.into_iter().filter_map(name).collect(),
                waiting: view.waiting,
                quantum_ns: view.quantum,
            })
        };
        let tenant = |(key, seat): (&u32, &Seat)| {
            let view = self.policy.tenant(now.ns, id(*key))?;
            let got = |length: Duration| {
                let ns = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
                seat.got_millis(now.ns, view.leased_ns, ns)
            };
            Some(TenantShare {
                id: seat.id.clone(),
                uuids: seat.uuids.clone(),
                share: seat.share,
                state: seat.state,
                processes: seat.bound.len(),
                owing: seat.bound.owing(),
                waiting_ns: view.waiting_since.map(|since| now.ns.saturating_sub(since)),
                got_1s_millis: got(Duration::from_secs(1)),
                got_10s_millis: got(Duration::from_secs(10)),
                leased_ns: view.leased_ns,
                waited_ns: view.waited_ns,
                long_waits: view.long_waits,
                longest_wait_ns: view.longest_wait_ns,
                leases: view.leases,
                overlaps: view.overlaps,
                ignored: seat.ignored,
                misdeeds: seat.lane.misdeeds(),
            })
        };
        let mut tenants: Vec<TenantShare> = self.seats.iter().filter_map(tenant).collect();
        tenants.sort_by(|a, b| a.id.cmp(&b.id));
        let mut gpus: Vec<GpuShare> = self.gpus.iter().enumerate().filter_map(gpu).collect();
        gpus.sort_by(|a, b| a.uuid.cmp(&b.uuid));
        View {
            gpus,
            tenants,
            commands: self.commands,
            turn_p50_ns: self.turns.quantile(500),
            turn_p99_ns: self.turns.quantile(990),
            turns: self.turns.turns(),
        }
    }
}

fn id(key: u32) -> TenantId {
    TenantId(u64::from(key))
}
