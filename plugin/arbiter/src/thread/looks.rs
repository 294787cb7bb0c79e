//! Reading what tenants' words show: how often, for how long, and what the policy is told.

use super::{Now, Thread};
use crate::policy::{GateState, TenantId, Watch};

/// The part of the time, as a divisor, that reading words may take: of each tenant's, and of all.
const LOOKING: u64 = 32;

impl Thread {
    /// When words are to be read next.
    pub(super) fn look_due(&self) -> Option<u64> {
        let after = self.look_after?.max(self.look_ns * LOOKING);
        Some(self.looked_ns.saturating_add(after))
    }

    /// Asks the policy how often to read words, where that may have changed: it costs a look at all tenants.
    pub(super) fn plan_looks(&mut self) {
        if std::mem::take(&mut self.has_news) {
            let lasts = |id: TenantId| {
                let tenant = self.tenants.get(&id.0);
                let lands_ns = tenant.and_then(|tenant| tenant.flights.lands_ns());
                lands_ns.map_or(0, |lands_ns| lands_ns.saturating_sub(self.looked_ns))
            };
            self.look_after = self.policy.look_after(lasts);
        }
    }

    /// Reads the words that the policy waits for: first of tenants that wait, for whom an idle holder is closed.
    pub(super) fn look(&mut self, now: Now) {
        (self.looked_ns, self.look_ns) = (now.ns, 0);
        let mut can_tell = self.look_for(now, |watch| watch == Watch::Awake);
        self.carry_out(now);
        can_tell |= self.look_for(now, |watch| watch != Watch::Awake);
        self.has_news = true;
        self.carry_out(now);
        // Of those that have no pages nothing is seen, however often.
        self.look_after = self.look_after.filter(|_| can_tell);
    }

    /// Whether there is anything to read.
    fn look_for(&mut self, now: Now, wanted: impl Fn(Watch) -> bool) -> bool {
        let watches = self.policy.watches().filter(|(_, watch)| wanted(*watch));
        let watches: Vec<(TenantId, Watch)> = watches.collect();
        let mut can_tell = false;
        for (id, watch) in watches {
            let Some(tenant) = self.tenants.get_mut(&id.0) else { continue };
            if tenant.flights.len() == 0 {
                continue;
            }
            can_tell = true;
            if tenant.looks_ns > now.ns || watch == Watch::Awake && tenant.is_ahead {
                continue;
            }
            let mut at_ns = now.ns;
            if matches!(watch, Watch::Drained | Watch::Pauses) && self.watches_ns <= now.ns {
                at_ns = tenant.watch_landing(now.ns);
                self.watches_ns = at_ns + (at_ns - now.ns) * LOOKING;
            }
            match watch {
                Watch::Drained => {
                    tenant.look_at_flight(at_ns);
                    if tenant.has_settled() {
                        self.settled.push(id.0);
                        self.policy.drained(at_ns, id, tenant.drains.used());
                    }
                }
                Watch::Quiet | Watch::Pauses if tenant.is_seen() => {
                    if let Some(since) = tenant.flights.quiet_since(at_ns) {
                        self.policy.quiet(at_ns, id, since);
                    }
                }
                Watch::Awake if tenant.is_seen() => {
                    tenant.invite();
                    match tenant.is_awake(now.ns) {
                        true => self.policy.awake(now.ns, id),
                        false => self.policy.asleep(now.ns, id),
                    }
                }
                Watch::Quiet | Watch::Pauses | Watch::Awake => {}
            }
            let Some(tenant) = self.tenants.get_mut(&id.0) else { continue };
            // Of a launch whose thread has no CPU to say that it waits.
            if tenant.state == GateState::Closed && tenant.flights.waits() && !self.policy.wants(id)
            {
                self.policy.want(now.ns, id);
            }
            let own_ns = tenant.flights.cost_ns();
            tenant.looks_ns = now.ns.saturating_add(own_ns * LOOKING);
            // Not as measured: one that was interrupted would put the next off for milliseconds.
            self.look_ns += own_ns;
        }
        can_tell
    }
}
