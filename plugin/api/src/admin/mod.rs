//! What root alone asks over the socket of the JSON API: the whole status, a sign of life, and changes of limits, cordons and
//! the configuration.

pub mod reach;
mod status;
mod text;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
pub use reach::{EXIT_FORBIDDEN, EXIT_UNAVAILABLE, EXIT_USAGE, ask};
use serde::de::DeserializeOwned;
pub use status::StatusView;
pub(crate) use status::Survey;
use tessera_agent::allocations::steer::SteerError;
use tessera_agent::reload::{ReloadCause, Reloader};
use tessera_agent::{Agent, Lift};
use tessera_model::audit::Actor;
use tessera_model::percent::format_cores;
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_system::files;
use tessera_view::change::{
    Call, CordonRequest, CordonResponse, PlanRequest, PlanResponse, QuotaResponse, ReloadRequest,
    ReloadResponse, ResetQuotaRequest, SetQuotaRequest, Target, UncordonRequest,
};
use tessera_view::status::{LIVE, STATUS};
use tessera_web::{Peer, Refusal, SourceError};
pub use text::{Names, text as status_text};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

/// Calls that may be at work at a time: half of the threads that may block are left to kubelet's.
const CALLS: usize = 4;
/// The longest is a reload of the configuration. It goes on when nobody waits for it any more.
const LONGEST: Duration = Duration::from_secs(25);

/// What answers.
#[derive(Clone)]
struct Service {
    view: Arc<StatusView>,
    turns: Turns,
}

/// Work in the runtime that serves kubelet: so much at a time, the other threads are left to kubelet's calls.
#[derive(Clone)]
pub(crate) struct Turns {
    free: Arc<Semaphore>,
    main: Handle,
}

/// The routes. Call it within the runtime that serves kubelet.
pub fn routes(view: Arc<StatusView>) -> Router {
    let service = Service { view, turns: Turns::new(CALLS) };
    let router = Router::new()
        // Whether the threads that serve kubelet still turn: asks nobody. A liveness probe.
        .route(
            LIVE,
            get(|State(service): State<Service>| async move {
                let turned = service.turns.main.spawn(async {}).await;
                turned
                    .map(|()| Json(serde_json::json!({})))
                    .map_err(|error| Refusal::from(failed(error)))
            }),
        )
        .route(
            STATUS,
            get(|State(service): State<Service>| async move {
                // Reads pages and asks the driver: not on the thread that serves kubelet.
                let status = |view: Arc<StatusView>| async move {
                    tokio::task::spawn_blocking(move || view.status()).await.map_err(failed)
                };
                service.at_work(status).await
            }),
        );
    let router = with(router, plan);
    let router = with(router, reload);
    let router = with(router, set_quota);
    let router = with(router, reset_quota);
    let router = with(router, cordon);
    let router = with(router, uncordon);
    router.with_state(service)
}

/// With a request that is posted.
fn with<C: Call, F>(
    router: Router<Service>,
    answer: impl Fn(Arc<StatusView>, C, Peer) -> F + Clone + Send + Sync + 'static,
) -> Router<Service>
where
    F: Future<Output = Result<C::Answer, SourceError>> + Send + 'static,
{
    let handler =
        move |State(service): State<Service>, Extension(peer): Extension<Peer>, body: Bytes| {
            let answer = answer.clone();
            async move {
                let request: C = read(&body)?;
                service.at_work(move |view| answer(view, request, peer)).await
            }
        };
    router.route(C::PATH, post(handler))
}

/// A field that is unknown is refused: whoever misspells it means a change.
fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, SourceError> {
    serde_json::from_slice(body)
        .map_err(|error| SourceError::Invalid(format!("the request cannot be read: {error}")))
}

fn failed(error: impl std::fmt::Display) -> SourceError {
    tracing::error!(%error, "a question");
    SourceError::Unavailable("the plugin failed on this; its log says more".to_owned())
}

impl Service {
    async fn at_work<T, F>(
        &self,
        call: impl FnOnce(Arc<StatusView>) -> F,
    ) -> Result<Json<T>, Refusal>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, SourceError>> + Send + 'static,
    {
        let late = |_| SourceError::Unavailable("it takes longer; ask again".to_owned());
        let call = self.turns.take(call(Arc::clone(&self.view)));
        Ok(Json(tokio::time::timeout(LONGEST, call).await.map_err(late)??))
    }
}

impl Turns {
    /// So many. Call it within that runtime.
    pub fn new(most: usize) -> Self {
        Turns { free: Arc::new(Semaphore::new(most)), main: Handle::current() }
    }

