//! The configuration over the admin socket: plans, and reading the file again.

use std::path::PathBuf;
use std::sync::Arc;

use tessera_kubelet_api::admin::{Configuration, PlanRequest, PlanResponse, ReloadResponse};
use tonic::Status;

use super::status::StatusView;
use tessera_agent::reload::plan::{changes, problems};
use tessera_agent::reload::{ReloadCause, ReloadState, Reloader};
use tessera_model::audit::Actor;

/// Larger ones are no configuration.
const LONGEST: usize = 1 << 20;

fn reloader(view: &StatusView) -> Result<Arc<Reloader>, Status> {
    view.reloader().cloned().ok_or_else(|| Status::unavailable("the plugin is still starting"))
}

/// How it stands with the file.
pub(super) fn state(state: &ReloadState) -> Configuration {
    Configuration {
        hash: state.hash.clone(),
        attempted_unix_ms: state.attempted_unix_ms,
        succeeded_unix_ms: state.succeeded_unix_ms,
        errors: state.errors.clone(),
        waiting_keys: state.waiting.clone(),
        applied: state.applied,
        refused: state.refused,
    }
}

pub(super) async fn plan(view: &StatusView, request: PlanRequest) -> Result<PlanResponse, Status> {
    let reloader = reloader(view)?;
    if request.text.len() > LONGEST {
        return Err(Status::invalid_argument("a configuration is at most 1 MiB"));
    }
    let file = PathBuf::from(request.file);
    let planned = tokio::task::spawn_blocking(move || reloader.plan(request.text, &file)).await;
    planned.map_err(|error| Status::internal(error.to_string()))
}

pub(super) async fn reload(
    view: &StatusView,
    actor: Option<Actor>,
) -> Result<ReloadResponse, Status> {
    let reloader = reloader(view)?;
    let Some(file) = reloader.file().map(|file| file.path().display().to_string()) else {
        return Err(Status::failed_precondition("this plugin was started without a file"));
    };
    let reading = Arc::clone(&reloader);
    let read =
        tokio::task::spawn_blocking(move || reading.reload(&ReloadCause::Asked(actor))).await;
    let outcome = read.map_err(|error| Status::internal(error.to_string()))?;
    Ok(ReloadResponse {
        problems: problems(&outcome.problems),
        changes: changes(&outcome.changes),
        waiting: changes(&outcome.waiting),
        configuration: Some(state(&reloader.state())),
        file,
    })
}
