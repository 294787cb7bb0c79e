//! `status`: what is wrong first, then GPUs; of one node, then pods.

use std::process::ExitCode;

use tessera_api::admin::reach::{TIMEOUT, get};
use tessera_api::admin::{EXIT_UNAVAILABLE, status_text};
use tessera_api::print::{Cell, Column, Page, Paper, Sheet, Tone};
use tessera_config::Config;
use tessera_model::counted::plural;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::{printable, time_format};
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::gpu::Gpu;
use tessera_view::status::{LIVE, Registration, Status};

use crate::output::{Format, show};
use crate::source::{Failure, Source, failed, status};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Output format
    #[arg(long, short, value_enum, default_value = "text")]
    output: Format,
    /// Of this node's plugin: print problems only; succeed if it offers the resource (a readiness probe)
    #[arg(long)]
    ready: bool,
    /// Of this node's plugin: print problems only; succeed if it answers at all (a liveness probe)
    #[arg(long, conflicts_with = "ready")]
    live: bool,
}

/// What a missing plugin means for pods.
const WHAT_HOLDS: &str = "running pods keep their limits, and new ones wait for the plugin";

pub(crate) async fn main(args: &Args, source: &Source) -> Result<ExitCode, Failure> {
    match source {
        Source::Node(config) if args.live => live(config).await,
        Source::Node(config) if args.ready => Ok(readiness(&status(config).await?)),
        Source::Node(config) => of_node(args.output, config).await,
        Source::Cluster(..) if args.live || args.ready => Err(Failure::usage(
            "--ready and --live are of the plugin's own command, `tessera status`",
        )),
        Source::Cluster(..) => {
            let fleet = source.fleet().await?;
            show(&fleet, args.output, |paper| text(&fleet, paper))?;
            Ok(source.exit(&fleet))
        }
    }
}

async fn of_node(format: Format, config: &Config) -> Result<ExitCode, Failure> {
    let status = status(config).await.map_err(|mut failure| {
        failure.text.push_str("; ");
        failure.text.push_str(WHAT_HOLDS);
        failure
    })?;
    show(&status, format, |paper| status_text(&status, paper))?;
    // Somebody who waits for GPUs waits for this, too.
    let has_none = status.gpus.iter().all(|gpu| gpu.memory_total_bytes == 0);
    Ok(ExitCode::from(if has_none { EXIT_UNAVAILABLE } else { 0 }))
}

fn readiness(status: &Status) -> ExitCode {
    let plugin = &status.plugin;
    if plugin.registration == Registration::Live {
        return ExitCode::SUCCESS;
    }
    let why = match plugin.registration_error.as_str() {
        "" => "kubelet has not taken the registration yet, or has not been asked",
        error => error,
    };
    eprintln!("not registered: {}", printable::line(why));
    for warning in &status.warnings {
        eprintln!("{}", printable::line(warning));
    }
    ExitCode::FAILURE
}

/// Says nothing of kubelet, GPUs or pages, for none of which a restart would be of use.
async fn live(config: &Config) -> Result<ExitCode, Failure> {
    let answer = get::<serde_json::Value>(&config.paths.admin, LIVE, TIMEOUT).await;
    answer.map_err(|error| failed(&error))?;
    Ok(ExitCode::SUCCESS)
}

const COLUMNS: &[Column] = &[
    Column::name("NODE"),
    Column::number("GPU"),
    Column::name("MODEL").rank(3),
    Column::text("STATE"),
    Column::number("MEMORY USED").rank(1),
    Column::number("SOLD").rank(1),
    Column::number("OF").rank(1),
    Column::number("SHARES").rank(2),
    Column::text("FITS NEXT"),
];

/// What is amiss, a sentence each with the node in front; then a line for each GPU.
fn text(fleet: &Fleet, paper: Paper) -> String {
    let mut page = Page::new(paper);
    let answering = fleet.nodes.iter().filter(|entry| entry.answers).count();
    let views = || fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let gpus: usize = views().map(|view| view.gpus.len()).sum();
    let tenants: usize = views()
        .map(|view| {
            view.tenants.len().saturating_add(usize::try_from(view.hidden_tenants).unwrap_or(0))
        })
        .fold(0, usize::saturating_add);
    let title = format!(
        "{}: {answering} of {} nodes answer, {}, {}",
        fleet.name,
        fleet.nodes.len(),
        plural(gpus, "GPU"),
        plural(tenants, "tenant")
    );
    page.say(0, Tone::Head, &title);
    for entry in &fleet.nodes {
        for sentence in amiss(entry, fleet.at_unix_ms) {
            page.say(0, Tone::Warn, &format!("! {}: {sentence}", entry.node));
        }
    }
    let mut sheet = Sheet::new(COLUMNS);
    for entry in &fleet.nodes {
        for gpu in entry.view.iter().flat_map(|view| &view.gpus) {
            sheet.row(row(entry, gpu, page.is_wide()).map(Cell::from).into());
        }
    }
    if gpus > 0 {
        page.gap();
        sheet.lay(&mut page);
    }
    page.finish()
}

