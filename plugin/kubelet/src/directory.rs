//! Kubelet's device plugin directory: names of the plugin's sockets there, and which kubelet listens.

use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tessera_model::short_name;
use tessera_system::files;

/// Characters of the resource's name in a socket's name, so that this fits into kubelet's directory.
const MAX_SLUG: usize = 32;

/// Makes socket names that nothing else makes: `tessera-<resource>-<random>.sock`.
#[derive(Debug)]
pub(super) struct Names {
    prefix: String,
}

impl Names {
    pub(super) fn new(resource_name: &str) -> Self {
        let slug: String = resource_name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' })
            .collect();
        // Kubernetes allows names that would not fit into a socket's path.
        let slug = match slug.len() > MAX_SLUG {
            true => short_name::with_hash(&slug, MAX_SLUG, resource_name),
            false => slug,
        };
        Self { prefix: format!("tessera-{slug}-") }
    }

    /// Another one each time. Resources may differ in a character that the name does not show.
    pub(super) fn next(&self) -> String {
        format!("{}{:016x}.sock", self.prefix, RandomState::new().hash_one(()))
    }

    /// Whether a plugin for the same resource may have made this name.
    pub(super) fn is_ours(&self, name: &str) -> bool {
        let random = name.strip_prefix(&self.prefix).and_then(|rest| rest.strip_suffix(".sock"));
        random.is_some_and(|random| {
            random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    }
}

/// What distinguishes one file from another that has taken its name; where the file system knows no birth, by its last
/// change, too. The birth, unlike the change, survives chmod and relabelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity(files::Identity, Option<(i64, i64)>);

impl Identity {
    pub(super) fn of(path: &Path) -> Option<Self> {
        let meta = std::fs::symlink_metadata(path).ok()?;
        let changed = meta.created().is_err().then(|| (meta.ctime(), meta.ctime_nsec()));
        Some(Identity(files::Identity::of(&meta), changed))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::sockets::MAX_PATH;

    #[test]
    fn names_are_unique_and_recognised_only_for_the_same_resource() {
        let names = Names::new("tessera.dev/gpu");
        let (first, second) = (names.next(), names.next());
        assert_ne!(first, second);
        assert!(first.starts_with("tessera-tessera.dev-gpu-"));
        assert!(names.is_ours(&first));
        // A resource whose name begins like ours is another one.
        assert!(!names.is_ours(&Names::new("tessera.dev/gpu-large").next()));
        assert!(!names.is_ours("kubelet.sock"));
        assert!(!names.is_ours("tessera-tessera.dev-gpu-notes.sock"));
    }

    #[test]
    fn names_of_any_resource_fit_into_kubelets_directory_and_differ() {
        let long =
            |leaf: &str| format!("shares.gpu.platform.example.com/{}-{leaf}", "x".repeat(60));
        let (a, b) = (Names::new(&long("a")), Names::new(&long("b")));
        let (name, other) = (a.next(), b.next());
        assert!("/var/lib/kubelet/device-plugins/".len() + name.len() <= MAX_PATH, "{name}");
        assert!(a.is_ours(&name) && !a.is_ours(&other), "{name} {other}");
        // Names that look alike get sockets of their own.
        assert_ne!(Names::new("a.b/c_d").next(), Names::new("a.b/c-d").next());
    }

    #[test]
    fn a_file_stays_the_same_when_its_mode_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet.sock");
        std::fs::write(&path, "").unwrap();
        if std::fs::metadata(&path).unwrap().created().is_err() {
            return;
        }
        let before = Identity::of(&path);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(Identity::of(&path), before);
    }

    fn touch(path: &Path) {
        let _ = std::fs::remove_file(path);
        std::fs::write(path, "").unwrap();
    }

    #[test]
    fn another_file_of_the_name_is_another_even_if_the_inode_number_is_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet.sock");
        assert_eq!(Identity::of(&path), None);
        touch(&path);
        let before = Identity::of(&path);
        // Kernel timestamps are as coarse as a tick: a few files later there is a new one.
        let mut again = std::iter::repeat_with(|| {
            touch(&path);
            Identity::of(&path)
        });
        assert!(again.by_ref().take(1_000_000).any(|now| now != before));
    }
}