    /// Does this when it may: it goes on, and counts, also when nobody waits for it any more.
    pub async fn take<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, SourceError>> + Send + 'static,
    ) -> Result<T, SourceError> {
        let turn = Arc::clone(&self.free).acquire_owned().await.map_err(failed)?;
        let done = self.main.spawn(async move {
            let _turn = turn;
            call.await
        });
        done.await.map_err(failed)?
    }

    /// The same on a thread that may block.
    pub async fn block<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, SourceError> + Send + 'static,
    ) -> Result<T, SourceError> {
        self.take(async { tokio::task::spawn_blocking(work).await.map_err(failed)? }).await
    }
}

/// A configuration file of more bytes is refused.
const LARGEST: usize = 1 << 20;

fn reloader(view: &StatusView) -> Result<Arc<Reloader>, SourceError> {
    view.reloader
        .get()
        .cloned()
        .ok_or_else(|| SourceError::Unavailable("the plugin is still starting".to_owned()))
}

async fn plan(
    view: Arc<StatusView>,
    request: PlanRequest,
    _: Peer,
) -> Result<PlanResponse, SourceError> {
    let reloader = reloader(&view)?;
    if request.text.len() > LARGEST {
        return Err(SourceError::Invalid("a configuration is at most 1 MiB".to_owned()));
    }
    let file = PathBuf::from(request.file);
    let planned = tokio::task::spawn_blocking(move || reloader.plan(request.text, &file)).await;
    planned.map_err(failed)
}

async fn reload(
    view: Arc<StatusView>,
    _: ReloadRequest,
    peer: Peer,
) -> Result<ReloadResponse, SourceError> {
    let reloader = reloader(&view)?;
    let actor = actor(peer, "config reload".to_owned());
    if reloader.file().is_none() {
        return Err(SourceError::Conflict("this plugin was started without a file".to_owned()));
    }
    let read =
        tokio::task::spawn_blocking(move || reloader.reload(&ReloadCause::Asked(Some(actor))))
            .await;
    read.map_err(failed)
}

async fn set_quota(
    view: Arc<StatusView>,
    request: SetQuotaRequest,
    peer: Peer,
) -> Result<QuotaResponse, SourceError> {
    let actor = actor(peer, set_command(&request));
    blocking(&view, move |agent| agent.set_quota(&request, actor)).await
}

async fn reset_quota(
    view: Arc<StatusView>,
    request: ResetQuotaRequest,
    peer: Peer,
) -> Result<QuotaResponse, SourceError> {
    let actor = actor(peer, reset_command(&request));
    blocking(&view, move |agent| agent.reset_quota(&request, actor)).await
}

async fn cordon(
    view: Arc<StatusView>,
    request: CordonRequest,
    peer: Peer,
) -> Result<CordonResponse, SourceError> {
    let CordonRequest { gpu, all, reason } = request;
    named(&gpu, all)?;
    let mut command = format!("cordon {}", if all { "--all" } else { &gpu });
    with_reason(&mut command, &reason);
    let actor = actor(peer, command);
    let gpu = (!all).then_some(gpu);
    blocking(&view, move |agent| agent.cordon(gpu.as_deref(), some(reason), actor)).await
}

async fn uncordon(
    view: Arc<StatusView>,
    request: UncordonRequest,
    peer: Peer,
) -> Result<CordonResponse, SourceError> {
    let UncordonRequest { gpu, all, each, reason } = request;
    named(&gpu, all)?;
    if each && !all {
        return Err(SourceError::Invalid("each goes with all".to_owned()));
    }
    let what = match (all, each) {
        (true, true) => "--all --each",
        (true, false) => "--all",
        (false, _) => &gpu,
    };
    let mut command = format!("uncordon {what}");
    with_reason(&mut command, &reason);
    let actor = actor(peer, command);
    blocking(&view, move |agent| {
        let lift = match (all, each) {
            (true, true) => Lift::Each,
            (true, false) => Lift::Node,
            (false, _) => Lift::Gpu(&gpu),
        };
        agent.uncordon(lift, some(reason), actor)
    })
    .await
}

fn named(gpu: &str, all: bool) -> Result<(), SourceError> {
    if gpu.is_empty() && !all {
        return Err(SourceError::Invalid("name a GPU by UUID or index, or say --all".to_owned()));
    }
    Ok(())
}

