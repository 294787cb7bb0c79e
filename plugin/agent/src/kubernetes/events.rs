//! What repeats is one event with a count, as `kubectl describe` shows it ("x7 over 3m"). A container decides how often
//! something is refused, and must not decide how often the API server is asked: the journal draws a container's lines of
//! one kind together for a minute. Pure.
//!
//! A line of the audit trail is worded as an event on a pod.
//! An owner has rights in one namespace: no other tenant is named. What a line gives as its reason may name neighbours
//! or repeat what a process calls itself, so no reason is repeated but the driver's about a GPU. `tessera explain` has
//! the others for their owners.
//!
//! Reasons are words in CamelCase that people filter by (`kubectl get events --field-selector reason=…`);
//! they stay as they are.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tessera_cluster::events::LONGEST_MESSAGE as LONGEST;
use tessera_model::audit::{Event, What};
use tessera_model::health::State;
use tessera_model::printable;

/// How long an event goes on being counted; after that another is made. Kubernetes forgets an event after an
/// hour (`--event-ttl`).
const LASTS: Duration = Duration::from_secs(1800);

/// On which pod's container, and about which of its GPUs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    pub namespace: String,
    pub pod: String,
    /// The pod's UID, without which `kubectl describe pod` does not show the event.
    pub uid: Option<String>,
    /// The container's name; empty where it concerns the whole pod.
    pub container: String,
    /// The GPU's UUID; empty where it concerns none. What befalls two GPUs of a pod is two events.
    pub gpu: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    pub name: String,
    pub count: u64,
    pub first_unix_ms: i64,
    pub began: Instant,
}

