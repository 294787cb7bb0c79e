//! `tessera recommend` for people.

use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_view::advice::{Recommendation, Recommendations};

use super::{length, name};
use tessera_api::print::{Cell, Column, Page, Paper, Sheet, Tone};
use tessera_model::printable;

const COLUMNS: &[Column] = &[
    Column::name("WORKLOAD").least(20),
    Column::name("CONTAINER").rank(3),
    Column::number("PODS").rank(4),
    Column::number("MEMORY"),
    Column::number("SHARE"),
    Column::number("SAVES").rank(2),
    Column::text("CONFIDENCE").rank(1),
    Column::number("SEEN").rank(5),
];

/// A line for each workload, and for each that should change, why and how.
pub(crate) fn text(advice: &Recommendations, paper: Paper) -> String {
    let mut page = Page::new(paper);
    page.notes(&advice.remarks);
    if advice.workloads.is_empty() {
        page.say(0, Tone::Plain, "Nothing was seen in that time, and nothing lives: no advice.");
        return page.finish();
    }
    let mut sheet = Sheet::new(COLUMNS);
    advice.workloads.iter().for_each(|one| sheet.row(row(one).map(Cell::from).into()));
    sheet.lay(&mut page);
    let mut out = page.finish();
    for one in &advice.workloads {
        let mut page = Page::new(paper);
        page.gap();
        let container = one.container_and_part();
        let name = format!("{}/{}, container {container}:", one.namespace, one.workload);
        page.say(0, Tone::Plain, &name);
        one.evidence.iter().for_each(|text| page.say(2, Tone::Plain, &format!("- {text}")));
        out.push_str(&page.finish());
        for (i, change) in one.changes.iter().enumerate() {
            // A command is copied whole: it is not wrapped.
            let label = if i == 0 { "  do: " } else { "      " };
            out.push_str(&format!("{label}{}\n", printable::line(&change.text)));
        }
    }
    out
}

fn row(one: &Recommendation) -> [String; 8] {
    [
        format!("{}/{}", one.namespace, one.workload),
        name(&one.container_and_part()),
        one.pods.len().to_string(),
        change(format_bytes(one.memory_limit_bytes), format_bytes(one.memory_bytes)),
        change(format_cores(one.cores_millis), format_cores(one.recommended_cores_millis)),
        saves(one.saves_memory_bytes, one.saves_cores_millis),
        one.confidence.clone(),
        if one.observed_seconds > 0.0 { length(one.observed_seconds) } else { name("") },
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
