//! The two images: the plugin's, as users deploy it, and a tenant's.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cluster::Cluster;
use crate::process;

pub const PLUGIN: &str = "localhost/tessera:e2e";
/// CUDA clients and a shell; carries the simulated driver for the node to install.
pub const TENANT: &str = "localhost/tessera-tenant:e2e";
/// Where the simulated driver lies in the tenant's image.
pub const SIM_DIR: &str = "/opt/simgpu";

/// The images of deploy/examples/kind, as its README makes them.
const KIND: [(&str, &str); 2] =
    [("plugin", "localhost/tessera:dev"), ("simulator", "localhost/tessera-simulator:dev")];

pub fn load_kind(cluster: &Cluster, repo: &Path, artefacts: &Path) -> Result<()> {
    let work = tempfile::tempdir()?;
    for (name, image) in KIND {
        let rootfs = work.path().join(name);
        run(Command::new(repo.join("deploy/image/rootfs")).arg(name).arg(artefacts).arg(&rootfs))?;
        cluster.load_image(image, &rootfs)?;
    }
    Ok(())
}

/// Assembles both images from `artefacts` and puts them on the nodes.
pub fn load(cluster: &Cluster, repo: &Path, artefacts: &Path) -> Result<()> {
    let work = tempfile::tempdir()?;
    let script = repo.join("deploy/image/rootfs");

    let plugin = work.path().join("plugin");
    run(Command::new(&script).arg("plugin").arg(artefacts).arg(&plugin))?;
    cluster.load_image(PLUGIN, &plugin)?;

    let tenant = work.path().join("tenant");
    let program = "tessera-tenant";
    run(Command::new(&script).arg("base").arg(&tenant).arg(artefacts.join(program)))?;
    let overlay = repo.join("tests/e2e/overlay");
    let sim = tenant.join(SIM_DIR.trim_start_matches('/'));
    fs::create_dir_all(sim.join("bin"))?;
    for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let from = artefacts.join("sim").join(library);
        fs::copy(&from, sim.join(library))
            .with_context(|| format!("{}: run `make build`", from.display()))?;
    }
    // Its name has no dot: it is not installed on the node.
    fs::copy(artefacts.join("sim/simgpu-ctl"), sim.join("bin/simgpu-ctl"))
        .with_context(|| format!("{}/sim/simgpu-ctl: run `make build`", artefacts.display()))?;
    fs::copy(overlay.join("simgpu.toml"), sim.join("simgpu.toml"))?;
    let path = tenant.join("usr/local/bin").join(program);
    fs::rename(&path, sim.join("bin").join(program))?;
    fs::copy(overlay.join("toolkit"), &path)?;
    cluster.load_image(TENANT, &tenant)
}

fn run(command: &mut Command) -> Result<()> {
    process::run(command, None, Duration::from_secs(60))?.success("assembling an image").map(drop)
}
