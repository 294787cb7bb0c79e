//! `tessera status`: asks the plugin; without one, reads the pages themselves.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use tessera_kubelet_api::admin::admin_client::AdminClient;
use tessera_kubelet_api::admin::{
    Allocation, AllocationState, ComputePolicy, GpuUse, LiveRequest, Plugin, Process, Registration,
    StatusRequest, StatusResponse,
};
use tessera_region::abi;
use tessera_region::quota::{self, Policy};
use tessera_region::usage::UsageFile;
use tonic::transport::{Channel, Endpoint};

use super::table;
use tessera_config::Config;
use tessera_model::clock::unix_ms;
use tessera_model::printable;
use tessera_tenant::regions;

/// How long the plugin may take to answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// Exit status when the plugin does not answer: `EX_UNAVAILABLE`.
pub const EXIT_UNAVAILABLE: u8 = 69;

/// Most bytes of an answer: a node has thousands of allocations at most.
const LARGEST: usize = 64 << 20;

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Prints the status. With `ready`, prints nothing but what is amiss, and the exit status says
/// whether the node offers the resource: a readiness probe.
///
/// # Errors
/// The answer cannot be printed.
pub fn main(config: &Config, format: Format, ready: bool) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(ask(&config.paths.admin));
    if ready {
        return Ok(match answer {
            Ok(status) => {
                let plugin = status.plugin.unwrap_or_default();
                let live = plugin.registration() == Registration::Live;
                if !live {
                    eprintln!("not registered: {}", printable::line(&plugin.registration_error));
                    for warning in &status.warnings {
                        eprintln!("{}", printable::line(warning));
                    }
                }
                if live { ExitCode::SUCCESS } else { ExitCode::FAILURE }
            }
            Err(error) => {
                eprintln!("{}", printable::line(&format!("{error:#}")));
                ExitCode::from(EXIT_UNAVAILABLE)
            }
        });
    }
    let (status, code) = match answer {
        Ok(status) => (status, ExitCode::SUCCESS),
        Err(error) => {
            // The limits hold without the plugin, and what they are can be read.
            let warning = format!(
                "the plugin does not answer at {} ({error:#}); this is read from the pages: \
                 running pods keep their limits, new ones wait for the plugin",
                config.paths.admin.display()
            );
            (offline(config, warning), ExitCode::from(EXIT_UNAVAILABLE))
        }
    };
    let text = match format {
        Format::Text => table::text(&status),
        Format::Json => format!("{:#}\n", table::json(&status)),
    };
    use std::io::Write;
    std::io::stdout().write_all(text.as_bytes()).context("standard output")?;
    Ok(code)
}

/// Whether the plugin answers at all: a liveness probe. Says nothing of kubelet, GPUs or pages, for none
/// of which a restart would be of use.
///
/// # Errors
/// No runtime.
pub fn live(config: &Config) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let call = async {
        let answer = connect(&config.paths.admin).await?.live(LiveRequest {}).await;
        answer.map(drop).map_err(|status| anyhow::anyhow!("{}", status.message()))
    };
    let answer = runtime.block_on(async { tokio::time::timeout(TIMEOUT, call).await });
    match answer.context("it takes too long").and_then(|answer| answer) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            let error = format!("{}: {error:#}", config.paths.admin.display());
            eprintln!("the plugin does not answer at {}", printable::line(&error));
            Ok(ExitCode::from(EXIT_UNAVAILABLE))
        }
    }
}

/// Asks the plugin one thing.
///
/// # Errors
/// It does not answer, or refuses.
pub fn call<T, F>(socket: &Path, ask: impl FnOnce(AdminClient<Channel>) -> F) -> anyhow::Result<T>
where
    F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = async {
        let answer = ask(connect(socket).await?).await;
        anyhow::Ok(answer.map_err(|status| anyhow::anyhow!("{}", status.message()))?.into_inner())
    };
    runtime
        .block_on(async { tokio::time::timeout(TIMEOUT, answer).await })
        .context("it takes too long")?
}

