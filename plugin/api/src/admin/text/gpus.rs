//! The node's GPUs.

use std::collections::BTreeSet;

use tessera_view::gpu::Replicas;
use tessera_view::status::{Gpu, GpuState, Health, Status};

use super::names::Names;
use crate::print::{Cell, Column, Page, Sheet, Tone};
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_rules::front_end::FrontEnd;

const COLUMNS: &[Column] = &[
    Column::text("GPU"),
    Column::text("ID").rank(3),
    Column::name("NAME").rank(4),
    Column::text("HEALTH"),
    Column::number("MEMORY").rank(1),
    Column::number("USED").rank(1),
    Column::number("SOLD").rank(1),
    Column::number("CHARGED").rank(2),
    Column::number("TIME SOLD").rank(1),
    // What is left for claims, whole: `1023.9 GiB, 99.9%`.
    Column::text("FREE").least(17),
    Column::name("LEASE").rank(2),
];

/// A line for each.
pub(super) fn lay(page: &mut Page, status: &Status, names: &Names) {
    if status.gpus.is_empty() {
        let text = "No GPUs: the plugin has found none that it may share on this node. What it waits for \
                    stands above; `tessera config check` lists what gpus.include and gpus.exclude leave.";
        return page.say(0, Tone::Plain, text);
    }
    page.say(0, Tone::Head, "GPUS");
    let mut sheet = Sheet::new(COLUMNS);
    for gpu in &status.gpus {
        sheet.row(vec![
            gpu.index.to_string().into(),
            names.id(&gpu.uuid).into(),
            gpu.name.as_str().into(),
            health(gpu),
            format_bytes(gpu.memory_total_bytes).into(),
            format_bytes(gpu.memory_used_bytes).into(),
            format_bytes(gpu.memory_limits_bytes).into(),
            format_bytes(gpu.memory_charged_bytes).into(),
            format_cores(gpu.cores_millis).into(),
            free(gpu).into(),
            lease(gpu, names).into(),
        ]);
    }
    sheet.lay(page);
    let moves =
        |to: FrontEnd| status.gpus.iter().any(|gpu| gpu.moving && gpu.front_end == to.as_str());
    if moves(FrontEnd::Dra) {
        let text = "FREE, moving: for claims, once the device plugin's pods there have ended";
        page.say(2, Tone::Plain, text);
    }
    if moves(FrontEnd::DevicePlugin) {
        let text =
            "FREE, moving: for the device plugin, once the pods with claims there have ended";
        page.say(2, Tone::Plain, text);
    }
}

/// In a word; the sentence stands above.
fn health(gpu: &Gpu) -> Cell {
    match (gpu.state, gpu.health) {
        (GpuState::Unhealthy, _) => Cell::toned(gpu.state.name(), Tone::Bad),
        (GpuState::Suspect | GpuState::Recovering, _) => Cell::toned(gpu.state.name(), Tone::Warn),
        _ if !gpu.cordon.is_empty() => Cell::toned("cordoned", Tone::Warn),
        (_, Health::Unhealthy) => Cell::toned("withheld", Tone::Warn),
        (state, _) => state.name().into(),
    }
}

/// `3 of 4`; with several resources, each by its name. Of a GPU that is for claims, what is left of it.
fn free(gpu: &Gpu) -> String {
    if gpu.moving {
        return "moving".to_owned();
    }
    if gpu.front_end == FrontEnd::Dra.as_str() {
        return match gpu.no_room.as_str() {
            "" => left_of(gpu).join(", "),
            lack => format!("no {lack}"),
        };
    }
    let count = |of: &Replicas| format!("{} of {}", of.free, of.count);
    match gpu.by_resource().as_slice() {
        [] => "0 of 0".to_owned(),
        [one] => count(one),
        several => {
            let last = |of: &Replicas| of.resource_name.rsplit('/').next().map(str::to_owned);
            let tell_apart = several.iter().map(last).collect::<BTreeSet<_>>();
            let is_short = tell_apart.len() == several.len();
            let name = |of: &Replicas| last(of).filter(|_| is_short);
            let each = several.iter().map(|of| {
                let name = name(of).unwrap_or_else(|| of.resource_name.clone());
                format!("{name}: {}", count(of))
            });
            each.collect::<Vec<_>>().join(", ")
        }
    }
}

/// What claims may still get of a GPU, in a sentence.
pub(crate) fn left(gpu: &Gpu) -> String {
    left_of(gpu).join(" and ")
}

/// Memory and GPU time.
fn left_of(gpu: &Gpu) -> [String; 2] {
    [format_bytes(gpu.left_memory_bytes), format_cores(gpu.left_cores_millis)]
}

/// The holder of a GPU's lease, as a pod where that is known.
fn lease(gpu: &Gpu, names: &Names) -> String {
    let mut text = match gpu.lease_holder.as_str() {
        "" => "-".to_owned(),
        id => names.pod(id).to_owned(),
    };
    gpu.lease_late.iter().for_each(|id| text.push_str(&format!(" and late {}", names.pod(id))));
    match gpu.lease_waiting {
        0 => {}
        1 => text.push_str(" (1 waits)"),
        waiting => text.push_str(&format!(" ({waiting} wait)")),
    }
    text
}
