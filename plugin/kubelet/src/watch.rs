//! Notices when kubelet restarts or wipes sockets: inotify on the device plugin directory, and a
//! periodic check of the files in case inotify misses something (overflow, no watch left, a file
//! system without events).

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::net::unix::pipe;
use tokio::time::{Interval, MissedTickBehavior};

use super::registration::Event;
use super::socket::Identity;

/// What is in the directory, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Snapshot {
    /// `kubelet.sock`.
    pub(super) kubelet: Option<Identity>,
    /// Our own socket.
    pub(super) own: Option<Identity>,
}

impl Snapshot {
    pub(super) fn take(kubelet: &Path, own: &Path) -> Self {
        Self { kubelet: Identity::of(kubelet), own: Identity::of(own) }
    }

    /// What has happened between `self` and `later`.
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
    /// With the identity of the directory that it watches.
    inotify: Option<(pipe::Receiver, Option<(u64, u64)>)>,
    poll: Interval,
}

impl Watcher {
    /// Must be called within a tokio runtime.
    pub(super) fn new(dir: &Path, poll_interval: Duration) -> Self {
        let inotify = match watch(dir) {
            Ok(watch) => Some((watch, directory(dir))),
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "no inotify; looking more often instead");
                None
            }
        };
        let interval = if inotify.is_some() { poll_interval } else { poll_interval / 10 };
        let mut poll = tokio::time::interval(interval.max(Duration::from_millis(1)));
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        poll.reset();
        Self { dir: dir.to_path_buf(), inotify, poll }
    }

    /// Waits until something may have changed. Nothing is lost if the future is dropped.
    pub(super) async fn changed(&mut self) {
        let Some((watch, watched)) = &self.inotify else {
            self.poll.tick().await;
            return;
        };
        tokio::select! {
            ready = watch.readable() => {
                let mut events = [0; 4096];
                let end = loop {
                    // The events' contents do not matter: the snapshot tells.
                    match watch.try_read(&mut events) {
                        Ok(count) if count > 0 => {}
                        end => break end,
                    }
                };
                let drained = matches!(&end, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
                if ready.is_err() || !drained {
                    tracing::warn!(?end, "inotify failed; looking at the sockets now and then");
                    self.inotify = None;
                }
            }
            _ = self.poll.tick() => {
                // A directory that was replaced has lost its watch.
                if directory(&self.dir) != *watched && let Ok(watch) = self::watch(&self.dir) {
                    self.inotify = Some((watch, directory(&self.dir)));
                }
            }
        }
    }
}

fn directory(dir: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(dir).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// An inotify descriptor is read as a pipe is; tokio's pipe type is the one that takes any readable
/// descriptor into ownership without unsafe code.
fn watch(dir: &Path) -> io::Result<pipe::Receiver> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    let interest = AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVED_TO
        | AddWatchFlags::IN_MOVED_FROM;
    inotify.add_watch(dir, interest)?;
    pipe::Receiver::from_owned_fd_unchecked(OwnedFd::from(inotify))
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
        touch(&dir.path().join("kubelet.sock"));
        tokio::time::timeout(Duration::from_secs(10), watcher.changed()).await.unwrap();
    }

    #[tokio::test]
    async fn without_inotify_the_files_are_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("later");
        let mut watcher = Watcher::new(&missing, Duration::from_millis(50));
        assert!(watcher.inotify.is_none());
        tokio::time::timeout(Duration::from_secs(10), watcher.changed()).await.unwrap();
    }
}
