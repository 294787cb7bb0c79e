//! The configuration in force: one for all who look at it, replaced as a whole.

use std::sync::{Arc, PoisonError, RwLock};

use super::Config;

/// See the module's text. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Current(Arc<RwLock<Arc<Config>>>);

impl Current {
    /// Whoever needs several values that belong together takes them from one answer.
    #[must_use]
    pub fn get(&self) -> Arc<Config> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on this one holds. Whoever calls sees to it that what was made of the one before
    /// follows.
    pub fn set(&self, config: Arc<Config>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = config;
    }
}

impl From<Config> for Current {
    fn from(config: Config) -> Self {
        Current(Arc::new(RwLock::new(Arc::new(config))))
    }
}
