//! News of directories, by inotify. What an event says does not matter: it is worth a look.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tessera_system::files;
use tokio::net::unix::pipe;
use tokio::time::Instant;
use tracing::debug;

/// Something comes, goes, or is there under another name.
pub const NAMES: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_DELETE_SELF);
/// As [`NAMES`], or a file was written.
pub const WRITES: AddWatchFlags = NAMES.union(AddWatchFlags::IN_CLOSE_WRITE);
/// As [`WRITES`], or a file is another size or has other rights.
pub const ALL: AddWatchFlags =
    WRITES.union(AddWatchFlags::IN_MODIFY).union(AddWatchFlags::IN_ATTRIB);

/// What is to be heard of each directory.
pub type Wanted = BTreeMap<PathBuf, AddWatchFlags>;

/// By directory, with its identity: a replaced one takes another watch.
type Watched = BTreeMap<PathBuf, ((u64, u64), AddWatchFlags)>;

#[derive(Debug, Default)]
pub struct News {
    watched: Watched,
    inotify: Option<pipe::Receiver>,
}

impl News {
    /// Watches what `wanted` names now, and what of it is there. True if that is a new watch: what came before it has no
    /// news. `path` may lead to a file system that does not answer.
    pub async fn follow(
        &mut self,
        path: &Path,
        wanted: impl FnOnce() -> Wanted + Send + 'static,
    ) -> bool {
        let watched = self.inotify.is_some().then(|| self.watched.clone());
        let path = path.to_owned();
        let looked = tokio::task::spawn_blocking(move || {
            files::in_time(&path, move || look(wanted(), watched.as_ref()))
        });
        let Ok(Ok(Some((wanted, opened)))) = looked.await else { return false };
        let before = self.inotify.is_some();
        let opened = opened.and_then(pipe::Receiver::from_owned_fd_unchecked);
        self.inotify = match opened {
            Ok(inotify) => Some(inotify),
            Err(error) => {
                debug!(%error, "no inotify; looking more often instead");
                None
            }
        };
        self.watched = wanted;
        before || self.inotify.is_some()
    }

    /// Whether there are any to be had.
    pub fn is_heard(&self) -> bool {
        self.inotify.is_some()
    }

    /// Waits until there are none for `rest`, but no longer than `patience` times that.
    pub async fn settle(&mut self, rest: Duration, patience: u32) {
        let late = Instant::now() + rest * patience;
        while Instant::now() < late && tokio::time::timeout(rest, self.more()).await.is_ok() {}
    }

    pub async fn more(&mut self) {
        let Some(inotify) = &self.inotify else { return std::future::pending().await };
        let ready = inotify.readable().await;
        let mut events = [0; 4096];
        let end = loop {
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

/// The directories that are there, and a watch on them; `None` where they are those that are watched already.
fn look(wanted: Wanted, watched: Option<&Watched>) -> Option<(Watched, io::Result<OwnedFd>)> {
    let with_identity = |(dir, interest): (PathBuf, AddWatchFlags)| {
        let identity = identity(&dir)?;
        Some((dir, (identity, interest)))
    };
    let wanted: Watched = wanted.into_iter().filter_map(with_identity).collect();
    if watched == Some(&wanted) {
        return None;
    }
    let opened = open(&wanted);
    Some((wanted, opened))
}

pub fn identity(dir: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(dir).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// An inotify descriptor is read as a pipe is.
fn open(dirs: &Watched) -> io::Result<OwnedFd> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    let mut any = false;
    for (dir, (_, interest)) in dirs {
        match inotify.add_watch(dir, *interest) {
            Ok(_) => any = true,
            // It went meanwhile, which the next look sees.
            Err(nix::errno::Errno::ENOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if !any {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(OwnedFd::from(inotify))
}
