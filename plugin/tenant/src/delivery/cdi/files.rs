//! The spec files of this node's allocations. Any file that is not ours by name and content is left
//! alone; each of ours is whole at any time, by rename.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{KIND, Spec};
use tessera_model::allocation_id::AllocationId;
use tessera_system::files;
use tessera_system::files::Dir;

/// Before the id in a file's name, as CDI proposes it for specs that come and go: vendor, class.
const PREFIX: &str = "tessera.dev-share_";
/// Runtimes read `.json` and `.yaml` and nothing else.
const SUFFIX: &str = ".json";

/// Why there is no spec. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Nothing can be written there.
    #[error(
        "cdi.directory {0} is read-only; mount it writable into the plugin, or name another that the \
         container runtime reads (cdi_spec_dirs in containerd's configuration)"
    )]
    ReadOnly(PathBuf),
    #[error("no room for a CDI spec in cdi.directory {0}: free some space there")]
    Full(PathBuf),
    /// The directory has no name any more.
    #[error(
        "cdi.directory {0} was removed from the node, and the plugin's pod still has what is no more; delete the \
         plugin's pod, so that its next one mounts what is there now"
    )]
    Removed(PathBuf),
    /// A directory with something in it has the file's name.
    #[error("{0} is a directory, and Tessera's CDI spec belongs there; remove it")]
    Occupied(PathBuf),
    #[error("cannot write the CDI spec {path}: {error}")]
    Io { path: PathBuf, error: io::Error },
}

/// What [`Specs::put`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It was there.
    Unchanged,
    /// It was not.
    Made,
    /// Something else was.
    Replaced,
}

/// The specs in one directory.
#[derive(Clone, Debug)]
pub struct Specs {
    directory: PathBuf,
}

impl Specs {
    /// Those in `directory`, which need not exist yet.
    pub fn new(directory: &Path) -> Self {
        Specs { directory: directory.to_owned() }
    }

    /// Where the spec of an allocation is.
    pub fn path(&self, id: &AllocationId) -> PathBuf {
        self.directory.join(format!("{PREFIX}{id}{SUFFIX}"))
    }

    /// Whether something that could be its spec is there.
    pub fn exists(&self, id: &AllocationId) -> bool {
        self.path(id).symlink_metadata().is_ok_and(|meta| meta.is_file())
    }

    /// Whether a spec of ours is there that a runtime can read.
    pub fn is_whole(&self, id: &AllocationId) -> bool {
        is_ours(&self.path(id))
    }

    /// Makes `spec` the content of the allocation's file.
    ///
    /// # Errors
    /// See [`FileError`]. What was there before is still there then.
    pub fn put(&self, id: &AllocationId, spec: &Spec) -> Result<Put, FileError> {
        let path = self.path(id);
        let content = spec.to_json();
        let is_there = path.symlink_metadata().is_ok();
        // Any runtime may read it, which need not be root. By a file in this directory: of a rename, containerd's
        // watch sees only where the file was. Not durable: after a power cut every file is written again before
        // kubelet knows this plugin.
        match files::put(&path, &content, 0o644, false) {
            Ok(false) => Ok(Put::Unchanged),
            Ok(true) if is_there => Ok(Put::Replaced),
            Ok(true) => Ok(Put::Made),
            Err(error) => Err(match error.kind() {
                ErrorKind::DirectoryNotEmpty => FileError::Occupied(path),
                ErrorKind::ReadOnlyFilesystem => FileError::ReadOnly(self.directory.clone()),
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                    FileError::Full(self.directory.clone())
                }
                ErrorKind::NotFound if is_removed(&self.directory) => {
                    FileError::Removed(self.directory.clone())
                }
                _ => FileError::Io { path, error },
            }),
        }
    }

    /// Removes the spec of an allocation, if there is one.
    ///
    /// # Errors
    /// The file system's.
    pub fn remove(&self, id: &AllocationId) -> io::Result<()> {
        match Dir::holding(&self.path(id)).and_then(|(dir, name)| dir.remove(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes specs of ours that `keep` does not want, and what a killed plugin left half written.
    /// Returns the ids of those removed.
    pub fn sweep(&self, keep: impl Fn(&AllocationId) -> bool) -> Vec<AllocationId> {
        let mut removed = Vec::new();
        let Ok(dir) = Dir::open_trusted(&self.directory) else { return removed };
        for name in dir.names().unwrap_or_default() {
            let path = self.directory.join(&name);
            if is_temporary(&name) {
                let _ = dir.remove(&name);
            } else if let Some(id) = id_in(&name)
                && !keep(&id)
                && is_ours(&path)
                && dir.remove(&name).is_ok()
            {
                removed.push(id);
            }
        }
        removed
    }
}

/// Whether a directory is there, mounted or open, that has no name any more.
fn is_removed(directory: &Path) -> bool {
    directory.metadata().is_ok_and(|meta| meta.nlink() == 0)
}

fn id_in(name: &OsString) -> Option<AllocationId> {
    AllocationId::parse(name.to_str()?.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?)
}

/// Whether it is what a killed plugin left half written: see [`Dir::replace`].
fn is_temporary(name: &OsString) -> bool {
    let dotted = format!(".{PREFIX}");
    name.to_str().is_some_and(|name| name.starts_with(&dotted) && name.ends_with(".new"))
}

/// Whether a file is a spec of our kind.
fn is_ours(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_file())
        && files::read(path, files::SMALL)
            .ok()
            .and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok())
            .is_some_and(|spec| spec["kind"] == KIND)
}

#[cfg(test)]
mod tests;
