//! What repeats is one event with a count, as `kubectl describe` shows it ("x7 over 3m"), and the node's requests are
//! limited: a container decides how often something is refused, and must not decide how often the API server is asked. The
//! journal draws a container's lines of one kind together for a minute, and what nobody has seen yet goes first, so that no
//! pod has the limit to itself. What has to wait goes on being counted. Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tessera_peers::token_bucket::TokenBucket;

use super::words::Words;

/// How long an event goes on being counted; after that another is made. Kubernetes forgets an event after an
/// hour (`--event-ttl`).
const LASTS: Duration = Duration::from_secs(1800);
/// Least time between two updates of one event.
pub const UPDATE: Duration = Duration::from_secs(30);
/// Events that are remembered, or wait.
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
    /// The object's name, once it exists.
    pub name: Option<String>,
    pub subject: Subject,
    pub words: Words,
    pub count: u64,
    /// When first and last, Unix milliseconds.
    pub first_unix_ms: i64,
    pub last_unix_ms: i64,
    began: Instant,
    sent: Option<(Instant, u64)>,
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
            name: None,
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
        let first = due.min_by_key(|at| self.list[*at].sent.map(|(at, _)| at))?;
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

    /// When something will be due, if anything waits.
    pub fn next(&self) -> Option<Instant> {
        let waiting = self.list.iter().filter(|series| series.waits());
        let at = |series: &Series| series.sent.map_or(series.began, |(at, _)| at + UPDATE);
        let next = waiting.map(at).min()?;
        Some(self.held_until.map_or(next, |held| next.max(held)))
    }

    pub fn get(&self, at: usize) -> Option<&Series> {
        self.list.get(at)
    }

    /// The API server has it, by this name.
    pub fn sent(&mut self, at: usize, name: String, now: Instant) {
        if let Some(series) = self.list.get_mut(at) {
            series.name = Some(name);
            series.sent = Some((now, series.count));
        }
    }

    /// The API server does not know its name any more: it is made again.
    pub fn lost(&mut self, at: usize) {
        if let Some(series) = self.list.get_mut(at) {
            series.name = None;
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
        self.sent.is_none_or(|(_, count)| count < self.count)
    }

    fn due(&self, now: Instant) -> bool {
        match self.sent {
            None => true,
            Some((at, count)) => count < self.count && now.duration_since(at) >= UPDATE,
        }
    }
}

/// Least time between two lines of the log.
const SAID_EVERY: Duration = Duration::from_secs(300);

/// Those that no line of the log has counted yet, and when the last line was.
#[derive(Debug, Default)]
pub(super) struct GivenUp {
    unsaid: u64,
    said: Option<Instant>,
}

impl GivenUp {
    /// Counts more of them; gives how many to say now, if there is something to say and it is time.
    pub fn add(&mut self, events: u64, now: Instant) -> Option<u64> {
        self.unsaid = self.unsaid.saturating_add(events);
        let is_time = self.said.is_none_or(|said| now.duration_since(said) >= SAID_EVERY);
        if self.unsaid == 0 || !is_time {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
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
        assert_eq!(series.name.as_deref(), Some("a.1"));
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

    #[test]
    fn a_flood_is_one_line_each_interval_and_every_event_is_counted_once() {
        let (mut given_up, begun) = (GivenUp::default(), Instant::now());
        assert_eq!(given_up.add(0, begun), None);
        let mut said = Vec::new();
        for second in 0..=900 {
            said.extend(given_up.add(7, begun + Duration::from_secs(second)));
        }
        assert_eq!(said, [7, 2100, 2100, 2100]);
        assert_eq!(said.iter().sum::<u64>(), 7 * 901);
    }
}
