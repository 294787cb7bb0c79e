//! What is known of each node: the last answer, and since when there is none. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use tessera_model::time_format;
use tessera_view::fleet::Entry;
use tessera_view::node::{Node, Warning};

use crate::ask::{AskError, Why};
use crate::places::Place;

/// Clocks that differ by more than this are spoken of.
const SKEW: Duration = Duration::from_secs(60);
/// The longest pause after failures.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// All nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entries {
    nodes: BTreeMap<String, Known>,
    /// Nodes that are being asked.
    asked: BTreeSet<String>,
}

#[derive(Clone, Debug, Default)]
struct Known {
    entry: Entry,
    /// Why it did not answer the last time.
    error: Option<AskError>,
    /// Failures since the last answer.
    failures: u32,
    /// Not asked before.
    not_before: Option<Instant>,
}

impl Entries {
    /// These are all nodes now. What is known of others is forgotten.
    pub fn set_places(&mut self, places: &[Place]) {
        let names: BTreeSet<&str> = places.iter().map(|place| place.node.as_str()).collect();
        self.nodes.retain(|name, _| names.contains(name.as_str()));
        for place in places {
            let known = self.nodes.entry(place.node.clone()).or_default();
            known.entry.node.clone_from(&place.node);
        }
    }

    /// Begins to ask a node; false where it is being asked, or has failed so often that it is to wait. Without
    /// `patience` it does not wait.
    pub fn begin(&mut self, node: &str, now: Instant, patience: bool) -> bool {
        let not_before = self.nodes.get(node).and_then(|known| known.not_before);
        let waits = not_before.is_some_and(|at| at > now);
        !(patience && waits) && self.asked.insert(node.to_owned())
    }

    /// Takes a node's answer, which came now, by both clocks.
    pub fn take(
        &mut self,
        node: &str,
        answer: Result<Node, AskError>,
        now_unix_ms: i64,
        now: Instant,
    ) {
        self.asked.remove(node);
        // A node that is no more.
        let Some(known) = self.nodes.get_mut(node) else { return };
        match answer {
            Ok(mut view) => {
                view.warnings.extend(skew(view.at_unix_ms, now_unix_ms));
                known.entry.answers = true;
                known.entry.answered_unix_ms = now_unix_ms;
                known.entry.error.clear();
                known.error = None;
                known.entry.view = Some(view);
                (known.failures, known.not_before) = (0, None);
            }
            Err(error) => {
                known.entry.answers = false;
                known.entry.error = error.to_string();
                known.error = Some(error);
                known.failures = known.failures.saturating_add(1);
                let pause = Duration::from_secs(1 << known.failures.min(5)).min(LONGEST_PAUSE);
                known.not_before = Some(now + pause);
            }
        }
    }

    /// Nothing can be asked at all, and why. What was known stays.
    pub fn fail(&mut self, error: &str) {
        for known in self.nodes.values_mut() {
            known.entry.answers = false;
            error.clone_into(&mut known.entry.error);
        }
    }

    /// Nodes that were asked and did not answer a moment ago, with the reason. Later than that, one may answer again.
    pub fn silent(&self, now: Instant) -> BTreeMap<String, String> {
        let is_recent = |known: &Known| known.not_before.is_some_and(|at| now < at + LONGEST_PAUSE);
        let silent = self.nodes.iter().filter_map(|(node, known)| {
            let error = known.error.as_ref().filter(|error| error.why == Why::Silent)?;
            is_recent(known).then(|| (node.clone(), error.text.clone()))
        });
        silent.collect()
    }

    /// Whether each node answered the last time, and why not.
    pub fn answers(&self) -> Vec<(String, Result<(), AskError>)> {
        let asked = self.nodes.iter().filter(|(_, one)| one.entry.answers || one.error.is_some());
        let answer = |known: &Known| match &known.error {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        };
        asked.map(|(node, known)| (node.clone(), answer(known))).collect()
    }

    /// By name.
    pub fn all(&self) -> Vec<Entry> {
        self.nodes.values().map(|known| known.entry.clone()).collect()
    }
}

