//! Why a claim cannot be prepared. The text reaches the pod's events, so it says what to do.

use tessera_cluster::k8s_openapi::api::resource::v1::{
    DeviceRequestAllocationResult as DeviceResult, ResourceClaim,
};
use tessera_model::sharing::Compute;

use super::parameters::{Looser, ParameterError};
use crate::names;

/// Why a claim cannot be prepared.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Fault {
    /// No such object.
    #[error("it does not exist any more; the pod that used it can only be deleted")]
    Gone,
    /// Another object has its name.
    #[error(
        "it was deleted and made again: the pod was scheduled with another claim of that name (the UID is \
         {found} now); delete the pod, so that it is scheduled with this one"
    )]
    MadeAgain {
        /// The UID of the object of that name.
        found: String,
    },
    /// It is on its way out.
    #[error("it is being deleted and no pod may use it any more; delete the pod")]
    Deleting,
    /// The scheduler has not allocated it.
    #[error(
        "it is not allocated (any more): status.allocation is missing; the pod can run when it is scheduled \
         again"
    )]
    NotAllocated,
    /// Kubelet asked the wrong driver.
    #[error(
        "its allocation has no device of {driver}; the pod can run when it is scheduled again",
        driver = names::DRIVER
    )]
    NothingOfOurs,
    #[error(
        "request {}: device {} is of pool {}, and this node's is {own}; the pod runs on another node than its \
         claim was allocated for: delete the pod",
        .result.request, .result.device, .result.pool
    )]
    OtherPool {
        result: Box<DeviceResult>,
        /// The node's pool.
        own: String,
    },
    #[error(
        "request {}: device {} is not on this node; was the GPU replaced, or does the configuration give it to \
         the device plugin (dra.gpus)? Delete the pod, so that it is scheduled again",
        .result.request, .result.device
    )]
    UnknownDevice { result: Box<DeviceResult> },
    /// The driver is there for what it has prepared.
    #[error(
        "request {}: device {}: DRA is turned off on this node (dra.enabled is false); claims that are prepared go \
         on until they end, and no other is prepared. Delete the pod, so that it is scheduled again",
        .result.request, .result.device
    )]
    TurnedOff { result: Box<DeviceResult> },
    /// The whole GPU was handed out.
    #[error(
        "request {}: device {} was allocated whole: consumedCapacity.{name} is missing, because the cluster \
         does not divide devices: it needs Kubernetes 1.36 (DRAConsumableCapacity); delete the pod, so that it \
         is scheduled again",
        .result.request, .result.device
    )]
    NotDivided { result: Box<DeviceResult>, name: &'static str },
    /// A capacity that makes no sense.
    #[error("request {}: device {}: consumedCapacity.{name} is \"{value}\": {why}", .result.request, .result.device)]
    Capacity {
        result: Box<DeviceResult>,
        name: &'static str,
        /// As it was written.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// Parameters that make no sense.
    #[error(transparent)]
    Parameters(#[from] ParameterError),
    /// Parameters of the claim that would loosen a limit.
    #[error(
        "request {request}: the claim says compute: {}, and {by} says {}: a claim may be as strict or stricter, never \
         looser; write {} in the claim, or leave compute out",
        .asked.name(), .granted.name(), .granted.or_stricter()
    )]
    Looser {
        request: String,
        /// Who grants the limit, and so may loosen it: DeviceClass or node, by name.
        by: String,
        /// What the claim says.
        asked: Compute,
        /// What the grantor says.
        granted: Compute,
    },
}

impl Fault {
    /// Of a device of `claim` whose limit the claim would loosen.
    pub(super) fn looser(claim: &ResourceClaim, result: &DeviceResult, looser: Looser) -> Self {
        let Looser { asked, granted, by_class } = looser;
        let request = &result.request;
        let by = match super::asked(claim, request) {
            _ if !by_class => format!(
                "the configuration of node {} (share.compute, or its layout's)",
                result.pool
            ),
            Some((class, _)) => format!("DeviceClass {class}"),
            None => "its DeviceClass".to_owned(),
        };
        Fault::Looser { request: request.clone(), by, asked, granted }
    }
}
