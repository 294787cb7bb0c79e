//! `[container]`, `[driver]` and `[cdi]`: how a container gets shim, pages and GPU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::form::{
    absolute, boolean, filled, inline, list, mapping, optional_path, parsed, path, word,
};
use crate::parse::Checks;
use crate::table::table;
use crate::{DeviceListStrategy, GpuNames, Inject, name};
use tessera_model::cdi_name;

table! {
    /// What a container is given besides its pages.
    pub struct Container {
        /// How the shim gets into every process. `file` mounts a read-only `/etc/ld.so.preload`. `env` sets
        /// `LD_PRELOAD`, which replaces the image's own; only images whose glibc reads another file (Nix) need
        /// it.
        inject: Vec<Inject> = vec![Inject::File], filled(word(), "list of `file`, `env`; not empty",
            "without the shim no quota would hold; name \"file\", \"env\" or both"), NewPods;
        /// How a container gets its GPUs: [shares.md](shares.md#ways-into-the-container) compares the
        /// strategies.
        device_list_strategy: DeviceListStrategy = DeviceListStrategy::Envvar, word(), NewPods;
        /// Whether kubelet is told the GPU's device nodes, too, where NVIDIA's toolkit brings them (`envvar`,
        /// `volume-mounts`), so that they stay open when systemd or kubelet writes the container's device rules
        /// again.
        pass_device_specs: bool = true, boolean(), NewPods;
    }
}

impl Container {
    /// Whether `/etc/ld.so.preload` is mounted.
    pub fn inject_file(&self) -> bool {
        self.inject.contains(&Inject::File)
    }

    /// Whether `LD_PRELOAD` is set.
    pub fn inject_env(&self) -> bool {
        self.inject.contains(&Inject::Env)
    }
}

/// Where the driver's libraries are mounted in a container.
pub const CONTAINER_DRIVER_DIR: &str = "/usr/local/tessera/driver";

table! {
    /// Where driver libraries and device nodes come from, beyond NVIDIA's own toolkit.
    pub struct Driver: check_driver {
        /// Host directory with libcuda and libnvidia-ml, mounted into containers at
        /// `/usr/local/tessera/driver`. Empty: NVIDIA's toolkit provides them.
        libraries: Option<PathBuf> = None, optional_path(), NewPods;
        /// Root of a driver's installation on the host (`/run/nvidia/driver`, `/`), instead of
        /// `driver.libraries`; the plugin must see the same path. Where `paths.nvml` is empty, NVML is loaded
        /// from there too, from the next start on.
        root: Option<PathBuf> = None, optional_path(), NewPods;
        /// Device nodes for the strategy `device-nodes`, and for CDI without `cdi.gpu_kind`. `{minor}` is the
        /// GPU's minor number. Those of MIG instances are added.
        device_nodes: Vec<String> = ["/dev/nvidia{minor}", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
            .map(String::from).to_vec(),
            list(parsed(node, String::clone, "absolute path", || json!({ "pattern": "^/" })), "list of absolute paths"),
            NewPods;
        /// Additional mounts for every container; `read_only` defaults to true.
        mounts: Vec<Mount> = Vec::new(), inline(), NewPods;
        /// Additional variables for every container. A pod's own variables take precedence.
        env: BTreeMap<String, String> = BTreeMap::new(),
            mapping((variable, r"^[^=\x00]+$"), name::any(), wrong_variable, "table of strings", false), NewPods;
    }
}

fn node(text: &str) -> Result<String, String> {
    absolute(text).map(|_| text.to_owned())
}

fn variable(name: &str) -> Result<String, String> {
    match name.is_empty() || name.contains(['=', '\0']) {
        true => Err(format!("\"{name}\" cannot name a variable")),
        false => Ok(name.to_owned()),
    }
}

fn wrong_variable(name: &str, why: &str) -> String {
    format!("{name}: {why}")
}

fn check_driver(driver: &Driver, checks: &mut Checks<'_>) {
    if driver.root.is_some() && driver.libraries.is_some() {
        let message = "libraries are found below driver.root or lie in driver.libraries: set one";
        checks.problem("root", message);
    }
}

const HALF_A_MOUNT: &str = "each mount needs `host` and `container`";

table! {
    /// One mount.
    pub struct Mount {
        /// Path on the host.
        host: PathBuf = PathBuf::new(), path(), NewPods, required HALF_A_MOUNT;
        /// Path in the container.
        container: PathBuf = PathBuf::new(),
            parsed(elsewhere, |path| path.display().to_string(), "absolute path", || json!({
                "pattern": "^/", "not": { "pattern": "^/(usr/local/tessera(/|$)|etc/ld\\.so\\.preload$)" },
            })), NewPods, required HALF_A_MOUNT;
        /// Mounted read-only.
        read_only: bool = true, boolean(), NewPods;
    }
}

fn elsewhere(text: &str) -> Result<PathBuf, String> {
    let path = absolute(text)?;
    match path.starts_with("/usr/local/tessera") || path == Path::new("/etc/ld.so.preload") {
        true => Err(format!("{} is Tessera's own; mount elsewhere", path.display())),
        false => Ok(path),
    }
}

table! {
    /// The Container Device Interface, where `container.device_list_strategy` asks for it.
    pub struct Cdi {
        /// Where the plugin writes specs, one file per allocation, and the runtime reads them.
        directory: PathBuf = "/var/run/cdi".into(), path(), Restart;
        /// Kind of the spec that has the GPU itself, as `nvidia-ctk cdi generate` makes it. Empty: Tessera
        /// writes it, from `[driver]`.
        gpu_kind: Option<String> = Some("nvidia.com/gpu".into()),
            parsed(kind, |kind| kind.clone().unwrap_or_default(), "`vendor/class`, or empty", kind_schema), NewPods;
        /// What that spec calls a GPU. An index may mean another GPU after a reboot.
        gpu_names: GpuNames = GpuNames::Uuid, word(), NewPods;
    }
}

fn kind(text: &str) -> Result<Option<String>, String> {
    if !text.is_empty() {
        cdi_name::kind(text).map_err(|error| format!("{error}; NVIDIA's is \"nvidia.com/gpu\""))?;
    }
    Ok(Some(text.to_owned()).filter(|kind| !kind.is_empty()))
}

fn kind_schema() -> serde_json::Value {
    let label = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?";
    let vendor = format!(r"[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?(\.{label})*");
    let class = "[A-Za-z]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?";
    json!({ "pattern": format!("^$|^{vendor}/{class}$"), "not": { "pattern": "^[^/]{254}" } })
}
