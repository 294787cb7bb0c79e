//! What was asked and answered since the start, for metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Codes of answers that are counted from 0, so that a rise from none to one is seen.
const COMMON: [u16; 6] = [200, 400, 401, 403, 404, 503];

/// A question to the API server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Review {
    Token,
    Access,
}

/// The same as a label's value.
const REVIEWS: [&str; 2] = ["token", "access"];
/// How it was answered, likewise: allowed, denied, or not at all.
const OUTCOMES: [&str; 3] = ["ok", "refused", "unreachable"];

/// Counters of one server.
#[derive(Debug)]
pub struct Counts {
    is_expected: AtomicBool,
    is_listening: AtomicBool,
    requests: Mutex<BTreeMap<u16, u64>>,
    is_reviewed: AtomicBool,
    reviews: [[AtomicU64; OUTCOMES.len()]; REVIEWS.len()],
}

impl Default for Counts {
    fn default() -> Self {
        Counts {
            is_expected: AtomicBool::default(),
            is_listening: AtomicBool::default(),
            requests: Mutex::new(COMMON.map(|code| (code, 0)).into()),
            is_reviewed: AtomicBool::default(),
            reviews: Default::default(),
        }
    }
}

impl Counts {
    /// TCP is to be served.
    pub fn expect_listener(&self) {
        self.is_expected.store(true, Ordering::Relaxed);
    }

    /// An API server is to be asked.
    pub fn expect_reviews(&self) {
        self.is_reviewed.store(true, Ordering::Relaxed);
    }

    /// TCP is served.
    pub(crate) fn listens(&self) {
        self.expect_listener();
        self.is_listening.store(true, Ordering::Relaxed);
    }

    /// Whether TCP is served; `None` where it is not to be.
    pub fn listening(&self) -> Option<bool> {
        let is_expected = self.is_expected.load(Ordering::Relaxed);
        is_expected.then(|| self.is_listening.load(Ordering::Relaxed))
    }

    /// An answer over TCP.
    pub(crate) fn answered(&self, code: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry(code).or_default() += 1;
    }

    /// Answers over TCP by code.
    pub fn requests(&self) -> Vec<(u16, u64)> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.iter().map(|(code, count)| (*code, *count)).collect()
    }

    /// Questions to the API server by kind and outcome; none where it is never asked.
    pub fn reviews(&self) -> Vec<(&'static str, &'static str, u64)> {
        if !self.is_reviewed.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let of = |(review, counts): (&'static str, &[AtomicU64; OUTCOMES.len()])| {
            let count = |(outcome, count): (&'static str, &AtomicU64)| {
                (review, outcome, count.load(Ordering::Relaxed))
            };
            OUTCOMES.into_iter().zip(counts).map(count).collect::<Vec<_>>()
        };
        REVIEWS.into_iter().zip(&self.reviews).flat_map(of).collect()
    }

    /// A question to the API server. One that is given up counts as none: any client may hang up at any time.
    pub(crate) fn reviewed<E>(&self, review: Review, answer: Result<bool, E>) {
        let outcome = match answer {
            Ok(true) => 0,
            Ok(false) => 1,
            Err(_) => 2,
        };
        self.reviews[review as usize][outcome].fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_codes_are_counted_from_nothing() {
        let counts = Counts::default();
        assert!(counts.requests().contains(&(503, 0)));
        counts.answered(503);
        counts.answered(418);
        assert!(counts.requests().contains(&(503, 1)) && counts.requests().contains(&(418, 1)));
        assert_eq!(counts.listening(), None);
        counts.expect_listener();
        assert_eq!(counts.listening(), Some(false));
        counts.listens();
        assert_eq!(counts.listening(), Some(true));
    }
}
