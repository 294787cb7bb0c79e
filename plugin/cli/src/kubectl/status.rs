//! `kubectl tessera status`: what is amiss first, then GPUs by node.

use std::fmt::Write;
use std::process::ExitCode;

use tessera_fleet::Fleet as Cluster;
use tessera_fleet::pending::trouble;
use tessera_model::counted::plural;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::{printable, time_format};
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::gpu::Gpu;

use super::columns::{self, WIDTH, gives, left, right};
use super::failure::{self, Failure};
use super::options::Format;
use super::scope;

/// Longest sentence of what is amiss, in characters.
const SENTENCE: usize = 400;

pub(super) async fn main(cluster: &Cluster, format: Format) -> Result<ExitCode, Failure> {
    let fleet = cluster.gather().await?;
    let (_, any) = scope::silent(&fleet);
    match format {
        Format::Json => super::print_json(&fleet)?,
        format => super::print(&text(&fleet, format == Format::Wide))?,
    }
    Ok(if any { ExitCode::SUCCESS } else { failure::unanswered(cluster) })
}

/// What is amiss, a sentence each with the node in front; then a line for each GPU.
fn text(fleet: &Fleet, wide: bool) -> String {
    let mut out = String::new();
    let answering = fleet.nodes.iter().filter(|entry| entry.answers).count();
    let views = || fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let gpus: usize = views().map(|view| view.gpus.len()).sum();
    let tenants: usize = views()
        .map(|view| view.tenants.len().saturating_add(usize::try_from(view.hidden()).unwrap_or(0)))
        .fold(0, usize::saturating_add);
    let _ = writeln!(
        out,
        "{}: {answering} of {} nodes answer, {}, {}",
        printable::line(&fleet.name),
        fleet.nodes.len(),
        plural(gpus, "GPU"),
        plural(tenants, "tenant")
    );
    for entry in &fleet.nodes {
        for sentence in amiss(entry, fleet.at_unix_ms) {
            columns::put(&mut out, "! ", &format!("{}: {sentence}", entry.node));
        }
    }
    let rows: Vec<Vec<String>> = fleet
        .nodes
        .iter()
        .flat_map(|entry| {
            entry.view.iter().flat_map(|view| view.gpus.iter().map(|gpu| row(entry, gpu, wide)))
        })
        .collect();
    if !rows.is_empty() {
        let columns = [
            gives("NODE"),
            right("GPU"),
            gives("MODEL"),
            left("STATE"),
            right("MEMORY USED"),
            right("SOLD"),
            right("OF"),
            right("SHARES"),
            gives("FITS NEXT"),
        ];
        out.push('\n');
        out.push_str(&columns::table(&columns, &rows, if wide { usize::MAX } else { WIDTH }));
    }
    out
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
    all.extend(view.gpus.iter().filter_map(trouble));
    all.extend(view.plugin.amiss.iter().cloned());
    if !view.plugin.config_error.is_empty() {
        all.push(format!("the configuration was refused: {}", view.plugin.config_error));
    }
    if view.gpus.is_empty() {
        all.push("the plugin finds no GPU".to_owned());
    }
    all.extend(view.warnings.iter().map(|warning| warning.text.clone()));
    all.iter().map(|text| printable::line(&printable::brief(text, SENTENCE)).into_owned()).collect()
}

fn row(entry: &Entry, gpu: &Gpu, wide: bool) -> Vec<String> {
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
    vec![
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
        let text = text(&fleet(), false);
        assert!(
            text.starts_with(
                "prod: 1 of 2 nodes answer, 2 GPUs, 0 tenants\n! a: GPU 1 is unhealthy: XID 79"
            ),
            "{text}"
        );
        assert!(text.contains("! b: does not answer: it did not answer within 5 s"), "{text}");
        assert!(text.contains("3 × 20 GiB, 25%"), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains("GPU-1234"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(super::text(&fleet(), true).contains("GPU-12345678"));
    }
}
