//! The image: buildah builds `deploy/Dockerfile` from a stand-in of its base image (`tests/deploy/image.py`).

use std::path::PathBuf;

use nix::unistd::geteuid;
use tessera_harness::external;

use crate::chart::check;

/// The installed buildah. It must be able to mount, so it needs root.
fn buildah() -> Result<PathBuf, String> {
    if !geteuid().is_root() {
        return Err("buildah makes images as root only in this test".to_owned());
    }
    external::fetched("buildah")
}

#[test]
fn image_is_built_in_layers() {
    match buildah() {
        Ok(path) => check("image-is-built-in-layers", &[("BUILDAH", path)]),
        Err(reason) => external::skip("image_is_built_in_layers", &reason),
    }
}

#[test]
fn image_skeleton_is_a_workspace() {
    check("image-skeleton-is-a-workspace", &[]);
}
