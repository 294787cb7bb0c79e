//! `tessera recommend` for people.

use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;
use tessera_view::advice::{Recommendation, Recommendations};

use super::text::{cell, name, paragraph, remarks, table};

const WORKLOAD: usize = 36;
const CONTAINER: usize = 14;

/// A line for each workload, and for each that should change, why and how.
pub(crate) fn text(advice: &Recommendations) -> String {
    let mut out = String::new();
    remarks(&mut out, &advice.remarks);
    if advice.workloads.is_empty() {
        out.push_str("Nothing was seen in that time, and nothing lives: no advice.\n");
        return out;
    }
    let header =
        ["WORKLOAD", "CONTAINER", "PODS", "MEMORY", "SHARE", "SAVES", "CONFIDENCE", "SEEN"];
    table(&mut out, &header, advice.workloads.iter().map(row).collect());
    for one in &advice.workloads {
        out.push('\n');
        paragraph(
            &mut out,
            "",
            &format!("{}/{}, container {}:", one.namespace, one.workload, one.container),
        );
        for text in &one.evidence {
            paragraph(&mut out, "  - ", text);
        }
        for (i, line) in one.changes.iter().enumerate() {
            // A command is copied whole: it is not wrapped.
            let label = if i == 0 { "  do: " } else { "      " };
            out.push_str(&format!("{label}{}\n", tessera_model::printable::line(line)));
        }
    }
    out
}

fn row(one: &Recommendation) -> Vec<String> {
    vec![
        cell(&format!("{}/{}", one.namespace, one.workload), WORKLOAD),
        name(&one.container, CONTAINER),
        one.pods.len().to_string(),
        change(format_bytes(one.memory_limit_bytes), format_bytes(one.memory_bytes)),
        change(format_cores(one.cores_millis), format_cores(one.recommended_cores_millis)),
        saves(one.saves_memory_bytes, one.saves_cores_millis),
        one.confidence.clone(),
        seen(one.observed_seconds),
    ]
}

fn change(before: String, after: String) -> String {
    if before == after { before } else { format!("{before} → {after}") }
}

fn saves(memory: i64, cores: i64) -> String {
    let sign = |value: i64| if value < 0 { "-" } else { "" };
    let bytes = format!("{}{}", sign(memory), format_bytes(memory.unsigned_abs()));
    let share = format!("{}{}", sign(cores), format_cores(cores.unsigned_abs()));
    match (memory, cores) {
        (0, 0) => "-".to_owned(),
        (_, 0) => bytes,
        (0, _) => share,
        _ => format!("{bytes}, {share}"),
    }
}

/// Observed time.
fn seen(seconds: f64) -> String {
    // Seconds beyond what an instant can have are nobody's.
    let ms = std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default().as_millis();
    match i64::try_from(ms).unwrap_or(i64::MAX) {
        0 => "-".to_owned(),
        ms => time_format::ago(0, ms),
    }
}
