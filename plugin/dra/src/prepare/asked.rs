//! Claims that kubelet asked for and that hold nothing: refused ones, and those of monitors. Kubelet wants each of them
//! unprepared before its pod can end, so the driver may not leave before that; a file each says so to the next start.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tessera_cluster::resource::ClaimRef;
use tessera_system::files::{self, Dir};
use tessera_system::locks::lock;
use tokio::sync::watch;
use tracing::warn;

/// Most of them; kubelet has no more pods on a node.
const MOST: usize = 4096;
/// Longest UID; Kubernetes' have 36 bytes.
const LONGEST_UID: usize = 64;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Asked {
    dir: PathBuf,
    /// By UID.
    claims: Mutex<BTreeMap<String, ClaimRef>>,
    /// How many there are.
    count: watch::Sender<usize>,
}

impl Asked {
    /// Those that the directory names; it need not be there.
    pub(super) fn open(dir: &Path) -> Self {
        let claims = read(dir);
        let count = watch::Sender::new(claims.len());
        Asked { dir: dir.to_owned(), claims: Mutex::new(claims), count }
    }

    /// In the order of their UIDs.
    pub(super) fn all(&self) -> Vec<ClaimRef> {
        lock(&self.claims).values().cloned().collect()
    }

    /// How many there are, now and after each change.
    pub(super) fn count(&self) -> watch::Receiver<usize> {
        self.count.subscribe()
    }

    /// Kubelet has asked for it, and it holds nothing.
    pub(super) fn note(&self, claim: &ClaimRef) {
        let mut claims = lock(&self.claims);
        if claims.contains_key(&claim.uid) || claims.len() >= MOST {
            return;
        }
        // What is no file's name is remembered until the next start.
        if is_name(&claim.uid) {
            let text = format!("{}/{}\n", claim.namespace, claim.name);
            let written = Dir::make(&self.dir)
                .and_then(|dir| dir.replace(claim.uid.as_ref(), text.as_bytes(), 0o600, false));
            if let Err(error) = written {
                warn!(dir = %self.dir.display(), %error, "a claim that was asked for is not noted");
            }
        }
        claims.insert(claim.uid.clone(), claim.clone());
        self.count.send_replace(claims.len());
    }

    /// It holds something by now, is unprepared, or is no more.
    pub(super) fn forget(&self, uid: &str) {
        let mut claims = lock(&self.claims);
        if claims.remove(uid).is_none() {
            return;
        }
        if is_name(uid)
            && let Err(error) = Dir::open_trusted(&self.dir).and_then(|dir| dir.remove(uid))
        {
            warn!(dir = %self.dir.display(), %error, "a claim that has ended stays noted");
        }
        self.count.send_replace(claims.len());
    }
}

/// What the directory names; nothing where it cannot be read.
fn read(path: &Path) -> BTreeMap<String, ClaimRef> {
    let Ok(dir) = Dir::open_trusted(path) else { return BTreeMap::new() };
    let names = dir.names().unwrap_or_default();
    let uids = names.iter().filter_map(|name| name.to_str()).filter(|name| is_name(name));
    let claim = |uid: &str| {
        let text = files::read(&path.join(uid), files::SMALL).ok()?;
        let text = String::from_utf8(text).ok()?;
        let (namespace, name) = text.trim_end().split_once('/')?;
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Some((uid.to_owned(), ClaimRef { namespace, name, uid: uid.to_owned() }))
    };
    uids.take(MOST).filter_map(claim).collect()
}

fn is_name(uid: &str) -> bool {
    (1..=LONGEST_UID).contains(&uid.len())
        && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(uid: &str) -> ClaimRef {
        ClaimRef { namespace: "team".into(), name: "chat".into(), uid: uid.into() }
    }

    #[test]
    fn what_kubelet_asked_for_is_known_after_a_restart_until_it_is_unprepared() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("asked");
        let asked = Asked::open(&path);
        let mut count = asked.count();
        asked.note(&claim("u-1"));
        asked.note(&claim("u-1"));
        // No path leads out of the directory.
        asked.note(&claim("../u-2"));
        assert_eq!(*count.borrow_and_update(), 2);
        assert_eq!(Asked::open(&path).all(), [claim("u-1")]);
        asked.forget("u-1");
        asked.forget("../u-2");
        asked.forget("never");
        assert_eq!(*count.borrow_and_update(), 0);
        assert_eq!(Asked::open(&path).all(), []);
    }

    #[test]
    fn what_is_no_note_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("u-1"), "no claim").unwrap();
        std::fs::write(dir.path().join(".u-2"), "team/chat").unwrap();
        std::fs::create_dir(dir.path().join("u-3")).unwrap();
        assert_eq!(Asked::open(dir.path()).all(), []);
        // Where nothing can be kept, it is known until the end.
        let nowhere = Asked::open(&dir.path().join("u-1"));
        nowhere.note(&claim("u-4"));
        assert_eq!(nowhere.all(), [claim("u-4")]);
    }
}
