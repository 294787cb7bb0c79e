//! Waits that end, however busy the machine is.

use std::time::Duration;

use crate::PATIENCE;

/// Fails the test if `future` hangs.
pub async fn bounded<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("it hangs")
}

/// Looks again and again until `look` finds something.
pub async fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    bounded(async {
        loop {
            if let Some(found) = look() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}
