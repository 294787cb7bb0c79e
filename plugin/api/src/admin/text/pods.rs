//! Allocations, by the pods that hold them.

use tessera_view::status::{Allocation, Status};
use tessera_view::tenant::Use;

use super::names::Names;
use crate::print::{Cell, Column, Page, Sheet, Tone};
use tessera_model::percent::{format_cores, format_used};
use tessera_model::quantity::format_bytes;

const COLUMNS: &[Column] = &[
    Column::name("POD/CONTAINER").least(16),
    Column::text(STATE).rank(3),
    Column::name(RESOURCE).rank(2),
    Column::text("REPLICAS"),
    Column::text("GPU"),
    Column::number("USED"),
    Column::number("QUOTA"),
    Column::number("PEAK"),
    Column::number("OVERHEAD"),
    Column::number("NVML"),
    Column::text("TIME SHARE").rank(1),
    Column::number("USED 10s").rank(2),
    Column::number("LEASED").rank(4),
    Column::text("GATE").rank(2),
    Column::number("PROCESSES"),
    Column::number("REFUSED").rank(1),
    Column::text("ID").rank(3),
];

const STATE: &str = "STATE";
const RESOURCE: &str = "RESOURCE";
/// What only a wide page has.
const WIDE: [&str; 5] = ["REPLICAS", "PEAK", "OVERHEAD", "NVML", "PROCESSES"];

/// A line for each GPU of each.
pub(super) fn lay(page: &mut Page, status: &Status, names: &Names) {
    if status.allocations.is_empty() {
        return page.say(0, Tone::Plain, "No allocations: no running container holds a GPU here.");
    }
    page.say(0, Tone::Head, "ALLOCATIONS");
    let is_wide = page.is_wide();
    let mut sheet = Sheet::new(COLUMNS);
    for allocation in &status.allocations {
        for (i, used) in allocation.gpus.iter().enumerate() {
            let gpu = match is_wide {
                true => used.gpu_uuid.clone(),
                false => names.gpu(&used.gpu_uuid),
            };
            sheet.row(row(allocation, used, i, gpu, names.id(&allocation.id)));
        }
    }
    let same = |name: fn(&Allocation) -> String| {
        let first = status.allocations.first().map(name);
        first.filter(|first| status.allocations.iter().all(|a| name(a) == *first))
    };
    if !is_wide {
        for title in WIDE {
            sheet = sheet.without(title);
        }
        // What all have in common tells nothing.
        let state = same(|a| a.state.name().to_owned());
        if state.is_some_and(|state| state == "started") {
            sheet = sheet.without(STATE);
        }
        if same(resource).is_some_and(|name| !name.starts_with(CLAIM)) {
            sheet = sheet.without(RESOURCE);
        }
    }
    sheet.lay(page);
    let used = || status.allocations.iter().flat_map(|allocation| &allocation.gpus);
    if used().any(|used| used.allocated.is_some()) {
        page.say(2, Tone::Plain, "* changed while it runs; see `tessera quota show`");
    }
    if status
        .allocations
        .iter()
        .any(|a| a.compute.as_ref().is_some_and(|c| c.gate_text() == "closed"))
    {
        page.say(2, Tone::Plain, "GATE closed: it waits, because another has the GPU's time now");
    }
}

const CLAIM: &str = "claim ";

/// What belongs to the whole allocation stands in its first row.
fn row(allocation: &Allocation, used: &Use, i: usize, gpu: String, id: &str) -> Vec<Cell> {
    let once = |text: String| if i == 0 { text } else { String::new() };
    let replicas = allocation.replica_ids.iter().filter_map(|id| id.rsplit_once("::"));
    let replicas = replicas.filter(|(uuid, _)| *uuid == used.gpu_uuid).map(|(_, index)| index);
    let [used_time, leased, gate] = compute(allocation).map(|text| once(text).into());
    vec![
        once(name(allocation)).into(),
        once(allocation.state.name().to_owned()).into(),
        once(resource(allocation)).into(),
        match &allocation.claim {
            Some(claim) => once(claim.request.clone()),
            None => replicas.collect::<Vec<_>>().join(","),
        }
        .into(),
        gpu.into(),
        memory(used),
        changed(format_bytes(used.memory_limit_bytes), used).into(),
        format_bytes(used.memory_peak_bytes).into(),
        format_bytes(used.memory_overhead_bytes).into(),
        used.memory_nvml_bytes.map_or_else(|| "-".to_owned(), format_bytes).into(),
        share(used).into(),
        used_time,
        leased,
        gate,
        once(allocation.processes.len().to_string()).into(),
        refused(allocation, i),
        once(id.to_owned()).into(),
    ]
}

fn name(allocation: &Allocation) -> String {
    match (&allocation.holder, allocation.other_holders.len()) {
        (Some(holder), 0) => format!("{}/{}/{}", holder.namespace, holder.pod, holder.container),
        (Some(holder), more) => {
            format!("{}/{}/{} +{more}", holder.namespace, holder.pod, holder.container)
        }
        (None, _) => "not named by kubelet yet".to_owned(),
    }
}

fn resource(allocation: &Allocation) -> String {
    match (&allocation.claim, allocation.resource_name.as_str()) {
        (Some(claim), _) => format!("{CLAIM}{}/{}", claim.namespace, claim.name),
        (None, "") => "-".to_owned(),
        (None, name) => name.to_owned(),
    }
}

/// A use that fills the quota stands out.
fn memory(used: &Use) -> Cell {
    let bytes = used.memory_used_bytes;
    let is_full = used.memory_limit_bytes > 0 && bytes >= used.memory_limit_bytes / 100 * 95;
    let tone = if is_full { Tone::Warn } else { Tone::Plain };
    Cell::toned(format_bytes(bytes), tone)
}

fn share(used: &Use) -> String {
    changed(format!("{} {}", format_cores(used.cores_millis), used.policy.name()), used)
}

/// Marks a limit that was changed while the allocation ran.
fn changed(text: String, used: &Use) -> String {
    if used.allocated.is_some() { text + "*" } else { text }
}

/// What it used and what it had leased in the last ten seconds, and what its gate says.
fn compute(allocation: &Allocation) -> [String; 3] {
    match &allocation.compute {
        Some(compute) => [
            format_used(compute.used_10s_millis),
            format_cores(compute.got_10s_millis),
            compute.gate_text().to_owned(),
        ],
        None => ["-", "-", "-"].map(str::to_owned),
    }
}

fn refused(allocation: &Allocation, i: usize) -> Cell {
    match (i, allocation.refusals) {
        (0, 0) => "0".into(),
        (0, count) => Cell::toned(count.to_string(), Tone::Warn),
        _ => "".into(),
    }
}
