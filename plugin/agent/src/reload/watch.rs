//! When to read the file again: SIGHUP, and news of the file.
//!
//! The directory is watched, not the file: a ConfigMap's update renames the link `..data` beside it, and
//! editors rename a new file over the old one. Where the file is a link, so are the directories that it
//! leads through. News only triggers a read: the text shows whether it is another.
//! It is also read periodically: a node may have run out of inotify watches.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tracing::error;

use super::{ReloadCause, Reloader};
use tessera_kubelet::news::{self, News};

/// How long the file must rest before it is read: it may be written in pieces.
pub const DEBOUNCE: Duration = Duration::from_millis(250);
/// However long that goes on, it is read after so many times that.
const PATIENCE: u32 = 8;
/// How often it is looked at without news, and where there are none to be had.
const SELDOM: Duration = Duration::from_secs(60);
const OFTEN: Duration = Duration::from_secs(10);
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
    let mut news = News::default();
    loop {
        let file = path.clone();
        let wanted =
            move || directories(&file).into_iter().map(|dir| (dir, news::WRITES)).collect();
        if news.follow(&path, wanted).await {
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
            () = come(&mut news) => {
                news.settle(debounce, PATIENCE).await;
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

/// Waits until it is worth a look.
async fn come(news: &mut News) {
    let seldom = if news.is_heard() { SELDOM } else { OFTEN };
    let _ = tokio::time::timeout(seldom, news.more()).await;
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

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_kubelet::news::identity;

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
