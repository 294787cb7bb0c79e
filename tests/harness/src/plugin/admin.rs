//! A client of the admin socket.

use std::path::Path;

use tessera_kubelet_api::admin::Target;
use tessera_kubelet_api::admin::admin_client::AdminClient;
use tonic::transport::{Channel, Endpoint};

/// A connection to the admin socket of the node whose files are below `dir`.
pub async fn admin(dir: &Path) -> AdminClient<Channel> {
    let socket = dir.join("admin.sock");
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
    AdminClient::new(endpoint.connect().await.unwrap())
}

/// What a request is about: a pod, an allocation or a GPU, by its name.
pub fn target(name: &str) -> Option<Target> {
    Some(Target { name: name.into(), ..Target::default() })
}
