//! `[[layout]]`.

use super::super::{Config, LayoutShare, choices};
use super::Takes::{AtOnce, NewPods};
use super::{Key, each, toml};

pub(super) const KEYS: &[Key] = &[
    each(
        "layout[].gpus",
        "list, as `gpus.include`; required",
        AtOnce,
        |c| {
            let layouts = c.layouts.iter().enumerate();
            layouts.map(|(i, l)| (format!("layout[{i}].gpus"), toml::strings(&l.gpus))).collect()
        },
        "GPUs that are cut into the shares below. The first layout that names a GPU counts; one that \
         none names is cut as `[share]` says.",
    ),
    each(
        "layout[].shares[].resource",
        "`domain/name`; required, once in a layout",
        AtOnce,
        |c| shares(c, "resource", |share| Some(toml::string(&share.resource))),
        "What pods ask for.",
    ),
    each(
        "layout[].shares[].count",
        "whole number from 1 to 256; left out: 1",
        AtOnce,
        |c| shares(c, "count", |share| Some(share.count.to_string())),
        "How many replicas of it each GPU has.",
    ),
    each(
        "layout[].shares[].memory",
        "`auto`, a percentage, or quantity, bytes; left out: `auto`",
        NewPods,
        |c| shares(c, "memory", |share| Some(toml::amount(share.memory, toml::bytes))),
        "Memory of one: bytes, or a part of what the reserve leaves; `auto` divides what the others \
         leave.",
    ),
    each(
        "layout[].shares[].cores",
        "`auto`, a percentage, or quantity, GPUs; left out: `auto`",
        NewPods,
        |c| {
            let millis = |units| toml::millis(u32::try_from(units).unwrap_or(u32::MAX));
            shares(c, "cores", |share| Some(toml::amount(share.cores, millis)))
        },
        "Compute of one, likewise.",
    ),
    each(
        "layout[].shares[].compute",
        "as `share.compute`, its default",
        NewPods,
        |c| shares(c, "compute", |s| s.compute.map(|word| toml::word(&word, &choices::COMPUTE))),
        "What its compute share means.",
    ),
    each(
        "layout[].shares[].placement",
        "as `share.placement`, its default; the same wherever the resource is sold",
        AtOnce,
        |c| shares(c, "placement", |s| s.placement.map(|w| toml::word(&w, &choices::PLACEMENT))),
        "Which GPU is preferred.",
    ),
    each(
        "layout[].shares[].split",
        "as `share.split`, its default; the same wherever the resource is sold",
        NewPods,
        |c| shares(c, "split", |s| s.split.map(|word| toml::word(&word, &choices::SPLIT))),
        "Whether one container may have several GPUs.",
    ),
];

fn shares(
    config: &Config,
    key: &str,
    show: impl Fn(&LayoutShare) -> Option<String>,
) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (i, layout) in config.layouts.iter().enumerate() {
        for (j, share) in layout.shares.iter().enumerate() {
            let value = show(share);
            all.extend(value.map(|value| (format!("layout[{i}].shares[{j}].{key}"), value)));
        }
    }
    all
}
