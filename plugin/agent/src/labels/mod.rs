//! Node labels by which pods choose among unlike nodes. A pod can't choose among the GPUs of one node, so a
//! number says what a share gets at least, whichever GPU of the node it lies on, and a word that is not
//! true of all of them is [`MIXED`].

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::{info, warn};

use crate::Agent;
use tessera_config::Config;
use tessera_gpu::{Discovery, Facts};
use tessera_model::gpu::Gpu;
use tessera_model::short_name;
use tessera_rules::shares;
use tessera_rules::shares::Share;
use tessera_system::files::{self, Dir};
use tessera_system::locks::lock;

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

/// How often it is looked at whether the file is there and still right: the configuration may have been
/// replaced, and node feature discovery's directory may have been cleared.
const LOOK: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct State {
    /// Where the file is that this plugin wrote.
    written: Option<PathBuf>,
    /// Of which GPUs the driver was asked last, and what it said.
    asked: Option<(Vec<Gpu>, Facts)>,
}

/// Keeps the features file for node feature discovery as the configuration in force wants it, from the first look to
/// [`Keeper::remove`]: whole at any time, by rename. Its worker reads every file of the directory but those whose names begin
/// with a dot.
pub struct Keeper {
    agent: Arc<Agent>,
    discovery: Arc<dyn Discovery>,
    state: Mutex<State>,
}

impl Keeper {
    pub fn new(agent: Arc<Agent>, discovery: Arc<dyn Discovery>) -> Arc<Self> {
        Arc::new(Keeper { agent, discovery, state: Mutex::default() })
    }

    /// Looks now and then, for ever. What goes wrong is a condition of `status`.
    pub async fn run(self: &Arc<Self>) {
        loop {
            let keeper = Arc::clone(self);
            let outcome = tokio::task::spawn_blocking(move || keeper.refresh()).await;
            let problem = outcome.unwrap_or_else(|error| Err(error.to_string())).err();
            self.agent.board().set_condition("labels", problem);
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Makes the file what the configuration wants, of the GPUs that are included now. Blocking: asks the driver.
    fn refresh(&self) -> Result<(), String> {
        let gpus = self.agent.inventory().catalogue().devices();
        let config = self.agent.config();
        lock(&self.state).refresh(&config, gpus, |gpus| self.discovery.facts(gpus))
    }

    /// Removes the file that was written: a node without the plugin has no shares to choose.
    pub fn remove(&self) {
        lock(&self.state).remove();
    }
}

impl State {
    fn refresh(
        &mut self,
        config: &Config,
        gpus: Vec<Gpu>,
        ask: impl Fn(&[Gpu]) -> Facts,
    ) -> Result<(), String> {
        let wanted = config.labels.nfd_file.as_ref();
        let State { written, asked } = self;
        if let Some(old) = written.as_ref().filter(|old| Some(*old) != wanted) {
            remove(old).map_err(|error| format!("cannot remove {}: {error}", old.display()))?;
            *written = None;
        }
        let Some(path) = wanted else { return Ok(()) };
        if asked.as_ref().is_none_or(|(known, _)| *known != gpus) {
            let facts = ask(&gpus);
            *asked = Some((gpus, facts));
        }
        let Some((gpus, facts)) = asked else { return Ok(()) };
        let labels = labels(gpus, facts, config);
        let new = put(path, &lines(&labels)).map_err(|error| {
            format!(
                "no node labels: cannot write labels.nfd_file {}: {error}; mount node feature discovery's \
                 directory writable into the plugin, or leave the key empty",
                path.display()
            )
        })?;
        if new {
            info!(file = %path.display(), labels = labels.len(), "node labels for node feature discovery");
        }
        *written = Some(path.clone());
        Ok(())
    }

    fn remove(&mut self) {
        if let Some(path) = self.written.take()
            && let Err(error) = remove(&path)
        {
            warn!(file = %path.display(), %error, "node labels stay");
        }
    }
}

/// Makes `text` the content of `path`, unless it is already; whether it was not.
///
/// Errors: The file system's; a file that holds something else than labels of ours. What was there before is still
/// there then.
fn put(path: &Path, text: &str) -> io::Result<bool> {
    let plain = path.symlink_metadata().is_ok_and(|meta| meta.is_file());
    if plain {
        let found = files::read(path, files::SMALL)?;
        if found == text.as_bytes() {
            return Ok(false);
        }
        if !is_ours(&found) {
            return Err(not_ours());
        }
    }
    let (dir, name) = Dir::of(path)?;
    // Not durable: after a power cut it is written again.
    dir.replace(name, text.as_bytes(), 0o644, false)?;
    Ok(true)
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = match files::read(path, files::SMALL) {
        Ok(found) if !is_ours(&found) => return Err(not_ours()),
        Ok(_) => Dir::holding(path).and_then(|(dir, name)| dir.remove(name)),
        Err(error) => Err(error.into()),
    };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether all of it is labels as this plugin writes them.
fn is_ours(found: &[u8]) -> bool {
    let prefix = PREFIX.as_bytes();
    found.split(|byte| *byte == b'\n').all(|line| line.is_empty() || line.starts_with(prefix))
}

fn not_ours() -> io::Error {
    io::Error::new(
        ErrorKind::AlreadyExists,
        "it holds something else than Tessera's labels and is left alone: name another file",
    )
}

#[cfg(test)]
mod tests;
