//! The configuration, asked by root: plans, and reading the file again.

use std::path::PathBuf;
use std::sync::Arc;

use tessera_view::change::{PlanRequest, PlanResponse, ReloadRequest, ReloadResponse};

use super::server::failed;
use super::status::StatusView;
use super::steer;
use tessera_agent::reload::{ReloadCause, Reloader};
use tessera_web::{Peer, SourceError};

/// Larger ones are no configuration.
const LONGEST: usize = 1 << 20;

fn reloader(view: &StatusView) -> Result<Arc<Reloader>, SourceError> {
    view.reloader()
        .cloned()
        .ok_or_else(|| SourceError::Unavailable("the plugin is still starting".to_owned()))
}

pub(super) async fn plan(
    view: Arc<StatusView>,
    request: PlanRequest,
    _: Peer,
) -> Result<PlanResponse, SourceError> {
    let reloader = reloader(&view)?;
    if request.text.len() > LONGEST {
        return Err(SourceError::Invalid("a configuration is at most 1 MiB".to_owned()));
    }
    let file = PathBuf::from(request.file);
    let planned = tokio::task::spawn_blocking(move || reloader.plan(request.text, &file)).await;
    planned.map_err(failed)
}

pub(super) async fn reload(
    view: Arc<StatusView>,
    _: ReloadRequest,
    peer: Peer,
) -> Result<ReloadResponse, SourceError> {
    let reloader = reloader(&view)?;
    let actor = steer::actor(peer, "config reload".to_owned());
    if reloader.file().is_none() {
        return Err(SourceError::Conflict("this plugin was started without a file".to_owned()));
    }
    let read =
        tokio::task::spawn_blocking(move || reloader.reload(&ReloadCause::Asked(Some(actor))))
            .await;
    read.map_err(failed)
}
