//! What was asked and answered since the start, for metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::authorise::{Review, Reviews, User};

/// Codes of answers that are counted from 0, so that a rise from none to one is seen.
const COMMON: [u16; 6] = [200, 400, 401, 403, 404, 503];

/// A question to the API server, as a label's value.
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

    fn reviewed<E>(&self, review: usize, answer: &Result<bool, E>) {
        let outcome = match answer {
            Ok(true) => 0,
            Ok(false) => 1,
            Err(_) => 2,
        };
        self.reviews[review][outcome].fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts what is asked of an API server.
#[derive(Debug)]
pub struct CountedReviews<R> {
    reviews: R,
    counts: Arc<Counts>,
}

impl<R: Reviews> CountedReviews<R> {
    /// Of these reviews, in these counters.
    pub fn new(reviews: R, counts: Arc<Counts>) -> Self {
        counts.expect_reviews();
        CountedReviews { reviews, counts }
    }
}

// What is given up counts as nothing: any client may hang up at any time.
impl<R: Reviews> Reviews for CountedReviews<R> {
    fn user<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
        Box::pin(async move {
            let user = self.reviews.user(token).await;
            self.counts.reviewed(0, &user.as_ref().map(Option::is_some));
            user
        })
    }

    fn may_get_pods<'a>(&'a self, user: &'a User, namespace: &'a str) -> Review<'a, bool> {
        Box::pin(async move {
            let may = self.reviews.may_get_pods(user, namespace).await;
            self.counts.reviewed(1, &may);
            may
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authorise::ReviewError;

    /// Knows one user, who may read one namespace; another token is never answered.
    struct OneUser;

    impl Reviews for OneUser {
        fn user<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
            Box::pin(async move {
                match token {
                    "good" => Ok(Some(User::default())),
                    "bad" => Ok(None),
                    "slow" => std::future::pending().await,
                    _ => Err(ReviewError("away".to_owned())),
                }
            })
        }

        fn may_get_pods<'a>(&'a self, _: &'a User, namespace: &'a str) -> Review<'a, bool> {
            Box::pin(async move { Ok(namespace == "team") })
        }
    }

    #[tokio::test]
    async fn every_answered_question_has_one_outcome_and_hanging_up_is_none() {
        let counts = Arc::new(Counts::default());
        assert_eq!(counts.reviews(), [], "nobody is asked");
        let reviews = CountedReviews::new(OneUser, Arc::clone(&counts));
        assert_eq!(counts.reviews().len(), 6, "each is there from the start");
        for token in ["good", "bad", "bad", "away"] {
            let _ = reviews.user(token).await;
        }
        let short = std::time::Duration::from_millis(1);
        assert!(tokio::time::timeout(short, reviews.user("slow")).await.is_err());
        for namespace in ["team", "theirs"] {
            reviews.may_get_pods(&User::default(), namespace).await.unwrap();
        }
        let seen: Vec<u64> = counts.reviews().into_iter().map(|(_, _, count)| count).collect();
        assert_eq!(seen, [1, 2, 1, 1, 1, 0]);
    }

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
