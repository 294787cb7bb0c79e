//! One stage as a gRPC server.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;
use tessera_tenant_program::report;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use crate::gpu::{Gpu, Work};
use crate::proto::stage_client::StageClient;
use crate::proto::stage_server::{Stage, StageServer};
use crate::proto::{Step, Tensor};

/// How long the rest of the pipeline may take; kubelet starts the stages in any order.
const NEXT: Duration = Duration::from_secs(30);

struct Service {
    name: String,
    host: String,
    gpu: Gpu,
    next: Option<StageClient<Channel>>,
}

#[tonic::async_trait]
impl Stage for Service {
    async fn infer(&self, request: Request<Tensor>) -> Result<Response<Tensor>, Status> {
        let arrived = Instant::now();
        let mut tensor = request.into_inner();
        let failed = |error: anyhow::Error| Status::internal(format!("{}: {error:#}", self.name));
        tensor.data = self.gpu.run(std::mem::take(&mut tensor.data)).await.map_err(failed)?;
        tensor.steps.push(Step {
            stage: self.name.clone(),
            host: self.host.clone(),
            gpu: self.gpu.uuid.clone(),
            memory_bytes: self.gpu.memory_bytes,
            micros: u64::try_from(arrived.elapsed().as_micros()).unwrap_or(u64::MAX),
        });
        match &self.next {
            // Clones share one connection.
            Some(next) => next.clone().infer(tensor).await,
            None => Ok(Response::new(tensor)),
        }
    }
}

/// Serves until SIGTERM or SIGINT; requests that have come are answered.
///
/// # Errors
/// No GPU, or the address is taken.
pub async fn run(work: Work, listen: SocketAddr, next: Option<String>) -> Result<()> {
    let name = work.stage.name();
    let gpu = Gpu::open(work)?;
    // Connects at the first request, and again when the next stage was restarted.
    let next = next
        .map(|uri| Endpoint::from_shared(uri.clone()).with_context(|| format!("--next {uri}")))
        .transpose()?
        .map(|endpoint| StageClient::new(endpoint.timeout(NEXT).connect_lazy()));
    report::line("ready", json!({"stage": name, "gpu": gpu.uuid, "memory": gpu.memory_bytes}));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = std::env::var("POD_NAME").unwrap_or_else(|_| host.trim().to_owned());
    let service = Service { name: name.to_owned(), host, gpu, next };
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    Server::builder()
        .serve_with_shutdown(listen, StageServer::new(service), async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        })
        .await
        .with_context(|| format!("--listen {listen}"))
}
