//! Any events in any order.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tessera_arbiter::policy::TenantView;

use super::*;

#[derive(Clone, Debug)]
pub enum Event {
    Join(u32, Vec<u8>, Share),
    Adopt(u32),
    Leave(u32),
    Share(u32, Share),
    Want(u32),
    Idle(u32),
    Drained(u32),
    Gone(u32),
    Tick,
    Quiet(u32, u64),
    Works(u32, bool),
    Awake(u32, bool),
}

impl Event {
    /// Tells the policy.
    pub fn happen(&self, policy: &mut Policy, now: u64) {
        match *self {
            Self::Join(who, ref gpus, share) => policy.join(now, TenantId(who), gpus, share),
            Self::Adopt(who) => policy.adopt(now, TenantId(who)),
            Self::Leave(who) => policy.leave(now, TenantId(who)),
            Self::Share(who, share) => policy.set_share(now, TenantId(who), share),
            Self::Want(who) => policy.want(now, TenantId(who)),
            Self::Idle(who) => policy.idle(now, TenantId(who)),
            Self::Drained(who) => policy.drained(now, TenantId(who), None),
            Self::Gone(who) => policy.gone(now, TenantId(who)),
            Self::Tick => policy.tick(now),
            Self::Quiet(who, ns) => policy.quiet(now, TenantId(who), now.saturating_sub(ns)),
            Self::Works(who, works) => policy.works(now, TenantId(who), works),
            Self::Awake(who, true) => policy.awake(now, TenantId(who)),
            Self::Awake(who, false) => policy.asleep(now, TenantId(who)),
        }
    }
}

pub fn event() -> impl Strategy<Value = Event> {
    let who = 0_u32..6;
    let share = (0_u32..1200, any::<bool>())
        .prop_map(|(millis, capped)| if capped { strict(millis) } else { burst(millis) });
    prop_oneof![
        3 => (who.clone(), prop::collection::vec(0_u8..3, 0..3), share.clone())
            .prop_map(|(who, gpus, share)| Event::Join(who, gpus, share)),
        1 => who.clone().prop_map(Event::Adopt),
        1 => who.clone().prop_map(Event::Leave),
        1 => (who.clone(), share).prop_map(|(who, share)| Event::Share(who, share)),
        8 => who.clone().prop_map(Event::Want),
        3 => who.clone().prop_map(Event::Idle),
        6 => who.clone().prop_map(Event::Drained),
        1 => who.clone().prop_map(Event::Gone),
        8 => Just(Event::Tick),
        1 => (who.clone(), 0..2 * MS).prop_map(|(who, ns)| Event::Quiet(who, ns)),
        1 => (who.clone(), any::<bool>()).prop_map(|(who, works)| Event::Works(who, works)),
        2 => (who, any::<bool>()).prop_map(|(who, is_awake)| Event::Awake(who, is_awake)),
    ]
}

/// What the commands have said, and what nobody may see.
#[derive(Default)]
struct Gates(BTreeMap<TenantId, GateState>);

impl Gates {
    fn carry_out(&mut self, policy: &mut Policy, now: u64) -> Result<(), TestCaseError> {
        let commands: Vec<_> = policy.commands().collect();
        for command in commands {
            prop_assert!(policy.tenant(now, command.tenant).is_some(), "of nobody: {command:?}");
            let before = self.0.insert(command.tenant, command.state);
            if command.state == GateState::Solo || command.state == GateState::Closed {
                continue;
            }
            // What SOLO let through is not bounded: it drains before the gate says anything else.
            prop_assert!(before != Some(GateState::Solo), "{command:?} after SOLO");
        }
        self.0.retain(|&id, _| policy.tenant(now, id).is_some());
        let mut holders: BTreeMap<u8, TenantId> = BTreeMap::new();
        for view in policy.tenants(now) {
            let gate = self.0.get(&view.tenant).copied();
            prop_assert_eq!(gate, Some(view.state), "{:?}", view);
            if view.state == GateState::Solo {
                prop_assert!(view.share.kind == ShareKind::Burst, "{:?}", view);
            }
            for &gpu in view.gpus.iter().filter(|_| view.state != GateState::Closed) {
                let other = holders.insert(gpu, view.tenant);
                prop_assert!(other.is_none(), "{:?} and {:?} on GPU {}", other, view, gpu);
            }
        }
        Ok(())
    }
}

