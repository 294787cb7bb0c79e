//! A line for each GPU.

use crossterm::style::ContentStyle;
use tessera_view::status::{Gpu, GpuState, Health};

use super::Paint;
use crate::top::model::Model;
use crate::top::picture::{Picture, raw, span};
use crate::top::text::{bytes, cut, holder, quantum};

/// Draws the GPUs, in a third of what is left at most: a node may have sixteen.
pub(super) fn draw(model: &Model, paint: Paint, page: &mut Picture) {
    let gpus = &model.status.gpus;
    if gpus.is_empty() {
        return page.line([raw("No GPUs.")]);
    }
    let width = page.width();
    let room = (page.left() / 3).max(1);
    let shown = if gpus.len() < room { gpus.len() } else { room.saturating_sub(2).max(1) };
    let bar = if width >= 100 { 12 } else { 6 };
    let named = width >= 120;
    let name = if named { format!("{:<22} ", "NAME") } else { String::new() };
    let memory = "USED/SOLD/TOTAL";
    let gap = " ".repeat(bar + 1);
    let head = format!("GPU {name}{:<10} {gap}{memory:<20} {:>6} WAIT LEASE", "HEALTH", "QUANT");
    page.line([span(&format!("{head:<width$}"), paint.head())]);
    for gpu in gpus.iter().take(shown) {
        let (bars, style) = paint.bar(gpu.memory_used_bytes, gpu.memory_total_bytes, bar);
        let (health, health_style) = health(gpu, paint);
        let memory = format!(
            "{}/{}/{}",
            bytes(gpu.memory_used_bytes),
            bytes(gpu.memory_limits_bytes),
            bytes(gpu.memory_total_bytes)
        );
        let name = if named { format!("{:<22} ", cut(&gpu.name, 22)) } else { String::new() };
        page.line([
            raw(&format!("{:>3} {name}", gpu.index)),
            span(&format!("{health:<10} "), health_style),
            span(&format!("{bars} "), style),
            raw(&format!(
                "{memory:<20} {:>6} {:>4} {}",
                quantum(gpu.lease_quantum_us),
                gpu.lease_waiting,
                holder(gpu, &model.status.allocations),
            )),
        ]);
    }
    if shown < gpus.len() {
        page.line([span(&format!("    and {} more GPUs", gpus.len() - shown), paint.dim())]);
    }
}

fn health(gpu: &Gpu, paint: Paint) -> (&'static str, ContentStyle) {
    match (gpu.state, gpu.health) {
        _ if !gpu.cordon.is_empty() => ("cordoned", paint.warn()),
        // Held back for another reason than its health.
        (GpuState::Healthy, Health::Unhealthy) => ("withheld", paint.bad()),
        (GpuState::Healthy, _) => ("healthy", paint.good()),
        (state @ (GpuState::Suspect | GpuState::Recovering), _) => (state.name(), paint.warn()),
        (state, _) => (state.name(), paint.bad()),
    }
}
