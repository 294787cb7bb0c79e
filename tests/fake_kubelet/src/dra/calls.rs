//! Kubelet's calls, DRA v1.

use std::collections::BTreeMap;

use tessera_kubelet_api::dra::v1;
use tessera_kubelet_api::dra::v1::dra_plugin_client::DraPluginClient;
use tonic::transport::Channel;

use super::{ClaimName, PreparedDevice};

/// By UID: the devices, or the driver's words.
pub(super) type PrepareAnswer = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

fn claims(claims: Vec<ClaimName>) -> Vec<v1::Claim> {
    let claim = |ClaimName { namespace, name, uid }| v1::Claim { namespace, uid, name };
    claims.into_iter().map(claim).collect()
}

pub(super) async fn prepare(
    channel: Channel,
    names: Vec<ClaimName>,
) -> Result<PrepareAnswer, tonic::Status> {
    let request = v1::NodePrepareResourcesRequest { claims: claims(names) };
    let answer = DraPluginClient::new(channel).node_prepare_resources(request).await?.into_inner();
    let devices = |device: v1::Device| PreparedDevice {
        requests: device.request_names,
        pool: device.pool_name,
        device: device.device_name,
        cdi_devices: device.cdi_device_ids,
        share_id: device.share_id,
    };
    let one = |answer: v1::NodePrepareResourceResponse| match answer.error.is_empty() {
        true => Ok(answer.devices.into_iter().map(devices).collect()),
        false => Err(answer.error),
    };
    Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, one(answer))).collect())
}

/// NodeUnprepareResources; the errors by UID.
pub(super) async fn unprepare(
    channel: Channel,
    names: Vec<ClaimName>,
) -> Result<BTreeMap<String, String>, tonic::Status> {
    let request = v1::NodeUnprepareResourcesRequest { claims: claims(names) };
    let answer =
        DraPluginClient::new(channel).node_unprepare_resources(request).await?.into_inner();
    Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, answer.error)).collect())
}
