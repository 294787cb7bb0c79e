//! Kubelet's device plugin directory: names of the plugin's sockets there, and news of kubelet's restarts and of sockets
//! that are wiped, by inotify and by a periodic check of the files in case this misses something (overflow, no watch left,
//! a file system without events).

use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tessera_model::short_name;
use tessera_system::files;
use tokio::time::Instant;

use super::news::{self, News};

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

/// Tells when it is worth a look at the sockets.
#[derive(Debug)]
pub(super) struct Watcher {
    dir: PathBuf,
    news: News,
    looked: Instant,
    poll_interval: Duration,
}

impl Watcher {
    pub(super) fn new(dir: &Path, poll_interval: Duration) -> Self {
        let (news, looked) = (News::default(), Instant::now());
        Self { dir: dir.to_path_buf(), news, looked, poll_interval }
    }

    /// Waits until something may have changed. Nothing is lost if the future is dropped.
    pub(super) async fn changed(&mut self) {
        let dir = self.dir.clone();
        // A directory that was replaced has lost its watch; what came before a new one has no news.
        let is_new = self.news.follow(&self.dir, move || [(dir, news::NAMES)].into()).await;
        if !is_new {
            let pause = self.poll_interval / if self.news.is_heard() { 1 } else { 10 };
            let _ = tokio::time::timeout_at(self.looked + pause, self.news.more()).await;
        }
        self.looked = Instant::now();
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

    #[tokio::test]
    async fn a_new_file_is_noticed_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut watcher = Watcher::new(dir.path(), Duration::from_secs(3600));
        watcher.changed().await;
        touch(&dir.path().join("kubelet.sock"));
        tokio::time::timeout(Duration::from_secs(10), watcher.changed()).await.unwrap();
    }

    #[tokio::test]
    async fn without_inotify_the_files_are_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("later");
        let mut watcher = Watcher::new(&missing, Duration::from_millis(50));
        tokio::time::timeout(Duration::from_secs(10), watcher.changed()).await.unwrap();
        assert!(!watcher.news.is_heard());
    }
}
