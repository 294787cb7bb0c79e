//! Whether the sockets answer.

use std::path::Path;
use std::time::Duration;

use tessera_kubelet_api::dra::v1::NodePrepareResourcesRequest;
use tessera_kubelet_api::dra::v1::dra_plugin_client::DraPluginClient;
use tessera_kubelet_api::pluginregistration::InfoRequest;
use tessera_kubelet_api::pluginregistration::registration_client::RegistrationClient;
use tonic::transport::{Channel, Endpoint};

use super::sockets::Paths;

/// Longest call; kubelet gives GetInfo a second.
const LIMIT: Duration = Duration::from_secs(1);

/// GetInfo of the registrar, and a Prepare of nothing.
pub(super) async fn ask(paths: &Paths) -> Result<(), String> {
    let failed = |path: &Path, what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    let channel = connect(&paths.registrar).await.map_err(|e| failed(&paths.registrar, &e))?;
    let info = RegistrationClient::new(channel).get_info(InfoRequest {}).await;
    info.map_err(|status| failed(&paths.registrar, &status.message()))?;
    let channel = connect(&paths.dra).await.map_err(|e| failed(&paths.dra, &e))?;
    let nothing = NodePrepareResourcesRequest::default();
    let prepared = DraPluginClient::new(channel).node_prepare_resources(nothing).await;
    prepared.map_err(|status| failed(&paths.dra, &status.message()))?;
    Ok(())
}

async fn connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    let address = format!("unix:{}", path.display());
    Endpoint::try_from(address)?.connect_timeout(LIMIT).timeout(LIMIT).connect().await
}
