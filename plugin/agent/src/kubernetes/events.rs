//! What repeats is one event with a count, as `kubectl describe` shows it ("x7 over 3m"), and the node's requests are
//! limited: a container decides how often something is refused, and must not decide how often the API server is asked. The
//! journal draws a container's lines of one kind together for a minute, and what nobody has seen yet goes first, so that no
//! pod has the limit to itself. What has to wait goes on being counted. Pure.
//!
//! A line of the audit trail is worded as an event on a pod.
//! An owner has rights in one namespace: no other tenant is named. What a line gives as its reason may name neighbours
//! or repeat what a process calls itself, so no reason is repeated but the driver's about a GPU. `tessera explain` has
//! the others for their owners.
//!
//! Reasons are words in CamelCase that people filter by (`kubectl get events --field-selector reason=…`);
//! they stay as they are.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tessera_cluster::events::LONGEST_MESSAGE as LONGEST;
use tessera_model::audit::{Event, What};
use tessera_model::health::State;
use tessera_model::printable;
use tessera_peers::token_bucket::TokenBucket;

/// How long an event goes on being counted; after that another is made. Kubernetes forgets an event after an
/// hour (`--event-ttl`).
const LASTS: Duration = Duration::from_secs(1800);
pub const UPDATE: Duration = Duration::from_secs(30);
pub const REMEMBERED: usize = 256;
/// Requests of the node at once, and how often there may be another.
pub const NODE: (u32, Duration) = (60, Duration::from_secs(1));

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
pub struct Series {
    pub subject: Subject,
    pub words: Words,
    pub count: u64,
    /// When first and last, Unix milliseconds.
    pub first_unix_ms: i64,
    pub last_unix_ms: i64,
    began: Instant,
    pub sent: Option<Sent>,
}

/// An event as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    pub name: String,
    pub at: Instant,
    pub count: u64,
}

#[derive(Debug, Default)]
pub struct Events {
    list: VecDeque<Series>,
    node: Option<TokenBucket>,
    /// The node has had its requests: none before then.
    held_until: Option<Instant>,
}

impl Events {
    /// Takes something that happened `times` times; how many events had to be given up for it, unsent.
    pub fn add(
        &mut self,
        subject: Subject,
        words: Words,
        times: u64,
        at_unix_ms: i64,
        now: Instant,
    ) -> u64 {
        self.list.retain(|series| series.waits() || now.duration_since(series.began) < LASTS);
        let is_same = |s: &&mut Series| {
            s.subject == subject
                && s.words.reason == words.reason
                && now.duration_since(s.began) < LASTS
        };
        if let Some(series) = self.list.iter_mut().find(is_same) {
            series.count = series.count.saturating_add(times);
            series.last_unix_ms = at_unix_ms;
            series.words = words;
            return 0;
        }
        let mut given_up = 0;
        while self.list.len() >= REMEMBERED {
            // Those already sent go first.
            let at = self.list.iter().position(|series| !series.waits()).unwrap_or(0);
            given_up += u64::from(self.list.remove(at).is_some_and(|series| series.waits()));
        }
        self.list.push_back(Series {
            subject,
            words,
            count: times,
            first_unix_ms: at_unix_ms,
            last_unix_ms: at_unix_ms,
            began: now,
            sent: None,
        });
        given_up
    }

    /// The next to send: new ones at once, counts now and then.
    pub fn due(&self, now: Instant) -> Option<usize> {
        self.list.iter().position(|series| series.due(now))
    }

    /// As [`Events::due`], and counts the request that follows. `None` also where the node has had its requests. What
    /// nobody has seen yet goes first, then what was sent longest ago: none starves.
    pub fn take_due(&mut self, now: Instant) -> Option<usize> {
        let due = (0..self.list.len()).filter(|at| self.list[*at].due(now));
        let first = due.min_by_key(|at| self.list[*at].sent.as_ref().map(|sent| sent.at))?;
        let (size, interval) = NODE;
        let node = self.node.get_or_insert_with(|| TokenBucket::every(size, interval, now));
        match node.take(now) {
            Ok(()) => Some(first),
            Err(wait) => {
                self.held_until = Some(now + wait);
                None
            }
        }
    }