/// An overlap is counted when another tenant gets one of the GPUs, and never otherwise.
fn blames_none_without_a_neighbour(
    before: &[TenantView],
    after: &[TenantView],
) -> Result<(), TestCaseError> {
    for view in after {
        let old = before.iter().find(|old| old.tenant == view.tenant);
        // One that joined again counts from 0.
        let Some(old) = old.filter(|old| old.totals.overlaps < view.totals.overlaps) else {
            continue;
        };
        let beside = after.iter().filter(|other| other.tenant != view.tenant);
        let mut open = beside.filter(|other| other.state != GateState::Closed);
        let shares_gpu = open.any(|other| other.gpus.iter().any(|gpu| view.gpus.contains(gpu)));
        prop_assert!(shares_gpu, "{:?} after {:?}", view, old);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_order_of_events_breaks_the_invariants_or_stops_the_grants(
        events in prop::collection::vec((event(), 0..30 * MS), 1..120),
    ) {
        let mut policy = Policy::new(Settings::default());
        let mut gates = Gates::default();
        let mut now = 0;
        for (event, passed) in events {
            // Back, too: the caller's clock is not trusted.
            now = if passed % 7 == 0 { now / 2 } else { now + passed };
            let before = policy.tenants(now);
            event.happen(&mut policy, now);
            gates.carry_out(&mut policy, now)?;
            blames_none_without_a_neighbour(&before, &policy.tenants(now))?;
        }
        // Everybody wants, with a CPU to say so, and drains when closed: everybody is granted, gangs and late ones too.
        now += 5 * SECOND;
        let ids: Vec<TenantId> = policy.tenants(now).iter().map(|view| view.tenant).collect();
        for &id in &ids {
            let kind = policy.tenant(now, id).map_or(ShareKind::Burst, |view| view.share.kind);
            policy.set_share(now, id, Share { millis: 200, kind });
            gates.carry_out(&mut policy, now)?;
        }
        let mut served = vec![false; ids.len()];
        for step in 0..20_000 {
            for &id in &ids {
                if policy.tenant(now, id).is_some_and(|view| view.state == GateState::Closed) {
                    policy.drained(now, id, None);
                    gates.carry_out(&mut policy, now)?;
                    policy.want(now, id);
                    policy.awake(now, id);
                    gates.carry_out(&mut policy, now)?;
                }
            }
            let views = policy.tenants(now);
            for (view, served) in views.iter().zip(&mut served) {
                *served |= view.state != GateState::Closed;
            }
            if served.iter().all(|&served| served) {
                return Ok(());
            }
            let soon = now + MS;
            now = policy.deadline().map_or(soon, |at| at.clamp(now, soon));
            policy.tick(now);
            gates.carry_out(&mut policy, now)?;
            prop_assert!(step < 19_999, "{views:?}");
        }
    }
}

#[test]
fn a_silent_tenant_that_an_earlier_arbiter_left_is_not_blamed() {
    let mut policy = Policy::new(Settings::default());
    for who in 0..2 {
        policy.join(0, TenantId(who), &[0], burst(400));
    }
    policy.adopt(0, TenantId(0));
    policy.want(1, TenantId(1));
    let deadline = policy.deadline().expect("a drain that is waited for");
    policy.tick(deadline);
    let view = |who| policy.tenant(deadline, TenantId(who)).expect("a tenant");
    assert_eq!(view(1).state, GateState::Open, "it waits no longer than the deadline");
    assert_eq!(view(0).totals.overlaps, 0);
}

#[test]
fn a_late_drain_that_holds_up_nobody_is_no_overlap() {
    let mut policy = Policy::new(Settings::default());
    policy.join(0, TenantId(0), &[0], strict(100));
    policy.want(0, TenantId(0));
    let mut now = 0;
    while let Some(at) = policy.deadline().filter(|at| *at < 10 * SECOND) {
        now = at;
        policy.tick(now);
    }
    let view = policy.tenant(now, TenantId(0)).expect("a tenant");
    assert_eq!((view.state, view.totals.overlaps), (GateState::Closed, 0), "{view:?}");
    assert!(view.totals.leases > 0);
}

#[test]
fn a_tick_leaves_no_deadline_in_the_past() {
    let mut policy = Policy::new(Settings::default());
    for who in 0..4 {
        policy.join(0, TenantId(who), &[0], if who == 3 { strict(100) } else { burst(300) });
        policy.want(0, TenantId(who));
    }
    let mut now = 0;
    for _ in 0..1000 {
        let Some(at) = policy.deadline() else { break };
        assert!(at > now || now == 0, "{at} at {now}");
        now = now.max(at);
        policy.tick(now);
        let closed: Vec<_> = policy.commands().filter(|c| c.state == GateState::Closed).collect();
        for command in closed {
            now += 50 * US;
            policy.drained(now, command.tenant, None);
            policy.want(now, command.tenant);
        }
    }
    assert!(now > SECOND);
}
