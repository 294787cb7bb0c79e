//! Kubelet's calls, in the version that was chosen.

use std::collections::BTreeMap;

use tessera_kubelet_api::dra::{v1, v1beta1};
use tonic::transport::Channel;

use super::{ClaimName, PreparedDevice};

/// By UID: the devices, or the driver's words.
pub(super) type PrepareAnswer = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

/// NodePrepareResources of that service.
pub(super) async fn prepare(
    service: &str,
    channel: Channel,
    claims: Vec<ClaimName>,
) -> Result<PrepareAnswer, tonic::Status> {
    if service == "v1.DRAPlugin" {
        let claims = claims
            .into_iter()
            .map(|ClaimName { namespace, name, uid }| v1::Claim { namespace, uid, name })
            .collect();
        let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
        let request = v1::NodePrepareResourcesRequest { claims };
        let answer = client.node_prepare_resources(request).await?.into_inner();
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
        return Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, one(answer))).collect());
    }
    let claims = claims
        .into_iter()
        .map(|ClaimName { namespace, name, uid }| v1beta1::Claim { namespace, uid, name })
        .collect();
    let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(channel);
    let request = v1beta1::NodePrepareResourcesRequest { claims };
    let answer = client.node_prepare_resources(request).await?.into_inner();
    let devices = |device: v1beta1::Device| PreparedDevice {
        requests: device.request_names,
        pool: device.pool_name,
        device: device.device_name,
        cdi_devices: device.cdi_device_ids,
        share_id: None,
    };
    let one = |answer: v1beta1::NodePrepareResourceResponse| match answer.error.is_empty() {
        true => Ok(answer.devices.into_iter().map(devices).collect()),
        false => Err(answer.error),
    };
    Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, one(answer))).collect())
}

/// NodeUnprepareResources of that service; the errors by UID.
pub(super) async fn unprepare(
    service: &str,
    channel: Channel,
    claims: Vec<ClaimName>,
) -> Result<BTreeMap<String, String>, tonic::Status> {
    if service == "v1.DRAPlugin" {
        let claims = claims
            .into_iter()
            .map(|ClaimName { namespace, name, uid }| v1::Claim { namespace, uid, name })
            .collect();
        let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
        let request = v1::NodeUnprepareResourcesRequest { claims };
        let answer = client.node_unprepare_resources(request).await?.into_inner();
        return Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, answer.error)).collect());
    }
    let claims = claims
        .into_iter()
        .map(|ClaimName { namespace, name, uid }| v1beta1::Claim { namespace, uid, name })
        .collect();
    let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(channel);
    let request = v1beta1::NodeUnprepareResourcesRequest { claims };
    let answer = client.node_unprepare_resources(request).await?.into_inner();
    Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, answer.error)).collect())
}
