//! What must hold between keys, whatever GPUs there are: of a configuration whose values are right by themselves. The
//! chart's `_sense.tpl` has the same rules.

use std::collections::BTreeMap;

use tessera_model::duration;
use tessera_model::percent::{format_cores, format_percent};
use tessera_model::quantity::format_compared;

use crate::form::WHOLE_PERCENT;
use crate::{Amount, Api, ApiAuthorisation, Config, Layout, LayoutShare, Problem};

/// Is given each key that contradicts another, and why.
type Wrong<'w> = dyn FnMut(&str, String) + 'w;

pub(super) fn check(config: &Config) -> Vec<Problem> {
    let mut found = Vec::new();
    let mut wrong = |key: &str, message: String| found.push(config.source.problem(key, message));
    check_lengths(config, &mut wrong);
    check_replicas(config, &mut wrong);
    check_memory(config, &mut wrong);
    for (i, layout) in config.layouts.iter().enumerate() {
        check_sums(&format!("layout[{i}].shares"), layout, &mut wrong);
    }
    check_terms(&config.layouts, &mut wrong);
    check_step(config, &mut wrong);
    check_api(&config.api, &mut wrong);
    if config.driver.root.is_some() && config.driver.libraries.is_some() {
        let message = "libraries are found below driver.root or lie in driver.libraries: set one";
        wrong("driver.root", message.to_owned());
    }
    found
}

fn check_lengths(config: &Config, wrong: &mut Wrong<'_>) {
    let Config { compute, health, history, .. } = config;
    for (table, (key, length), (other, most)) in [
        ("compute", ("quantum_min", compute.quantum_min), ("quantum", compute.quantum)),
        ("compute", ("quantum", compute.quantum), ("quantum_max", compute.quantum_max)),
        ("compute", ("drain_min", compute.drain_min), ("drain_max", compute.drain_max)),
        ("health", ("recovery", health.recovery), ("recovery_max", health.recovery_max)),
        ("history", ("keep_10s", history.keep_10s), ("keep_5m", history.keep_5m)),
        ("history", ("keep_5m", history.keep_5m), ("keep_1h", history.keep_1h)),
    ] {
        if length > most {
            let message = format!("is longer than {table}.{other} ({})", duration::format(most));
            wrong(&format!("{table}.{key}"), message);
        }
    }
}

fn check_replicas(config: &Config, wrong: &mut Wrong<'_>) {
    let share = &config.share;
    if let Some(cores) = share.cores_millis.map(u64::from)
        && cores * u64::from(share.replicas) > 1000
    {
        let message = format!(
            "{} replicas of {} are more than one GPU; lower cores or replicas",
            share.replicas,
            format_cores(cores),
        );
        wrong("share.cores", message);
    }
}

/// A replica in which no context fits.
fn check_memory(config: &Config, wrong: &mut Wrong<'_>) {
    let Some(overhead) = config.gpus.context_overhead_bytes else { return };
    let share = config.share.memory_bytes.map(|bytes| ("share.memory".to_owned(), bytes));
    let layouts = config.layouts.iter().enumerate().flat_map(|(i, layout)| {
        let shares = layout.shares.iter().enumerate();
        shares.filter_map(move |(j, share)| match share.memory {
            Amount::Exact(bytes) => Some((format!("layout[{i}].shares[{j}].memory"), bytes)),
            Amount::Auto | Amount::Percent(_) => None,
        })
    });
    for (key, memory) in share.into_iter().chain(layouts).filter(|(_, bytes)| *bytes <= overhead) {
        let [memory, overhead] = format_compared(memory, overhead);
        let message = format!(
            "{memory} is not more than gpus.context_overhead ({overhead}): not one CUDA context would fit; \
             raise the memory, or lower context_overhead if your GPUs need less"
        );
        wrong(&key, message);
    }
}

