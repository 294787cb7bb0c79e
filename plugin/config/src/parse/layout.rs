//! `[[layout]]`.

use std::collections::BTreeMap;

use super::{check_resource_name, set, too_little};
use crate::layout::{Amount, Layout, LayoutShare, WHOLE_PERCENT};
use crate::reader::{Report, Section};
use crate::{Config, choices};
use tessera_model::quantity::Quantity;
use tessera_model::replica;
use tessera_model::sharing::{Placement, Split};

/// All layouts, with what is wrong in each by itself and between them.
pub(super) fn read(report: &mut Report<'_>, root: &mut Section<'_, '_>, config: &mut Config) {
    let Some(sections) = root.sections(report, "layout") else { return };
    config.layouts = sections.into_iter().map(|s| read_layout(report, s, config)).collect();
    check_terms(report, &config.layouts);
}

fn read_layout(report: &mut Report<'_>, mut section: Section<'_, '_>, config: &Config) -> Layout {
    let gpus = section.strings(report, "gpus");
    if !section.names("gpus") || gpus.as_ref().is_some_and(Vec::is_empty) {
        let message = "must name GPUs: UUIDs, indexes, or product names such as \"NVIDIA A100*\"";
        section.problem(report, "gpus", message);
    }
    let gpus = gpus.unwrap_or_default();
    if gpus.iter().any(String::is_empty) {
        section.problem(report, "gpus", "an empty name matches no GPU; remove it");
    }
    let shares = section.sections(report, "shares");
    if !section.names("shares") || shares.as_ref().is_some_and(Vec::is_empty) {
        let message = "must list at least one { resource = \"tessera.dev/gpu-large\", count = 1, \
                       memory = \"50%\", cores = \"50%\" }; use gpus.exclude for a GPU that is \
                       not to be shared";
        section.problem(report, "shares", message);
    }
    let shares: Vec<LayoutShare> = shares
        .unwrap_or_default()
        .into_iter()
        .filter_map(|share| read_share(report, share, config))
        .collect();
    check_sums(report, &section, &shares);
    section.finish(report);
    Layout { gpus, shares }
}

fn read_share(
    report: &mut Report<'_>,
    mut section: Section<'_, '_>,
    config: &Config,
) -> Option<LayoutShare> {
    let resource = section.string(report, "resource");
    if let Some(name) = &resource {
        if let Err(message) = check_resource_name(name) {
            section.problem(report, "resource", message);
        }
    } else if !section.names("resource") {
        section.problem(report, "resource", "is missing: the name that pods ask for");
    }
    let mut share = LayoutShare {
        resource: resource.clone().unwrap_or_default(),
        count: 1,
        memory: Amount::Auto,
        cores: Amount::Auto,
        compute: None,
        placement: None,
        split: None,
    };
    if let Some(count) = section.integer(report, "count") {
        match u32::try_from(count) {
            Ok(count @ 1..=replica::MAX_PER_GPU) => share.count = count,
            _ => {
                let most = replica::MAX_PER_GPU;
                section.problem(report, "count", format!("must be from 1 to {most}"));
            }
        }
    }
    set(&mut share.memory, section.amount(report, "memory", Quantity::units));
    if let Amount::Exact(bytes) = share.memory
        && let Some(message) = too_little(bytes, &config.gpus)
    {
        section.problem(report, "memory", message);
    }
    if let Some(cores) = section.amount(report, "cores", Quantity::millis) {
        if cores.of(1000).is_none_or(|millis| (1..=1000).contains(&millis)) {
            share.cores = cores;
        } else {
            let message = "counts whole GPUs and must be more than 0 and at most 1; a quarter is \
                           \"25%\", \"250m\" or 0.25";
            section.problem(report, "cores", message);
        }
    }
    share.compute = section.choice(report, "compute", &choices::COMPUTE);
    share.placement = section.choice(report, "placement", &choices::PLACEMENT);
    share.split = section.choice(report, "split", &choices::SPLIT);
    section.finish(report);
    resource.map(|_| share)
}

