//! `[container]`, `[driver]` and `[cdi]`: how a container gets shim, pages and GPU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::form::{Mapping, absolute, boolean, list, optional_path, parsed, path, tables, word};
use crate::report::Checks;
use crate::table::table;
use crate::{DeviceListStrategy, GpuNames, Inject, name};
use tessera_model::cdi_name;

table! {
    /// What a container is given besides its pages.
    pub struct Container {
        /// How the shim gets into every process: `file` is a read-only `/etc/ld.so.preload`, which a
        /// container cannot unset. `env` is `LD_PRELOAD`: it replaces one that the image sets, such as its
        /// allocator's, and reaches more than `file` only in images whose glibc reads another file (Nix).
        inject: Vec<Inject> = vec![Inject::File], list(word(), "list of `file`, `env`; not empty")
            .not_empty("without the shim no quota would hold; name \"file\", \"env\" or both"), NewPods;
        /// How a container gets its GPUs; see [plugin.md](plugin.md#how-a-container-gets-its-gpu).
        /// `envvar`: `NVIDIA_VISIBLE_DEVICES`, for NVIDIA's container toolkit. `volume-mounts`: the same as
        /// mounts, which a pod can't set itself (the toolkit needs
        /// `accept-nvidia-visible-devices-as-volume-mounts = true`). `cdi-cri`: CDI devices, by a field that
        /// kubelets from 1.28 on pass to the runtime. `cdi-annotations`: CDI devices, by annotations: older
        /// kubelets, with containerd 1.7 or CRI-O. `device-nodes`: `driver.device_nodes`, without any
        /// toolkit. `none`: nothing (the simulated GPU).
        device_list_strategy: DeviceListStrategy = DeviceListStrategy::Envvar, word(), NewPods;
    }
}

impl Container {
    /// Whether `/etc/ld.so.preload` is mounted.
    #[must_use]
    pub fn inject_file(&self) -> bool {
        self.inject.contains(&Inject::File)
    }

    /// Whether `LD_PRELOAD` is set.
    #[must_use]
    pub fn inject_env(&self) -> bool {
        self.inject.contains(&Inject::Env)
    }
}

/// Where the driver's libraries are mounted in a container.
pub const CONTAINER_DRIVER_DIR: &str = "/usr/local/tessera/driver";

table! {
    /// Where driver libraries and device nodes come from, beyond NVIDIA's own toolkit.
    pub struct Driver: check_driver {
        /// Host directory with libcuda and libnvidia-ml to mount into containers at
        /// `/usr/local/tessera/driver` and name in `LD_LIBRARY_PATH`. Empty: NVIDIA's toolkit provides them.
        libraries: Option<PathBuf> = None, optional_path(), NewPods;
        /// Instead: root of a driver's installation on the host (`/run/nvidia/driver`, `/`), below which the
        /// libraries that compute needs are found; each is mounted by itself. The plugin must see the same
        /// path. NVML is loaded from there too where `paths.nvml` is empty, and stays until a restart.
        root: Option<PathBuf> = None, optional_path(), NewPods;
        /// Device nodes for `device-nodes`, and for the CDI strategies without `cdi.gpu_kind`. `{minor}` is
        /// the GPU's minor number. A MIG instance's capabilities are added by themselves.
        device_nodes: Vec<String> = ["/dev/nvidia{minor}", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
            .map(String::from).to_vec(),
            list(parsed(node, String::clone, "absolute path", || json!({ "pattern": "^/" })), "list of absolute paths"),
            NewPods;
        /// More mounts for every container; `read_only` is true unless it is given.
        mounts: Vec<Mount> = Vec::new(), tables().inline(), NewPods;
        /// More variables for every container. A pod's own win over these.
        env: BTreeMap<String, String> = BTreeMap::new(),
            Mapping::new(variable, r"^[^=\x00]+$", name::any(), wrong_variable, "table of strings"), NewPods;
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

fn check_driver(driver: &Driver, checks: &mut Checks<'_, '_>) {
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
        /// Where specs are written, one file per allocation: a directory that the container runtime reads.
        directory: PathBuf = "/var/run/cdi".into(), path(), Restart;
        /// Whose spec has the GPU itself: the kind that NVIDIA's toolkit generates (`nvidia-ctk cdi
        /// generate`). Empty: our own, from `[driver]`.
        gpu_kind: Option<String> = Some("nvidia.com/gpu".into()),
            parsed(kind, |kind| kind.clone().unwrap_or_default(), "`vendor/class`, or empty", kind_schema), NewPods;
        /// What that spec calls a GPU. An index may be another GPU's after a reboot.
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