type Key = (Subject, &'static str);

/// Events that are counted on, by subject and reason.
#[derive(Debug, Default)]
pub struct Events(BTreeMap<Key, Sent>);

impl Events {
    pub fn get(&mut self, key: &Key, now: Instant) -> Option<Sent> {
        self.0.retain(|_, sent| now.duration_since(sent.began) < LASTS);
        self.0.get(key).cloned()
    }

    pub fn put(&mut self, key: Key, sent: Sent) {
        self.0.insert(key, sent);
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    pub reason: &'static str,
    pub warning: bool,
    pub message: String,
}

/// The reason, and whether it is a warning; `None` where pods get no event.
fn reason(what: &What) -> Option<(&'static str, bool)> {
    Some(match what {
        What::RefusedMemory { .. } => ("GPUMemoryRefused", true),
        What::DriverRefused => ("GPUMemoryFull", true),
        What::Overlapped => ("GPUTimeOverrun", false),
        What::Rationed => ("GPUTimeRationed", false),
        What::Unlisted => ("GPUNotGranted", true),
        What::Delayed { .. } => ("GPUTimeDelayed", false),
        What::Bypassed { .. } => ("GPUQuotaBypassed", true),
        What::Unaccounted => ("GPUMemoryUnaccounted", true),
        What::Tampered { .. } => ("GPUQuotaTampered", true),
        What::Health { to: State::Unhealthy, .. } => ("GPUUnhealthy", true),
        What::Health { to: State::Healthy, .. } => ("GPUHealthy", false),
        What::Cordoned => ("GPUCordoned", false),
        What::Uncordoned => ("GPUUncordoned", false),
        What::QuotaSet { .. } => ("GPUQuotaChanged", false),
        What::QuotaReset { .. } => ("GPUQuotaReset", false),
        _ => return None,
    })
}

pub fn concerns_pods(what: &What) -> bool {
    reason(what).is_some()
}

/// Whether a line that names neither allocation nor holder concerns every pod on its GPU. What a stranger does is
/// no news for the pods beside it.
pub fn concerns_neighbours(what: &What) -> bool {
    matches!(what, What::Health { .. } | What::Cordoned | What::Uncordoned)
}

/// Words for a line whose holder is the pod that gets them; `None` if pods get no event about it.
pub fn words(line: &Event) -> Option<Words> {
    let (reason, warning) = reason(&line.what)?;
    let mut message = line.sentence(line.gpu.as_deref().unwrap_or("its GPU"));
    match (&line.what, &line.by) {
        // What the driver says of a GPU names no pod.
        (What::Health { .. }, _) if !line.detail().is_empty() => {
            message = format!("{message}: {}", line.detail());
        }
        // Without the command, in which an operator gives a reason: that may name anybody.
        (
            What::Cordoned | What::Uncordoned | What::QuotaSet { .. } | What::QuotaReset { .. },
            Some(by),
        ) => message = format!("{message}, by {}", by.who()),
        _ => {}
    }
    let message = cut(message, LONGEST / 2);
    let advice = line.advice();
    if advice.is_empty() {
        return Some(Words { reason, warning, message });
    }
    // A pod without a share has nothing to explain.
    let is_strangers = matches!(line.what, What::Bypassed { .. }) && line.id.is_none();
    let holder = line.holder.as_ref().filter(|_| !is_strangers);
    let more = holder.map_or_else(String::new, |holder| {
        format!("; `kubectl tessera explain {} -n {}` has more", holder.pod, holder.namespace)
    });
    let message = cut(format!("{message}. {advice}{more}"), LONGEST);
    Some(Words { reason, warning, message })
}

fn cut(text: String, longest: usize) -> String {
    let mut text = printable::line(&text).into_owned();
    printable::cut(&mut text, longest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(pod: &str, reason: &'static str) -> Key {
        let (namespace, container) = ("team".into(), "main".into());
        let gpu = String::new();
        (Subject { namespace, pod: pod.into(), uid: None, container, gpu }, reason)
    }

    #[test]
    fn an_event_is_counted_on_for_half_an_hour() {
        let (mut events, began) = (Events::default(), Instant::now());
        let sent = Sent { name: "a.1".into(), count: 1, first_unix_ms: 1, began };
        events.put(key("a", "R"), sent.clone());
        let gpu = "GPU-1".to_owned();
        let other = (Subject { gpu, ..key("a", "R").0 }, "R");
        for unknown in [key("a", "S"), key("b", "R"), other] {
            assert_eq!(events.get(&unknown, began), None);
        }
        assert_eq!(events.get(&key("a", "R"), began), Some(sent));
        assert_eq!(events.get(&key("a", "R"), began + LASTS), None);
        assert!(events.0.is_empty());
    }
}

#[cfg(test)]
mod words_tests {
    use super::*;
    use tessera_model::allocation_id::AllocationId;
    use tessera_model::audit::{Actor, Behind};
    use tessera_model::health;
    use tessera_model::record::Holder;

    fn line(what: What) -> Event {
        Event::of_node(what, 0)
    }

    fn holder(namespace: &str, pod: &str) -> Holder {
        let container = "main".to_owned();
        Holder { namespace: namespace.to_owned(), pod: pod.to_owned(), container }
    }

    fn id() -> Option<AllocationId> {
        AllocationId::parse("0123456789abcdef0123456789abcdef")
    }

    #[test]
    fn a_process_past_the_quota_is_its_containers_or_that_of_a_pod_without_a_share() {
        let what = What::Bypassed { pid: 7, bytes: 1 << 30 };
        let stranger = Event { holder: Some(holder("team", "chat")), ..line(what).on_gpu("GPU-1") };
        let sent = words(&stranger).unwrap();
        let text = "process 7 uses 1 GiB of GPU-1, which is shared, and has no share of it. ";
        assert!(sent.message.starts_with(text), "{}", sent.message);
        let sent = words(&Event { id: id(), ..stranger }).unwrap();
        let text = "process 7 uses 1 GiB of GPU-1 past Tessera's library; ";
        assert!(sent.message.starts_with(text), "{}", sent.message);
    }

    /// Every line that may be, in all the ways in which it may name somebody.
    fn lines_that_name_neighbours() -> Vec<Event> {
        let theirs = || Some(holder("theirs", "train"));
        let id_of = || "theirs".to_owned();
        let mut lines = Vec::new();
        for (what, id) in What::examples().into_iter().flat_map(|w| [(w.clone(), None), (w, id())])
        {
            let what = match what {
                What::Delayed { waited_ms, within_ms, .. } => {
                    let behind = Behind::Allocation { id: id_of(), holder: theirs() };
                    What::Delayed { waited_ms, within_ms, behind }
                }
                what => what,
            };
            // What the driver says of a GPU names no pod.
            let reason = match what {
                What::Health { .. } => "XID 79",
                _ => "process 1 (theirs) of pod theirs/train uses 1 GiB",
            };
            let command = "cordon 0 --reason \"for theirs/train\"".to_owned();
            let (login_uid, login, user) = (None, None, Some("root".to_owned()));
            let by = Actor::Admin { uid: 0, pid: 7, login_uid, user, login, command };
            let line = Event { id, ..line(what).on_gpu("GPU-1").because(reason).by(by) };
            lines.push(Event { holder: Some(holder("team", "chat")), ..line });
        }
        lines
    }

    #[test]
    fn no_event_names_a_neighbour_and_every_warning_says_what_to_do() {
        for line in lines_that_name_neighbours() {
            let Some(sent) = words(&line) else { continue };
            assert!(!sent.message.contains("theirs"), "{:?}: {}", line.what, sent.message);
            let is_persons = matches!(
                line.what,
                What::QuotaSet { .. } | What::QuotaReset { .. } | What::Cordoned | What::Uncordoned
            );
            assert_eq!(sent.message.contains(", by root"), is_persons, "{}", sent.message);
            let sentences = sent.message.split(". ").count();
            assert!(!sent.warning || sentences >= 2, "{:?}: {}", line.what, sent.message);
            let hint = "`kubectl tessera explain chat -n team` has more";
            let is_stranger = matches!(line.what, What::Bypassed { .. }) && line.id.is_none();
            assert!(
                !sent.warning || is_stranger || sent.message.ends_with(hint),
                "{}",
                sent.message
            );
            assert!(sent.message.len() < LONGEST, "{}", sent.message);
        }
    }

    #[test]
    fn a_sick_gpu_is_reported_when_it_falls_ill_and_when_it_is_well() {
        let health = |from, to| words(&line(What::Health { from, to }).on_gpu("GPU-1"));
        use health::State::{Healthy, Recovering, Suspect, Unhealthy};
        assert_eq!(health(Suspect, Unhealthy).unwrap().reason, "GPUUnhealthy");
        assert_eq!(health(Recovering, Healthy).unwrap().reason, "GPUHealthy");
        assert_eq!(health(Healthy, Suspect), None);
        assert_eq!(words(&line(What::Started)), None);
        assert_eq!(words(&line(What::Cordoned).on_gpu("GPU-1")).unwrap().reason, "GPUCordoned");
    }

    #[test]
    fn what_is_too_long_for_an_event_is_cut() {
        let line = Event { holder: Some(holder("team", "chat")), ..line(What::Cordoned) };
        let what = What::Tampered { what: "ä".repeat(LONGEST) };
        let sent = words(&Event { what, ..line.clone() }).unwrap();
        assert!(sent.message.len() <= LONGEST && sent.message.ends_with("has more"), "with advice");
        let sent = words(&line.on_gpu(&"ä".repeat(LONGEST))).unwrap();
        assert!(sent.message.len() <= LONGEST && sent.message.ends_with("has more"));
    }
}
