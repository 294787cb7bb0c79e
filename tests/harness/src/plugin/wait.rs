//! Waits that end, however busy the machine is.

use std::time::Duration;

/// What takes longer hangs, however busy the machine is.
pub const HANGS: Duration = Duration::from_secs(180);

/// Fails the test if `future` hangs.
pub async fn bounded<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(HANGS, future).await.expect("it hangs")
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
