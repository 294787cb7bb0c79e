//! The admin service's changes: quotas and cordons.

use std::path::Path;
use std::sync::Arc;

use tessera_kubelet_api::admin::{
    ComputePolicy, CordonRequest, CordonResponse, Limits, QuotaChange, QuotaResponse,
    ResetQuotaRequest, SetQuotaRequest, StandingCordon,
};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use super::StatusView;
use super::words::policy as policy_name;
use tessera_agent::allocations::Target;
use tessera_agent::allocations::steer::{ChangeOptions, Changed, QuotaRequest, SteerError};
use tessera_agent::{Agent, Cordons, Lift};
use tessera_model::audit::Actor;
use tessera_model::percent::format_cores;
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_model::sharing::Compute;
use tessera_model::steered::Cordon;
use tessera_system::files;

/// `SetQuota`.
pub(super) async fn set_quota(
    view: &StatusView,
    request: Request<SetQuotaRequest>,
) -> Result<Response<QuotaResponse>, Status> {
    let actor = actor(&request, set_command(request.get_ref()));
    let request = request.into_inner();
    let compute = match request.policy() {
        ComputePolicy::Unspecified => None,
        ComputePolicy::Burst => Some(Compute::Burst),
        ComputePolicy::Strict => Some(Compute::Strict),
        ComputePolicy::None => Some(Compute::None),
    };
    let change = QuotaRequest {
        memory_limit_bytes: request.memory_limit_bytes,
        cores_millis: request.cores_millis,
        compute,
        gpu: some(request.gpu),
        options: ChangeOptions {
            force: request.force,
            dry_run: request.dry_run,
            reason: some(request.reason),
        },
    };
    let target = target(request.target);
    let changed = blocking(view, move |agent| agent.set_quota(&target, &change, actor)).await?;
    Ok(Response::new(answer(&changed)))
}

/// `ResetQuota`.
pub(super) async fn reset_quota(
    view: &StatusView,
    request: Request<ResetQuotaRequest>,
) -> Result<Response<QuotaResponse>, Status> {
    let actor = actor(&request, reset_command(request.get_ref()));
    let request = request.into_inner();
    let options = ChangeOptions {
        force: request.force,
        dry_run: request.dry_run,
        reason: some(request.reason),
    };
    let target = target(request.target);
    let changed = blocking(view, move |agent| agent.reset_quota(&target, &options, actor)).await?;
    Ok(Response::new(answer(&changed)))
}

/// `Cordon`, and with `again` `Uncordon`.
pub(super) async fn cordon(
    view: &StatusView,
    request: Request<CordonRequest>,
    again: bool,
) -> Result<Response<CordonResponse>, Status> {
    let CordonRequest { gpu, all, reason, each } = request.get_ref();
    let verb = if again { "uncordon" } else { "cordon" };
    let what = match (*all, *each && again) {
        (true, true) => "--all --each",
        (true, false) => "--all",
        (false, _) => gpu,
    };
    let mut command = format!("{verb} {what}");
    with_reason(&mut command, reason);
    let actor = actor(&request, command);
    let CordonRequest { gpu, all, reason, each } = request.into_inner();
    if gpu.is_empty() && !all {
        return Err(Status::invalid_argument("name a GPU by UUID or index, or say --all"));
    }
    if each && !(all && again) {
        return Err(Status::invalid_argument("each goes with all, to uncordon"));
    }
    let done = blocking(view, move |agent| {
        let gpu = (!all).then_some(gpu.as_str());
        match (again, gpu) {
            (false, gpu) => agent.cordon(gpu, some(reason), actor),
            (true, Some(gpu)) => agent.uncordon(Lift::Gpu(gpu), some(reason), actor),
            (true, None) if each => agent.uncordon(Lift::Each, some(reason), actor),
            (true, None) => agent.uncordon(Lift::Node, some(reason), actor),
        }
    });
    let Cordons { changed, standing, running } = done.await?;
    let gpus = view.agent().map(|agent| agent.inventory().catalogue());
    let index = |uuid: &str| Some(gpus.as_ref()?.gpus.get(uuid)?.gpu.index);
    let one = |(uuid, cordon): &(String, Cordon)| StandingCordon {
        gpu_uuid: uuid.clone(),
        gpu_index: index(uuid),
        since_unix_ms: cordon.at_unix_ms,
        by: cordon.by.who(),
        reason: cordon.reason.clone().unwrap_or_default(),
    };
    Ok(Response::new(CordonResponse {
        changed,
        cordoned: standing.iter().map(|(uuid, _)| uuid.clone()).collect(),
        running: u32::try_from(running).unwrap_or(u32::MAX),
        standing: standing.iter().map(one).collect(),
    }))
}

