//! The Register call to kubelet.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tessera_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use tessera_kubelet_api::deviceplugin::{DevicePluginOptions, RegisterRequest, VERSION};
use tonic::transport::{Channel, Endpoint};

/// Why Register failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegisterError {
    #[error("cannot reach kubelet at {path}: {reason}")]
    Unreachable { path: PathBuf, reason: String },
    #[error(
        "kubelet did not answer Register within {0:?}: it dials the plugin's socket back first; is \
         the directory the one that kubelet sees?"
    )]
    Slow(Duration),
    #[error("kubelet refused Register: {}", .0.message())]
    Refused(Box<tonic::Status>),
}

/// What the plugin implements of the API; kubelet asks again after Register and goes by that answer.
pub(super) const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: true };

/// Announces `endpoint`, the file name of our socket, as the server of `resource_name`.
pub(super) async fn register(
    kubelet: &Path,
    endpoint: String,
    resource_name: String,
    timeout: Duration,
) -> Result<(), RegisterError> {
    let call = async {
        let channel = connect(kubelet).await.map_err(|error| RegisterError::Unreachable {
            path: kubelet.to_path_buf(),
            reason: causes(&error),
        })?;
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint,
            resource_name,
            options: Some(OPTIONS),
        };
        let answer = RegistrationClient::new(channel).register(request).await;
        answer.map(drop).map_err(|status| RegisterError::Refused(Box::new(status)))
    };
    tokio::time::timeout(timeout, call).await.map_err(|_| RegisterError::Slow(timeout))?
}

/// Connects to a gRPC server's Unix socket.
pub(super) async fn connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("unix://{}", path.display()))?.connect().await
}

/// An error with all its causes; tonic's own text is only "transport error".
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
