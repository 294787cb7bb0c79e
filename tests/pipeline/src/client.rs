//! Sends images at a fixed rate, whether or not the last one is answered, and checks every answer.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use tessera_tenant_program::histogram::Histogram;
use tessera_tenant_program::report;
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::math;
use crate::proto::stage_client::StageClient;
use crate::proto::{Step, Tensor};

/// How long the pipeline may take to come up.
const START: Duration = Duration::from_secs(120);
const BETWEEN_TRIES: Duration = Duration::from_millis(200);

/// What to send.
#[derive(Clone, Debug)]
pub struct Load {
    /// Of the first stage.
    pub target: String,
    /// How many.
    pub requests: u64,
    /// Per second.
    pub rate: f64,
    /// What 99 of 100 answers may take at most; `None`: as long as they like.
    pub max_p99: Option<Duration>,
}

/// Sends all requests, and reports what came of them.
///
/// # Errors
/// A wrong answer, a failed request, or no pipeline.
pub async fn run(load: &Load) -> Result<()> {
    let endpoint = Endpoint::from_shared(load.target.clone()).context("--target")?;
    let client = StageClient::new(endpoint.timeout(START).connect_lazy());
    let steps = wait_for_all(&client).await?;
    report::line("ready", json!({"stages": steps.len()}));

    let mut tick = tokio::time::interval(Duration::from_secs_f64(1.0 / load.rate));
    let mut flying = JoinSet::new();
    for id in 1..=load.requests {
        tick.tick().await;
        let (client, sent) = (client.clone(), Instant::now());
        flying.spawn(async move { (id, ask(client, id).await, sent.elapsed()) });
    }
    let mut latency = Histogram::default();
    let mut of_stages = BTreeMap::<String, Histogram>::new();
    let (mut wrong, mut failed) = (0u64, 0u64);
    while let Some(done) = flying.join_next().await {
        let (id, answer, took) = done?;
        match answer {
            Ok(tensor) => {
                wrong += u64::from(tensor.id != id || tensor.data != math::expected(id));
                for step in tensor.steps {
                    of_stages.entry(step.stage).or_default().record(step.micros * 1000);
                }
                latency.record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            }
            Err(status) => {
                eprintln!("request {id}: {status}");
                failed += 1;
            }
        }
    }
    let stage = |step: &Step| {
        let own = &of_stages[&step.stage];
        json!({
            "stage": step.stage, "host": step.host, "gpu": step.gpu, "memory": step.memory_bytes,
            "p50_us": own.permille(500) / 1000, "p99_us": own.permille(990) / 1000,
        })
    };
    report::line(
        "done",
        json!({
            "requests": load.requests, "wrong": wrong, "failed": failed,
            "p50_us": latency.permille(500) / 1000, "p99_us": latency.permille(990) / 1000,
            "max_us": latency.max() / 1000,
            "stages": steps.iter().map(stage).collect::<Vec<_>>(),
        }),
    );
    let p99 = Duration::from_nanos(latency.permille(990));
    if let Some(most) = load.max_p99 {
        ensure!(p99 <= most, "a hundredth of the answers took longer than {most:?}: {p99:?}");
    }
    ensure!(wrong == 0 && failed == 0, "{wrong} wrong answers, {failed} failed requests");
    Ok(())
}

async fn ask(mut client: StageClient<Channel>, id: u64) -> Result<Tensor, tonic::Status> {
    let tensor = Tensor { id, data: math::image(id), steps: Vec::new() };
    client.infer(tensor).await.map(tonic::Response::into_inner)
}

/// Asks until every stage is there; what they did.
async fn wait_for_all(client: &StageClient<Channel>) -> Result<Vec<Step>> {
    let begun = Instant::now();
    loop {
        match ask(client.clone(), 0).await {
            Ok(tensor) => return Ok(tensor.steps),
            // A stage that is not there yet.
            Err(status) if status.code() == Code::Unavailable && begun.elapsed() < START => {
                tokio::time::sleep(BETWEEN_TRIES).await;
            }
            Err(status) => bail!("no answer from the pipeline: {status}"),
        }
    }
}
