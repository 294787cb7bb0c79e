//! `quota`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;
use tessera_api::admin::Names;
use tessera_api::print::{Cell, Column, Page, Paper, Sheet, Tone};
use tessera_config::Config;
use tessera_model::percent::{format_cores, parse_cores};
use tessera_model::quantity::{format_bytes, parse_bytes};
use tessera_model::sharing::Compute;
use tessera_model::written_name::{is_written, proposals, there_is};
use tessera_view::change::{QuotaResponse, ResetQuotaRequest, SetQuotaRequest, Target};
use tessera_view::status::{Allocation, Status};
use tessera_view::tenant::Limits;

use super::{given, holder, place, run, words};
use crate::output::{Format, show};
use crate::source::{Failure, Source, change, status};

/// What of quotas.
#[derive(Debug, Subcommand)]
pub(crate) enum QuotaCommand {
    /// Change the limits of a running container, until its allocation ends
    Set(SetArgs),
    /// Give a container back the limits that it was allocated with
    Reset(ResetArgs),
    /// Show limits in force, and beside them those of the allocation where they were changed
    Show {
        /// Only this pod (`name` or `namespace/name`) or allocation (its id, or four characters and more of it)
        #[arg(value_name = "POD|ALLOCATION")]
        name: Option<String>,
        /// Only pods of this namespace
        #[arg(long, short, value_name = "NAMESPACE")]
        namespace: Option<String>,
        /// Output format
        #[arg(long, short, value_enum, default_value = "text")]
        output: Format,
    },
}

/// Whose.
#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// A pod, as `name` or `namespace/name`, or an allocation's id (four characters and more of it will do)
    #[arg(value_name = "POD|ALLOCATION")]
    name: String,
    /// The pod's namespace
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// The container, where the pod has several with GPUs
    #[arg(long, value_name = "CONTAINER")]
    container: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct HowArgs {
    /// Also below what is in use: it keeps what it has, and everything new is refused until it fits
    #[arg(long)]
    force: bool,
    /// Say what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Why, for the audit trail
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("change").args(["memory", "cores", "policy"]).multiple(true).required(true))]
pub(crate) struct SetArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Memory that all its processes may hold on each of its GPUs: 12GiB, 12Gi, 512Mi
    #[arg(long, short, value_name = "QUANTITY", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// GPU time, in percent of a GPU: 40
    #[arg(long, value_name = "PERCENT", value_parser = parse_cores)]
    cores: Option<u32>,
    /// What --cores means: burst (a weight; idle time is anybody's), strict (also a cap) or none
    #[arg(long, value_name = "POLICY", value_parser = tessera_run::policy())]
    policy: Option<Compute>,
    /// Change the memory of this GPU alone, where it has several
    #[arg(long, value_name = "UUID|INDEX", default_value = "")]
    gpu: String,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    how: HowArgs,
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

pub(crate) async fn quota(command: QuotaCommand, source: &Source) -> Result<ExitCode, Failure> {
    let (fleet, common) = match source {
        Source::Node(config) => return of_node(command, config).await,
        Source::Cluster(fleet, common) => (fleet, common),
    };
    let (place, subject) = match (command.whose(), common.one_node()?) {
        (Some(written), _) => {
            let (place, subject) = holder(fleet, common, written).await?;
            (place, Some(subject))
        }
        (None, "") => return Err(Failure::usage("say whose: a pod, an allocation, or --node")),
        (None, node) => (place(fleet, node).await?, None),
    };
    run(fleet, &place, &command.words(subject.as_deref())).await
}

impl QuotaCommand {
    fn whose(&self) -> Option<&str> {
        match self {
            QuotaCommand::Set(args) => Some(&args.target.name),
            QuotaCommand::Reset(args) => Some(&args.target.name),
            QuotaCommand::Show { name, .. } => name.as_deref(),
        }
    }

    /// The plugin's own command.
    fn words(&self, subject: Option<&str>) -> Vec<String> {
        let flags = |how: &HowArgs| [("force", how.force), ("dry-run", how.dry_run)];
        match self {
            QuotaCommand::Set(SetArgs { target, memory, cores, policy, gpu, how }) => {
                let cores = cores.map(|cores| format_cores(cores).trim_end_matches('%').to_owned());
                let options = [
                    ("memory", memory.map(|bytes| bytes.to_string())),
                    ("cores", cores),
                    ("policy", policy.map(|policy| policy.into_str().to_owned())),
                    ("gpu", given(gpu)),
                    ("container", target.container.clone()),
                    ("reason", given(&how.reason)),
                ];
                words(&["quota", "set"], &options, &flags(how), how.output, subject)
            }
            QuotaCommand::Reset(ResetArgs { target, how }) => {
                let options =
                    [("container", target.container.clone()), ("reason", given(&how.reason))];
                words(&["quota", "reset"], &options, &flags(how), how.output, subject)
            }
            QuotaCommand::Show { output, .. } => {
                words(&["quota", "show"], &[], &[], *output, subject)
            }
        }
    }
}

