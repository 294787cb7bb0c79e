//! `tessera status` for people: what is wrong first, then GPUs, then pods, in as many columns as the paper has.

mod gpus;
mod names;
mod pods;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use tessera_model::counted::plural;
use tessera_model::time_format;
use tessera_view::status::{Allocation, Dra, Gpu, GpuState, Registration, Status};

use crate::print::{Column, Page, Paper, Sheet, Tone};
pub(crate) use gpus::left;
pub use names::Names;

/// Aligned text.
pub fn text(status: &Status, paper: Paper) -> String {
    let names = Names::of(status, paper.width.is_none());
    let mut page = Page::new(paper);
    plugin(&mut page, status);
    attention(&mut page, status, &names);
    resources(&mut page, status);
    page.gap();
    gpus::lay(&mut page, status, &names);
    page.gap();
    pods::lay(&mut page, status, &names);
    page.finish()
}

/// The plugin in a line, and what is odd about the node it serves.
fn plugin(page: &mut Page, status: &Status) {
    let plugin = &status.plugin;
    let state = plugin.registration.text();
    let text = format!(
        "tessera {} (pid {}) serves {}: {state}",
        plugin.version, plugin.pid, plugin.resource_name
    );
    let is_live = plugin.registration == Registration::Live;
    page.say(0, if is_live { Tone::Head } else { Tone::Bad }, &text);
    if !matches!(plugin.others_seen_by.as_str(), "" | "GetAllocatableResources") {
        let text = format!(
            "other device plugins are seen by {} only: this kubelet has no GetAllocatableResources",
            plugin.others_seen_by
        );
        page.say(2, Tone::Plain, &text);
    }
    if let Some(dra) = &plugin.dra {
        page.say(0, Tone::Plain, &dra_line(dra));
    }
}

/// `DRA driver gpu.tessera.dev: registered; 4 devices in 1 slice published, pool n1; 12 claims prepared`.
fn dra_line(dra: &Dra) -> String {
    let registration = match dra.registered {
        true => "registered".to_owned(),
        _ if dra.registration_error.is_empty() => "not registered".to_owned(),
        _ => format!("not registered ({})", dra.registration_error),
    };
    let plural = |n: u32, one: &str| plural(usize::try_from(n).unwrap_or(usize::MAX), one);
    format!(
        "DRA driver {}: {registration}; {} in {} {}, pool {}; {} prepared",
        dra.driver,
        plural(dra.devices, "device"),
        plural(dra.slices, "slice"),
        dra.publication,
        dra.pool,
        plural(dra.claims, "claim"),
    )
}

/// Each resource, where there are several or one is retired.
fn resources(page: &mut Page, status: &Status) {
    let resources = status.plugin.resources.as_slice();
    if resources.len() < 2 && !resources.iter().any(|resource| resource.retired) {
        return;
    }
    page.gap();
    page.say(0, Tone::Head, "RESOURCES");
    let mut sheet = Sheet::new(&[
        Column::name("NAME"),
        Column::name("REGISTRATION"),
        Column::number("HEALTHY"),
        Column::number("REPLICAS"),
    ]);
    for resource in resources {
        let state = resource.registration.text();
        let retired = if resource.retired { "; retired, served while it is held" } else { "" };
        sheet.row(vec![
            resource.name.as_str().into(),
            format!("{state}{retired}").into(),
            resource.healthy.to_string().into(),
            resource.replicas.to_string().into(),
        ]);
    }
    sheet.lay(page);
}

/// Everything that needs somebody, a sentence each, with what to do where we know.
fn attention(page: &mut Page, status: &Status, names: &Names) {
    let mut all = Vec::new();
    let plugin = &status.plugin;
    if plugin.registration != Registration::Live {
        let why = match plugin.registration_error.as_str() {
            "" => "kubelet has not answered yet; is it running?".to_owned(),
            error => format!("last error: {error}"),
        };
        let text = format!("new pods get no GPU here: {why}{}", runbook("TesseraNotReady"));
        all.push((Tone::Bad, text));
    } else if !plugin.registration_error.is_empty() {
        all.push((Tone::Warn, format!("last error: {}", plugin.registration_error)));
    }
    all.extend(status.gpus.iter().filter_map(|gpu| trouble(gpu, status, names)));
    let cordons = status.gpus.iter().filter(|gpu| !gpu.cordon.is_empty());
    all.extend(cordons.map(|gpu| (Tone::Warn, cordon(gpu, status, names))));
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
        let text = format!("GPU {name} is not given out: {}", gpu.health_reason);
        let advice = ". Keep what else sells it from this node";
        return held.then(|| (Tone::Warn, text + advice + &runbook("TesseraGpuWithheld")));
    }
    let ago = time_format::ago(gpu.state_since_unix_ms, status.at_unix_ms);
    let mut text = format!("GPU {name} is {} since {ago}: {}", gpu.state.name(), gpu.state_reason);
    if !gpu.state_waits_for.is_empty() {
        text.push_str(&format!("; waits for {}", gpu.state_waits_for));
    }
    let on = on(gpu, status, names);
    text.push_str(&on);
    Some(match gpu.state {
        GpuState::Unhealthy => {
            let advice = if on == NOBODY { "" } else { ". Delete those whose CUDA calls fail" };
            (Tone::Bad, text + advice + &runbook("TesseraGpuUnhealthy"))
        }
        _ => {
            let advice = format!(". `tessera cordon {name}` keeps new pods from it");
            (Tone::Warn, text + &advice + &runbook("TesseraGpuSuspect"))
        }
    })
}

fn cordon(gpu: &Gpu, status: &Status, names: &Names) -> String {
    let name = names.gpu(&gpu.uuid);
    let lift = match gpu.cordoned_with_node {
        true => "`tessera uncordon --all` ends that of the node".to_owned(),
        false => format!("`tessera uncordon {name}` ends it"),
    };
    let on = on(gpu, status, names);
    format!("GPU {name} is {}; {lift}{on}{}", gpu.cordon, runbook("TesseraGpuCordoned"))
}

const NOBODY: &str = ". No pod is on it";

/// The pods on a GPU.
fn on(gpu: &Gpu, status: &Status, names: &Names) -> String {
    let is_on = |one: &&Allocation| one.gpus.iter().any(|used| used.gpu_uuid == gpu.uuid);
    let pods = status.allocations.iter().filter(is_on).map(|one| names.pod(&one.id));
    let pods: Vec<&str> = pods.collect::<BTreeSet<_>>().into_iter().collect();
    if pods.is_empty() { NOBODY.to_owned() } else { format!(". On it: {}", pods.join(", ")) }
}

fn runbook(section: &str) -> String {
    format!(" (docs/runbook.md, {section})")
}
