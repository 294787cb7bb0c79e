//! Passes changes of GPU health to kubelet, the log, the history and `status`.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::Inventory;
use tessera_gpu::health::{Health, Observation, Transition};
use tessera_model::audit::{Event, What};
use tessera_model::clock::{monotonic_ns, unix_ms};
use tessera_model::health::{Moment, Remembered, State};
use tessera_rules::allocate::Catalogue;
use tessera_store::Change;
use tessera_system::files;

/// How much longer quiet may seem after a restart: the ledger hears of probes that stay unanswered this often, and of
/// anything else at once.
const IMPRECISION: Duration = Duration::from_secs(60);

/// Now, for another process or another boot.
pub(super) fn moment() -> Moment {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        let id = files::text(Path::new("/proc/sys/kernel/random/boot_id"), 64);
        id.map(|id| id.trim().to_owned()).unwrap_or_default()
    });
    Moment { boot: BOOT.clone(), monotonic_ms: monotonic_ns() / 1_000_000, unix_ms: unix_ms() }
}

/// What cannot be read of the ledger: such a GPU is not sold until it is reset.
pub(crate) fn unreadable() -> Remembered {
    let reason = "the ledger's entry about its trouble cannot be read".to_owned();
    Remembered {
        at: moment(),
        state: State::Unhealthy,
        reason: reason.clone(),
        since_ms: Some(0),
        disturbed_ms: Some(0),
        locked: Some(reason),
        ..Remembered::default()
    }
}

/// Whether more has happened than time and counters that move on by themselves.
fn says_more(before: &Remembered, now: &Remembered) -> bool {
    let fixed = |of: &Remembered| Remembered {
        at: Moment::default(),
        since_ms: None,
        disturbed_ms: None,
        suspicions_ms: vec![0; of.suspicions_ms.len()],
        energy_mj: None,
        recovered_ms: of.recovered_ms.map(|_| 0),
        ..of.clone()
    };
    // When the last trouble was, by the earlier clock.
    let quiet = before
        .at
        .until(&now.at)
        .saturating_add(Duration::from_millis(before.disturbed_ms.unwrap_or(0)));
    let last = now.disturbed_ms.map_or(quiet, Duration::from_millis);
    fixed(before) != fixed(now) || quiet.saturating_sub(last) >= IMPRECISION
}

/// Says of each GPU why it is sick, or that it is not; true if that is news.
pub(super) fn mark(catalogue: &mut Catalogue, health: &Health) -> bool {
    let mut changed = false;
    for (uuid, sold) in &mut catalogue.gpus {
        let reason = health.reason(uuid);
        if sold.sick.as_deref() != reason {
            sold.sick = reason.map(str::to_owned);
            changed = true;
        }
    }
    changed
}

impl Inventory {
    /// Takes what the driver reports of a GPU. Lines for the audit trail, and whether it changes what is sold.
    pub(crate) fn observe(&self, observation: &Observation) -> (Vec<Event>, bool) {
        let mut health = self.health.lock();
        let transitions = health.observe(observation, Instant::now());
        let at_unix_ms = unix_ms();
        let event = |Transition { uuid, from, to, reason }: Transition| {
            Event::of_gpu(&uuid, What::Health { from, to }, reason, at_unix_ms)
        };
        let events: Vec<Event> = transitions.into_iter().map(event).collect();
        for event in &events {
            let (uuid, sentence) =
                (event.gpu.as_deref().unwrap_or_default(), event.sentence("the GPU"));
            match health.reason(uuid) {
                Some(_) => warn!(gpu = uuid, "{sentence}: {}", event.detail()),
                None => info!(gpu = uuid, "{sentence}: {}", event.detail()),
            }
        }
        // Also the reason of a GPU that stays ill may be another by now.
        let mut catalogue = self.catalogue.lock();
        let changed = mark(Arc::make_mut(&mut catalogue), &health);
        (events, changed)
    }

    /// The driver had no such GPU before it was watched; see [`Health::was_gone`].
    pub(crate) fn was_gone(&self, uuid: &str) {
        self.health.lock().was_gone(uuid);
    }

    /// Whether the ledger has yet to be told of a GPU's trouble.
    pub fn has_unsaved_health(&self) -> bool {
        !self.unsaved_health(false).is_empty()
    }

    /// What the ledger has to be told: with `all` also that counters have moved on.
    fn unsaved_health(&self, all: bool) -> Vec<(String, Option<Remembered>)> {
        let now = self.health.lock().remember(&moment(), Instant::now());
        let saved = self.saved.lock();
        let is_news = |uuid: &String, known: &Remembered| match saved.get(uuid) {
            Some(before) => all || says_more(before, known),
            None => true,
        };
        let news = now.into_iter().filter(|(uuid, known)| is_news(uuid, known));
        news.map(|(uuid, known)| (uuid, Some(known))).collect()
    }

    /// Writes lines of the audit trail, and what a later start has to know of the GPUs. Blocking. A disk that refuses
    /// is reported in the log, and told again.
    pub(crate) fn save_health(&self, events: Vec<Event>, all: bool) {
        let mut writer = self.journal.writer();
        let change = Change { events, health: self.unsaved_health(all), ..Change::default() };
        if change.is_empty() {
            return;
        }
        if let Err(error) = writer.ledger.commit(&change) {
            warn!(%error, "a start of the plugin would not know of GPUs' trouble");
            return;
        }
        let health = change.health.into_iter();
        self.saved.lock().extend(health.filter_map(|(uuid, known)| Some((uuid, known?))));
    }

    /// Whether that would change nothing, whatever went before.
    pub fn ignores(&self, observation: &Observation) -> bool {
        Health::ignores(&self.config.get().health, observation)
    }

    /// GPUs that may not last, of those that are sold.
    pub fn suspects(&self) -> BTreeSet<String> {
        let health = self.health.lock();
        let catalogue = self.catalogue.lock();
        catalogue.gpus.keys().filter(|uuid| health.is_suspect(uuid)).cloned().collect()
    }

    pub(crate) fn with_health(&self, after: &Catalogue) -> Catalogue {
        let mut after = after.clone();
        mark(&mut after, &self.health.lock());
        after
    }
}
