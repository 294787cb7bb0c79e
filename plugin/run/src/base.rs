//! The directory for a user's runs: one that no other user can replace.

use std::path::{Path, PathBuf};

use nix::sys::stat::FileStat;

use tessera_system::files::Dir;

/// What the kernel shows for an owner that this user namespace has no name for (`overflowuid`, proc(5)). Nobody
/// here is one.
const UNMAPPED: u32 = 65534;

/// `$XDG_RUNTIME_DIR`, if it is this user's own; else the temporary directory.
///
/// # Errors
/// Others can change what is in the temporary directory.
pub(super) fn find() -> anyhow::Result<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    // With sudo it may be the caller's.
    if let Some(runtime) = runtime.filter(|dir| is_own(dir)) {
        return Ok(runtime);
    }
    let temporary = std::env::temp_dir();
    anyhow::ensure!(
        is_shared_safely(&temporary),
        "others may replace what is in {}: set XDG_RUNTIME_DIR to a directory of your own with mode \
         0700, in which and above which nobody else may write",
        temporary.display()
    );
    Ok(temporary)
}

/// Whether only this user can change what is in `dir`.
fn is_own(dir: &Path) -> bool {
    let own = |stat: FileStat| {
        stat.st_uid == nix::unistd::geteuid().as_raw() && stat.st_mode & 0o022 == 0
    };
    dir.is_absolute()
        && Dir::open(dir).and_then(|dir| dir.own_stat()).is_ok_and(own)
        && dir.canonicalize().is_ok_and(|real| real.ancestors().all(is_kept))
}

/// Whether others can change only what is theirs in `dir`.
fn is_shared_safely(dir: &Path) -> bool {
    dir.canonicalize().is_ok_and(|real| real.is_dir() && real.ancestors().all(is_kept))
}

/// Whether what others own in this directory is all that they can rename or remove: it is root's or the
/// user's, and either nobody else may write or it is sticky.
fn is_kept(dir: &Path) -> bool {
    let owners = [0, nix::unistd::geteuid().as_raw(), UNMAPPED];
    let kept = |stat: FileStat| {
        owners.contains(&stat.st_uid) && (stat.st_mode & 0o022 == 0 || stat.st_mode & 0o1000 != 0)
    };
    Dir::open(dir).and_then(|dir| dir.own_stat()).is_ok_and(kept)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn set_mode(dir: &Path, mode: u32) {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_that_others_can_change_is_not_taken() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("dir");
        fs::create_dir(&dir).unwrap();
        for (mode, own, shared) in
            [(0o700, true, true), (0o755, true, true), (0o777, false, false), (0o1777, false, true)]
        {
            set_mode(&dir, mode);
            assert_eq!((is_own(&dir), is_shared_safely(&dir)), (own, shared), "{mode:o}");
        }
        set_mode(&dir, 0o700);
        // A user that may write above may put another in its place.
        set_mode(base.path(), 0o777);
        assert!(!is_own(&dir) && !is_shared_safely(&dir));
        set_mode(base.path(), 0o700);
        let link = base.path().join("link");
        symlink("dir", &link).unwrap();
        assert!(!is_own(&link), "a link is nobody's");
        assert!(!is_own(Path::new("relative")) && !is_own(&base.path().join("absent")));
        if chown(&dir, Some(12345), None).is_ok() {
            assert!(!is_own(&dir) && !is_shared_safely(&dir), "somebody else's");
        }
    }
}
