//! Kubelet's calls: DRA v1 and v1beta1, one implementation behind both.

mod v1;
mod v1beta1;

use std::sync::Arc;

use crate::prepare::Preparer;

/// The services of both versions, over one [`Preparer`].
#[derive(Clone, Debug)]
pub struct Calls(Arc<Preparer>);

impl Calls {
    /// Over this preparer.
    pub fn new(preparer: Arc<Preparer>) -> Self {
        Calls(preparer)
    }
}