/// Does what waits for the disk where that is allowed.
async fn blocking<T: Send + 'static>(
    view: &StatusView,
    work: impl FnOnce(&Agent) -> Result<T, SteerError> + Send + 'static,
) -> Result<T, SourceError> {
    let Some(agent) = view.agent.get() else {
        return Err(SourceError::Unavailable(
            "the plugin waits for GPUs: there are no allocations yet; `tessera status` says what it \
             lacks"
                .to_owned(),
        ));
    };
    let agent = Arc::clone(agent);
    let done = tokio::task::spawn_blocking(move || work(&agent)).await;
    done.map_err(failed)?.map_err(|error| {
        let text = printable::reason(&error);
        match error {
            SteerError::NotFound(_) => SourceError::NotFound(text),
            SteerError::Invalid(_) => SourceError::Invalid(text),
            SteerError::Refused(_) => SourceError::Conflict(text),
            SteerError::NoRoom(_) => SourceError::NoRoom(text),
            SteerError::Ledger(_) => SourceError::Unavailable(text),
        }
    })
}

/// The caller, as the kernel says.
fn actor(peer: Peer, command: String) -> Actor {
    let Peer { uid, pid } = peer;
    let login_uid = login_uid(pid);
    // Not by the C library, which may ask a directory over the network.
    let users = files::text(Path::new("/etc/passwd"), USERS).unwrap_or_default();
    Actor::Admin {
        uid,
        pid,
        user: name_of(uid, &users),
        login: login_uid.and_then(|uid| name_of(uid, &users)),
        login_uid,
        command,
    }
}

/// Bytes of `/etc/passwd` at most.
const USERS: u64 = 1 << 20;

/// The first name of a uid in passwd(5).
fn name_of(uid: u32, users: &str) -> Option<String> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, id) = (fields.next()?, fields.nth(1)?);
        (id.parse() == Ok(uid) && !name.is_empty()).then(|| name.to_owned())
    })
}

fn login_uid(pid: u32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/loginuid")).ok()?;
    text.trim().parse().ok().filter(|uid| *uid != u32::MAX)
}

fn some(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

fn target_words(target: &Target) -> String {
    let mut words = target.name.clone();
    for (flag, value) in [("namespace", &target.namespace), ("container", &target.container)] {
        if !value.is_empty() {
            words.push_str(&format!(" --{flag} {value}"));
        }
    }
    words
}

fn set_command(request: &SetQuotaRequest) -> String {
    let mut text = format!("quota set {}", target_words(&request.target));
    if !request.gpu.is_empty() {
        text.push_str(&format!(" --gpu {}", request.gpu));
    }
    if let Some(bytes) = request.memory_limit_bytes {
        text.push_str(&format!(" --memory {}", format_bytes(bytes).replace(' ', "")));
    }
    if let Some(millis) = request.cores_millis {
        let percent = format_cores(millis);
        text.push_str(&format!(" --cores {}", percent.trim_end_matches('%')));
    }
    if let Some(policy) = request.policy {
        text.push_str(&format!(" --policy {}", policy.into_str()));
    }
    if request.force {
        text.push_str(" --force");
    }
    with_reason(&mut text, &request.reason);
    text
}

fn reset_command(request: &ResetQuotaRequest) -> String {
    let mut text = format!("quota reset {}", target_words(&request.target));
    if request.force {
        text.push_str(" --force");
    }
    with_reason(&mut text, &request.reason);
    text
}

fn with_reason(command: &mut String, reason: &str) {
    if !reason.is_empty() {
        command.push_str(&format!(" --reason {reason:?}"));
    }
}

#[cfg(test)]
mod tests {
    use tessera_model::sharing::Compute;

    use super::*;

    #[test]
    fn a_uid_is_named_by_the_first_line_that_has_it() {
        let users =
            "root:x:0:0::/root:/bin/sh\ntoor:x:0:0::/:\n:x:3:3::/:\nalice:x:1000:1000::/:\nbad\n";
        assert_eq!(name_of(0, users).as_deref(), Some("root"));
        assert_eq!(name_of(1000, users).as_deref(), Some("alice"));
        assert_eq!((name_of(3, users), name_of(7, users)), (None, None));
    }

    #[test]
    fn the_trail_tells_the_command_as_one_would_type_it() {
        let target = |name: &str| {
            let container = "main".to_owned();
            Target { name: name.into(), container, ..Default::default() }
        };
        let request = SetQuotaRequest {
            target: target("one/llm"),
            memory_limit_bytes: Some(12 << 30),
            cores_millis: Some(405),
            policy: Some(Compute::Strict),
            gpu: "0".into(),
            force: true,
            reason: "too slow".into(),
            ..Default::default()
        };
        assert_eq!(
            set_command(&request),
            "quota set one/llm --container main --gpu 0 --memory 12GiB --cores 40.5 --policy strict \
             --force --reason \"too slow\""
        );
        let request = ResetQuotaRequest { target: target("llm"), ..Default::default() };
        assert_eq!(reset_command(&request), "quota reset llm --container main");
    }
}