/// That a node's clock is ahead of ours, or behind, by more than the way of an answer explains.
fn skew(at_unix_ms: i64, now_unix_ms: i64) -> Option<Warning> {
    let by = at_unix_ms.abs_diff(now_unix_ms);
    if at_unix_ms == 0 || u128::from(by) <= SKEW.as_millis() {
        return None;
    }
    let by = time_format::ago(0, i64::try_from(by).unwrap_or(i64::MAX));
    let way = if at_unix_ms > now_unix_ms { "ahead of" } else { "behind" };
    let text = format!(
        "the node's clock is {by} {way} the asker's: instants of this node are by its own clock"
    );
    Some(Warning { text, ..Warning::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn entries() -> Entries {
        let place = |node: &str| Place { node: node.into(), ..Place::default() };
        let mut entries = Entries::default();
        entries.set_places(&[place("a"), place("b")]);
        entries
    }

    #[test]
    fn a_node_that_falls_silent_keeps_its_last_view_and_the_others_go_on() {
        let mut all = entries();
        let view = Node { node: "a".into(), at_unix_ms: 1000, ..Node::default() };
        let now = Instant::now();
        all.take("a", Ok(view.clone()), 1000, now);
        all.take("b", Ok(Node::default()), 1000, now);
        all.take("a", Err(Why::Silent.says("gone".into())), 3000, now);
        let now = all.all();
        assert_eq!(
            (now[0].answers, now[0].answered_unix_ms, now[0].error.as_str()),
            (false, 1000, "gone")
        );
        assert_eq!(now[0].view, Some(view));
        assert!(now[1].answers && now[1].error.is_empty());
        all.fail("no API server");
        assert!(all.all().iter().all(|entry| !entry.answers && entry.view.is_some()));
    }

    #[test]
    fn a_node_that_fails_is_asked_ever_less_often_and_at_once_by_a_person() {
        let mut all = entries();
        let mut at = Instant::now();
        let mut waits = Vec::new();
        for _ in 0..7 {
            assert!(all.begin("a", at, false));
            assert!(!all.begin("a", at, false), "it is being asked");
            all.take("a", Err(Why::Silent.says("stalls".into())), 0, at);
            let begun = at;
            while !all.begin("a", at, true) {
                at += SECOND;
            }
            waits.push((at - begun).as_secs());
            all.take("a", Err(Why::Silent.says("stalls".into())), 0, begun);
            at = begun;
        }
        assert!(waits.windows(2).all(|pair| pair[0] <= pair[1]), "{waits:?}");
        assert_eq!(waits.last(), Some(&30));
    }

    #[test]
    fn only_what_did_not_answer_a_moment_ago_is_silent() {
        let mut all = entries();
        let now = Instant::now();
        assert!(all.silent(now).is_empty(), "not asked yet");
        all.take("a", Err(Why::Silent.says("stalls".into())), 0, now);
        all.take("b", Err(Why::NoRights.says("no".into())), 0, now);
        assert_eq!(
            all.silent(now).into_iter().collect::<Vec<_>>(),
            [("a".into(), "stalls".into())]
        );
        assert!(!all.silent(now + 29 * SECOND).is_empty());
        assert!(all.silent(now + 60 * SECOND).is_empty(), "long ago");
        all.take("a", Ok(Node::default()), 0, now);
        assert!(all.silent(now).is_empty(), "it answers again");
    }

    #[test]
    fn clocks_that_differ_by_hours_are_said() {
        let (hours, mut all) = (5 * 3_600_000, entries());
        // A second or a millisecond more makes no other words.
        for (ahead, says) in [
            (hours, "5h 0m ahead of"),
            (hours - 1_001, "4h 59m ahead of"),
            (hours + 999, "5h 0m ahead of"),
            (90_000, "1m 30s ahead of"),
            (-hours, "5h 0m behind"),
            (900, ""),
        ] {
            let now = 1_800_000_000_000;
            let view = Node { at_unix_ms: now + ahead, ..Node::default() };
            all.take("a", Ok(view), now, Instant::now());
            let entry = all.all().remove(0);
            // When it answered is by our clock.
            assert_eq!(entry.answered_unix_ms, now);
            let warnings = entry.view.unwrap().warnings;
            let said = warnings.first().map_or("", |warning| &warning.text);
            assert!(said.contains(says) && said.is_empty() == says.is_empty(), "{said}");
        }
    }
}
