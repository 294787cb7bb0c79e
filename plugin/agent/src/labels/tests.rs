//! Keys, values, and what is promised of unlike GPUs.

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
fn a_long_products_name_is_shortened_with_a_hash_and_a_short_one_stays() {
    let long = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition MIG";
    let profiles = ["1g.24gb", "2g.48gb"].map(|profile| format!("{long} {profile}"));
    let node = |names: &[&str]| {
        let gpus: Vec<Gpu> = names.iter().map(|name| gpu(0, name, 24)).collect();
        labels(&gpus, &Facts::default(), &Config::default())
    };
    let both = node(&[&profiles[0], &profiles[1]]);
    assert_eq!(both["tessera.dev/gpu.product"], "mixed");
    let keys = |labels: &BTreeMap<String, String>| -> Vec<String> {
        let keys = labels.keys().filter_map(|key| key.strip_prefix("tessera.dev/gpu.product."));
        keys.map(str::to_owned).collect()
    };
    assert_eq!(keys(&both).len(), 2, "{both:#?}");
    // The same on every node, whatever else is there.
    for (at, profile) in profiles.iter().enumerate() {
        let one = node(&[profile]);
        assert!(keys(&both).contains(&keys(&one)[0]), "{one:#?}");
        assert_ne!(
            one["tessera.dev/gpu.product"],
            node(&[&profiles[1 - at]])["tessera.dev/gpu.product"]
        );
        assert!(
            one["tessera.dev/gpu.product"]
                .starts_with("NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation")
        );
    }
    assert_eq!(keys(&node(&["NVIDIA A100 MIG 1g.10gb+me"])), ["NVIDIA-A100-MIG-1g.10gb-me"]);
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
fn the_labels_follow_the_gpus_that_are_included() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    let path = dir.path().join("tessera");
    config.labels.nfd_file = Some(path.clone());
    let mut state = State::default();
    let label = |name: &str| {
        let text = std::fs::read_to_string(&path).unwrap();
        let key = format!("tessera.dev/gpu.{name}=");
        text.lines().find_map(|line| Some(line.strip_prefix(&key)?.to_owned()))
    };
    keep(&mut state, &config, &["GPU-a"]).unwrap();
    assert_eq!(label("count").as_deref(), Some("1"));
    // One more, of which the driver was not asked before.
    keep(&mut state, &config, &["GPU-a", "GPU-b"]).unwrap();
    assert_eq!(label("count").as_deref(), Some("2"));
    assert_eq!(label("compute.major").as_deref(), Some("9"), "of both");
    keep(&mut state, &config, &["GPU-b"]).unwrap();
    assert_eq!(label("count").as_deref(), Some("1"));
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
    let replicas = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .find_map(|line| Some(line.strip_prefix("tessera.dev/gpu.replicas=")?.to_owned()))
    };
    keep(&mut state, &with(None, 4), &["GPU-a"]).unwrap();
    assert!(!one.exists());
    keep(&mut state, &with(Some(&one), 4), &["GPU-a"]).unwrap();
    assert_eq!(replicas(&one).as_deref(), Some("4"));
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
fn it_is_replaced_as_a_whole_and_only_when_it_differs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("features.d/tessera");
    assert!(put(&path, "tessera.dev/gpu.a=1\n").unwrap());
    let before = std::fs::File::open(&path).unwrap();
    assert!(!put(&path, "tessera.dev/gpu.a=1\n").unwrap());
    assert!(put(&path, "tessera.dev/gpu.a=2\ntessera.dev/gpu.b=3\n").unwrap());
    // A reader of the old one reads all of it.
    assert_eq!(io::read_to_string(before).unwrap(), "tessera.dev/gpu.a=1\n");
    assert_eq!(
        std::fs::read_to_string(&path).unwrap(),
        "tessera.dev/gpu.a=2\ntessera.dev/gpu.b=3\n"
    );
    let names: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    remove(&path).unwrap();
    remove(&path).unwrap();
    assert!(!path.exists());
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
