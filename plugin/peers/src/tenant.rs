//! What the sessions of one allocation have said so far. Everything here came from a container:
//! bounded, counted, believed only where the kernel vouches for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use tessera_region::layout::SLOTS;
use tessera_region::session::{EventKind, Message};

use super::token_bucket::TokenBucket;
use tessera_system::locks::lock;

/// Sessions of one allocation at a time: every slot, and as many again that are dying. Fewer where the
/// plugin may open few files, so that no allocation takes them from the others.
pub const MAX_SESSIONS: usize = 2 * SLOTS;
/// Allocations that must be able to have their share of descriptors, two for each session; and half as
/// many that have as many processes at the gate.
const SHARES: u64 = 32;
/// Descriptors for everything else: the ledger, kubelet, pages, listeners.
const KEPT: u64 = 256;
/// Messages a second of one allocation, and how many at once.
const RATE: u32 = 2000;
const BURST: u32 = 4000;
/// Packets that are no messages after which a session is closed.
pub const MAX_GARBAGE: u32 = 16;

/// A process with a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its pid on the host, as the kernel says; `None` from a pid namespace we cannot see into.
    pub host_pid: Option<u32>,
    /// Its pid in its own namespace and its slot, as it says; `None` before its hello.
    pub hello: Option<(u32, u32)>,
}

/// Counters since the allocation began or the plugin started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets that were no message, or one that makes no sense in a session.
    pub garbage: u64,
    /// Sessions closed because of it.
    pub dropped: u64,
    /// Sessions turned away because there were too many.
    pub turned_away: u64,
    /// Times a sender had to wait for the rate limit.
    pub throttled: u64,
    /// Requests over the quota, as events report them.
    pub over_quota: u64,
    /// Requests within the quota that the driver refused.
    pub driver_refused: u64,
    /// GPUs a process saw that are not in its quota page.
    pub unknown_gpu: u64,
    /// Processes that got no slot.
    pub no_slot: u64,
}

/// The largest request over the quota that was reported since the last query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverQuota {
    /// Bytes asked for.
    pub bytes: u64,
    /// On which GPU, as the page counts.
    pub gpu: Option<u32>,
    /// Bytes in use there at that moment and bytes that may be held, where the page could be read: the process may be
    /// gone at the next look.
    pub memory: Option<(u64, u64)>,
}

/// What follows from a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// Nothing more.
    Taken,
    /// It wants a welcome.
    Greeted,
    /// It makes no sense in a session, and changes nothing.
    Nonsense,
}

/// The sessions of one allocation.
#[derive(Debug)]
pub struct TenantSessions {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    peers: BTreeMap<u64, Peer>,
    /// Those that ended last, the latest at the end.
    gone: VecDeque<Peer>,
    next: u64,
    counters: Counters,
    bucket: TokenBucket,
    hidden_pids: bool,
    most: usize,
    over_quota: OverQuota,
}

/// Sessions that one allocation may have, and processes at its gate, as far as this process may open
/// files.
pub fn max_processes() -> usize {
    share(tessera_system::descriptors::limit())
}

fn share(files: u64) -> usize {
    let share = files.saturating_sub(KEPT) / (2 * SHARES);
    usize::try_from(share).unwrap_or(MAX_SESSIONS).clamp(8, MAX_SESSIONS)
}

impl Default for TenantSessions {
    fn default() -> Self {
        TenantSessions {
            state: Mutex::new(State {
                most: max_processes(),
                peers: BTreeMap::new(),
                gone: VecDeque::new(),
                next: 0,
                counters: Counters::default(),
                bucket: TokenBucket::new(BURST, RATE, Instant::now()),
                hidden_pids: false,
                over_quota: OverQuota::default(),
            }),
        }
    }
}

impl TenantSessions {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Processes with a session.
    pub fn peers(&self) -> Vec<Peer> {
        self.state().peers.values().copied().collect()
    }

    pub fn counters(&self) -> Counters {
        self.state().counters
    }

    pub fn take_over_quota(&self) -> OverQuota {
        std::mem::take(&mut self.state().over_quota)
    }

    /// Whether a process came whose pid on the host cannot be known: the plugin lacks hostPID.
    pub fn has_hidden_pids(&self) -> bool {
        self.state().hidden_pids
    }

    /// Admits a session; `None` if there are too many.
    pub(super) fn enter(&self, host_pid: Option<u32>) -> Option<u64> {
        let mut state = self.state();
        state.hidden_pids |= host_pid.is_none();
        if state.peers.len() >= state.most {
            state.counters.turned_away += 1;
            return None;
        }
        let key = state.next;
        state.next += 1;
        state.peers.insert(key, Peer { host_pid, hello: None });
        Some(key)
    }

    /// Notes a session that was turned away before it was one.
    pub(super) fn turned_away(&self) {
        self.state().counters.turned_away += 1;
    }

    pub(super) fn leave(&self, key: u64) {
        let mut state = self.state();
        if let Some(peer) = state.peers.remove(&key) {
            state.gone.push_back(peer);
            if state.gone.len() > MAX_SESSIONS {
                state.gone.pop_front();
            }
        }
    }