/// Does what waits for the disk where that is allowed.
async fn blocking<T: Send + 'static>(
    view: &StatusView,
    work: impl FnOnce(&Agent) -> Result<T, SteerError> + Send + 'static,
) -> Result<T, Status> {
    let Some(agent) = view.agent() else {
        return Err(Status::unavailable(
            "the plugin waits for GPUs: there are no allocations yet; `tessera status` says what it \
             lacks",
        ));
    };
    let agent = Arc::clone(agent);
    let done = tokio::task::spawn_blocking(move || work(&agent)).await;
    done.map_err(|error| Status::internal(error.to_string()))?.map_err(|error| {
        let text = printable::reason(&error);
        match error {
            SteerError::NotFound(_) => Status::not_found(text),
            SteerError::Invalid(_) => Status::invalid_argument(text),
            SteerError::Refused(_) => Status::failed_precondition(text),
            SteerError::NoRoom(_) => Status::resource_exhausted(text),
            SteerError::Ledger(_) => Status::unavailable(text),
        }
    })
}

/// The caller, as the kernel says.
pub(super) fn actor<T>(request: &Request<T>, command: String) -> Actor {
    let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    let pid = peer.and_then(|peer| peer.pid()).and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
    // Whom the kernel does not name is nobody, in the sense of `nobody`.
    let uid = peer.map_or(65534, |peer| peer.uid());
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

fn target(target: Option<tessera_kubelet_api::admin::Target>) -> Target {
    let target = target.unwrap_or_default();
    Target {
        name: target.name,
        namespace: some(target.namespace),
        container: some(target.container),
    }
}

fn target_words(target: Option<&tessera_kubelet_api::admin::Target>) -> String {
    let Some(target) = target else { return String::new() };
    let mut words = target.name.clone();
    for (flag, value) in [("namespace", &target.namespace), ("container", &target.container)] {
        if !value.is_empty() {
            words.push_str(&format!(" --{flag} {value}"));
        }
    }
    words
}

fn set_command(request: &SetQuotaRequest) -> String {
    let mut text = format!("quota set {}", target_words(request.target.as_ref()));
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
    if request.policy() != ComputePolicy::Unspecified {
        text.push_str(&format!(" --policy {}", policy_name(request.policy())));
    }
    if request.force {
        text.push_str(" --force");
    }
    with_reason(&mut text, &request.reason);
    text
}

fn reset_command(request: &ResetQuotaRequest) -> String {
    let mut text = format!("quota reset {}", target_words(request.target.as_ref()));
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

/// The message that tells limits.
pub(super) fn limits(limits: &tessera_model::audit::Limits) -> Limits {
    Limits {
        memory_limit_bytes: limits.memory_limit_bytes,
        cores_millis: limits.cores_millis,
        policy: tessera_agent::messages::compute_policy(limits.compute).into(),
    }
}

fn answer(changed: &Changed) -> QuotaResponse {
    let gpus = changed.before.iter().zip(&changed.after).zip(&changed.in_use);
    QuotaResponse {
        allocation_id: changed.record.id.to_string(),
        holder: changed.record.holder.as_ref().map(tessera_agent::messages::holder),
        gpus: gpus
            .map(|((before, after), in_use)| QuotaChange {
                gpu_uuid: after.uuid.clone(),
                before: Some(limits(before)),
                after: Some(limits(after)),
                memory_in_use_bytes: *in_use,
            })
            .collect(),
        changed: changed.is_change(),
        notes: changed.notes.clone(),
    }
}

#[cfg(test)]
mod tests {
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
            Some(tessera_kubelet_api::admin::Target {
                name: name.into(),
                container,
                ..Default::default()
            })
        };
        let request = SetQuotaRequest {
            target: target("one/llm"),
            memory_limit_bytes: Some(12 << 30),
            cores_millis: Some(405),
            policy: ComputePolicy::Strict.into(),
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
