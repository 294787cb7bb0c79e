//! What a process keeps for its gate.

use super::capture::Captures;
use super::streams::Streams;
use crate::spin::Spin;
use core::sync::atomic::AtomicU32;

/// See the module.
#[derive(Debug)]
pub struct Local {
    pub(super) streams: Spin<Streams>,
    pub(super) captures: Captures,
    /// Contexts being destroyed.
    pub(super) going: AtomicU32,
}

impl Local {
    pub(crate) const fn new() -> Self {
        Self { streams: Spin::new(Streams {}), captures: Captures::new(), going: AtomicU32::new(0) }
    }
}
