//! `tessera quota`, `tessera cordon` and `tessera uncordon`: ask the plugin and print its answer.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use tessera_kubelet_api::admin::admin_client::AdminClient;
use tessera_kubelet_api::admin::{
    Allocation, ComputePolicy, CordonRequest, CordonResponse, Limits, QuotaResponse,
    ResetQuotaRequest, SetQuotaRequest, StatusRequest, Target,
};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::client::{EXIT_UNAVAILABLE, TIMEOUT, connect};
use super::table;
use super::table::policy_name;
use tessera_config::Config;
use tessera_model::percent::{format_cores, parse_cores};
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_model::quantity::parse_bytes;
use tessera_model::steered::Cordon;

/// What of quotas.
#[derive(Debug, Subcommand)]
pub enum QuotaCommand {
    /// Change the limits of a running container, until its allocation ends
    Set(SetArgs),
    /// Give a container back the limits that it was allocated with
    Reset(ResetArgs),
    /// Show limits in force, and beside them those of the allocation where they were changed
    Show {
        /// Only this pod (`name` or `namespace/name`) or allocation
        #[arg(value_name = "POD|ALLOCATION")]
        name: Option<String>,
    },
}

/// Whose.
#[derive(Debug, Args)]
pub struct TargetArgs {
    /// A pod, as `name` or `namespace/name`, or an allocation's id
    #[arg(value_name = "POD|ALLOCATION")]
    name: String,
    /// The pod's namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// The container, where the pod has several with GPUs
    #[arg(long, value_name = "CONTAINER")]
    container: Option<String>,
}

/// How.
#[derive(Debug, Args)]
pub struct HowArgs {
    /// Also below what is in use: it keeps what it has, and everything new is refused until it fits
    #[arg(long)]
    force: bool,
    /// Say what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Why, for the audit trail
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

/// Arguments of `tessera quota set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Memory that all its processes may hold on each of its GPUs: 12GiB, 12Gi, 512Mi
    #[arg(long, short, value_name = "QUANTITY", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// GPU time, in percent of a GPU: 40
    #[arg(long, value_name = "PERCENT", value_parser = parse_cores)]
    cores: Option<u32>,
    /// What --cores means: burst (a weight; idle time is anybody's), strict (also a cap) or none
    #[arg(long, value_name = "POLICY", value_enum)]
    policy: Option<Policy>,
    /// Change the memory of this GPU alone, where it has several
    #[arg(long, value_name = "UUID|INDEX", default_value = "")]
    gpu: String,
    #[command(flatten)]
    how: HowArgs,
}

/// Arguments of `tessera quota reset`.
#[derive(Debug, Args)]
pub struct ResetArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    how: HowArgs,
}

/// Arguments of `tessera cordon` and `tessera uncordon`.
#[derive(Debug, Args)]
pub struct CordonArgs {
    /// UUID, index or product name; of a MIG parent, all its instances
    #[arg(value_name = "GPU", required_unless_present = "all", conflicts_with = "all")]
    gpu: Option<String>,
    /// The whole node
    #[arg(long)]
    all: bool,
    /// Why, for the audit trail and for whoever wonders
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

/// What `--cores` means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Policy {
    Burst,
    Strict,
    None,
}

impl From<TargetArgs> for Target {
    fn from(args: TargetArgs) -> Self {
        Target {
            name: args.name,
            namespace: args.namespace.unwrap_or_default(),
            container: args.container.unwrap_or_default(),
        }
    }
}

/// `tessera quota`.
///
/// # Errors
/// No runtime, or the answer cannot be printed.
pub fn quota(command: QuotaCommand, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        QuotaCommand::Set(args) => {
            let policy = args.policy.map_or(ComputePolicy::Unspecified, |policy| match policy {
                Policy::Burst => ComputePolicy::Burst,
                Policy::Strict => ComputePolicy::Strict,
                Policy::None => ComputePolicy::None,
            });
            let dry_run = args.how.dry_run;
            let request = SetQuotaRequest {
                target: Some(args.target.into()),
                memory_limit_bytes: args.memory,
                cores_millis: args.cores,
                policy: policy.into(),
                gpu: args.gpu,
                force: args.how.force,
                dry_run,
                reason: args.how.reason,
            };
            let answer = ask(config, async |mut admin| admin.set_quota(request).await)?;
            tell(answer, |answer| quota_text(answer, dry_run))
        }
        QuotaCommand::Reset(ResetArgs { target, how }) => {
            let dry_run = how.dry_run;
            let (force, reason) = (how.force, how.reason);
            let request = ResetQuotaRequest { target: Some(target.into()), force, dry_run, reason };
            let answer = ask(config, async |mut admin| admin.reset_quota(request).await)?;
            tell(answer, |answer| quota_text(answer, dry_run))
        }
        QuotaCommand::Show { name } => {
            let answer = ask(config, async |mut admin| admin.status(StatusRequest {}).await)?;
            tell(answer, |status| show_text(&status.allocations, name.as_deref()))
        }
    }
}