    pub fn next(&self) -> Option<Instant> {
        let waiting = self.list.iter().filter(|series| series.waits());
        let at =
            |series: &Series| series.sent.as_ref().map_or(series.began, |sent| sent.at + UPDATE);
        let next = waiting.map(at).min()?;
        Some(self.held_until.map_or(next, |held| next.max(held)))
    }

    pub fn get(&self, at: usize) -> Option<&Series> {
        self.list.get(at)
    }

    pub fn sent(&mut self, at: usize, name: String, now: Instant) {
        if let Some(series) = self.list.get_mut(at) {
            series.sent = Some(Sent { name, at: now, count: series.count });
        }
    }

    /// The API server does not know its name any more: it is made again.
    pub fn lost(&mut self, at: usize) {
        if let Some(series) = self.list.get_mut(at) {
            series.sent = None;
        }
    }

    /// The API server will not have it, however often it is asked.
    pub fn give_up(&mut self, at: usize) {
        self.list.remove(at);
    }
}

impl Series {
    fn waits(&self) -> bool {
        self.sent.as_ref().is_none_or(|sent| sent.count < self.count)
    }

    fn due(&self, now: Instant) -> bool {
        self.waits() && self.sent.as_ref().is_none_or(|sent| now.duration_since(sent.at) >= UPDATE)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    pub reason: &'static str,
    /// `Warning`, or else `Normal`.
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
    use std::collections::BTreeMap;

    use super::*;

    impl Events {
        fn waiting(&self) -> usize {
            self.list.iter().filter(|series| series.waits()).count()
        }
    }

    fn subject(pod: &str) -> Subject {
        let (namespace, container) = ("team".into(), "main".into());
        Subject { namespace, pod: pod.into(), uid: None, container, gpu: String::new() }
    }

    fn words(reason: &'static str) -> Words {
        Words { reason, warning: true, message: "m".into() }
    }

    #[test]
    fn what_repeats_is_counted_and_sent_now_and_then() {
        let mut events = Events::default();
        let begin = Instant::now();
        events.add(subject("a"), words("R"), 1, 1, begin);
        assert_eq!(events.due(begin), Some(0));
        events.sent(0, "a.1".into(), begin);
        assert_eq!((events.due(begin), events.next(), events.waiting()), (None, None, 0));
        for _ in 0..9 {
            events.add(subject("a"), words("R"), 2, 7, begin);
        }
        assert_eq!((events.due(begin), events.next()), (None, Some(begin + UPDATE)));
        assert_eq!(events.due(begin + UPDATE), Some(0));
        let series = events.get(0).unwrap();
        assert_eq!((series.count, series.first_unix_ms, series.last_unix_ms), (19, 1, 7));
        assert_eq!(series.sent.as_ref().unwrap().name, "a.1");
        // After a while another event is made of it.
        events.sent(0, "a.1".into(), begin);
        events.add(subject("a"), words("R"), 1, 9, begin + LASTS);
        assert_eq!(events.get(0).unwrap().count, 1);
    }

    #[test]
    fn pods_reasons_and_gpus_have_events_of_their_own() {
        let mut events = Events::default();
        let now = Instant::now();
        events.add(subject("a"), words("R"), 1, 1, now);
        events.add(subject("a"), words("S"), 1, 1, now);
        events.add(subject("b"), words("R"), 1, 1, now);
        for gpu in ["GPU-1", "GPU-2"] {
            events.add(Subject { gpu: gpu.into(), ..subject("c") }, words("R"), 1, 1, now);
        }
        assert_eq!(events.waiting(), 5);
        events.sent(0, "x".into(), now);
        events.lost(0);
        assert_eq!(events.waiting(), 5);
        events.give_up(0);
        assert_eq!(events.waiting(), 4);
    }

    /// Sends all that may be sent for so many seconds, while every second something more happens to each pod.
    fn requests(pods: usize, reasons: &[&'static str], seconds: u64) -> BTreeMap<String, u64> {
        let (mut events, begin) = (Events::default(), Instant::now());
        let mut requests = BTreeMap::new();
        for second in 0..seconds {
            let now = begin + Duration::from_secs(second);
            for pod in 0..pods {
                for reason in reasons {
                    events.add(subject(&pod.to_string()), words(reason), 3, 1, now);
                }
            }
            while let Some(at) = events.take_due(now) {
                *requests.entry(events.get(at).unwrap().subject.pod.clone()).or_default() += 1;
                events.sent(at, "x".into(), now);
            }
        }
        requests
    }

    #[test]
    fn many_pods_that_flood_cost_the_nodes_requests_and_each_is_heard() {
        let requests = requests(60, &["A", "B"], 120);
        let all: u64 = requests.values().sum();
        assert!(all <= u64::from(NODE.0) + 120 / NODE.1.as_secs(), "{all}");
        assert_eq!(requests.len(), 60, "{requests:?}");
    }

    #[test]
    fn what_has_to_wait_is_counted_and_sent_when_it_may() {
        let (mut events, begin) = (Events::default(), Instant::now());
        for n in 0..=NODE.0 {
            let reason: &'static str = Box::leak(format!("R{n}").into_boxed_str());
            events.add(subject("a"), words(reason), 1, 1, begin);
        }
        while let Some(at) = events.take_due(begin) {
            events.sent(at, "x".into(), begin);
        }
        assert_eq!(events.waiting(), 1);
        let next = events.next().unwrap();
        assert!(next > begin && next <= begin + NODE.1);
        events.add(subject("a"), words("R60"), 4, 9, begin);
        assert_eq!(events.take_due(next - Duration::from_millis(1)), None);
        let at = events.take_due(next).expect("its time has come");
        assert_eq!(events.get(at).unwrap().count, 5);
    }

    #[test]
    fn without_an_end_of_pods_there_is_an_end_of_memory() {
        let mut events = Events::default();
        let now = Instant::now();
        let mut dropped = 0;
        for n in 0..3 * REMEMBERED {
            dropped += events.add(subject(&n.to_string()), words("R"), 1, 1, now);
        }
        assert_eq!((events.waiting(), dropped), (REMEMBERED, 2 * REMEMBERED as u64));
        events.sent(0, "x".into(), now);
        assert_eq!(
            events.add(subject("new"), words("R"), 1, 1, now),
            0,
            "what was sent goes first"
        );
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

    fn delayed(waited_ms: u64, within_ms: u64) -> What {
        let (id, holder) = ("x".to_owned(), Some(holder("theirs", "train")));
        What::Delayed { waited_ms, within_ms, behind: Behind::Allocation { id, holder } }
    }

    fn holder(namespace: &str, pod: &str) -> Holder {
        let container = "main".to_owned();
        Holder { namespace: namespace.to_owned(), pod: pod.to_owned(), container }
    }

    #[test]
    fn each_line_that_concerns_a_pod_has_a_reason_of_its_own() {
        let refused =
            What::RefusedMemory { bytes: 5 << 30, charged_bytes: 3 << 30, limit_bytes: 7 << 30 };
        let sent = words(&line(refused)).unwrap();
        assert_eq!((sent.reason, sent.warning), ("GPUMemoryRefused", true));
        let what = "a request for 5 GiB was refused: 3 GiB of 7 GiB device memory were in use. ";
        assert!(sent.message.starts_with(what), "{}", sent.message);
        let delayed = words(&line(delayed(12_340, 60_000))).unwrap();
        let what = "waited 12.3 s in 60.0 s for its part of GPU time. ";
        assert!(delayed.message.starts_with(what), "{}", delayed.message);
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
    fn who_changed_a_quota_is_said_without_the_command() {
        let command = "quota set chat --reason \"room for theirs/train\"".to_owned();
        let user = Some("root".to_owned());
        let by = Actor::Admin { uid: 0, pid: 7, login_uid: None, user, login: None, command };
        for what in [
            What::QuotaSet { before: Vec::new(), after: Vec::new(), forced: false },
            What::QuotaReset { before: Vec::new(), after: Vec::new() },
        ] {
            let sent = words(&line(what).by(by.clone()).because("for theirs")).unwrap();
            assert!(sent.message.ends_with(", by root"), "{}", sent.message);
            assert!(!sent.message.contains("theirs"), "{}", sent.message);
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
