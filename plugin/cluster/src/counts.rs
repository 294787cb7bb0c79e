//! How many requests there were: for metrics.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::error::{Kind, Verb};

/// Requests of one verb on one kind of object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Requests with an answer that is a success. A watch counts when it begins.
    pub served: u64,
    /// All others.
    pub failed: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counts(Mutex<BTreeMap<(Verb, Kind), Outcomes>>);

impl Counts {
    pub(crate) fn count(&self, verb: Verb, kind: Kind, served: bool) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let outcomes = counts.entry((verb, kind)).or_default();
        match served {
            true => outcomes.served += 1,
            false => outcomes.failed += 1,
        }
    }

    pub(crate) fn all(&self) -> BTreeMap<(Verb, Kind), Outcomes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
