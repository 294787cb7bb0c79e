//! What was measured of this node's GPUs, kept for the next start.

/// What a bare context takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredContext {
    /// The driver's version, as NVML prints it.
    pub driver: String,
    /// The GPU's product name.
    pub product: String,
    /// Bytes of device memory.
    pub bytes: u64,
}

impl MeasuredContext {
    /// Its entry's name in [`super::schema::META`].
    pub(super) fn key(&self) -> String {
        format!("{}{}", Self::prefix(&self.driver), self.product)
    }

    /// What the names of all entries of one driver begin with.
    pub(super) fn prefix(driver: &str) -> String {
        format!("context/{driver}/")
    }
}
