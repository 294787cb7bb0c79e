//! What is wrong, before anything else.

use std::collections::BTreeSet;

use tessera_view::status::{Allocation, Gpu, GpuState, Registration, Status};

use super::names::Names;
use crate::print::{Page, Tone};
use tessera_model::counted::plural;
use tessera_model::time_format;

/// Everything that needs somebody, a sentence each, with what to do where we know.
pub(super) fn say(page: &mut Page, status: &Status, names: &Names) {
    let mut all = Vec::new();
    let plugin = &status.plugin;
    if plugin.registration != Registration::Live {
        let why = match plugin.registration_error.as_str() {
            "" => "kubelet has not answered yet; is it running?".to_owned(),
            error => format!("last error: {error}"),
        };
        all.push((Tone::Bad, format!("new pods get no GPU here: {why}")));
    } else if !plugin.registration_error.is_empty() {
        all.push((Tone::Warn, format!("last error: {}", plugin.registration_error)));
    }
    all.extend(status.gpus.iter().filter_map(|gpu| trouble(gpu, status, names)));
    let cordons = status.gpus.iter().filter(|gpu| !gpu.cordon.is_empty());
    all.extend(cordons.map(|gpu| (Tone::Warn, cordon(gpu, names))));
    all.extend(status.warnings.iter().map(|warning| (Tone::Warn, warning.clone())));
    if all.is_empty() {
        page.say(0, Tone::Plain, "Nothing needs attention.");
        return;
    }
    page.gap();
    page.say(0, Tone::Head, &format!("ATTENTION: {}", plural(all.len(), "thing")));
    // What is broken stands before what is odd.
    all.sort_by_key(|(tone, _)| *tone != Tone::Bad);
    for (tone, text) in &all {
        page.say(2, *tone, text);
    }
}

/// One GPU's trouble: what, which pods are on it, what to do, and the section of docs/runbook.md.
fn trouble(gpu: &Gpu, status: &Status, names: &Names) -> Option<(Tone, String)> {
    if gpu.memory_total_bytes == 0 {
        // It was left out, and a warning says why.
        return None;
    }
    let name = names.gpu(&gpu.uuid);
    if gpu.state == GpuState::Healthy {
        // Held back for another reason than its health.
        let held = gpu.cordon.is_empty() && !gpu.health_reason.is_empty();
        let text = format!(
            "GPU {name} is not given out: {} (docs/runbook.md, TesseraGpuWithheld)",
            gpu.health_reason
        );
        return held.then_some((Tone::Warn, text));
    }
    let state = gpu.state.name();
    let ago = time_format::ago(gpu.state_since_unix_ms, status.at_unix_ms);
    let mut text = format!("GPU {name} is {state} since {ago}: {}", gpu.state_reason);
    if !gpu.state_waits_for.is_empty() {
        text.push_str(&format!("; waits for {}", gpu.state_waits_for));
    }
    let is_on = |one: &&Allocation| one.gpus.iter().any(|used| used.gpu_uuid == gpu.uuid);
    let on: BTreeSet<&str> =
        status.allocations.iter().filter(is_on).map(|one| names.pod(&one.id)).collect();
    let on: Vec<&str> = on.into_iter().collect();
    match on.as_slice() {
        [] => text.push_str(". No pod is on it"),
        pods => text.push_str(&format!(". On it: {}", pods.join(", "))),
    }
    let (tone, advice, section) = match gpu.state {
        GpuState::Unhealthy if !on.is_empty() => {
            (Tone::Bad, ". Delete those whose CUDA calls fail".to_owned(), "TesseraGpuUnhealthy")
        }
        GpuState::Unhealthy => (Tone::Bad, String::new(), "TesseraGpuUnhealthy"),
        _ => {
            let advice = format!(". `tessera cordon {name}` keeps new pods from it");
            (Tone::Warn, advice, "TesseraGpuSuspect")
        }
    };
    Some((tone, format!("{text}{advice} (docs/runbook.md, {section})")))
}

fn cordon(gpu: &Gpu, names: &Names) -> String {
    let name = names.gpu(&gpu.uuid);
    let lift = match gpu.cordoned_with_node {
        true => "`tessera uncordon --all` ends that of the node".to_owned(),
        false => format!("`tessera uncordon {name}` ends it"),
    };
    format!("GPU {name} is {}; {lift}", gpu.cordon)
}
