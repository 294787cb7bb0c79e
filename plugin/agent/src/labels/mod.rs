//! Node labels by which pods choose among unlike nodes. A pod can't choose among the GPUs of one node, so a
//! number says what a share gets at least, whichever GPU of the node it lies on, and a word that is not
//! true of all of them is [`MIXED`].

mod keeper;

use std::collections::{BTreeMap, BTreeSet};

use tessera_config::Config;
use tessera_gpu::Facts;
use tessera_model::gpu::Gpu;
use tessera_model::short_name;
use tessera_rules::shares;
use tessera_rules::shares::Share;

pub use keeper::Keeper;

/// Before every key.
const PREFIX: &str = "tessera.dev/gpu.";
/// Where GPUs of one node differ.
const MIXED: &str = "mixed";
/// Most characters of a label's value, and of a key's name behind the slash (Kubernetes, "Labels and
/// Selectors", "Syntax and character set").
const LONGEST: usize = 63;
/// What a product's own key leaves of that.
const LONGEST_PRODUCT: usize = LONGEST - "gpu.product.".len();

/// The labels of a node with these GPUs, by key; each a valid label.
pub fn labels(gpus: &[Gpu], facts: &Facts, config: &Config) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    let mut set = |name: &str, value: String| {
        labels.insert(format!("{PREFIX}{name}"), value);
    };
    set("count", gpus.len().to_string());
    let mut of_product = BTreeMap::<&str, u32>::new();
    for gpu in gpus {
        *of_product.entry(&gpu.name).or_default() += 1;
    }
    let product = common(of_product.keys().map(ToString::to_string));
    set("product", word(&product, LONGEST));
    let names = of_product.keys().map(|name| word(name, LONGEST_PRODUCT)).collect::<Vec<_>>();
    for ((product, count), name) in of_product.iter().zip(&names) {
        // Two that differ in what no label may have in it.
        let name = match names.iter().filter(|other| *other == name).count() {
            1 => name.clone(),
            _ => short_name::with_hash(name, LONGEST_PRODUCT, product),
        };
        set(&format!("product.{name}"), count.to_string());
    }
    let mib = |bytes: u64| (bytes >> 20).to_string();
    let least = |values: &mut dyn Iterator<Item = u64>| values.min();
    if let Some(bytes) = least(&mut gpus.iter().map(|gpu| gpu.memory_bytes)) {
        set("memory", mib(bytes));
    }
    let cuts: Vec<Vec<Share>> = gpus.iter().map(|gpu| shares::cut(gpu, config)).collect();
    let replicas = |cut: &Vec<Share>| cut.iter().map(|share| share.count).sum::<u32>().to_string();
    set("replicas", common(cuts.iter().map(replicas)));
    let all = || cuts.iter().flatten();
    if let Some(bytes) = least(&mut all().map(|share| share.limit.memory_bytes)) {
        set("share.memory", mib(bytes));
    }
    if let Some(millis) = all().map(|share| share.limit.cores_millis).min() {
        set("share.cores", millis.to_string());
    }
    set("policy", common(all().map(|share| share.compute.name().to_owned())));
    // Of a GPU that does not tell, nothing can be promised.
    let capabilities: Option<Vec<(u32, u32)>> =
        gpus.iter().map(|gpu| facts.compute_capability.get(&gpu.uuid).copied()).collect();
    if let Some((major, minor)) = capabilities.and_then(|all| all.into_iter().min()) {
        set("compute.major", major.to_string());
        set("compute.minor", minor.to_string());
    }
    if let Some(version) = &facts.driver_version {
        set("driver.version", word(version, LONGEST));
        if let Some(major) = version.split('.').next().filter(|part| part.parse::<u32>().is_ok()) {
            set("driver.major", major.to_owned());
        }
    }
    set("mig", common(gpus.iter().map(|gpu| gpu.mig.is_some().to_string())));
    labels
}

/// A line for each label, `key=value`: what node feature discovery reads, and `kubectl label` takes.
pub fn lines(labels: &BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}\n")).collect()
}

/// What all say, or [`MIXED`].
fn common(values: impl Iterator<Item = String>) -> String {
    let mut all: BTreeSet<String> = values.collect();
    match all.len() {
        1 => all.pop_first().unwrap_or_default(),
        _ => MIXED.to_owned(),
    }
}

/// `text` as a label's value of at most `longest` characters: letters, digits, `-`, `_` and `.` are kept, with
/// a letter or digit at both ends; anything else becomes one `-`. A longer one is cut, and ends with a hash.
fn word(text: &str, longest: usize) -> String {
    let mut word = String::new();
    for c in text.chars() {
        match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '_' | '.' => word.push(c),
            _ if word.ends_with('-') => {}
            _ => word.push('-'),
        }
    }
    let ends = |c: char| !c.is_ascii_alphanumeric();
    match word.trim_matches(ends) {
        "" => "unknown".to_owned(),
        long if long.len() > longest => short_name::with_hash(long, longest, text),
        word => word.to_owned(),
    }
}

#[cfg(test)]
mod tests;
