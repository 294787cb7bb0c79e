//! The file system that holds the pages: a tmpfs of its own with a limit, because a tenant can grow
//! its usage file, and must not be able to fill `/run` with it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

use crate::config::TmpfsPolicy;
use crate::config::quantity::format_bytes;

/// What `paths.pages` turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// A tmpfs of its own.
    Dedicated {
        /// Its size.
        bytes: u64,
        /// Mounted just now.
        mounted: bool,
    },
    /// Something else, and that is accepted; the sentence says what it means.
    Shared {
        /// For people; empty where the configuration asked for it.
        warning: String,
    },
}

/// No place for pages.
#[derive(Debug, thiserror::Error)]
pub enum TmpfsError {
    /// The directory cannot be made.
    #[error("paths.pages {path}: {error}")]
    Directory {
        /// The directory.
        path: String,
        /// What the system said.
        error: std::io::Error,
    },
    /// `pages.tmpfs = "require"` and it can't be.
    #[error(
        "paths.pages {path} is not a tmpfs of its own and none can be mounted there ({error}); run \
         `tessera prepare-host` as root on the host, or set pages.tmpfs = \"prefer\""
    )]
    Required {
        /// The directory.
        path: String,
        /// What the system said.
        error: String,
    },
}

/// Makes `dir` a tmpfs of its own of `bytes`, as far as `policy` asks and the kernel allows.
///
/// # Errors
/// See [`TmpfsError`].
pub fn ensure(dir: &Path, policy: TmpfsPolicy, bytes: u64) -> Result<Found, TmpfsError> {
    let path = || dir.display().to_string();
    std::fs::create_dir_all(dir).map_err(|error| TmpfsError::Directory { path: path(), error })?;
    if policy == TmpfsPolicy::Off {
        return Ok(Found::Shared { warning: String::new() });
    }
    if let Some(bytes) = dedicated(dir) {
        return Ok(Found::Dedicated { bytes, mounted: false });
    }
    let options = format!("size={bytes},mode=0755");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let error = match mount(Some("tessera"), dir, Some("tmpfs"), flags, Some(options.as_str())) {
        Ok(()) => match dedicated(dir) {
            Some(bytes) => return Ok(Found::Dedicated { bytes, mounted: true }),
            None => "the mount did not appear".to_owned(),
        },
        Err(error) => error.desc().to_owned(),
    };
    if policy == TmpfsPolicy::Require {
        return Err(TmpfsError::Required { path: path(), error });
    }
    Ok(Found::Shared {
        warning: format!(
            "paths.pages {} is not a tmpfs of its own and none can be mounted there ({error}): a \
             container that grows its usage file can fill the file system; run `tessera \
             prepare-host` on the host",
            path()
        ),
    })
}

/// The size of the tmpfs mounted right at `dir`; `None` for anything else.
fn dedicated(dir: &Path) -> Option<u64> {
    let device = |path: &Path| std::fs::metadata(path).ok().map(|meta| meta.dev());
    let stat = statfs(dir).ok().filter(|stat| stat.filesystem_type() == TMPFS_MAGIC)?;
    if device(dir)? == device(dir.parent()?)? {
        return None;
    }
    let block = u64::try_from(stat.block_size()).ok()?;
    Some(stat.blocks().saturating_mul(block))
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Found::Dedicated { bytes, mounted } => {
                let verb = if *mounted { "mounted" } else { "found" };
                write!(f, "{verb} a tmpfs of {}", format_bytes(*bytes))
            }
            Found::Shared { .. } => f.write_str("not a tmpfs of its own"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_file_system_is_not_dedicated() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(dedicated(dir.path()), None);
        let off = ensure(&dir.path().join("a/b"), TmpfsPolicy::Off, 1 << 20).unwrap();
        assert_eq!(off, Found::Shared { warning: String::new() });
        assert!(dir.path().join("a/b").is_dir());
    }

    #[test]
    fn where_pages_may_not_be_made_the_error_names_the_key() {
        let error = ensure(Path::new("/dev/null/pages"), TmpfsPolicy::Prefer, 1 << 20).unwrap_err();
        assert!(error.to_string().starts_with("paths.pages /dev/null/pages: "), "{error}");
    }
}
