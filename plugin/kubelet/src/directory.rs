//! Notices when kubelet restarts or wipes sockets: by news of the device plugin directory, and by a periodic check of the
//! files in case these miss something (overflow, no watch left, a file system without events).

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use super::news::{self, News};
use super::registration::Event;
use super::socket::Identity;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) kubelet: Option<Identity>,
    pub(super) own: Option<Identity>,
}

impl Snapshot {
    pub(super) fn take(kubelet: &Path, own: &Path) -> Self {
        Self { kubelet: Identity::of(kubelet), own: Identity::of(own) }
    }

    pub(super) fn events(&self, later: &Self) -> Vec<Event> {
        let mut events = vec![];
        match (self.kubelet, later.kubelet) {
            (before, Some(now)) if before != Some(now) => events.push(Event::KubeletAppeared),
            (Some(_), None) => events.push(Event::KubeletGone),
            _ => {}
        }
        // A new kubelet brings a new socket of ours anyway.
        if self.own.is_some() && later.own != self.own && events != [Event::KubeletAppeared] {
            events.push(Event::SocketLost);
        }
        events
    }
}

/// Tells when it is worth taking a new [`Snapshot`].
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
    use super::*;

    fn snapshot(dir: &Path) -> Snapshot {
        Snapshot::take(&dir.join("kubelet.sock"), &dir.join("own.sock"))
    }

    fn touch(path: &Path) {
        let _ = std::fs::remove_file(path);
        std::fs::write(path, "").unwrap();
    }

    #[test]
    fn snapshots_tell_what_happened_even_if_the_inode_number_is_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let (kubelet, own) = (dir.path().join("kubelet.sock"), dir.path().join("own.sock"));
        touch(&own);
        let nobody = snapshot(dir.path());
        assert_eq!(nobody.events(&nobody), []);
        touch(&kubelet);
        let started = snapshot(dir.path());
        assert_eq!(nobody.events(&started), [Event::KubeletAppeared]);
        // Kernel timestamps are as coarse as a tick: a few files later there is a new one.
        let mut restarted = started;
        for _ in 0..1_000_000 {
            touch(&kubelet);
            restarted = snapshot(dir.path());
            if restarted != started {
                break;
            }
        }
        assert_eq!(started.events(&restarted), [Event::KubeletAppeared]);
        std::fs::remove_file(&own).unwrap();
        let wiped = snapshot(dir.path());
        assert_eq!(restarted.events(&wiped), [Event::SocketLost]);
        std::fs::remove_file(&kubelet).unwrap();
        assert_eq!(wiped.events(&snapshot(dir.path())), [Event::KubeletGone]);
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