fn amiss(entry: &Entry, now_unix_ms: i64) -> Vec<String> {
    let mut all = Vec::new();
    if !entry.answers {
        let since = match entry.answered_unix_ms {
            0 => String::new(),
            at => format!(" (last answer {} ago)", time_format::ago(at, now_unix_ms)),
        };
        all.push(format!("does not answer{since}: {}", entry.error));
    }
    let Some(view) = &entry.view else { return all };
    all.extend(view.gpus.iter().filter_map(Gpu::trouble));
    all.extend(view.plugin.amiss.iter().cloned());
    if !view.plugin.config_error.is_empty() {
        all.push(format!("the configuration was refused: {}", view.plugin.config_error));
    }
    if view.gpus.is_empty() {
        all.push("the plugin finds no GPU".to_owned());
    }
    all.extend(view.warnings.iter().map(|warning| warning.text.clone()));
    all
}

fn row(entry: &Entry, gpu: &Gpu, wide: bool) -> [String; 9] {
    let state = match (gpu.cordon.is_empty(), gpu.state.as_str(), entry.answers) {
        (_, _, false) => "?".to_owned(),
        (false, ..) => "cordoned".to_owned(),
        (true, "", _) => "-".to_owned(),
        (true, state, _) => state.to_owned(),
    };
    let fits: Vec<String> = gpu
        .fits
        .iter()
        .filter(|fit| fit.count > 0)
        .map(|fit| {
            let cores = match fit.cores_millis {
                0 => String::new(),
                millis => format!(", {}", format_cores(millis)),
            };
            format!("{} × {}{cores}", fit.count, format_bytes(fit.memory_bytes))
        })
        .collect();
    let name = if wide { format!("{} {}", gpu.name, gpu.uuid) } else { gpu.name.clone() };
    [
        entry.node.clone(),
        gpu.index.to_string(),
        name,
        state,
        format_bytes(gpu.memory_used_bytes),
        format_bytes(gpu.memory_limits_bytes),
        format_bytes(gpu.memory_total_bytes),
        format_cores(gpu.cores_millis),
        match (fits.is_empty(), gpu.no_room.as_str()) {
            (false, _) => fits.join(" or "),
            (true, "") => "nothing".to_owned(),
            (true, lack) => format!("nothing: too little {lack}"),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_view::gpu::Fit;
    use tessera_view::node::{Node, Warning};

    fn fleet() -> Fleet {
        let gpu = Gpu {
            uuid: "GPU-12345678".into(),
            name: "NVIDIA H100 80GB HBM3".into(),
            state: "healthy".into(),
            memory_total_bytes: 80 << 30,
            memory_used_bytes: 12 << 30,
            fits: vec![Fit {
                count: 3,
                memory_bytes: 20 << 30,
                cores_millis: 250,
                ..Fit::default()
            }],
            ..Gpu::default()
        };
        let sick = Gpu {
            index: 1,
            state: "unhealthy".into(),
            state_reason: "XID 79 \u{1b}[31m".into(),
            ..gpu.clone()
        };
        let warnings = vec![Warning { text: "w".repeat(900), ..Warning::default() }];
        let view = Node { gpus: vec![gpu, sick], warnings, ..Node::default() };
        let a = Entry { node: "a".into(), answers: true, view: Some(view), ..Entry::default() };
        let b = Entry {
            node: "b".into(),
            error: "it did not answer within 5 s".into(),
            ..Entry::default()
        };
        Fleet { name: "prod".into(), nodes: vec![a, b], ..Fleet::default() }
    }

    #[test]
    fn what_is_amiss_comes_first_and_no_line_is_too_wide() {
        let text = text(&fleet(), Paper::plain());
        assert!(
            text.starts_with(
                "prod: 1 of 2 nodes answer, 2 GPUs, 0 tenants\n! a: GPU 1 is unhealthy: XID 79"
            ),
            "{text}"
        );
        assert!(text.contains("! b: does not answer: it did not answer within 5 s"), "{text}");
        assert!(text.contains("3 × 20 GiB, 25%"), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains("GPU-1234"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        assert!(
            super::text(&fleet(), Paper { width: None, colour: false }).contains("GPU-12345678")
        );
    }
}
