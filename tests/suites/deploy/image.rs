//! The image: buildah builds `deploy/Dockerfile` from a stand-in of its base image (`tests/deploy/image.py`).

use std::path::PathBuf;
use std::process::Command;

use nix::unistd::geteuid;
use tessera_harness::external;

use crate::chart::check;

/// The installed buildah. It must be able to mount, so it needs root. A machine of CI installs it.
fn buildah() -> Result<PathBuf, String> {
    if !geteuid().is_root() {
        return Err("buildah makes images as root only in this test".to_owned());
    }
    if let Some(found) = external::on_path("buildah") {
        return Ok(found);
    }
    if external::may_skip() {
        return Err("no buildah on the PATH: apt-get install buildah".to_owned());
    }
    let install = Command::new("apt-get")
        .args(["install", "-y", "--no-install-recommends", "buildah"])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .output()
        .map_err(|error| format!("apt-get: {error}"))?;
    let said = String::from_utf8_lossy(&install.stderr).into_owned();
    external::on_path("buildah").ok_or_else(|| format!("apt-get install buildah: {said}"))
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
