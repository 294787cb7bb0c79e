//! Sees to it that running pods' containers can start again, whenever something of what they start with is touched, and at
//! intervals; see `allocations/mend.rs`.

use std::sync::Arc;
use std::time::Duration;

use tracing::error;

use crate::Agent;
use crate::news::News;

/// How long what has news must rest, and however long it goes on, after how many times that it is looked at.
const DEBOUNCE: Duration = Duration::from_millis(20);
const PATIENCE: u32 = 10;
/// Between two looks at least: whoever makes news without end costs no more than that.
const PAUSE: Duration = Duration::from_millis(100);
/// How often it is looked without news.
const LOOK: Duration = Duration::from_secs(10);

/// Looks until it is dropped.
pub async fn keep(agent: Arc<Agent>) {
    let mut news = News::default();
    loop {
        let (asked, pages) = (Arc::clone(&agent), agent.config().paths.pages.clone());
        // First: what happens during the look is news.
        news.follow(&pages, move || asked.allocations().directories()).await;
        let looking = Arc::clone(&agent);
        let is_mended = match tokio::task::spawn_blocking(move || looking.mend()).await {
            Ok(is_mended) => is_mended,
            Err(error) => {
                error!(%error, "a look at what containers start with");
                false
            }
        };
        tokio::time::sleep(PAUSE).await;
        if is_mended {
            // Directories may be others now.
            continue;
        }
        if tokio::time::timeout(LOOK, news.more()).await.is_ok() {
            let late = tokio::time::Instant::now() + DEBOUNCE * PATIENCE;
            while tokio::time::Instant::now() < late
                && tokio::time::timeout(DEBOUNCE, news.more()).await.is_ok()
            {}
        }
    }
}
