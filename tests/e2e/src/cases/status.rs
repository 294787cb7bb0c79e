//! What operators see.

use anyhow::Result;

use crate::suite::Suite;

pub fn status_shows_pods_quota_and_use(_suite: &Suite<'_>) -> Result<()> {
    anyhow::bail!("not written")
}
