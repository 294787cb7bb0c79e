//! The driver's libraries below the root of its installation: `/` of a host, or the root file system
//! of a container that installed the driver (`/run/nvidia/driver` of NVIDIA's GPU operator).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use super::DriverError;

/// Where distributions put libraries, those of the driver first. As NVIDIA's container toolkit looks
/// for them, and the root itself, for a flat directory.
const DIRECTORIES: [&str; 13] = [
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
    "lib",
    "usr/local/lib",
    "usr/local/lib64",
    "",
];

/// The libraries of NVIDIA's driver capabilities `compute` and `utility`, as libnvidia-container and NVIDIA's
/// container toolkit list them, without version. All but the first may be missing. Not OpenCL's: it is a second
/// driver, which opens the devices itself, past every limit.
pub const LIBRARIES: [&str; 15] = [
    "libcuda.so",
    "libnvidia-ml.so",
    "libnvidia-ptxjitcompiler.so",
    "libnvidia-nvvm.so",
    "libnvidia-nvvm70.so",
    "libnvidia-tileiras.so",
    "libnvidia-sandboxutils.so",
    "libnvidia-gpucomp.so",
    "libnvidia-fatbinaryloader.so",
    "libnvidia-compiler.so",
    "libnvidia-allocator.so",
    "libnvidia-pkcs11.so",
    "libnvidia-pkcs11-openssl3.so",
    "libnvidia-cfg.so",
    "libcudadebugger.so",
];

/// More links than this in one path are a loop, as for the kernel.
const MOST_LINKS: usize = 40;

/// Every name that a program may load one of them by (`libcuda.so.1`, and with the full version), and
/// the file on the host that it means.
///
/// Not the directory as a whole: a host's other libraries would come before the container's own.
///
/// # Errors
/// There is no libcuda.
pub(super) fn libraries(root: &Path) -> Result<BTreeMap<String, PathBuf>, DriverError> {
    let mut found: BTreeMap<&str, BTreeMap<String, PathBuf>> = BTreeMap::new();
    for directory in DIRECTORIES {
        for (library, files) in versions(root, directory) {
            found.entry(library).or_insert(files);
        }
    }
    let found: BTreeMap<String, PathBuf> = found.into_values().flatten().collect();
    if found.contains_key("libcuda.so.1") {
        Ok(found)
    } else {
        Err(DriverError::NoLibraries { root: root.to_owned() })
    }
}

/// Of each library the names in `directory` that are it and a version, with their files. Reads the
/// directory once: it may have thousands of others.
fn versions(root: &Path, directory: &str) -> BTreeMap<&'static str, BTreeMap<String, PathBuf>> {
    let mut found: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    let Some(directory) = resolve(root, Path::new(directory)) else { return found };
    let entries = std::fs::read_dir(root.join(&directory)).into_iter().flatten().flatten();
    for name in entries.filter_map(|entry| entry.file_name().into_string().ok()) {
        let Some(library) = library(&name) else { continue };
        let Some(file) = resolve(root, &directory.join(&name)) else { continue };
        let file = root.join(file);
        if file.is_file() {
            found.entry(library).or_default().insert(name, file);
        }
    }
    found
}

/// Which library a file name is a version of.
fn library(name: &str) -> Option<&'static str> {
    LIBRARIES.into_iter().find(|library| {
        let version = name.strip_prefix(library).and_then(|rest| rest.strip_prefix('.'));
        version.is_some_and(|text| text.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
    })
}

/// Follows the links of `path`, which is relative to `root`, as a process whose root that is would:
/// an absolute link begins at `root`, and nothing leads out of it. The result is relative to `root`.
fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut links = 0;
    let mut done = PathBuf::new();
    let mut rest: Vec<OsString> = parts(path);
    while let Some(next) = rest.pop() {
        if next == ".." {
            done.pop();
            continue;
        }
        let step = done.join(&next);
        match std::fs::read_link(root.join(&step)) {
            Ok(target) => {
                links += 1;
                if links > MOST_LINKS {
                    return None;
                }
                if target.is_absolute() {
                    done = PathBuf::new();
                }
                rest.extend(parts(&target));
            }
            Err(_) => done = step,
        }
    }
    Some(done)
}

/// The names in a path, last first.
fn parts(path: &Path) -> Vec<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        })
        .rev()
        .collect()
}