/// A client of the admin service at `socket`.
///
/// # Errors
/// Nobody answers there, or the socket may not be opened.
pub async fn connect(socket: &Path) -> anyhow::Result<AdminClient<Channel>> {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
    let channel = endpoint.connect().await.map_err(|error| {
        // tonic's own text is only "transport error".
        let mut cause: &dyn std::error::Error = &error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        anyhow::anyhow!("{cause}")
    })?;
    Ok(AdminClient::new(channel).max_decoding_message_size(LARGEST))
}

/// The plugin's answer to Status.
pub async fn ask(socket: &Path) -> anyhow::Result<StatusResponse> {
    let call = async {
        let answer = connect(socket).await?.status(StatusRequest {}).await;
        anyhow::Ok(answer.map_err(|status| anyhow::anyhow!("{}", status.message()))?.into_inner())
    };
    tokio::time::timeout(TIMEOUT, call).await.context("it takes too long")?
}

/// What the pages say by themselves: no pods, no replica ids, no GPUs.
pub fn offline(config: &Config, warning: String) -> StatusResponse {
    let root = &config.paths.pages;
    let mut allocations = Vec::new();
    for id in regions::existing(root) {
        let Some(spec) = regions::read_spec(root, &id) else { continue };
        let dir = regions::dir(root, &id);
        let abi = quota::abi_in(&dir).unwrap_or_else(abi::version);
        let usage = UsageFile::open_as(&dir, abi).ok();
        let snapshot = usage.and_then(|usage| usage.snapshot().ok()).unwrap_or_default();
        let gpus = spec.gpus.iter().enumerate().map(|(gpu, quota)| GpuUse {
            gpu_uuid: quota.uuid.clone(),
            memory_limit_bytes: quota.memory_limit_bytes,
            memory_charged_bytes: snapshot.charged(gpu),
            memory_granted_bytes: snapshot.granted(gpu),
            memory_peak_bytes: snapshot.slots.iter().map(|s| s.peak[gpu]).max().unwrap_or(0),
            memory_overhead_bytes: regions::read_overhead(root, &id, gpu),
            memory_nvml_bytes: None,
            context_overhead_bytes: quota.context_overhead_bytes,
            cores_millis: quota.cores_millis,
            policy: match quota.policy {
                Policy::Burst => ComputePolicy::Burst,
                Policy::Strict => ComputePolicy::Strict,
                Policy::None => ComputePolicy::None,
            }
            .into(),
            ..GpuUse::default()
        });
        allocations.push(Allocation {
            id: id.to_string(),
            state: AllocationState::Unspecified.into(),
            generation: spec.generation,
            gpus: gpus.collect(),
            processes: snapshot
                .slots
                .iter()
                .map(|slot| Process {
                    container_pid: slot.pid_hint,
                    slot: u32::try_from(slot.index).unwrap_or(u32::MAX),
                    memory_charged_bytes: slot.charged.iter().fold(0, |a, b| a.saturating_add(*b)),
                    ..Process::default()
                })
                .collect(),
            refusals: snapshot.slots.iter().fold(0, |a, slot| a.saturating_add(slot.refusals)),
            pages_dir: dir.display().to_string(),
            ..Allocation::default()
        });
    }
    StatusResponse {
        plugin: Some(Plugin {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            resource_name: resource_names(config),
            registration: Registration::Waiting.into(),
            ..Plugin::default()
        }),
        allocations,
        warnings: vec![warning],
        at_unix_ms: unix_ms(),
        ..StatusResponse::default()
    }
}

/// What the configuration may sell, whatever GPUs there are.
fn resource_names(config: &Config) -> String {
    let shares = config.layouts.iter().flat_map(|layout| &layout.shares);
    let mut names = vec![config.resource.name.as_str()];
    names.extend(shares.map(|share| share.resource.as_str()));
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}
