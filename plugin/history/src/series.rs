//! What a series is of.

/// A tenant on one GPU, or a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The allocation; empty for a GPU's own.
    pub id: String,
    /// Which Allocate of this id; 0 for a GPU's own.
    pub generation: u64,
    pub gpu_uuid: String,
}

/// A series and its names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// What it is of.
    pub key: Key,
    /// The pod's namespace; empty where kubelet never named it.
    pub namespace: String,
    pub pod: String,
    pub container: String,
}

impl Series {
    /// It is a GPU's own.
    pub fn is_gpu(&self) -> bool {
        self.key.id.is_empty()
    }
}
