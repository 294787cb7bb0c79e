//! The fleet as it was a moment ago: however many ask, the source is asked once at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_view::fleet::Fleet;
use tokio::sync::Mutex;

use crate::source::{Source, SourceError};

/// See the module.
pub(crate) struct FleetCache {
    source: Arc<dyn Source>,
    kept: Mutex<Option<(Instant, Arc<Fleet>)>>,
}

impl FleetCache {
    pub fn new(source: Arc<dyn Source>) -> Self {
        FleetCache { source, kept: Mutex::default() }
    }

    /// Not older than `age`.
    ///
    /// # Errors
    /// As the source says.
    pub async fn get(&self, age: Duration) -> Result<Arc<Fleet>, SourceError> {
        let mut kept = self.kept.lock().await;
        if let Some((at, fleet)) = &*kept
            && at.elapsed() < age
        {
            return Ok(Arc::clone(fleet));
        }
        // What is old goes first: a fleet may be large.
        *kept = None;
        let at = Instant::now();
        let fleet = Arc::new(self.source.fleet().await?);
        *kept = Some((at, Arc::clone(&fleet)));
        Ok(fleet)
    }
}
