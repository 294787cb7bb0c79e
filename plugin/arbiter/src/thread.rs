//! The arbiter's thread: receives messages, feeds the policy, and writes its answers into the gates.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::Instant;

use tessera_region::layout::ARBITER_GONE;
use tessera_region::session::Message;
use tracing::warn;

use super::arbitrated_tenant::{ArbitratedTenant, OpenedPages};
use super::gate_connections::GateEvent;
use super::latency::TurnHistogram;
use super::linked_shares::LinkedShares;
use super::policy::{GateState, GpuIndex, IdleTotals, MS, Policy, RING, TenantId};
use super::reactor::{Reactor, Ready, Token};
use super::trace::{Begun, Noted, TraceAnswer, TraceError, Tracing};
use super::view::{GpuShare, TenantShare, View};
use tessera_config::Leases;
use tessera_model::clock::monotonic_ns;

/// How often pages show that the arbiter lives, while processes are bound and while there are none: an idle
/// node should cost nothing, and a new process must not find an old time.
const BEAT_NS: u64 = 20_000_000;
const IDLE_BEAT_NS: u64 = 400_000_000;

/// Orders to the thread.
#[derive(Debug)]
pub(super) enum Order {
    /// Takes a tenant on, or reads its page again.
    Admit(Box<OpenedPages>),
    /// The allocation has ended.
    Release(String),
    /// Changes the settings.
    Configure(Leases),
    /// How long an allocation's work ran since the last such order, nanoseconds.
    Measured(String, Option<u64>),
    /// Asks for a view.
    View(SyncSender<View>),
    /// Begins to note what happens.
    BeginTrace(Tracing, TraceAnswer),
    /// The asker has enough, or is gone.
    EndTrace(Option<SyncSender<Noted>>),
    /// Ends. Whether tenants are informed: not where another arbiter takes over.
    End(bool),
}

/// One moment, by both clocks.
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

#[derive(Debug)]
pub(super) struct Thread {
    reactor: Reactor,
    orders: Receiver<Order>,
    leases: Leases,
    /// Connections that a tenant may have.
    max_processes: usize,
    policy: Policy,
    tenants: BTreeMap<u32, ArbitratedTenant>,
    /// Processes with several shares.
    links: LinkedShares,
    /// Tenants whose links have changed, and those that need a part of the fallback cycle: the next beat sees to
    /// them, so that whoever comes and goes costs no more than that.
    moved: BTreeSet<u32>,
    unplaced: BTreeSet<u32>,
    /// When each tenant is due that is, the soonest first.
    dues: BTreeSet<(Instant, u32)>,
    next_key: u32,
    /// The GPUs' UUIDs by their index in the policy; free ones are `None`.
    gpus: Vec<Option<String>>,
    next_beat_ns: u64,
    /// When words were read last, what that took, and how long after it they are read again.
    looked_ns: u64,
    look_ns: u64,
    look_after: Option<u64>,
    /// When the end of a drain may be watched again.
    watches_ns: u64,
    /// Whether the policy may wait for other words than it did when it was asked last.
    has_news: bool,
    events: Vec<GateEvent>,
    /// Tenants that have drained, and were not invited yet.
    settled: Vec<u32>,
    turns: TurnHistogram,
    commands: u64,
    /// A trace that goes on.
    traced: Option<Begun>,
    /// It has been ordered to end; see [`Order::End`].
    ends: Option<bool>,
    /// Idle time of GPUs that no tenant has now, by UUID.
    idle_before: BTreeMap<String, IdleTotals>,
}

impl Thread {
    pub fn new(
        reactor: Reactor,
        orders: Receiver<Order>,
        leases: Leases,
        max_processes: usize,
    ) -> Self {
        Thread {
            reactor,
            orders,
            policy: Policy::new(super::settings(&leases)),
            leases,
            max_processes,
            tenants: BTreeMap::new(),
            links: LinkedShares::default(),
            moved: BTreeSet::new(),
            unplaced: BTreeSet::new(),
            dues: BTreeSet::new(),
            next_key: 0,
            gpus: Vec::new(),
            next_beat_ns: 0,
            looked_ns: 0,
            look_ns: 0,
            look_after: None,
            watches_ns: 0,
            has_news: false,
            events: Vec::with_capacity(16),
            settled: Vec::new(),
            turns: TurnHistogram::default(),
            commands: 0,
            traced: None,
            ends: None,
            idle_before: BTreeMap::new(),
        }
    }