/// `tessera cordon`, and with `again` `tessera uncordon`.
///
/// # Errors
/// No runtime, or the answer cannot be printed.
pub fn cordon(args: CordonArgs, again: bool, config: &Config) -> anyhow::Result<ExitCode> {
    let CordonArgs { gpu, all, reason } = args;
    let request = CordonRequest { gpu: gpu.unwrap_or_default(), all, reason };
    let answer = ask(config, async |mut admin| match again {
        true => admin.uncordon(request).await,
        false => admin.cordon(request).await,
    })?;
    tell(answer, |answer| cordon_text(answer, again))
}

/// What became of a request: the plugin's answer, or what it or the way to it has against it.
type Answer<T> = Result<T, (String, ExitCode)>;

fn ask<T, F: Future<Output = Result<Response<T>, Status>>>(
    config: &Config,
    call: impl FnOnce(AdminClient<Channel>) -> F,
) -> anyhow::Result<Answer<T>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let path = &config.paths.admin;
    let unreachable = |error: String| {
        let text = format!("the plugin does not answer at {} ({error})", path.display());
        Err((text, ExitCode::from(EXIT_UNAVAILABLE)))
    };
    let asking = async {
        let admin = match connect(path).await {
            Ok(admin) => admin,
            Err(error) => return unreachable(format!("{error:#}")),
        };
        match call(admin).await {
            Ok(answer) => Ok(answer.into_inner()),
            Err(status) if status.code() == Code::Unimplemented => Err((
                "the plugin that runs here is of an older version and cannot do that".to_owned(),
                ExitCode::FAILURE,
            )),
            Err(status) => Err((status.message().to_owned(), ExitCode::FAILURE)),
        }
    };
    Ok(runtime.block_on(async {
        match tokio::time::timeout(TIMEOUT, asking).await {
            Ok(answer) => answer,
            Err(_) => unreachable("it takes too long; it may still do what was asked".to_owned()),
        }
    }))
}

fn tell<T>(answer: Answer<T>, text: impl FnOnce(&T) -> String) -> anyhow::Result<ExitCode> {
    match answer {
        Ok(answer) => {
            let text = text(&answer);
            std::io::stdout()
                .write_all(printable::lines(&text).as_bytes())
                .context("standard output")?;
            Ok(ExitCode::SUCCESS)
        }
        Err((text, code)) => {
            eprintln!("tessera: {}", printable::line(&text));
            Ok(code)
        }
    }
}

fn limits_cells(limits: &Limits) -> [String; 2] {
    [
        format_bytes(limits.memory_limit_bytes),
        format!("{} {}", format_cores(limits.cores_millis), policy_name(limits.policy())),
    ]
}

fn arrow(before: String, after: String) -> String {
    if before == after { after } else { format!("{before} -> {after}") }
}

fn quota_text(answer: &QuotaResponse, dry_run: bool) -> String {
    let name = match &answer.holder {
        Some(holder) => format!(
            "{}/{} container {} (allocation {})",
            holder.namespace, holder.pod, holder.container, answer.allocation_id
        ),
        None => format!("allocation {}", answer.allocation_id),
    };
    let what = match (answer.changed, dry_run) {
        (false, _) => "has these limits already",
        (true, true) => "would change; this was a dry run",
        (true, false) => "changed",
    };
    let rows = answer.gpus.iter().map(|gpu| {
        let [memory, cores] = limits_cells(&gpu.before.unwrap_or_default());
        let [memory_after, cores_after] = limits_cells(&gpu.after.unwrap_or_default());
        vec![
            format!("  {}", gpu.gpu_uuid),
            arrow(memory, memory_after),
            arrow(cores, cores_after),
            gpu.memory_in_use_bytes.map_or_else(|| "-".to_owned(), format_bytes),
        ]
    });
    let mut out = format!("{name}: {what}\n");
    table::table(&mut out, &["  GPU", "MEMORY", "CORES", "IN USE"], rows.collect());
    answer.notes.iter().for_each(|note| out.push_str(&format!("  note: {note}\n")));
    out
}

