//! An allocation's quota and usage page, as the plugin would have written them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use tessera_region::quota::{self, GpuQuota, Policy, QuotaSpec, QuotaWriter};
use tessera_region::usage::{self, Snapshot, UsageFile};

/// How long what dead processes held stays charged: a little longer than the simulated driver takes where
/// its configuration says nothing. No plugin looks here.
const DEPARTURE: Duration = Duration::from_millis(20);

/// A pages directory for one test, removed with this value.
#[derive(Debug)]
pub struct Pages {
    /// What `TESSERA_DIR` is set to.
    pub dir: PathBuf,
    /// The plugin's handle on the quota page, to change limits while tenants run.
    pub quota: QuotaWriter,
    _temporary: Option<TempDir>,
}

impl Pages {
    /// An allocation with a memory limit in bytes per GPU, no compute limit and free contexts.
    pub fn create(limits: &[(&str, u64)]) -> Self {
        Self::with_overhead(limits, 0)
    }

    /// The same, where every context is charged `overhead` bytes.
    pub fn with_overhead(limits: &[(&str, u64)], overhead: u64) -> Self {
        let dir = tempfile::tempdir().expect("a writable temporary directory");
        let gpus = limits.iter().map(|&(uuid, bytes)| free(uuid, bytes, overhead)).collect();
        let pages = Self::of(dir.path(), "0123456789abcdef", gpus);
        Self { _temporary: Some(dir), ..pages }
    }

    /// One of several shares: the directory of this allocation in `parent`, which is what `TESSERA_DIR` is
    /// set to, or what a container has.
    pub fn share(parent: &Path, allocation: &str, limits: &[(&str, u64)]) -> Self {
        let dir = parent.join(allocation);
        std::fs::create_dir(&dir).expect("a writable directory without that share");
        Self::of(
            &dir,
            allocation,
            limits.iter().map(|&(uuid, bytes)| free(uuid, bytes, 0)).collect(),
        )
    }

    /// In this directory, with these quotas.
    pub fn of(dir: &Path, allocation: &str, gpus: Vec<GpuQuota>) -> Self {
        let spec = QuotaSpec { allocation: allocation.to_owned(), generation: 1, gpus };
        let quota = quota::create(dir, &spec).expect("a valid quota");
        quota.set_departure(DEPARTURE);
        usage::create(dir, spec.generation).expect("a writable directory");
        Self { dir: dir.to_owned(), quota, _temporary: None }
    }

    pub fn quota_file(&self) -> PathBuf {
        self.dir.join(tessera_region::layout::QUOTA_FILE)
    }

    pub fn usage_file(&self) -> PathBuf {
        self.dir.join(tessera_region::layout::USAGE_FILE)
    }

    /// What the plugin sees in the usage page now.
    pub fn snapshot(&self) -> Snapshot {
        self.usage().snapshot().expect("an untampered usage page")
    }

    /// The bytes that living processes are charged on the page's `gpu`-th GPU. Recovers the dead first,
    /// as if the driver had back what they held.
    pub fn charged(&self, gpu: usize) -> u64 {
        self.usage().recover_dead().expect("a writable usage page");
        self.snapshot().charged(gpu)
    }

    /// The plugin's handle on the usage page.
    pub fn usage(&self) -> UsageFile {
        UsageFile::open(&self.dir).expect("a usage page")
    }
}

fn free(uuid: &str, memory_limit_bytes: u64, context_overhead_bytes: u64) -> GpuQuota {
    GpuQuota {
        uuid: uuid.to_owned(),
        memory_limit_bytes,
        context_overhead_bytes,
        cores_millis: 1000,
        policy: Policy::None,
    }
}

// Where a plugin of a test has its files: below the test's own directory, every one of them.

/// `[paths]` that are on every node, with what each is called below the test's directory.
const PATHS: [(&str, &str); 9] = [
    ("kubelet", "kubelet/device-plugins"),
    ("pod_resources", "kubelet/pod-resources/kubelet.sock"),
    ("plugins_registry", "kubelet/plugins_registry"),
    ("dra", "dra"),
    ("container_logs", "logs"),
    ("pages", "pages"),
    ("shim", "shim"),
    ("ledger", "ledger.redb"),
    ("admin", "admin.sock"),
];

/// `[cdi]`, `[pages]` and `[paths]` of a configuration: all below `dir`, but for what `given` names.
pub fn own_paths(dir: &Path, given: &[(&str, &Path)]) -> String {
    let line = |(key, path): (&str, &Path)| format!("{key} = {:?}\n", path.display().to_string());
    let is_given = |key: &str| given.iter().any(|(named, _)| *named == key);
    let own = PATHS.iter().filter(|(key, _)| !is_given(key));
    let paths: String = own
        .map(|(key, name)| line((key, &dir.join(name))))
        .chain(given.iter().copied().map(line))
        .collect();
    let cdi = line(("directory", &dir.join("cdi")));
    format!("[cdi]\n{cdi}[pages]\ntmpfs = \"off\"\n[paths]\n{paths}")
}

#[cfg(all(test, feature = "plugin"))]
mod tests {
    use super::*;
    use tessera_config::{Config, keys};

    #[test]
    fn each_path_that_a_plugin_writes_by_default_is_below_the_tests_directory() {
        let dir = tempfile::tempdir().unwrap();
        let text = own_paths(dir.path(), &[]);
        Config::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let set: toml::Table = text.parse().unwrap();
        let rows = keys::rows();
        let mut paths = 0;
        for row in rows.iter().filter(|row| row.default.as_deref().is_some_and(is_path)) {
            let (section, key) = row.key.split_once('.').unwrap();
            let path = set[section].get(key).and_then(toml::Value::as_str);
            let path = path.unwrap_or_else(|| panic!("{} is the machine's own", row.key));
            assert!(Path::new(path).starts_with(dir.path()), "{}: {path}", row.key);
            paths += 1;
        }
        assert_eq!(paths, PATHS.len() + 1);
    }

    fn is_path(default: &str) -> bool {
        default.starts_with("\"/")
    }
}
