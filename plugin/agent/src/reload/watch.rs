//! When to read the file again: SIGHUP, and news of the file.
//!
//! The directory is watched, not the file: a ConfigMap's update renames the link `..data` beside it, and
//! editors rename a new file over the old one. Where the file is a link, so are the directories that it
//! leads through. News only triggers a read: the text shows whether it is another.
//! It is also read periodically: a node may have run out of inotify watches.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{debug, error};

use super::{ReloadCause, Reloader};
use tessera_system::files;

/// How long the file must rest before it is read: it may be written in pieces.
pub const DEBOUNCE: Duration = Duration::from_millis(250);
/// However long that goes on, it is read after so many times that.
const PATIENCE: u32 = 8;
/// How often it is looked at without news, and where there are none to be had.
const SELDOM: Duration = Duration::from_secs(60);
const OFTEN: Duration = Duration::from_secs(10);
/// Links to follow.
const LINKS: usize = 16;

/// Reads the file again whenever that is due. Never ends.
pub async fn watch(reloader: Arc<Reloader>, debounce: Duration) {
    let Some(path) = reloader.file().map(|file| file.path().to_owned()) else {
        return std::future::pending().await;
    };
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => Some(hangup),
        Err(error) => {
            error!(%error, "SIGHUP is not heard");
            None
        }
    };
    let mut news = FileEvents::default();
    loop {
        if news.follow(&path).await {
            // What came before the watch was there has no news.
            read(&reloader, ReloadCause::Change).await;
        }
        let hung_up = async {
            match &mut hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let why = tokio::select! {
            _ = hung_up => ReloadCause::Signal,
            () = news.come() => {
                let late = tokio::time::Instant::now() + debounce * PATIENCE;
                while tokio::time::Instant::now() < late
                    && tokio::time::timeout(debounce, news.more()).await.is_ok()
                {}
                ReloadCause::Change
            }
        };
        read(&reloader, why).await;
    }
}

async fn read(reloader: &Arc<Reloader>, why: ReloadCause) {
    let reloader = Arc::clone(reloader);
    if let Err(error) = tokio::task::spawn_blocking(move || reloader.reload(&why)).await {
        error!(%error, "reading the configuration");
    }
}

/// Directories, each with its identity.
type Watched = BTreeMap<PathBuf, (u64, u64)>;

/// The directories that the path leads through now, and a watch on them; `None` where they are those that are
/// watched already.
fn look(file: &Path, watched: Option<&Watched>) -> Option<(Watched, io::Result<OwnedFd>)> {
    let with_identity = |dir: PathBuf| {
        let identity = identity(&dir)?;
        Some((dir, identity))
    };
    let wanted: Watched = directories(file).into_iter().filter_map(with_identity).collect();
    if watched == Some(&wanted) {
        return None;
    }
    let opened = open(wanted.keys());
    Some((wanted, opened))
}

/// News of the file's directories.
#[derive(Default)]
struct FileEvents {
    /// By directory, with its identity: a replaced one takes another watch.
    watched: Watched,
    inotify: Option<pipe::Receiver>,
}

impl FileEvents {
    /// Watches where the file is now. True if that is a new watch.
    async fn follow(&mut self, file: &Path) -> bool {
        let file = file.to_owned();
        let watched = self.inotify.is_some().then(|| self.watched.clone());
        // Links may lead to a file system that does not answer.
        let looked = tokio::task::spawn_blocking(move || {
            let own = file.clone();
            files::in_time(&file, move || look(&own, watched.as_ref()))
        });
        let Ok(Ok(Some((wanted, opened)))) = looked.await else { return false };
        let before = self.inotify.is_some();
        let opened = opened.and_then(pipe::Receiver::from_owned_fd_unchecked);
        self.inotify = match opened {
            Ok(inotify) => Some(inotify),
            Err(error) => {
                debug!(%error, "no inotify; looking at the configuration more often instead");
                None
            }
        };
        self.watched = wanted;
        before || self.inotify.is_some()
    }

    /// Waits until it is worth a look.
    async fn come(&mut self) {
        let seldom = if self.inotify.is_some() { SELDOM } else { OFTEN };
        let _ = tokio::time::timeout(seldom, self.more()).await;
    }

    /// Waits for news.
    async fn more(&mut self) {
        let Some(inotify) = &self.inotify else { return std::future::pending().await };
        let ready = inotify.readable().await;
        let mut events = [0; 4096];
        let end = loop {
            // What they say does not matter.
            match inotify.try_read(&mut events) {
                Ok(count) if count > 0 => {}
                end => break end,
            }
        };
        let drained = matches!(&end, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        if ready.is_err() || !drained {
            self.inotify = None;
        }
    }
}

/// The directory of the file, and those of what it leads to.
fn directories(file: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut at = file.to_owned();
    for _ in 0..LINKS {
        let dir = at.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = dir.to_owned();
        let Ok(target) = std::fs::read_link(&at) else {
            found.push(dir);
            break;
        };
        at = dir.join(target);
        found.push(dir);
    }
    found.extend(file.canonicalize().ok().and_then(|real| Some(real.parent()?.to_owned())));
    found.sort();
    found.dedup();
    found
}

fn identity(dir: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(dir).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// An inotify descriptor is read as a pipe is.
fn open<'d>(dirs: impl Iterator<Item = &'d PathBuf>) -> io::Result<OwnedFd> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    let interest = AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_CLOSE_WRITE
        | AddWatchFlags::IN_MOVED_TO
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_DELETE_SELF;
    let mut any = false;
    for dir in dirs {
        inotify.add_watch(dir, interest)?;
        any = true;
    }
    if !any {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(OwnedFd::from(inotify))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_directories_are_those_of_its_links_too() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("etc/..2026")).unwrap();
        std::fs::write(root.join("etc/..2026/config.toml"), "").unwrap();
        let link = |target: &str, at: &str| {
            std::os::unix::fs::symlink(target, root.join(at)).unwrap();
        };
        link("..2026", "etc/..data");
        link("..data/config.toml", "etc/config.toml");
        link("etc/config.toml", "link.toml");
        let found = directories(&root.join("link.toml"));
        let want = ["", "etc", "etc/..2026", "etc/..data"].map(|dir| root.join(dir));
        for dir in want {
            assert!(found.iter().any(|found| identity(found) == identity(&dir)), "{found:?}");
        }
        assert_eq!(directories(&root.join("absent/config.toml")), [root.join("absent")]);
    }
}