fn show_text(allocations: &[Allocation], name: Option<&str>) -> String {
    let is_meant = |allocation: &&Allocation| {
        let Some(name) = name else { return true };
        let pod = allocation.holder.as_ref().is_some_and(|holder| {
            holder.pod == name || format!("{}/{}", holder.namespace, holder.pod) == name
        });
        pod || allocation.id == name
    };
    let mut rows = Vec::new();
    for allocation in allocations.iter().filter(is_meant) {
        let (pod, container) = match &allocation.holder {
            Some(holder) => (format!("{}/{}", holder.namespace, holder.pod), &*holder.container),
            None => ("-".to_owned(), "-"),
        };
        for used in &allocation.gpus {
            let limits = Limits {
                memory_limit_bytes: used.memory_limit_bytes,
                cores_millis: used.cores_millis,
                policy: used.policy,
            };
            let [memory, cores] = limits_cells(&limits);
            let allocated = match &used.allocated {
                Some(allocated) => limits_cells(allocated).join(", "),
                None => "the same".to_owned(),
            };
            rows.push(vec![
                format!("  {pod}"),
                container.to_owned(),
                used.gpu_uuid.clone(),
                memory,
                cores,
                allocated,
                allocation.id.clone(),
            ]);
        }
    }
    if rows.is_empty() {
        return "No allocations.\n".to_owned();
    }
    let mut out = String::new();
    let header = ["  POD", "CONTAINER", "GPU", "MEMORY", "CORES", "ALLOCATED WITH", "ID"];
    table::table(&mut out, &header, rows);
    out
}

fn cordon_text(answer: &CordonResponse, again: bool) -> String {
    let words = |list: &[String]| {
        let words = list.iter().map(|uuid| match uuid.as_str() {
            Cordon::NODE => "the node",
            uuid => uuid,
        });
        words.collect::<Vec<_>>().join(", ")
    };
    let mut out = match (answer.changed.is_empty(), again) {
        (true, _) => "nothing to do\n".to_owned(),
        (false, true) => format!("{}: given out again\n", words(&answer.changed)),
        (false, false) => format!(
            "{}: cordoned; nothing more is given out, {} running {} on\n",
            words(&answer.changed),
            answer.running,
            if answer.running == 1 { "allocation goes" } else { "allocations go" },
        ),
    };
    match answer.cordoned.as_slice() {
        [] => out.push_str("nothing is cordoned\n"),
        list => out.push_str(&format!("cordoned now: {}\n", words(list))),
    }
    out
}

#[cfg(test)]
mod tests {
    use tessera_kubelet_api::admin::{GpuUse, Holder, QuotaChange};

    use super::*;

    fn limits(gib: u64, cores_millis: u32) -> Limits {
        let policy = ComputePolicy::Strict.into();
        Limits { memory_limit_bytes: gib << 30, cores_millis, policy }
    }

    #[test]
    fn before_and_after_are_told_and_what_stays_once() {
        let answer = QuotaResponse {
            allocation_id: "abc".into(),
            gpus: vec![QuotaChange {
                gpu_uuid: "GPU-a".into(),
                before: Some(limits(8, 400)),
                after: Some(limits(12, 400)),
                memory_in_use_bytes: Some(1 << 30),
            }],
            changed: true,
            notes: vec!["take care".into()],
            ..Default::default()
        };
        let text = quota_text(&answer, false);
        assert!(text.starts_with("allocation abc: changed\n"), "{text}");
        assert!(text.contains("8 GiB -> 12 GiB  40% strict  1 GiB"), "{text}");
        assert!(text.contains("note: take care"), "{text}");
        assert!(quota_text(&answer, true).contains("dry run"));
    }

    #[test]
    fn changed_limits_are_shown_beside_those_of_the_allocation() {
        let allocation = |pod: &str, allocated| Allocation {
            id: format!("id-{pod}"),
            holder: Some(Holder {
                namespace: "one".into(),
                pod: pod.into(),
                container: "main".into(),
            }),
            gpus: vec![GpuUse {
                gpu_uuid: "GPU-a".into(),
                memory_limit_bytes: 12 << 30,
                cores_millis: 400,
                policy: ComputePolicy::Burst.into(),
                allocated,
                ..Default::default()
            }],
            ..Default::default()
        };
        let all = [allocation("x", Some(limits(8, 250))), allocation("y", None)];
        let text = show_text(&all, None);
        assert!(text.contains("12 GiB  40% burst  8 GiB, 25% strict"), "{text}");
        assert!(text.contains("the same"), "{text}");
        let text = show_text(&all, Some("one/y"));
        assert!(text.contains("id-y") && !text.contains("id-x"), "{text}");
        assert_eq!(show_text(&all, Some("z")), "No allocations.\n");
    }

    #[test]
    fn a_cordon_tells_what_goes_on_and_what_stands() {
        let answer = CordonResponse {
            changed: vec!["GPU-a".into()],
            cordoned: vec!["*".into(), "GPU-a".into()],
            running: 1,
        };
        let text = cordon_text(&answer, false);
        assert!(
            text.contains(
                "GPU-a: cordoned; nothing more is given out, 1 running allocation goes on"
            )
        );
        assert!(text.contains("cordoned now: the node, GPU-a"), "{text}");
        let none = CordonResponse::default();
        assert_eq!(cordon_text(&none, true), "nothing to do\nnothing is cordoned\n");
    }
}
