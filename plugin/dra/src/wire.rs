//! Kubelet's calls: DRA v1.

use std::sync::Arc;

use tessera_cluster::resource::ClaimRef;
use tessera_kubelet_api::dra::v1::dra_plugin_server::DraPlugin;
use tessera_kubelet_api::dra::v1::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use tonic::{Request, Response, Status};

use crate::prepare::{Prepared, Preparer};

/// The service, over one [`Preparer`].
#[derive(Clone, Debug)]
pub struct Calls(Arc<Preparer>);

impl Calls {
    /// Over this preparer.
    pub fn new(preparer: Arc<Preparer>) -> Self {
        Calls(preparer)
    }
}

#[tonic::async_trait]
impl DraPlugin for Calls {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter().map(reference).collect();
        let outcome = self.0.prepare(claims).await.into_iter();
        let claims = outcome.map(|(uid, prepared)| (uid, answer(prepared))).collect();
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter().map(reference).collect();
        let outcome = self.0.unprepare(claims).await.into_iter();
        let answer = |unprepared: Result<(), String>| NodeUnprepareResourceResponse {
            error: unprepared.err().unwrap_or_default(),
        };
        let claims = outcome.map(|(uid, unprepared)| (uid, answer(unprepared))).collect();
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

fn reference(claim: Claim) -> ClaimRef {
    ClaimRef { namespace: claim.namespace, name: claim.name, uid: claim.uid }
}

fn answer(prepared: Result<Vec<Prepared>, String>) -> NodePrepareResourceResponse {
    match prepared {
        Ok(devices) => NodePrepareResourceResponse {
            devices: devices.into_iter().map(device).collect(),
            error: String::new(),
        },
        Err(error) => NodePrepareResourceResponse { devices: Vec::new(), error },
    }
}

fn device(prepared: Prepared) -> Device {
    Device {
        request_names: vec![prepared.request],
        pool_name: prepared.pool,
        device_name: prepared.device,
        cdi_device_ids: prepared.cdi_devices,
        share_id: prepared.share_id,
    }
}