/// What must hold between the shares of a layout, whatever GPUs there are; the rest is
/// `tessera_rules::capacity`'s.
fn check_sums(report: &mut Report<'_>, section: &Section<'_, '_>, shares: &[LayoutShare]) {
    let at = section.path();
    let mut seen = BTreeMap::new();
    for (i, share) in shares.iter().enumerate() {
        if let Some(first) = seen.insert(&share.resource, i) {
            let key = format!("{at}.shares[{i}].resource");
            let line = report.lines.get(&key).copied();
            let message = format!(
                "\"{}\" is shares[{first}] of this layout already; give each its own name, or \
                 raise count",
                share.resource
            );
            report.problem(&key, line, message);
        }
    }
    let percent = |amount: fn(&LayoutShare) -> Amount| -> u64 {
        let part = |share: &LayoutShare| match amount(share) {
            Amount::Percent(part) => u64::from(part) * u64::from(share.count),
            Amount::Auto | Amount::Exact(_) => 0,
        };
        shares.iter().map(part).sum()
    };
    let whole = u64::from(WHOLE_PERCENT);
    let memory = percent(|share| share.memory);
    if memory > whole {
        let message = format!(
            "the memory of all shares is {} of each GPU; lower memory or count to 100% or less \
             together",
            as_percent(memory)
        );
        section.problem(report, "shares", message);
    } else if memory == whole && shares.iter().any(|share| share.memory == Amount::Auto) {
        let message = "memory = \"auto\" divides what the others leave, and they leave nothing; \
                       lower theirs";
        section.problem(report, "shares", message);
    }
    let fixed = |share: &LayoutShare| share.cores.of(1000).unwrap_or(0) * u64::from(share.count);
    let cores: u64 = shares.iter().map(fixed).fold(0, u64::saturating_add);
    let autos: u64 = shares
        .iter()
        .filter(|share| share.cores == Amount::Auto)
        .map(|share| u64::from(share.count))
        .sum();
    if cores > 1000 {
        let message = format!(
            "the cores of all shares are {cores}m, more than one GPU (1000m); lower cores or count"
        );
        section.problem(report, "shares", message);
    } else if 1000 - cores < autos {
        let message = format!(
            "cores = \"auto\" divides what the others leave, and {}m are too little for {autos}; \
             lower the others' cores",
            1000 - cores
        );
        section.problem(report, "shares", message);
    }
}

/// How kubelet is answered about a resource does not depend on the GPU.
fn check_terms(report: &mut Report<'_>, layouts: &[Layout]) {
    type Terms = (Option<Placement>, Option<Split>);
    let mut seen: BTreeMap<&str, (Terms, String)> = BTreeMap::new();
    for (i, layout) in layouts.iter().enumerate() {
        for (j, share) in layout.shares.iter().enumerate() {
            let terms = (share.placement, share.split);
            let at = format!("layout[{i}].shares[{j}]");
            let Some((before, first)) = seen.get(share.resource.as_str()) else {
                seen.insert(&share.resource, (terms, at));
                continue;
            };
            for (key, differs) in
                [("placement", before.0 != terms.0), ("split", before.1 != terms.1)]
            {
                if differs {
                    let full = format!("{at}.{key}");
                    let at_resource = format!("{at}.resource");
                    let line = report.lines.get(&full).or(report.lines.get(&at_resource)).copied();
                    let message = format!(
                        "{} has another one in {first}; it must be the same in all layouts",
                        share.resource
                    );
                    report.problem(&full, line, message);
                }
            }
        }
    }
}

fn as_percent(part: u64) -> String {
    let (whole, rest) = (part / 1000, part % 1000);
    if rest == 0 { format!("{whole}%") } else { format!("{whole}.{rest:03}%") }
}
