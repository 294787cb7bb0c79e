//! Health v1alpha1.

use std::pin::Pin;

use tessera_kubelet_api::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealth;
use tessera_kubelet_api::dra_health::v1alpha1::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use super::{Health, Report};

#[tonic::async_trait]
impl DraResourceHealth for Health {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send + 'static>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let answer = |reports: Vec<Report>| NodeWatchResourcesResponse {
            devices: reports.into_iter().map(device).collect(),
        };
        Ok(Response::new(Box::pin(self.watch().map(move |reports| Ok(answer(reports))))))
    }
}

fn device(report: Report) -> DeviceHealth {
    let health = if report.is_healthy { HealthStatus::Healthy } else { HealthStatus::Unhealthy };
    DeviceHealth {
        device: Some(DeviceIdentifier { pool_name: report.pool, device_name: report.device }),
        health: health.into(),
        last_updated_time: report.unix_seconds,
        health_check_timeout_seconds: 0,
        message: report.message,
    }
}
