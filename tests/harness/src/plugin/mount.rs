//! File systems that a test mounts.

use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Mounted until it is dropped.
#[derive(Debug)]
pub struct Mounted(PathBuf);

impl Mounted {
    /// A tmpfs at `dir`, which is made; `None`, with a word about it, where this process may not.
    pub fn tmpfs(dir: &Path, flags: MsFlags, options: &str) -> Option<Self> {
        std::fs::create_dir_all(dir).unwrap();
        if let Err(error) = mount(Some("test"), dir, Some("tmpfs"), flags, Some(options)) {
            eprintln!("not run: no file system can be mounted here ({error})");
            return None;
        }
        Some(Mounted(dir.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}
