//! A line for each GPU.

use crossterm::style::ContentStyle;
use tessera_view::fleet::Entry;
use tessera_view::gpu::Gpu;

use super::Paint;
use crate::top::model::Model;
use crate::top::picture::{Picture, raw, span};
use crate::top::text::{bytes, holder, quantum};
use tessera_api::print::shorten;

/// Of this node all, of a cluster those that a tenant which is shown is on; with what each is called.
fn shown(model: &Model) -> Vec<(&Entry, &Gpu, String)> {
    let rows = model.shown();
    let is_on = |entry: &Entry, gpu: &Gpu| {
        model.is_own() || rows.iter().any(|row| row.node == entry.node && row.gpu_uuid == gpu.uuid)
    };
    let all = model.fleet.nodes.iter().flat_map(|entry| {
        let gpus = entry.view.iter().flat_map(|view| &view.gpus);
        gpus.map(move |gpu| (entry, gpu))
    });
    let called = |entry: &Entry, gpu: &Gpu| match model.is_own() {
        true => gpu.index.to_string(),
        false => format!("{}/{}", shorten(&entry.node, 24), gpu.index),
    };
    all.filter(|(entry, gpu)| is_on(entry, gpu))
        .map(|(entry, gpu)| (entry, gpu, called(entry, gpu)))
        .collect()
}

/// Draws the GPUs, in a third of what is left at most: a node may have sixteen.
pub(super) fn draw(model: &Model, paint: Paint, page: &mut Picture) {
    let gpus = shown(model);
    if gpus.is_empty() {
        if model.is_own() {
            page.line([raw("No GPUs.")]);
        }
        return;
    }
    let width = page.width();
    let room = (page.left() / 3).max(1);
    let fits = if gpus.len() < room { gpus.len() } else { room.saturating_sub(2).max(1) };
    let bar = if width >= 100 { 12 } else { 6 };
    let named = width >= 120;
    let name = if named { format!("{:<22} ", "NAME") } else { String::new() };
    let memory = "USED/SOLD/TOTAL";
    let gap = " ".repeat(bar + 1);
    let index = gpus.iter().map(|(_, _, called)| called.chars().count()).max().unwrap_or(0).max(3);
    let head = format!(
        "{:<index$} {name}{:<10} {gap}{memory:<20} {:>6} WAIT LEASE",
        "GPU", "HEALTH", "QUANT"
    );
    page.line([span(&format!("{head:<width$}"), paint.head())]);
    for (entry, gpu, called) in gpus.iter().take(fits) {
        let (bars, style) = paint.bar(gpu.memory_used_bytes, gpu.memory_total_bytes, bar);
        let (health, health_style) = health(gpu, paint);
        let memory = format!(
            "{}/{}/{}",
            bytes(gpu.memory_used_bytes),
            bytes(gpu.memory_limits_bytes),
            bytes(gpu.memory_total_bytes)
        );
        let name = if named { format!("{:<22} ", shorten(&gpu.name, 22)) } else { String::new() };
        let lease = gpu.lease.clone().unwrap_or_default();
        let tenants = entry.view.as_ref().map_or(&[][..], |view| &view.tenants);
        page.line([
            raw(&format!("{called:>index$} {name}")),
            span(&format!("{health:<10} "), health_style),
            span(&format!("{bars} "), style),
            raw(&format!(
                "{memory:<20} {:>6} {:>4} {}",
                quantum(lease.quantum_us),
                lease.waiting,
                holder(gpu, tenants),
            )),
        ]);
    }
    if fits < gpus.len() {
        page.line([span(&format!("    and {} more GPUs", gpus.len() - fits), paint.dim())]);
    }
}

fn health(gpu: &Gpu, paint: Paint) -> (&str, ContentStyle) {
    match gpu.state.as_str() {
        _ if !gpu.cordon.is_empty() => ("cordoned", paint.warn()),
        // Held back for another reason than its health.
        "healthy" if !gpu.withheld.is_empty() => ("withheld", paint.bad()),
        "healthy" => ("healthy", paint.good()),
        state @ ("suspect" | "recovering") => (state, paint.warn()),
        state => (state, paint.bad()),
    }
}
