//! What kubelet says that a container holds.

/// One container's devices of one resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holding {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The extended resource.
    pub resource_name: String,
    /// Device ids, sorted.
    pub device_ids: Vec<String>,
}
