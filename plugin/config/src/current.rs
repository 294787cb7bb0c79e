//! The configuration in force: shared by all readers, replaced as a whole.

use std::sync::Arc;

use tokio::sync::watch;

use super::Config;

/// See the module's text. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Current(Arc<watch::Sender<Arc<Config>>>);

impl Current {
    /// A caller that needs several related values takes them from one answer.
    pub fn get(&self) -> Arc<Config> {
        Arc::clone(&self.0.borrow())
    }

    /// Replaces the configuration. The caller sees to it that what was made of the one before
    /// follows.
    pub fn set(&self, config: Arc<Config>) {
        self.0.send_replace(config);
    }

    /// Hears of each that takes its place, the newest only.
    pub fn changes(&self) -> watch::Receiver<Arc<Config>> {
        self.0.subscribe()
    }
}

impl From<Config> for Current {
    fn from(config: Config) -> Self {
        Current(Arc::new(watch::Sender::new(Arc::new(config))))
    }
}
