//! What the agent knows, as the admin service's messages have it.

use tessera_kubelet_api::admin;
use tessera_model::record::Holder;
use tessera_model::sharing::Compute;

/// What a compute share means.
#[must_use]
pub fn compute_policy(compute: Compute) -> admin::ComputePolicy {
    match compute {
        Compute::Burst => admin::ComputePolicy::Burst,
        Compute::Strict => admin::ComputePolicy::Strict,
        Compute::None => admin::ComputePolicy::None,
    }
}

/// The container that holds an allocation.
#[must_use]
pub fn holder(holder: &Holder) -> admin::Holder {
    admin::Holder {
        namespace: holder.namespace.clone(),
        pod: holder.pod.clone(),
        container: holder.container.clone(),
    }
}
