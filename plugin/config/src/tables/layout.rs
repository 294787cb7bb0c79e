//! `[[layout]]`: what GPUs are cut into where equal replicas under one name are not enough.

use std::collections::BTreeMap;

use crate::form::{Amount, WHOLE_PERCENT};
use crate::form::{filled, given, part_of_memory, part_of_time, tables, whole, word};
use crate::name;
use crate::parse::Checks;
use crate::table::table;
use tessera_model::percent::{format_cores, format_percent};
use tessera_model::replica::MAX_PER_GPU;
use tessera_model::sharing::{Compute, Placement, Split};

use super::sharing::NO_MEMORY;

/// Two layouts as they stand in a file, for `config.toml`.
pub(crate) const EXAMPLE: &str = r#"[[layout]]
gpus = ["GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28", "0"]
shares = [{ resource = "tessera.dev/gpu-whole" }]

[[layout]]
gpus = ["NVIDIA A100*"]
shares = [
  { resource = "tessera.dev/gpu-large", count = 1, memory = "50%", cores = "50%" },
  { resource = "tessera.dev/gpu-small", count = 2, memory = "25%", cores = "25%",
    compute = "strict", placement = "distributed", split = "spread" },
]
"#;

const NO_GPUS: &str = "must name GPUs: UUIDs, indexes, or product names such as \"NVIDIA A100*\"";
const NO_SHARES: &str = "must list at least one { resource = \"tessera.dev/gpu-large\", count = 1, \
                         memory = \"50%\", cores = \"50%\" }; use gpus.exclude for a GPU that is \
                         not to be shared";

table! {
    /// Unequal shares of the GPUs that it names. The first layout that names a GPU applies to it.
    pub struct Layout: check_sums {
        /// GPUs that are divided so. The first layout that names a GPU applies to it, `[share]` to all others.
        gpus: Vec<String> = Vec::new(), filled(name::gpu(),
            "list, as `gpus.include`", NO_GPUS), AtOnce, required NO_GPUS;
        /// The shares of each of these GPUs; each resource appears once.
        shares: Vec<LayoutShare> = Vec::new(), tables(Some(NO_SHARES)), AtOnce, required NO_SHARES;
    }
}

table! {
    /// Equal replicas of each GPU of a layout.
    pub struct LayoutShare {
        /// What pods ask for; once in a layout.
        resource: String = String::new(),
            name::resource("`domain/name`"), AtOnce,
            required "is missing: the name that pods ask for";
        /// Number of replicas on each GPU.
        count: u32 = 1, whole(1..=MAX_PER_GPU);
        /// Memory of one replica: bytes, or a part of what the reserve leaves. `auto` divides what the other
        /// shares leave.
        memory: Amount = Amount::Auto, part_of_memory(NO_MEMORY), NewPods;
        /// Compute of one replica: a part of the GPU's time, rounded down to 0.1%. `auto` divides what the
        /// other shares leave.
        cores: Amount = Amount::Auto, part_of_time(), NewPods;
        /// As `share.compute`, which it is where left out.
        compute: Option<Compute> = None, given(word()), NewPods;
        /// As `share.placement`, likewise; the same wherever the resource is sold.
        placement: Option<Placement> = None, given(word());
        /// As `share.split`, likewise; the same wherever the resource is sold.
        split: Option<Split> = None, given(word()), NewPods;
    }
}

/// What must hold between the shares of a layout, whatever GPUs there are; the rest is
/// `tessera_rules::capacity`'s.
fn check_sums(layout: &Layout, checks: &mut Checks<'_>) {
    let shares = &layout.shares;
    let mut seen = BTreeMap::new();
    for (i, share) in shares.iter().enumerate().filter(|(_, share)| !share.resource.is_empty()) {
        if let Some(first) = seen.insert(&share.resource, i) {
            let message = format!(
                "\"{}\" is shares[{first}] of this layout already; give each its own name, or \
                 raise count",
                share.resource
            );
            checks.problem(&format!("shares[{i}].resource"), &message);
        }
    }
    // A share that is wrong counts with nothing: what is too much is so without it, what is left is not known.
    let is_complete = checks.are_sound(&["shares"]);
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
        checks.problem("shares", &message);
    } else if is_complete
        && memory == whole
        && shares.iter().any(|share| share.memory == Amount::Auto)
    {
        let message = "memory = \"auto\" divides what the others leave, and they leave nothing; \
                       lower theirs";
        checks.problem("shares", message);
    }
    let cores = sum(&|share| share.cores.of(1000).unwrap_or(0));
    let autos = sum(&|share| u64::from(share.cores == Amount::Auto));
    if cores > 1000 {
        let message = format!(
            "the cores of all shares are {}, more than one GPU; lower cores or count",
            format_cores(cores)
        );
        checks.problem("shares", &message);
    } else if is_complete && 1000 - cores < autos {
        let message = format!(
            "cores = \"auto\" divides what the others leave, and {} are too little for {autos}; \
             lower the others' cores",
            format_cores(1000 - cores)
        );
        checks.problem("shares", &message);
    }
}

/// What must hold between layouts: how kubelet is answered about a resource does not depend on the GPU.
pub(crate) fn check_terms(layouts: &[Layout], checks: &mut Checks<'_>) {
    let mut seen: BTreeMap<&str, (&LayoutShare, String)> = BTreeMap::new();
    let all = layouts.iter().enumerate().flat_map(|(i, layout)| {
        layout.shares.iter().enumerate().map(move |(j, share)| (i, j, share))
    });
    for (i, j, share) in all.filter(|(_, _, share)| !share.resource.is_empty()) {
        let at = format!("layout[{i}].shares[{j}]");
        let Some((before, first)) = seen.get(share.resource.as_str()) else {
            seen.insert(&share.resource, (share, at));
            continue;
        };
        let placement = ("placement", before.placement != share.placement);
        for (key, differs) in [placement, ("split", before.split != share.split)] {
            let (here, there) = (format!("{at}.{key}"), format!("{first}.{key}"));
            if differs && checks.are_sound(&[&here, &there]) {
                let message = format!(
                    "{} has another one in {first}; it must be the same in all layouts",
                    share.resource
                );
                checks.problem(&here, &message);
            }
        }
    }
}