async fn of_node(command: QuotaCommand, config: &Config) -> Result<ExitCode, Failure> {
    match command {
        QuotaCommand::Set(SetArgs { target, memory, cores, policy, gpu, how }) => {
            let request = SetQuotaRequest {
                target: target.into(),
                memory_limit_bytes: memory,
                cores_millis: cores,
                policy,
                gpu,
                force: how.force,
                dry_run: how.dry_run,
                reason: how.reason,
            };
            let answer = change(config, &request).await?;
            show(&answer, how.output, |paper| quota_text(&answer, how.dry_run, paper))?;
        }
        QuotaCommand::Reset(ResetArgs { target, how }) => {
            let HowArgs { force, dry_run, reason, output } = how;
            let request = ResetQuotaRequest { target: target.into(), force, dry_run, reason };
            let answer = change(config, &request).await?;
            show(&answer, output, |paper| quota_text(&answer, dry_run, paper))?;
        }
        QuotaCommand::Show { name, namespace, output } => {
            let status = status(config).await?;
            let all = of_namespace(&status.allocations, namespace.as_deref());
            let allocations = meant(&all, name.as_deref())?;
            let status = Status { allocations, ..status };
            // As `status -o json` has them.
            let Status { api_version, allocations, at_unix_ms, .. } = &status;
            let shown = json!({
                "api_version": api_version, "allocations": allocations, "at_unix_ms": at_unix_ms,
            });
            show(&shown, output, |paper| show_text(&status, paper))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn limits_cells(limits: &Limits) -> [String; 2] {
    [
        format_bytes(limits.memory_limit_bytes),
        format!("{} {}", format_cores(limits.cores_millis), limits.policy.into_str()),
    ]
}

fn arrow(before: String, after: String) -> String {
    if before == after { after } else { format!("{before} -> {after}") }
}

fn quota_text(answer: &QuotaResponse, dry_run: bool, paper: Paper) -> String {
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
    let mut page = Page::new(paper);
    page.say(0, Tone::Plain, &format!("{name}: {what}"));
    let mut sheet = Sheet::new(&[
        Column::text("GPU"),
        Column::text("MEMORY"),
        Column::text("TIME SHARE"),
        Column::number("IN USE"),
    ]);
    for gpu in &answer.gpus {
        let [memory, cores] = limits_cells(&gpu.before);
        let [memory_after, cores_after] = limits_cells(&gpu.after);
        sheet.row(vec![
            gpu.gpu_uuid.as_str().into(),
            arrow(memory, memory_after).into(),
            arrow(cores, cores_after).into(),
            gpu.memory_in_use_bytes.map_or_else(|| "-".to_owned(), format_bytes).into(),
        ]);
    }
    sheet.lay(&mut page);
    answer.notes.iter().for_each(|note| page.say(2, Tone::Plain, &format!("note: {note}")));
    page.finish()
}

/// Those of a namespace; all without one.
fn of_namespace(all: &[Allocation], namespace: Option<&str>) -> Vec<Allocation> {
    let is_in = |allocation: &&Allocation| {
        let holder = allocation.holder.as_ref();
        namespace.is_none_or(|name| holder.is_some_and(|holder| holder.namespace == name))
    };
    all.iter().filter(is_in).cloned().collect()
}

/// Those that are called so; all without a name.
fn meant(all: &[Allocation], name: Option<&str>) -> Result<Vec<Allocation>, Failure> {
    let Some(name) = name else { return Ok(all.to_vec()) };
    let is_meant = |allocation: &&Allocation| {
        let pod = allocation.holder.as_ref().is_some_and(|holder| {
            holder.pod == name || format!("{}/{}", holder.namespace, holder.pod) == name
        });
        pod || is_written(&allocation.id, name)
    };
    let meant: Vec<Allocation> = all.iter().filter(is_meant).cloned().collect();
    if !meant.is_empty() {
        return Ok(meant);
    }
    let known = all.iter().filter_map(|a| a.holder.as_ref());
    let known = known.map(|h| format!("{}/{}", h.namespace, h.pod)).collect();
    let there = match proposals(known, name).as_slice() {
        [] => "; no pod holds a GPU here now".to_owned(),
        some => there_is(some),
    };
    Err(Failure::failed(format!("no running pod or allocation is called {name}{there}")))
}

fn show_text(status: &Status, paper: Paper) -> String {
    let mut page = Page::new(paper);
    if status.allocations.is_empty() {
        page.say(0, Tone::Plain, "No allocations: no running container holds a GPU here.");
        return page.finish();
    }
    let names = Names::of(status, paper.width.is_none());
    let mut sheet = Sheet::new(&[
        Column::name("POD/CONTAINER"),
        Column::text("GPU"),
        Column::number("MEMORY"),
        Column::text("TIME SHARE"),
        Column::text("ALLOCATED WITH"),
        Column::text("ID"),
    ]);
    for allocation in &status.allocations {
        let name = match &allocation.holder {
            Some(holder) => format!("{}/{}/{}", holder.namespace, holder.pod, holder.container),
            None => "not named by kubelet yet".to_owned(),
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
            let cells = [
                name.clone(),
                names.gpu(&used.gpu_uuid),
                memory,
                cores,
                allocated,
                names.id(&allocation.id).to_owned(),
            ];
            sheet.row(cells.map(Cell::from).into());
        }
    }
    sheet.lay(&mut page);
    page.finish()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tessera_view::change::QuotaChange;
    use tessera_view::status::Holder;
    use tessera_view::tenant::Use;

    use super::*;

    fn limits(gib: u64, cores_millis: u32) -> Limits {
        let policy = Compute::Strict;
        Limits { memory_limit_bytes: gib << 30, cores_millis, policy }
    }

    #[test]
    fn before_and_after_are_shown_and_what_stays_once() {
        let answer = QuotaResponse {
            allocation_id: "abc".into(),
            gpus: vec![QuotaChange {
                gpu_uuid: "GPU-a".into(),
                before: limits(8, 400),
                after: limits(12, 400),
                memory_in_use_bytes: Some(1 << 30),
            }],
            changed: true,
            notes: vec!["take care".into()],
            ..Default::default()
        };
        let text = quota_text(&answer, false, Paper::plain());
        assert!(text.starts_with("allocation abc: changed\n"), "{text}");
        assert!(text.contains("8 GiB -> 12 GiB  40% strict   1 GiB"), "{text}");
        assert!(text.contains("note: take care"), "{text}");
        assert!(quota_text(&answer, true, Paper::plain()).contains("dry run"));
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
            gpus: vec![Use {
                gpu_uuid: "GPU-a".into(),
                memory_limit_bytes: 12 << 30,
                cores_millis: 400,
                policy: Compute::Burst,
                allocated,
                ..Default::default()
            }],
            ..Default::default()
        };
        let all = [allocation("x", Some(limits(8, 250))), allocation("y", None)];
        let status = |name: Option<&str>| {
            let allocations = meant(&all, name)?;
            Ok::<_, Failure>(Status { allocations, ..Default::default() })
        };
        let text = |name| show_text(&status(name).unwrap(), Paper::plain());
        let whole = text(None);
        assert!(whole.contains("12 GiB  40% burst   8 GiB, 25% strict"), "{whole}");
        assert!(whole.contains("the same"), "{whole}");
        let one = text(Some("one/y"));
        assert!(one.contains("id-y") && !one.contains("id-x"), "{one}");
        assert_eq!(one, text(Some("id-y")));
        // Somebody mistyped, and wants to know it.
        let why = status(Some("z")).unwrap_err().text;
        assert!(why.ends_with("there is one/x, one/y"), "{why}");
    }

    #[derive(Parser)]
    struct Quota {
        #[command(subcommand)]
        command: QuotaCommand,
    }

    #[test]
    fn what_is_run_is_the_plugins_own_command_and_names_are_no_options() {
        let of = |text: &str| {
            let parsed =
                Quota::try_parse_from(["quota"].into_iter().chain(text.split(' '))).unwrap();
            parsed.command.words(Some("team/chat")).join(" ")
        };
        assert_eq!(
            of("set chat --memory 12Gi --cores 40 --force --reason why"),
            "quota set --memory=12884901888 --cores=40 --reason=why --force -- team/chat"
        );
        assert_eq!(
            of("reset chat --dry-run --container=a"),
            "quota reset --container=a --dry-run -- team/chat"
        );
        assert_eq!(of("show chat -o json"), "quota show --output=json -- team/chat");
        assert_eq!(
            of("set chat --cores 40 -o json --dry-run"),
            "quota set --cores=40 --output=json --dry-run -- team/chat"
        );
    }
}
