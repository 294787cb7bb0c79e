//! Where a plugin of a test has its files: below the test's own directory, every one of them.

use std::path::Path;

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
