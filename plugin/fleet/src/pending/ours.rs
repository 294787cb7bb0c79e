//! What is left of our resources on a node, and why no more.

use std::collections::BTreeSet;

use tessera_model::percent::format_cores;
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::gpu::{Fit, Gpu};
use tessera_view::node::Node as View;

use super::{Block, BlockKind, block, claims};
use crate::answer::quoted;

/// The domain of resources that a plugin sells if its configuration names none.
const DOMAIN: &str = "tessera.dev/";
/// Longest reason that is passed on.
const LONGEST: usize = 160;

/// Names of resources that a plugin sells.
pub(super) fn resources(fleet: &Fleet) -> BTreeSet<String> {
    let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let names = views.flat_map(|view| {
        let cut =
            view.gpus.iter().flat_map(|gpu| &gpu.replicas).map(|one| one.resource_name.clone());
        view.plugin.resources.iter().cloned().chain(cut)
    });
    names.filter(|name| !name.is_empty()).collect()
}

/// Whether a resource is one of ours.
pub(super) fn is_ours(resources: &BTreeSet<String>, name: &str) -> bool {
    name.starts_with(DOMAIN) || resources.contains(name)
}

/// The view of a node; or why there is none, in words.
pub(super) fn view<'a>(fleet: &'a Fleet, node: &str) -> Result<&'a View, Absent> {
    let Some(entry) = fleet.nodes.iter().find(|entry| entry.node == node) else {
        return Err(Absent::NoPlugin);
    };
    match entry {
        Entry { answers: true, view: Some(view), .. } => Ok(view),
        entry => Err(Absent::Silent(quoted(&entry.error, LONGEST))),
    }
}

/// Why there is no view of a node.
pub(super) enum Absent {
    /// The cluster has no pod of the plugin there.
    NoPlugin,
    /// It does not answer.
    Silent(String),
}

/// What the plugin can hand out of a resource now.
pub(super) fn free(view: &View, resource: &str) -> u64 {
    replicas(view, resource).map(|(_, one)| u64::from(one.free)).sum()
}

/// What the plugin's tenants hold of a resource.
pub(super) fn held(view: &View, resource: &str) -> u64 {
    replicas(view, resource).map(|(_, one)| u64::from(one.held)).sum()
}

/// Whether the device plugin has any of a resource.
pub(super) fn is_offered(view: &View, resource: &str) -> bool {
    replicas(view, resource).any(|(_, one)| one.count > 0)
}

fn replicas<'a>(
    view: &'a View,
    resource: &'a str,
) -> impl Iterator<Item = (&'a Gpu, &'a tessera_view::gpu::Replicas)> {
    view.gpus.iter().flat_map(move |gpu| {
        gpu.replicas
            .iter()
            .filter(move |one| one.resource_name == resource)
            .map(move |one| (gpu, one))
    })
}

/// GPUs that have some of the resource and hand out nothing of it because they are cordoned or not healthy.
pub(super) fn withheld(view: &View, resource: &str) -> Vec<Block> {
    let gpus = replicas(view, resource).filter(|(_, one)| one.held < one.count && one.free == 0);
    gpus.filter_map(|(gpu, _)| out_of_service(gpu)).collect()
}

/// Why a GPU hands out nothing; `None` where it would.
pub(super) fn out_of_service(gpu: &Gpu) -> Option<Block> {
    let short = |text: &str| quoted(text, LONGEST);
    let index = gpu.index;
    if !gpu.cordon.is_empty() {
        let text = match gpu.cordon.as_str() {
            "cordoned" => format!("GPU {index} is cordoned"),
            by => format!("GPU {index} is cordoned: {}", short(by)),
        };
        return Some(block(BlockKind::Cordon, text));
    }
    if matches!(gpu.state.as_str(), "unhealthy" | "recovering") {
        let mut text = format!("GPU {index} is {}: {}", gpu.state, short(&gpu.state_reason));
        if !gpu.state_waits_for.is_empty() {
            text.push_str(&format!("; it waits for {}", short(&gpu.state_waits_for)));
        }
        return Some(block(BlockKind::Health, text));
    }
    None
}

/// A size in words.
pub(super) fn size(memory_bytes: u64, cores_millis: u32) -> String {
    match (memory_bytes, cores_millis) {
        (memory, 0) => format_bytes(memory),
        (0, cores) => format!("{} of a GPU", format_cores(cores)),
        (memory, cores) => format!("{} and {} of a GPU", format_bytes(memory), format_cores(cores)),
    }
}

/// The largest that fits on a node, in words.
pub(super) fn largest(view: &View) -> String {
    let all = view.gpus.iter().flat_map(|gpu| gpu.fits.iter().map(move |fit| (gpu, fit)));
    let best = all
        .filter(|(gpu, fit)| fit.count > 0 && out_of_service(gpu).is_none())
        .max_by_key(|(_, fit)| (fit.memory_bytes, fit.cores_millis, fit.count));
    match best {
        Some((gpu, fit)) => {
            let Fit { resource_name, count, memory_bytes, cores_millis } = fit;
            let name = match resource_name.as_str() {
                "" => String::new(),
                name => format!("{} of ", printable::line(name)),
            };
            format!("{count} × {name}{} on GPU {}", size(*memory_bytes, *cores_millis), gpu.index)
        }
        None => match claims::in_service(view).any(|gpu| !gpu.no_room.is_empty()) {
            true => format!("nothing: {}", claims::lacking(view, &[&claims::SHARE])),
            false => "nothing".to_owned(),
        },
    }
}
