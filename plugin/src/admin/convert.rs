//! What the plugin knows, as the admin service's messages have it.

use tessera_kubelet::admin::{ComputePolicy, Holder};

use crate::config::Compute;
use crate::ledger;

impl From<Compute> for ComputePolicy {
    fn from(compute: Compute) -> Self {
        match compute {
            Compute::Burst => ComputePolicy::Burst,
            Compute::Strict => ComputePolicy::Strict,
            Compute::None => ComputePolicy::None,
        }
    }
}

impl From<&ledger::Holder> for Holder {
    fn from(holder: &ledger::Holder) -> Self {
        Holder {
            namespace: holder.namespace.clone(),
            pod: holder.pod.clone(),
            container: holder.container.clone(),
        }
    }
}
