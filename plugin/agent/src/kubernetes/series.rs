//! What repeats is one event with a count, as `kubectl describe` shows it ("x7 over 3m"). Pure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::words::Words;

/// How long an event goes on being counted; after that another is made. Kubernetes forgets an event after an
/// hour (`--event-ttl`).
const LASTS: Duration = Duration::from_secs(1800);
/// Least time between two updates of one event.
pub const UPDATE: Duration = Duration::from_secs(30);
/// Events that are remembered, or wait.
pub const REMEMBERED: usize = 256;

/// On which pod's container.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's UID, without which `kubectl describe pod` does not show the event.
    pub uid: Option<String>,
    /// The container's name; empty where it concerns the whole pod.
    pub container: String,
}

/// One event on a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Series {
    /// The object's name, once it exists.
    pub name: Option<String>,
    /// On whom.
    pub subject: Subject,
    /// What.
    pub words: Words,
    /// How often.
    pub count: u64,
    /// When first and last, Unix milliseconds.
    pub first_unix_ms: i64,
    /// See above.
    pub last_unix_ms: i64,
    began: Instant,
    sent: Option<(Instant, u64)>,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Events {
    list: VecDeque<Series>,
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
            // Those that were told first.
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
    #[must_use]
    pub fn due(&self, now: Instant) -> Option<usize> {
        self.list.iter().position(|series| series.due(now))
    }

    /// When something will be due, if anything waits.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        let waiting = self.list.iter().filter(|series| series.waits());
        waiting.map(|series| series.sent.map_or(series.began, |(at, _)| at + UPDATE)).min()
    }

    /// One of them, by its place.
    #[must_use]
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

    /// The API server does not know its name any more: it is made anew.
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

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.list.iter().filter(|series| series.waits()).count()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(pod: &str) -> Subject {
        let (namespace, container) = ("team".into(), "main".into());
        Subject { namespace, pod: pod.into(), uid: None, container }
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
    fn pods_and_reasons_have_events_of_their_own() {
        let mut events = Events::default();
        let now = Instant::now();
        events.add(subject("a"), words("R"), 1, 1, now);
        events.add(subject("a"), words("S"), 1, 1, now);
        events.add(subject("b"), words("R"), 1, 1, now);
        assert_eq!(events.waiting(), 3);
        events.sent(0, "x".into(), now);
        events.lost(0);
        assert_eq!(events.waiting(), 3);
        events.give_up(0);
        assert_eq!(events.waiting(), 2);
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
            "what was told goes first"
        );
    }
}