    /// Runs until it is ordered to stop, or until no sender of orders is left.
    pub fn run(mut self) {
        let mut ready = Ready::new();
        while self.ends.is_none() {
            let at = self.next_due();
            self.reactor.arm(at);
            if let Err(error) = self.reactor.wait(&mut ready) {
                warn!(%error, "the arbiter cannot wait; tenants ration themselves from now on");
                break;
            }
            for token in &ready.tokens {
                let now = Now::read();
                let before = self.commands;
                self.handle(*token, now);
                if self.commands != before {
                    self.turns.add(monotonic_ns().saturating_sub(now.ns));
                }
            }
            self.keep_time(Now::read());
        }
        if self.ends != Some(false) {
            self.tenants.values().for_each(|tenant| tenant.beat(ARBITER_GONE));
        }
    }

    /// Does what a ready event source asks for.
    fn handle(&mut self, token: Token, now: Now) {
        match token {
            Token::Wake => self.handle_orders(now),
            Token::Timer => {}
            Token::Listener(key) => {
                if let Some(tenant) = self.tenants.get_mut(&key) {
                    tenant.connections.accept(&self.reactor, now.instant);
                    self.note_due(key);
                }
            }
            Token::Peer(key, peer) => {
                if let Some(tenant) = self.tenants.get_mut(&key) {
                    let connections = &mut tenant.connections;
                    connections.receive(peer, &self.reactor, now.instant, &mut self.events);
                    self.handle_events(key, now);
                }
            }
            Token::Death(key, peer) => {
                if let Some(tenant) = self.tenants.get_mut(&key) {
                    tenant.connections.died(peer, &self.reactor, &mut self.events);
                    self.handle_events(key, now);
                }
            }
        }
    }

    fn next_due(&self) -> Option<u64> {
        let now = Now::read();
        let first = self.dues.first().map(|(at, _)| now.ns_of(*at));
        let beat = (!self.tenants.is_empty()).then_some(self.next_beat_ns);
        first.into_iter().chain(self.policy.deadline()).chain(self.look_due()).chain(beat).min()
    }

    /// Notes when a tenant is due next.
    fn note_due(&mut self, key: u32) {
        let Some(tenant) = self.tenants.get_mut(&key) else { return };
        let due = [tenant.connections.due(), tenant.inherited_until()].into_iter().flatten().min();
        let before = std::mem::replace(&mut tenant.due, due);
        if before != due {
            self.dues.extend(due.map(|at| (at, key)));
            if let Some(at) = before {
                self.dues.remove(&(at, key));
            }
        }
    }

    /// Does what is due.
    fn keep_time(&mut self, now: Now) {
        let due = self.dues.iter().take_while(|(at, _)| *at <= now.instant);
        let keys: Vec<u32> = due.map(|(_, key)| *key).collect();
        for key in keys {
            let Some(tenant) = self.tenants.get_mut(&key) else { continue };
            tenant.connections.resume(&self.reactor, now.instant, &mut self.events);
            self.handle_events(key, now);
        }
        if self.policy.deadline().is_some_and(|at| at <= now.ns) {
            self.policy.tick(now.ns);
            self.has_news = true;
            self.carry_out(now);
        }
        if self.look_due().is_some_and(|at| at <= now.ns) {
            self.look(now);
        }
        if now.ns >= self.next_beat_ns {
            self.beat(now);
        }
    }

    fn beat(&mut self, now: Now) {
        self.relink(now);
        self.place();
        let busy = self.tenants.values().any(|tenant| tenant.drains.len() > 0);
        self.next_beat_ns = now.ns + if busy { BEAT_NS } else { IDLE_BEAT_NS };
        for (key, tenant) in &mut self.tenants {
            tenant.beat(now.ns);
            // The GPU time of a tenant without processes does not change.
            if tenant.drains.len() > 0
                && tenant.wants_sample(now.ns)
                && let Some(view) = self.policy.tenant(now.ns, TenantId(*key))
            {
                tenant.sample(now.ns, &view.totals);
            }
        }
    }

