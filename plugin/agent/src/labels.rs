//! Node labels by which pods choose among unlike nodes. A pod can't choose among the GPUs of one node, so a
//! number says what a share gets at least, whichever GPU of the node it lies on, and a word that is not
//! true of all of them is [`MIXED`].

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tessera_config::Config;
use tessera_gpu::{Discovery, Facts};
use tessera_model::gpu::Gpu;
use tessera_model::short_name;
use tessera_rules::shares;
use tessera_rules::shares::Share;
use tessera_system::files::{self, Dir};
use tessera_system::locks::lock;
use tracing::{info, warn};

use crate::Agent;

const PREFIX: &str = "tessera.dev/gpu.";
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
    if let Some(bytes) = least(&mut all().map(|share| share.memory_bytes)) {
        set("share.memory", mib(bytes));
    }
    if let Some(millis) = all().map(|share| share.cores_millis).min() {
        set("share.cores", millis.to_string());
    }
    set("policy", common(all().map(|share| share.compute.into_str().to_owned())));
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
            self.agent.board.set_condition("labels", problem);
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Makes the file what the configuration wants, of the GPUs that are included now. Blocking: asks the driver.
    fn refresh(&self) -> Result<(), String> {
        let gpus = self.agent.inventory.catalogue().devices();
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

/// Makes `text` the content of `path`, unless it is already or holds something else than labels of ours; whether it was
/// not.
fn put(path: &Path, text: &str) -> io::Result<bool> {
    let is_plain = path.symlink_metadata().is_ok_and(|meta| meta.is_file());
    if is_plain && !is_ours(&files::read(path, files::SMALL)?) {
        return Err(not_ours());
    }
    // Not durable: after a power cut it is written again.
    files::put(path, text.as_bytes(), 0o644, false)
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tessera_model::mig::MigInstance;

    fn gpu(index: u32, name: &str, gib: u64) -> Gpu {
        let uuid = format!("GPU-{index}");
        Gpu { name: name.into(), memory_bytes: gib << 30, ..Gpu::example(&uuid, index) }
    }

    fn facts(capabilities: &[(u32, (u32, u32))]) -> Facts {
        Facts {
            cuda_version: None,
            driver_version: Some("550.54.15".into()),
            compute_capability: capabilities
                .iter()
                .map(|(index, capability)| (format!("GPU-{index}"), *capability))
                .collect(),
        }
    }

    fn config(text: &str) -> Config {
        Config::parse(text).unwrap()
    }

    #[track_caller]
    fn check(labels: &BTreeMap<String, String>, expected: &[(&str, &str)]) {
        for (name, value) in expected {
            let key = format!("tessera.dev/gpu.{name}");
            assert_eq!(labels.get(&key).map(String::as_str), Some(*value), "{name}: {labels:#?}");
        }
    }

    #[test]
    fn equal_gpus_are_described_exactly() {
        let gpus = [gpu(0, "NVIDIA L4", 24), gpu(1, "NVIDIA L4", 24)];
        let config = config("gpus.reserve = '1Gi'\nshare.compute = 'strict'\nshare.replicas = 2");
        let labels = labels(&gpus, &facts(&[(0, (8, 9)), (1, (8, 9))]), &config);
        check(
            &labels,
            &[
                ("count", "2"),
                ("product", "NVIDIA-L4"),
                ("product.NVIDIA-L4", "2"),
                ("memory", "24576"),
                ("replicas", "2"),
                ("share.memory", "11776"),
                ("share.cores", "500"),
                ("policy", "strict"),
                ("compute.major", "8"),
                ("compute.minor", "9"),
                ("driver.version", "550.54.15"),
                ("driver.major", "550"),
                ("mig", "false"),
            ],
        );
        assert_eq!(labels.len(), 13, "{labels:#?}");
    }

    #[test]
    fn of_unlike_gpus_only_what_holds_for_each_is_said() {
        let instance = MigInstance {
            parent_uuid: "GPU-9".into(),
            parent_index: 9,
            index: 0,
            gpu_instance: 1,
            compute_instance: 0,
        };
        let gpus = [
            gpu(0, "NVIDIA H100 80GB HBM3", 80),
            gpu(1, "Tesla T4", 16),
            Gpu { mig: Some(instance), ..gpu(2, "NVIDIA A100 MIG 1g.10gb", 10) },
        ];
        let config = config(
            "[[layout]]\ngpus = ['Tesla*']\nshares = [{ resource = 'tessera.dev/t4', count = 2, compute = 'none' }]",
        );
        let labels = labels(&gpus, &facts(&[(0, (9, 0)), (1, (7, 5)), (2, (8, 0))]), &config);
        check(
            &labels,
            &[
                ("count", "3"),
                ("product", "mixed"),
                ("product.NVIDIA-H100-80GB-HBM3", "1"),
                ("product.Tesla-T4", "1"),
                ("product.NVIDIA-A100-MIG-1g.10gb", "1"),
                ("memory", "10240"),
                ("replicas", "mixed"),
                ("policy", "mixed"),
                ("compute.major", "7"),
                ("compute.minor", "5"),
                ("mig", "mixed"),
            ],
        );
    }

    #[test]
    fn a_gpu_that_does_not_tell_its_capability_leaves_the_node_without() {
        let gpus = [gpu(0, "A", 16), gpu(1, "B", 16)];
        let silent = Facts { driver_version: None, ..facts(&[(0, (9, 0))]) };
        let labels = labels(&gpus, &silent, &Config::default());
        for key in labels.keys() {
            assert!(!key.contains("compute") && !key.contains("driver"), "{labels:#?}");
        }
    }

    #[test]
    fn a_long_products_name_is_the_same_on_every_node() {
        let long = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition MIG";
        let profiles =
            ["1g.24gb", "2g.48gb"].map(|profile| gpu(0, &format!("{long} {profile}"), 24));
        let labels = |gpus: &[Gpu]| labels(gpus, &Facts::default(), &Config::default());
        let both = labels(&profiles);
        for one in &profiles {
            let alone = labels(std::slice::from_ref(one));
            let keys = alone.keys().filter(|key| key.starts_with("tessera.dev/gpu.product."));
            assert!(keys.clone().count() == 1 && keys.clone().all(|key| both.contains_key(key)));
            let value = &alone["tessera.dev/gpu.product"];
            assert!(
                value.starts_with("NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation"),
                "{value}"
            );
        }
    }

    /// As the API server judges a name or value.
    fn is_valid(text: &str) -> bool {
        let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        text.len() <= 63
            && text.chars().all(inner)
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.ends_with(|c: char| c.is_ascii_alphanumeric())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

        /// However long and alike: of as many GPUs as there are, and of no product is another's.
        #[test]
        fn each_product_has_a_label_of_its_own(
            stem in "[A-Za-z0-9 .()-]{0,70}",
            tails in prop::collection::vec("[A-Za-z0-9 .+_-]{0,12}", 1..6),
            counts in prop::collection::vec(1u32..4, 6),
        ) {
            let mut expected = BTreeMap::new();
            let mut gpus = Vec::new();
            for (tail, count) in tails.iter().zip(counts) {
                let name = format!("{stem}{tail}");
                *expected.entry(name.clone()).or_insert(0) += count;
                gpus.extend((0..count).map(|n| gpu(n, &name, 16)));
            }
            let labels = labels(&gpus, &Facts::default(), &Config::default());
            let of_products = labels.iter().filter(|(key, _)| key.starts_with("tessera.dev/gpu.product."));
            let mut found: Vec<u32> = of_products.map(|(_, count)| count.parse().unwrap()).collect();
            let mut wanted: Vec<u32> = expected.values().copied().collect();
            found.sort_unstable();
            wanted.sort_unstable();
            prop_assert_eq!(found, wanted, "{:#?}", labels);
            let product = &labels["tessera.dev/gpu.product"];
            prop_assert_eq!(product == MIXED, expected.len() > 1, "{}", product);
        }

        /// Whatever a driver calls its products and itself.
        #[test]
        fn every_key_and_value_is_a_valid_label(name in ".{0,90}", tame in "[A-Za-z0-9 ._()-]{50,90}", version in ".{0,12}") {
            let gpus = [gpu(0, &name, 16), gpu(1, &tame, 80)];
            let facts = Facts { driver_version: Some(version), ..Facts::default() };
            for (key, value) in labels(&gpus, &facts, &Config::default()) {
                let name = key.strip_prefix("tessera.dev/").unwrap();
                prop_assert!(is_valid(name) && is_valid(&value), "{key}={value}");
            }
        }
    }

    /// Of GPUs of compute capability 9.0.
    fn keep(state: &mut State, config: &Config, gpus: &[&str]) -> Result<(), String> {
        let gpus = gpus.iter().zip(0..).map(|(uuid, index)| Gpu::example(uuid, index));
        let capability = |gpu: &Gpu| (gpu.uuid.clone(), (9, 0));
        state.refresh(config, gpus.collect(), |gpus| Facts {
            compute_capability: gpus.iter().map(capability).collect(),
            ..Facts::default()
        })
    }

    #[test]
    fn the_file_follows_the_configuration_and_goes_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let mut state = State::default();
        let with = |path: Option<&PathBuf>, replicas: u32| {
            let mut config = Config::default();
            config.labels.nfd_file = path.cloned();
            config.share.replicas = replicas;
            config
        };
        let label = |path: &PathBuf, name: &str| {
            let text = std::fs::read_to_string(path).unwrap();
            let key = format!("tessera.dev/gpu.{name}=");
            text.lines().find_map(|line| Some(line.strip_prefix(&key)?.to_owned()))
        };
        let replicas = |path: &PathBuf| label(path, "replicas");
        keep(&mut state, &with(None, 4), &["GPU-a"]).unwrap();
        assert!(!one.exists());
        keep(&mut state, &with(Some(&one), 4), &["GPU-a"]).unwrap();
        assert_eq!(replicas(&one).as_deref(), Some("4"));
        // One more GPU, of which the driver was not asked before.
        keep(&mut state, &with(Some(&one), 4), &["GPU-a", "GPU-b"]).unwrap();
        assert_eq!(label(&one, "count").as_deref(), Some("2"));
        assert_eq!(label(&one, "compute.major").as_deref(), Some("9"), "of both");
        // Another configuration, and somebody who removes it.
        keep(&mut state, &with(Some(&one), 7), &["GPU-a"]).unwrap();
        assert_eq!(replicas(&one).as_deref(), Some("7"));
        std::fs::remove_file(&one).unwrap();
        keep(&mut state, &with(Some(&one), 7), &["GPU-a"]).unwrap();
        assert!(one.exists());
        // Another place; then none.
        keep(&mut state, &with(Some(&two), 7), &["GPU-a"]).unwrap();
        assert!(!one.exists() && two.exists());
        keep(&mut state, &with(None, 7), &["GPU-a"]).unwrap();
        assert!(!two.exists());
        keep(&mut state, &with(Some(&two), 7), &["GPU-a"]).unwrap();
        state.remove();
        assert!(!two.exists());
    }

    #[test]
    fn a_place_that_cannot_be_written_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let mut config = Config::default();
        config.labels.nfd_file = Some(dir.path().join("file/tessera"));
        let error = keep(&mut State::default(), &config, &["GPU-a"]).unwrap_err();
        assert!(error.contains("labels.nfd_file") && error.contains("mount"), "{error}");
    }

    #[test]
    fn links_are_overwritten_and_not_followed_and_what_is_anothers_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("tessera"), dir.path().join("other"));
        std::fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(put(&path, "tessera.dev/gpu.a=1\n").unwrap());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
        assert!(path.symlink_metadata().unwrap().is_file());
        for at in [put(&other, "tessera.dev/gpu.a=1\n").map(drop), remove(&other)] {
            assert_eq!(at.unwrap_err().kind(), ErrorKind::AlreadyExists);
        }
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
    }
}
