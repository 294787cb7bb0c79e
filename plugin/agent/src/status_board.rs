//! What the agent's jobs publish for views: conditions by topic, and the source of knowledge about other
//! plugins. One writer per topic; readers copy what they show.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tessera_system::locks::lock;

/// Most sentences that are kept.
const MOST_NOTES: usize = 64;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct StatusBoard {
    /// What the plugin waits for, or lacks, by topic.
    conditions: Mutex<BTreeMap<&'static str, String>>,
    /// What went wrong since the start, a sentence each.
    notes: Mutex<Vec<String>>,
    /// How it is found out what other plugins sell.
    others_seen_by: Mutex<&'static str>,
}

impl StatusBoard {
    /// Says what is amiss about a topic, or with `None` that nothing is. True if that is news.
    pub fn set_condition(&self, topic: &'static str, text: Option<String>) -> bool {
        let mut conditions = lock(&self.conditions);
        let before = match &text {
            Some(text) => conditions.insert(topic, text.clone()),
            None => conditions.remove(topic),
        };
        before != text
    }

    /// What is amiss, in the order of topics.
    #[must_use]
    pub fn conditions(&self) -> Vec<String> {
        lock(&self.conditions).values().cloned().collect()
    }

    /// Adds a sentence to what `status` warns of, once.
    pub fn note(&self, note: String) {
        let mut notes = lock(&self.notes);
        if !notes.contains(&note) && notes.len() < MOST_NOTES {
            notes.push(note);
        }
    }

    /// What needs somebody's attention since the start.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        lock(&self.notes).clone()
    }

    /// Drops what was noted about something that is no more, by its name.
    pub(crate) fn forget(&self, name: &str) {
        lock(&self.notes).retain(|note| !note.contains(name));
    }

    /// Says how it is found out what other plugins sell.
    pub fn set_others_seen_by(&self, how: &'static str) {
        *lock(&self.others_seen_by) = how;
    }

    /// How it is found out what other plugins sell; empty where nobody looks.
    #[must_use]
    pub fn others_seen_by(&self) -> &'static str {
        *lock(&self.others_seen_by)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_news_once_and_goes_when_it_is_over() {
        let board = StatusBoard::default();
        assert!(board.set_condition("gpus", Some("none".into())));
        assert!(!board.set_condition("gpus", Some("none".into())));
        assert_eq!(board.conditions(), ["none"]);
        assert!(board.set_condition("gpus", None));
        assert!(!board.set_condition("gpus", None));
        assert!(board.conditions().is_empty());
    }
}