    /// Passes the events of a tenant's connections to the policy.
    fn handle_events(&mut self, key: u32, now: Now) {
        let Some(tenant) = self.tenants.get_mut(&key) else { return self.events.clear() };
        let processes = tenant.drains.len();
        for events in self.events.drain(..) {
            match events {
                GateEvent::Joined(connection, token, leads) => {
                    let joined = self.links.join(token, key, connection, leads, &mut self.moved);
                    tenant.ignored += u64::from(!joined);
                }
                GateEvent::Left(connection) => {
                    self.links.left(key, connection, &mut self.moved);
                }
                GateEvent::Hello(process) => {
                    tenant.drains.process_came(process);
                    // From now on the process reads the time, and this thread has to renew it.
                    tenant.beat(now.ns);
                    self.next_beat_ns = self.next_beat_ns.min(now.ns + BEAT_NS);
                }
                GateEvent::Page(process, page) => tenant.flights.insert(now.ns, process, page),
                GateEvent::Exited(process) => {
                    tenant.flights.remove(process);
                    tenant.drains.process_left(process);
                    if tenant.drains.len() == 0 {
                        self.policy.gone(now.ns, TenantId(key));
                    }
                }
                GateEvent::Message(_, Message::Want { .. }) => {
                    // A want that crossed the opening has been answered by it.
                    if tenant.state == GateState::Closed {
                        self.policy.want(now.ns, TenantId(key));
                        self.has_news = true;
                        // Who says so has a CPU, and is about to poll. Without pages nobody would see when that is over.
                        if tenant.is_seen() {
                            self.policy.awake(now.ns, TenantId(key));
                        }
                    }
                }
                GateEvent::Message(process, Message::Drained { epoch, used_ns, .. }) => {
                    match tenant.drains.drained(process, epoch, used_ns) {
                        true => tenant.flights.drained(process),
                        false => tenant.ignored += 1,
                    }
                }
                GateEvent::Message(process, Message::Idle { epoch, .. }) => match tenant.state {
                    GateState::Closed if tenant.drains.stands_still(process, epoch) => {
                        self.policy.helped(TenantId(key));
                    }
                    GateState::Yield if tenant.drains.idle(process, epoch) => {
                        self.policy.idle(now.ns, TenantId(key));
                    }
                    _ => {}
                },
                GateEvent::Message(process, Message::Late { epoch, works, .. }) => {
                    if let Some(works) = tenant.drains.late(process, epoch, works) {
                        self.policy.works(now.ns, TenantId(key), works);
                    }
                }
                // Not a message for the gate.
                GateEvent::Message(..) => tenant.ignored += 1,
            }
        }
        tenant.forget_inherited(now.instant);
        let (is_used, was_used) = (tenant.drains.len() > 0, processes > 0);
        if is_used != was_used && self.links.has(key) {
            self.moved.insert(key);
        }
        if is_used && !was_used {
            self.unplaced.insert(key);
        }
        if !(self.moved.is_empty() && self.unplaced.is_empty()) {
            self.next_beat_ns = self.next_beat_ns.min(now.ns + BEAT_NS);
        }
        // What one process has in flight may wait for a launch that waits in another.
        if tenant.state == GateState::Closed
            && tenant.drains.len() > 1
            && tenant.drains.is_stuck()
            && self.policy.wants(TenantId(key))
        {
            tenant.close_again();
            self.policy.helped(TenantId(key));
        }
        if tenant.has_settled() {
            self.settled.push(key);
            self.policy.drained(now.ns, TenantId(key), tenant.drains.used());
        }
        self.carry_out(now);
        self.note_due(key);
    }

    /// Writes the policy's commands until there are none left.
    fn carry_out(&mut self, now: Now) {
        let mut commands: VecDeque<_> = self.policy.commands().collect();
        loop {
            while let Some(command) = commands.pop_front() {
                let key = command.tenant.0;
                let Some(tenant) = self.tenants.get_mut(&key) else { continue };
                if command.state != GateState::Closed {
                    tenant.set_pace(&self.leases, command.pace);
                }
                tenant.set(now.ns, command.state);
                self.commands += 1;
                self.has_news = true;
                // A tenant without bound processes, or with nothing in flight, has drained when it is closed.
                if tenant.has_settled() {
                    self.settled.push(key);
                    self.policy.drained(now.ns, command.tenant, tenant.drains.used());
                    commands.extend(self.policy.commands());
                }
            }
            let rouses: Vec<TenantId> = self.policy.rouses().collect();
            self.has_news |= !rouses.is_empty();
            for id in rouses {
                let Some(tenant) = self.tenants.get_mut(&id.0) else { continue };
                // One whose threads cannot say that they are awake counts as awake.
                if !tenant.is_seen() || tenant.is_awake(now.ns) {
                    self.policy.awake(now.ns, id);
                }
                tenant.rouse();
            }
            commands.extend(self.policy.commands());
            if commands.is_empty() {
                break;
            }
        }
        // After the GPU has gone to the next: who is woken may take this thread's processor.
        for key in self.settled.drain(..) {
            if let Some(tenant) = self.tenants.get(&key) {
                tenant.invite();
            }
        }
        self.plan_looks();
    }

