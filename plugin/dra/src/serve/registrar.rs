//! What kubelet asks before it uses the driver, and what it says then.

use tessera_kubelet_api::pluginregistration::registration_server::Registration as Rpcs;
use tessera_kubelet_api::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tracing::{error, info};

use crate::names;

/// What is served. Kubelet 1.36 asks for health in v1alpha1.
const SERVICES: [&str; 3] = ["v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
/// Most bytes of kubelet's reason that are kept.
const LONGEST: usize = 1000;

/// How it stands with kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registration {
    /// Kubelet has taken the driver.
    pub is_registered: bool,
    /// When it last did so, Unix milliseconds; 0 for never.
    pub registered_unix_ms: i64,
    /// How often it did so.
    pub registrations: u64,
    /// Why kubelet refuses the driver, if it does.
    pub rejected: Option<String>,
    /// Why the driver is not served, if it is not.
    pub last_error: Option<String>,
}

impl Registration {
    pub(super) fn failed(&mut self, why: &str) {
        self.is_registered = false;
        self.last_error = Some(why.to_owned());
    }
}

/// The registrar's RPCs.
#[derive(Debug)]
pub(super) struct Service {
    endpoint: String,
    standing: watch::Sender<Registration>,
}

impl Service {
    pub(super) fn new(endpoint: String, standing: watch::Sender<Registration>) -> Self {
        Service { endpoint, standing }
    }
}

#[tonic::async_trait]
impl Rpcs for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: names::DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: SERVICES.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        self.standing.send_modify(|standing| {
            if plugin_registered {
                standing.is_registered = true;
                standing.registered_unix_ms = unix_ms();
                standing.registrations += 1;
                standing.rejected = None;
                standing.last_error = None;
            } else {
                let why = if error.is_empty() { "it gives no reason" } else { error.as_str() };
                let why = printable::brief(why, LONGEST).into_owned();
                standing.is_registered = false;
                standing.rejected = Some(why);
            }
        });
        if plugin_registered {
            info!(driver = names::DRIVER, "kubelet has registered the DRA driver");
        } else {
            error!(driver = names::DRIVER, "kubelet refuses the DRA driver: {error}");
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
