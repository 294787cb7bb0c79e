//! The arbiter's policy: who holds a GPU's lease, a pure state machine.
//!
//! Events go in with the time, [`Policy::commands`] come out; after every event, and when
//! [`Policy::deadline`] has come ([`Policy::tick`]), the caller carries the commands out. The caller
//! counts processes and epochs: `drained` here means that all bound processes of the tenant have
//! drained the current closing. Times are nanoseconds of one monotonic clock.
//!
//! Events may come in any order and from any tenant: one that makes no sense now is ignored.

mod phases;
mod types;
mod view;

use std::collections::{BTreeMap, VecDeque};

pub use phases::phases;
pub use types::{Command, GpuIndex, Kind, MAX_GPUS, MS, Settings, Share, State, TenantId};
pub use view::{GpuView, TenantView};

/// All leases of a node.
#[derive(Clone, Debug)]
pub struct Policy {
    settings: Settings,
    shares: BTreeMap<TenantId, Share>,
    commands: VecDeque<Command>,
}

impl Policy {
    /// Nobody there yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self { settings, shares: BTreeMap::new(), commands: VecDeque::new() }
    }

    /// A tenant with nothing in flight; its gate becomes CLOSED. One with several GPUs is a gang,
    /// granted all or none. GPUs from [`MAX_GPUS`] on are left out; without any it does not join.
    /// A known tenant with the same GPUs gets the share, with other GPUs it leaves first.
    pub fn join(&mut self, now: u64, id: TenantId, gpus: &[GpuIndex], share: Share) {
        if gpus.is_empty() {
            return;
        }
        self.set_share(now, id, share);
        self.shares.insert(id, share);
        self.commands.push_back(Command { tenant: id, state: State::Closed });
    }

    /// After the arbiter's own restart, right after `join`: the tenant's gate was open, so it may
    /// have work in flight. It drains like any other, and is charged until it has.
    pub fn adopt(&mut self, _now: u64, _id: TenantId) {}

    /// The tenant is no more. No command is given for it any more.
    pub fn leave(&mut self, _now: u64, id: TenantId) {
        self.shares.remove(&id);
    }

    /// Another share; what has been charged stays as it is.
    pub fn set_share(&mut self, _now: u64, id: TenantId, share: Share) {
        if let Some(known) = self.shares.get_mut(&id) {
            *known = share;
        }
    }

    /// A launch waits at the closed gate. Stays so until the next grant.
    pub fn want(&mut self, _now: u64, _id: TenantId) {}

    /// Nothing in flight and no launch for a while, while the gate says YIELD.
    pub fn idle(&mut self, _now: u64, _id: TenantId) {}

    /// Nothing of the tenant is in flight any more since its gate was closed.
    pub fn drained(&mut self, _now: u64, _id: TenantId) {}

    /// All its processes are dead: its lease ends at once, and it wants nothing.
    pub fn gone(&mut self, _now: u64, _id: TenantId) {}

    /// Time has come to [`Self::deadline`], or passed. Harmless at any other time.
    pub fn tick(&mut self, _now: u64) {}

    /// When to call [`Self::tick`] next, if nothing else happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        None
    }

    /// What is to be done, in this order; each is given once.
    pub fn commands(&mut self) -> impl Iterator<Item = Command> + '_ {
        self.commands.drain(..)
    }

    /// The constants.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// One GPU as it is at `now`; `None` for one that no tenant has.
    #[must_use]
    pub fn gpu(&self, _now: u64, _gpu: GpuIndex) -> Option<GpuView> {
        None
    }

    /// One tenant as it is at `now`.
    #[must_use]
    pub fn tenant(&self, _now: u64, _id: TenantId) -> Option<TenantView> {
        None
    }

    /// All tenants, in the order of their ids.
    #[must_use]
    pub fn tenants(&self, now: u64) -> Vec<TenantView> {
        self.shares.keys().filter_map(|&id| self.tenant(now, id)).collect()
    }
}