    /// Carries orders out.
    fn handle_orders(&mut self, now: Now) {
        while self.ends.is_none() {
            match self.orders.try_recv() {
                Ok(Order::Admit(opened)) => self.admit(*opened, now),
                Ok(Order::Release(allocation)) => {
                    if let Some(key) = self.key(&allocation) {
                        self.release(key, now);
                    }
                }
                Ok(Order::Configure(leases)) => self.configure(leases),
                Ok(Order::Measured(allocation, busy_ns)) => {
                    if let Some(key) = self.key(&allocation) {
                        self.policy.measured(now.ns, TenantId(key), busy_ns);
                    }
                }
                // The asking thread may have given up.
                Ok(Order::View(answer)) => drop(answer.try_send(self.view(now))),
                Ok(Order::BeginTrace(trace, answer)) => self.begin_trace(trace, &answer, now),
                Ok(Order::EndTrace(answer)) => self.end_trace(answer, now),
                Ok(Order::End(informs)) => self.ends = Some(informs),
                Err(TryRecvError::Disconnected) => self.ends = Some(true),
                Err(TryRecvError::Empty) => return,
            }
        }
    }

    fn begin_trace(&mut self, mut trace: Tracing, answer: &TraceAnswer, now: Now) {
        if self.traced.is_some() {
            drop(answer.try_send(Err(TraceError::Busy)));
            return;
        }
        let tenants = self.tenants.iter().map(|(key, tenant)| (TenantId(*key), tenant.id.clone()));
        let gpus = self.gpus.iter().zip(0..).filter_map(|(gpu, at)| Some((at, gpu.clone()?)));
        self.traced = Some(Begun {
            at: now.ns,
            standing: self.policy.begin_notes(now.ns, RING),
            tenants: tenants.collect(),
            gpus: gpus.collect(),
        });
        trace.is_begun = true;
        // Where the asker is gone, this ends it.
        drop(answer.try_send(Ok(trace)));
    }

    fn end_trace(&mut self, answer: Option<SyncSender<Noted>>, now: Now) {
        let Some(begun) = self.traced.take() else { return };
        let (lost, events) = self.policy.end_notes(now.ns);
        if let Some(answer) = answer {
            drop(answer.try_send(Noted { begun, until: now.ns, lost, events }));
        }
    }

    /// Windows change with each tenant's next lease.
    fn configure(&mut self, leases: Leases) {
        self.policy.configure(super::settings(&leases));
        self.leases = leases;
    }

    fn key(&self, allocation: &str) -> Option<u32> {
        self.tenants.iter().find(|(_, tenant)| tenant.id == allocation).map(|(key, _)| *key)
    }

    fn view(&self, now: Now) -> View {
        let name = |id: TenantId| self.tenants.get(&id.0).map(|tenant| tenant.id.clone());
        let gpu = |(index, uuid): (GpuIndex, &Option<String>)| {
            let view = self.policy.gpu(index)?;
            Some(GpuShare {
                uuid: uuid.clone()?,
                holder: view.holder.and_then(name),
                late: view.late.into_iter().filter_map(name).collect(),
                waiting: view.waiting,
                quantum_ns: view.quantum,
            })
        };
        let share = |(key, tenant): (&u32, &ArbitratedTenant)| {
            let view = self.policy.tenant(now.ns, TenantId(*key))?;
            let got = |ns: u64| tenant.got_millis(now.ns, view.totals.leased_ns, ns);
            Some(TenantShare {
                id: tenant.id.clone(),
                uuids: tenant.uuids.clone(),
                share: tenant.share,
                state: tenant.state,
                processes: tenant.drains.len(),
                owing: tenant.drains.owing(),
                waiting_ns: view.waiting_since.map(|since| now.ns.saturating_sub(since)),
                got_1s_millis: got(1000 * MS),
                got_10s_millis: got(10_000 * MS),
                used_10s_millis: tenant.used_millis(now.ns, &view.totals),
                totals: view.totals,
                ignored: tenant.ignored,
                violations: tenant.connections.violations(),
            })
        };
        let mut tenants: Vec<TenantShare> = self.tenants.iter().filter_map(share).collect();
        tenants.sort_by(|a, b| a.id.cmp(&b.id));
        let mut gpus: Vec<GpuShare> = (0..).zip(&self.gpus).filter_map(gpu).collect();
        gpus.sort_by(|a, b| a.uuid.cmp(&b.uuid));
        let mut idle = self.idle_before.clone();
        idle.extend(self.gpus.iter().zip(0..).filter_map(|(uuid, gpu)| {
            uuid.clone().map(|uuid| (uuid, self.policy.idle_totals(now.ns, gpu)))
        }));
        View { gpus, tenants, commands: self.commands, turns: self.turns.clone(), idle }
    }
}

#[cfg(test)]
mod flooded;
mod looks;
mod members;
