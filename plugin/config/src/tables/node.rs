//! How a container gets shim, pages and GPU (`[container]`, `[driver]`, `[cdi]`), and the plugin's own: `[paths]`,
//! `[pages]`, `[ledger]`, `[kubernetes]`, `[metrics]`, `[api]`, `[labels]` and `[log]`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tessera_model::cdi_name;

use crate::form::{absolute, boolean, bytes, optional_path, parsed, path, time, word};
use crate::grammar::{
    DEFAULT_PORT, LONGEST_FILTER, addresses, addresses_schema, any_name, everywhere,
    filter_pattern, log_filter, show_addresses,
};
use crate::table::{inline, list, mapping, table};
use crate::{
    ApiAuthorisation, DeviceListStrategy, Events, GpuNames, Inject, LogFormat, MIB, TmpfsPolicy,
};

table! {
    pub struct Paths {
        /// Kubelet's device-plugin directory, which kubelet has compiled in: another `--root-dir` moves only
        /// the next three.
        kubelet: PathBuf = "/var/lib/kubelet/device-plugins".into(), path(), Restart;
        /// Kubelet's PodResources socket.
        pod_resources: PathBuf = "/var/lib/kubelet/pod-resources/kubelet.sock".into(), path(), Restart;
        /// Where kubelet finds the DRA driver's socket.
        plugins_registry: PathBuf = "/var/lib/kubelet/plugins_registry".into(), path(), Restart;
        /// The DRA driver's own socket and lock.
        dra: PathBuf = "/var/lib/kubelet/plugins/gpu.tessera.dev".into(), path(), Restart;
        /// Kubelet's links to containers' logs, whose names identify a container without a share. The logs are
        /// not read.
        container_logs: PathBuf = "/var/log/containers".into(), path(), Restart;
        /// Quota and usage pages, one directory per allocation; a tmpfs of its own, see `[pages]`.
        pages: PathBuf = "/run/tessera/pages".into(), path(), Restart;
        /// Installed shims, by content: on persistent disk, not mounted noexec.
        shim: PathBuf = "/var/lib/tessera/shim".into(), path(), Restart;
        /// The libtessera.so to install. Empty: the one beside `tessera`.
        shim_source: Option<PathBuf> = None, optional_path(), Restart;
        /// The durable record. The last good configuration is kept beside it.
        ledger: PathBuf = "/var/lib/tessera/ledger.redb".into(), path(), Restart;
        /// Root's socket: `tessera status` and similar commands, and the JSON API; only root may use it.
        admin: PathBuf = "/run/tessera/admin.sock".into(), path(), Restart;
        /// Path of libnvidia-ml. Empty: below `driver.root`, or the loader's.
        nvml: Option<PathBuf> = None, optional_path(), Restart;
    }
}

table! {
    pub struct Pages {
        /// Where `paths.pages` is not a tmpfs of its own, `require` and `prefer` mount one; where that is not
        /// permitted, `require` does not start, and `prefer` warns and uses the directory.
        tmpfs: TmpfsPolicy = TmpfsPolicy::Prefer, word(), Restart;
        /// Size of the tmpfs; one allocation takes 140 KiB.
        size_bytes as "size": u64 = 64 * MIB,
            bytes(MIB, "must be at least 1Mi; one allocation takes 140 KiB"), Restart;
    }
}

table! {
    pub struct Ledger {
        /// Whether the plugin waits for the disk before each answer to kubelet. Else a power cut may lose the
        /// newest records.
        fsync: bool = true, boolean(), Restart;
        /// How long kubelet must not have listed a container, and none of its processes used a GPU, before its
        /// share is released.
        release_after: Duration = Duration::from_secs(30), time(Duration::from_secs(1), Duration::from_secs(3600));
    }
}

table! {
    pub struct Kubernetes {
        /// Whether pods get [Kubernetes events](trust.md#kubernetes-events). `auto`: where the plugin's pod has
        /// a service account's token.
        events: Events = Events::Auto, word();
    }
}

table! {
    pub struct Metrics {
        /// Address of [`/metrics`, `/healthz` and `/readyz`](metrics.md): all interfaces, one, or none.
        listen: Vec<SocketAddr> = everywhere(DEFAULT_PORT),
            parsed(addresses, |all| show_addresses(all), "`:PORT`, `IP:PORT`, or empty", addresses_schema), Restart;
    }
}

table! {
    pub struct Labels {
        /// File of [node labels](../deploy/README.md#node-labels) for node feature discovery, such as
        /// `/etc/kubernetes/node-feature-discovery/features.d/tessera`. Empty: none.
        nfd_file: Option<PathBuf> = None, optional_path();
    }
}

table! {
    pub struct Log {
        /// Which messages are logged, for instance `info,tessera=debug`.
        filter: String = "info".into(), parsed(
            |text| log_filter(text).map(|_| text.to_owned()), String::clone,
            "levels, of all and of modules: `off`, `error`, `warn`, `info`, `debug`, `trace`",
            || json!({ "pattern": filter_pattern(), "maxLength": LONGEST_FILTER }),
        );
        /// Text for people, or one JSON object per line.
        format: LogFormat = LogFormat::Text, word(), Restart;
    }
}

table! {
    pub struct Container {
        /// How the shim gets into every process. `file` mounts a read-only `/etc/ld.so.preload`. `env` sets
        /// `LD_PRELOAD`, which replaces the image's own; only images whose glibc reads another file (Nix) need
        /// it.
        inject: Vec<Inject> = vec![Inject::File], list(word(), "list of `file`, `env`; not empty",
            Some("without the shim no quota would hold; name \"file\", \"env\" or both")), NewPods;
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
    pub struct Driver {
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
            list(parsed(node, String::clone, "absolute path", || json!({ "pattern": "^/" })), "list of absolute paths",
                None),
            NewPods;
        /// Additional mounts for every container; `read_only` defaults to true.
        mounts: Vec<Mount> = Vec::new(), inline(), NewPods;
        /// Additional variables for every container. A pod's own variables take precedence.
        env: BTreeMap<String, String> = BTreeMap::new(),
            mapping((variable, r"^[^=\x00]+$"), any_name(), "table of strings", false), NewPods;
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

/// The API's port by default: beside that of `/metrics`.
const API_PORT: u16 = 9481;

table! {
    pub struct Api {
        /// Address of the [JSON API](api.md) and the page: all interfaces, one, or none. Root's socket is
        /// served in any case.
        listen: Vec<SocketAddr> = vec![SocketAddr::from(([127, 0, 0, 1], API_PORT))],
            parsed(addresses, |all| show_addresses(all), "`:PORT`, `IP:PORT`, or empty", addresses_schema), Restart;
        /// What a caller over the network must show. `kubernetes`: a token, over TLS; its user's rights on pods
        /// decide what is shown. `none`: nothing, on a loopback address alone. `auto`: `kubernetes` where the
        /// plugin's pod has a service account's token, else `none`.
        authorisation: ApiAuthorisation = ApiAuthorisation::Auto, word(), Restart;
        /// PEM file of the server's certificate, read again when it changes. Empty: a certificate of the
        /// plugin's own.
        tls_cert: Option<PathBuf> = None, optional_path(), Restart;
        /// PEM file of its key.
        tls_key: Option<PathBuf> = None, optional_path(), Restart;
    }
}
