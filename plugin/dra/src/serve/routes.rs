//! Which service a call is for, by its path: a router's crates would be four times the driver.

use std::convert::Infallible;
use std::task::{Context, Poll};

use tessera_kubelet_api::dra::v1::dra_plugin_server::DraPluginServer;
use tessera_kubelet_api::dra_health::v1::dra_resource_health_server::DraResourceHealthServer as HealthV1;
use tessera_kubelet_api::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1alpha1;
use tonic::body::Body;
use tonic::codegen::{Body as HttpBody, BoxFuture, Service, StdError, http};
use tonic::server::NamedService;

use crate::health::Health;
use crate::prepare::Preparer;

/// All services of the DRA socket.
#[derive(Clone, Debug)]
pub(super) struct Routes {
    dra: DraPluginServer<Preparer>,
    health_v1: HealthV1<Health>,
    health_v1alpha1: HealthV1alpha1<Health>,
}

impl Routes {
    pub(super) fn new(preparer: Preparer, health: Health) -> Self {
        Routes {
            dra: DraPluginServer::new(preparer),
            health_v1: HealthV1::new(health.clone()),
            health_v1alpha1: HealthV1alpha1::new(health),
        }
    }
}

/// Whether a request's path is one of this service's.
fn is_of<S: NamedService>(path: &str) -> bool {
    path.strip_prefix('/')
        .and_then(|rest| rest.strip_prefix(S::NAME))
        .is_some_and(|rest| rest.starts_with('/'))
}

impl<B> Service<http::Request<B>> for Routes
where
    B: HttpBody + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let path = request.uri().path();
        if is_of::<DraPluginServer<Preparer>>(path) {
            self.dra.call(request)
        } else if is_of::<HealthV1<Health>>(path) {
            self.health_v1.call(request)
        } else if is_of::<HealthV1alpha1<Health>>(path) {
            self.health_v1alpha1.call(request)
        } else {
            let unknown = tonic::Status::unimplemented("the driver has no such service");
            Box::pin(std::future::ready(Ok(unknown.into_http())))
        }
    }
}
