//! What was asked and answered since the start, for metrics.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tessera_system::locks::lock;

/// Codes of answers that are counted from 0, so that a rise from none to one is seen.
const COMMON: [u16; 6] = [200, 400, 401, 403, 404, 503];

/// Questions to the API server, as a label has them.
pub(crate) const TOKEN: &str = "token";
pub(crate) const ACCESS: &str = "access";
/// How they are answered, likewise: allowed, denied, or not at all.
const OUTCOMES: [&str; 3] = ["ok", "refused", "unreachable"];

/// Counters of one server.
#[derive(Debug)]
pub struct Counts {
    listening: Mutex<Option<bool>>,
    requests: Mutex<BTreeMap<u16, u64>>,
    reviews: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
}

impl Default for Counts {
    fn default() -> Self {
        Counts {
            listening: Mutex::default(),
            requests: Mutex::new(COMMON.map(|code| (code, 0)).into()),
            reviews: Mutex::default(),
        }
    }
}

impl Counts {
    /// TCP is to be served.
    pub fn expect_listener(&self) {
        lock(&self.listening).get_or_insert(false);
    }

    /// An API server is to be asked.
    pub fn expect_reviews(&self) {
        let all = [TOKEN, ACCESS].into_iter().flat_map(|review| OUTCOMES.map(|how| (review, how)));
        lock(&self.reviews).extend(all.map(|one| (one, 0)));
    }

    /// TCP is served.
    pub(crate) fn listens(&self) {
        *lock(&self.listening) = Some(true);
    }

    /// Whether TCP is served; `None` where it is not to be.
    pub fn listening(&self) -> Option<bool> {
        *lock(&self.listening)
    }

    /// An answer over TCP.
    pub(crate) fn answered(&self, code: u16) {
        *lock(&self.requests).entry(code).or_default() += 1;
    }

    /// Answers over TCP by code.
    pub fn requests(&self) -> Vec<(u16, u64)> {
        lock(&self.requests).iter().map(|(code, count)| (*code, *count)).collect()
    }

    /// Questions to the API server by kind and outcome; none where it is never asked.
    pub fn reviews(&self) -> Vec<(&'static str, &'static str, u64)> {
        lock(&self.reviews).iter().map(|((review, how), count)| (*review, *how, *count)).collect()
    }

    /// A question to the API server. One that is given up counts as none: any client may hang up at any time.
    pub(crate) fn reviewed<E>(&self, review: &'static str, answer: Result<bool, E>) {
        let [ok, refused, unreachable] = OUTCOMES;
        let how = answer.map_or(unreachable, |is_ok| if is_ok { ok } else { refused });
        *lock(&self.reviews).entry((review, how)).or_default() += 1;
    }
}
