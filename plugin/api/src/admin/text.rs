//! `tessera status` for people: what is wrong first, then GPUs, then pods, in as many columns as the paper has.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use tessera_model::counted::plural;
use tessera_model::percent::{format_cores, format_used};
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;
use tessera_rules::shares::FrontEnd;
use tessera_view::gpu::Replicas;
use tessera_view::status::{Allocation, Dra, Gpu, GpuState, Health, Registration, Status};
use tessera_view::tenant::Use;

use crate::print::{Cell, Column, Page, Paper, Sheet, Tone};

/// Aligned text.
pub fn text(status: &Status, paper: Paper) -> String {
    let names = Names::of(status, paper.width.is_none());
    let mut page = Page::new(paper);
    plugin(&mut page, status);
    attention(&mut page, status, &names);
    resources(&mut page, status);
    page.gap();
    lay_gpus(&mut page, status, &names);
    page.gap();
    lay_pods(&mut page, status, &names);
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
    let mut text =
        format!("GPU {name} is {} since {ago}: {}", gpu.state.into_str(), gpu.state_reason);
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

const GPU_COLUMNS: &[Column] = &[
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
fn lay_gpus(page: &mut Page, status: &Status, names: &Names) {
    if status.gpus.is_empty() {
        let text = "No GPUs: the plugin has found none that it may share on this node. What it waits for \
                    stands above; `tessera config check` lists what gpus.include and gpus.exclude leave.";
        return page.say(0, Tone::Plain, text);
    }
    page.say(0, Tone::Head, "GPUS");
    let mut sheet = Sheet::new(GPU_COLUMNS);
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
        |to: FrontEnd| status.gpus.iter().any(|gpu| gpu.moving && gpu.front_end == to.into_str());
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
        (GpuState::Unhealthy, _) => Cell::toned(gpu.state.into_str(), Tone::Bad),
        (GpuState::Suspect | GpuState::Recovering, _) => {
            Cell::toned(gpu.state.into_str(), Tone::Warn)
        }
        _ if !gpu.cordon.is_empty() => Cell::toned("cordoned", Tone::Warn),
        (_, Health::Unhealthy) => Cell::toned("withheld", Tone::Warn),
        (state, _) => state.into_str().into(),
    }
}

/// `3 of 4`; with several resources, each by its name. Of a GPU that is for claims, what is left of it.
fn free(gpu: &Gpu) -> String {
    if gpu.moving {
        return "moving".to_owned();
    }
    if gpu.front_end == FrontEnd::Dra.into_str() {
        return match gpu.no_room.as_str() {
            "" => {
                let memory = format_bytes(gpu.left_memory_bytes);
                format!("{memory}, {}", format_cores(gpu.left_cores_millis))
            }
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

const POD_COLUMNS: &[Column] = &[
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
fn lay_pods(page: &mut Page, status: &Status, names: &Names) {
    if status.allocations.is_empty() {
        return page.say(0, Tone::Plain, "No allocations: no running container holds a GPU here.");
    }
    page.say(0, Tone::Head, "ALLOCATIONS");
    let is_wide = page.is_wide();
    let mut sheet = Sheet::new(POD_COLUMNS);
    let mut allocations: Vec<&Allocation> = status.allocations.iter().collect();
    allocations.sort_by_cached_key(|allocation| {
        let uuid = allocation.gpus.first().map(|used| &used.gpu_uuid);
        (status.gpus.iter().position(|gpu| Some(&gpu.uuid) == uuid), name(allocation))
    });
    for allocation in allocations {
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
        let state = same(|a| a.state.into_str().to_owned());
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
        once(allocation.state.into_str().to_owned()).into(),
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
    changed(format!("{} {}", format_cores(used.cores_millis), used.policy.into_str()), used)
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

/// Fewest characters of an id, and of a GPU's UUID behind its kind.
const LEAST: usize = 8;
const LEAST_UUID: usize = 4;

/// What ids and GPUs are called on this page: as short as is unambiguous, for any command that takes an id takes its
/// beginning.
#[derive(Debug)]
pub struct Names {
    short: BTreeMap<String, String>,
    indexes: BTreeMap<String, u32>,
    pods: BTreeMap<String, String>,
}

impl Names {
    /// Of everything that a status names; `whole`: nothing is shortened.
    pub fn of(status: &Status, whole: bool) -> Self {
        let uses = status.allocations.iter().flat_map(|allocation| &allocation.gpus);
        let uuids = status.gpus.iter().map(|gpu| gpu.uuid.as_str());
        let uuids: Vec<&str> = uuids.chain(uses.map(|used| used.gpu_uuid.as_str())).collect();
        let ids: Vec<&str> = status.allocations.iter().map(|a| a.id.as_str()).collect();
        let mut short = BTreeMap::new();
        if !whole {
            shorten(uuids, &mut short, |uuid| {
                uuid.find('-').map_or(LEAST, |at| at + 1 + LEAST_UUID)
            });
            shorten(ids, &mut short, |_| LEAST);
        }
        let pod = |a: &Allocation| {
            let holder = a.holder.as_ref()?;
            Some((a.id.clone(), format!("{}/{}", holder.namespace, holder.pod)))
        };
        Names {
            short,
            indexes: status.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.index)).collect(),
            pods: status.allocations.iter().filter_map(pod).collect(),
        }
    }

    /// An id or a UUID.
    pub fn id<'a>(&'a self, id: &'a str) -> &'a str {
        self.short.get(id).map_or(id, String::as_str)
    }

    /// The pod of an allocation; its id where kubelet has not named it.
    pub fn pod<'a>(&'a self, id: &'a str) -> &'a str {
        self.pods.get(id).map_or_else(|| self.id(id), String::as_str)
    }

    /// A GPU's index; where that is not known, or several have it, its UUID.
    pub fn gpu(&self, uuid: &str) -> String {
        let Some(index) = self.indexes.get(uuid) else { return self.id(uuid).to_owned() };
        match self.indexes.values().filter(|other| *other == index).count() {
            1 => index.to_string(),
            // Instances of one GPU.
            _ => self.id(uuid).to_owned(),
        }
    }
}

/// Unambiguous beginnings: an id differs most from those beside it in order.
fn shorten(
    mut ids: Vec<&str>,
    short: &mut BTreeMap<String, String>,
    least: impl Fn(&str) -> usize,
) {
    ids.sort_unstable();
    ids.dedup();
    let common = |a: &str, b: &str| a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    for (at, id) in ids.iter().enumerate() {
        let before = at.checked_sub(1).map_or(0, |before| common(ids[before], id));
        let after = ids.get(at + 1).map_or(0, |after| common(after, id));
        let length = (before.max(after) + 1).max(least(id));
        short.insert((*id).to_owned(), id.chars().take(length).collect());
    }
}