/// What must hold between the shares of a layout, whose list is `key`; the rest is `tessera_rules::capacity`'s.
fn check_sums(key: &str, layout: &Layout, wrong: &mut Wrong<'_>) {
    let shares = &layout.shares;
    let mut seen = BTreeMap::new();
    for (i, share) in shares.iter().enumerate() {
        if let Some(first) = seen.insert(&share.resource, i) {
            let message = format!(
                "\"{}\" is shares[{first}] of this layout already; give each its own name, or raise count",
                share.resource
            );
            wrong(&format!("{key}[{i}].resource"), message);
        }
    }
    let sum = |part: &dyn Fn(&LayoutShare) -> u64| -> u64 {
        shares.iter().map(|share| part(share).saturating_mul(share.count.into())).sum()
    };
    let whole = u64::from(WHOLE_PERCENT);
    let memory = sum(&|share| match share.memory {
        Amount::Percent(part) => part.into(),
        Amount::Auto | Amount::Exact(_) => 0,
    });
    if memory > whole {
        let message = format!(
            "the memory of all shares is {} of each GPU; lower memory or count to 100% or less \
             together",
            format_percent(memory)
        );
        wrong(key, message);
    } else if memory == whole && shares.iter().any(|share| share.memory == Amount::Auto) {
        let message = "memory = \"auto\" divides what the others leave, and they leave nothing; \
                       lower theirs";
        wrong(key, message.to_owned());
    }
    let cores = sum(&|share| share.cores_millis.unwrap_or(0).into());
    let autos = sum(&|share| u64::from(share.cores_millis.is_none()));
    if cores > 1000 {
        let message = format!(
            "the cores of all shares are {}, more than one GPU; lower cores or count",
            format_cores(cores)
        );
        wrong(key, message);
    } else if 1000 - cores < autos {
        let message = format!(
            "cores = \"auto\" divides what the others leave, and {} are too little for {autos}; \
             lower the others' cores",
            format_cores(1000 - cores)
        );
        wrong(key, message);
    }
}

/// What must hold between layouts: how kubelet is answered about a resource does not depend on the GPU.
fn check_terms(layouts: &[Layout], wrong: &mut Wrong<'_>) {
    let mut seen: BTreeMap<&str, (&LayoutShare, String)> = BTreeMap::new();
    for (i, layout) in layouts.iter().enumerate() {
        for (j, share) in layout.shares.iter().enumerate() {
            let at = format!("layout[{i}].shares[{j}]");
            let Some((before, first)) = seen.get(share.resource.as_str()) else {
                seen.insert(&share.resource, (share, at));
                continue;
            };
            let placement = ("placement", before.placement != share.placement);
            for (key, differs) in [placement, ("split", before.split != share.split)] {
                if differs {
                    let message = format!(
                        "{} has another one in {first}; it must be the same in all layouts",
                        share.resource
                    );
                    wrong(&format!("{at}.{key}"), message);
                }
            }
        }
    }
}

/// What must hold between the step and a replica whose memory is written in bytes.
fn check_step(config: &Config, wrong: &mut Wrong<'_>) {
    let step = config.dra.memory_step_bytes;
    let Some(share) = config.share.memory_bytes.filter(|share| *share < step) else { return };
    if config.dra.enabled {
        let [step, share] = format_compared(step, share);
        let message = format!(
            "{step} is more than share.memory ({share}); lower the step, or raise the share"
        );
        wrong("dra.memory_step", message);
    }
}

fn check_api(api: &Api, wrong: &mut Wrong<'_>) {
    let is_open = api.listen.iter().any(|address| !address.ip().is_loopback());
    if api.authorisation == ApiAuthorisation::None && is_open {
        let message = "everybody in the network could read everything: write \"127.0.0.1:9481\", or set \
                       api.authorisation to \"kubernetes\"";
        wrong("api.listen", message.to_owned());
    }
    let (has, lacks) = match (&api.tls_cert, &api.tls_key) {
        (Some(_), None) => ("api.tls_cert", "api.tls_key"),
        (None, Some(_)) => ("api.tls_key", "api.tls_cert"),
        _ => return,
    };
    wrong(has, format!("set {lacks} too: a certificate is of no use without its key"));
}
