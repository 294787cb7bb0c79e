//! Answers of the API server, kept for a while: bounded in number and in time.

use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lru::LruCache;
use tokio::time::Instant;

/// See the module.
#[derive(Debug)]
pub(super) struct Cache<K: Hash + Eq, V> {
    kept: Mutex<LruCache<K, (Instant, V)>>,
    most: usize,
}

impl<K: Hash + Eq, V: Clone> Cache<K, V> {
    /// Of so many at most. What was used longest ago goes first.
    pub fn new(most: usize) -> Self {
        // Memory is taken as it is needed.
        Cache { kept: Mutex::new(LruCache::unbounded()), most }
    }

    /// What is kept, if its time is not over.
    pub fn get(&self, key: &K, now: Instant) -> Option<V> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.get(key) {
            Some((until, value)) if now < *until => Some(value.clone()),
            Some(_) => {
                kept.pop(key);
                None
            }
            None => None,
        }
    }

    /// Keeps it for so long.
    pub fn put(&self, key: K, value: V, now: Instant, time: Duration) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.put(key, (now + time, value));
        while kept.len() > self.most {
            kept.pop_lru();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a model: what is kept was put last under that key, its time is not over, and there are never more
        /// than the bound.
        #[test]
        fn it_keeps_what_was_put_last_no_longer_and_no_more(
            steps in proptest::collection::vec((0u8..20, 0u64..50, 0u64..60, any::<bool>()), 0..200),
        ) {
            let cache = Cache::new(8);
            let start = Instant::now();
            let (mut clock, mut put) = (0, std::collections::HashMap::new());
            for (number, (key, after, time, reads)) in steps.into_iter().enumerate() {
                clock += after;
                let now = start + Duration::from_secs(clock);
                if reads {
                    let got = cache.get(&key, now);
                    if let Some(got) = got {
                        let (value, until) = put[&key];
                        prop_assert_eq!(got, value);
                        prop_assert!(clock < until);
                    }
                } else {
                    cache.put(key, number, now, Duration::from_secs(time));
                    put.insert(key, (number, clock + time));
                    prop_assert!(cache.get(&key, now).is_some() || time == 0, "what is new is there");
                }
                prop_assert!(cache.kept.lock().unwrap().len() <= 8);
            }
        }
    }
}
