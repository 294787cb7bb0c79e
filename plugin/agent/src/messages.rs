//! What the agent knows, as the admin service's messages have it.

use tessera_kubelet_api::admin;
use tessera_model::origin::ClaimShare;
use tessera_model::record::Holder;
use tessera_model::sharing::Compute;

/// What a compute share means.
pub fn compute_policy(compute: Compute) -> admin::ComputePolicy {
    match compute {
        Compute::Burst => admin::ComputePolicy::Burst,
        Compute::Strict => admin::ComputePolicy::Strict,
        Compute::None => admin::ComputePolicy::None,
    }
}

/// What an allocation is of a claim.
pub fn claim(share: &ClaimShare) -> admin::Claim {
    admin::Claim {
        namespace: share.namespace.clone(),
        name: share.name.clone(),
        uid: share.uid.clone(),
        request: share.request.clone(),
        pool: share.pool.clone(),
        devices: share.results.iter().map(|result| result.device.clone()).collect(),
        share_ids: share
            .results
            .iter()
            .map(|result| result.share_id.clone().unwrap_or_default())
            .collect(),
    }
}

/// The container that holds an allocation.
pub fn holder(holder: &Holder) -> admin::Holder {
    admin::Holder {
        namespace: holder.namespace.clone(),
        pod: holder.pod.clone(),
        container: holder.container.clone(),
    }
}