    /// The pid on the host of the process that last said it was `pid` in its own namespace and had this
    /// slot; it may have ended.
    pub fn host_pid(&self, pid: u32, slot: u32) -> Option<u32> {
        let state = self.state();
        let mut all = state.gone.iter().chain(state.peers.values()).rev();
        all.find(|peer| peer.hello == Some((pid, slot)))?.host_pid
    }

    /// Whether a process with this pid on the host has, or had lately, a session.
    pub fn knows(&self, host_pid: u32) -> bool {
        let state = self.state();
        state.gone.iter().chain(state.peers.values()).any(|peer| peer.host_pid == Some(host_pid))
    }

    /// Takes a token of the rate limit, or says how long to wait.
    pub(super) fn admit(&self, now: Instant) -> Result<(), std::time::Duration> {
        let mut state = self.state();
        let result = state.bucket.take(now);
        state.counters.throttled += u64::from(result.is_err());
        result
    }

    pub(super) fn garbage(&self, dropped: bool) {
        let mut state = self.state();
        state.counters.garbage += 1;
        state.counters.dropped += u64::from(dropped);
    }

    /// Takes a message. `memory` reads what is in use on a GPU, and what may be held there.
    pub(super) fn hear(
        &self,
        key: u64,
        message: &Message,
        memory: impl FnOnce(u32) -> Option<(u64, u64)>,
    ) -> Heard {
        let mut state = self.state();
        match message {
            Message::Hello { slot, pid, .. } => {
                let said = (*pid, *slot);
                // A session is of one process with one slot: another word about them is no word.
                let known = state.peers.get_mut(&key).map(|peer| *peer.hello.get_or_insert(said));
                match known.is_none_or(|known| known == said) {
                    true => Heard::Greeted,
                    false => Heard::Nonsense,
                }
            }
            Message::Event(event) => {
                let (bytes, gpu) = (event.bytes, event.gpu);
                // A page is read for the largest alone, however many there are.
                if event.kind == EventKind::OverQuota && bytes > state.over_quota.bytes {
                    state.over_quota = OverQuota { bytes, gpu, memory: gpu.and_then(memory) };
                }
                let counters = &mut state.counters;
                let counter = match event.kind {
                    // It only brings the next look at the GPU forward.
                    EventKind::ContextMade => return Heard::Taken,
                    EventKind::OverQuota => &mut counters.over_quota,
                    EventKind::DriverRefused => &mut counters.driver_refused,
                    EventKind::UnknownGpu => &mut counters.unknown_gpu,
                    EventKind::NoSlot => &mut counters.no_slot,
                };
                *counter += 1;
                Heard::Taken
            }
            // The gate has a socket of its own, and a tenant has no business sending a welcome.
            Message::Want { .. }
            | Message::Drained { .. }
            | Message::Idle { .. }
            | Message::Late { .. }
            | Message::Joins { .. }
            | Message::Welcome { .. } => Heard::Nonsense,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_are_shared() {
        assert_eq!([share(1024), share(4096), share(1 << 20), share(0)], [12, 60, MAX_SESSIONS, 8]);
    }

    #[test]
    fn sessions_are_bounded() {
        let tenant = TenantSessions::default();
        let most = tenant.state().most;
        let keys: Vec<_> = (0..most).map(|_| tenant.enter(Some(1)).unwrap()).collect();
        assert_eq!(tenant.enter(Some(1)), None);
        assert_eq!(tenant.counters().turned_away, 1);
        tenant.leave(keys[0]);
        assert!(tenant.enter(Some(1)).is_some());
        assert_eq!(tenant.peers().len(), most);
    }

    #[test]
    fn who_has_ended_is_remembered_by_pid_and_slot() {
        let tenant = TenantSessions::default();
        for (host, slot) in [(70, 1), (71, 2), (72, 2)] {
            let key = tenant.enter(Some(host)).unwrap();
            tenant.hear(key, &Message::Hello { slot, pid: 7, generation: 1 }, |_| None);
            tenant.leave(key);
        }
        assert_eq!((tenant.host_pid(7, 1), tenant.host_pid(7, 2)), (Some(70), Some(72)));
        assert_eq!((tenant.host_pid(7, 3), tenant.host_pid(8, 1)), (None, None));
        assert!(tenant.knows(71) && !tenant.knows(7));
        for host in 0..u32::try_from(2 * MAX_SESSIONS).unwrap() {
            let key = tenant.enter(Some(1000 + host)).unwrap();
            tenant.leave(key);
        }
        assert!(!tenant.knows(72) && tenant.state().gone.len() == MAX_SESSIONS);
    }

    #[test]
    fn a_peer_in_an_unseen_pid_namespace_is_noted() {
        let tenant = TenantSessions::default();
        tenant.enter(Some(7));
        assert!(!tenant.has_hidden_pids());
        tenant.enter(None);
        assert!(tenant.has_hidden_pids());
    }
}
