//! `cdi-cri` and `cdi-annotations`: the container runtime makes the container by specs that it reads
//! itself, and kubelet's answer only names devices of them.
//!
//! The GPU is a device of NVIDIA's spec (`cdi.gpu_kind`), pages and shim are a device of ours, one
//! for each allocation in a file of its own. Not one file for all: a file that is damaged, or cannot
//! be written, then concerns one container, and nothing rewrites what running containers will be
//! restarted from. The name is a function of the allocation alone ([`KIND`] and its id), because
//! kubelet keeps it in its checkpoint: after a restart of the plugin, or of the node, which empties
//! `/var/run`, the same name must be there again.
//! Any file there that is not ours by name and content is left alone; each of ours is whole at any time, by rename.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tessera_config::{Config, DeviceListStrategy, GpuNames};
use tessera_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;
use tessera_region::layout;
use tessera_system::files::{self, Dir};

use super::driver::Parts;
use super::{DeliveryPlan, VISIBLE_DEVICES, VOID, mounts};
pub use tessera_model::cdi_name::SHARE_KIND as KIND;

const ANNOTATION: &str = "cdi.k8s.io/tessera.share_";

/// The qualified names of all that a container of this allocation needs.
pub fn names(plan: &DeliveryPlan<'_>, config: &Config) -> Vec<String> {
    let mut names = Vec::with_capacity(plan.gpus.len() + 1);
    let is_given = config.container.device_list_strategy != DeviceListStrategy::None;
    if let Some(kind) = config.cdi.gpu_kind.as_ref().filter(|_| is_given) {
        let naming = config.cdi.gpu_names;
        names.extend(plan.gpus.iter().map(|gpu| format!("{kind}={}", gpu_name(gpu, naming))));
    }
    names.push(format!("{KIND}={}", plan.id));
    names
}

fn gpu_name(gpu: &Gpu, naming: GpuNames) -> String {
    match naming {
        GpuNames::Uuid => gpu.uuid.clone(),
        GpuNames::Index => match &gpu.mig {
            None => gpu.index.to_string(),
            Some(mig) => format!("{}:{}", mig.parent_index, mig.index),
        },
    }
}

pub(super) fn add(
    plan: &DeliveryPlan<'_>,
    config: &Config,
    answer: &mut ContainerAllocateResponse,
) {
    let names = names(plan, config);
    if config.container.device_list_strategy == DeviceListStrategy::CdiAnnotations {
        answer.annotations.insert(format!("{ANNOTATION}{}", plan.id), names.join(","));
    } else {
        answer.cdi_devices = names.into_iter().map(|name| CdiDevice { name }).collect();
    }
    // For a kubelet or runtime that ignores the names: without a quota there is to be no GPU either.
    answer.envs.insert(VISIBLE_DEVICES.into(), VOID.into());
}

pub fn spec(plan: &DeliveryPlan<'_>, config: &Config) -> Value {
    let mut env = vec![format!("{VISIBLE_DEVICES}={VOID}")];
    if config.container.inject_env() {
        env.push(format!("LD_PRELOAD={}", layout::CONTAINER_SHIM));
    }
    if plan.by_cdi_alone {
        env.extend(variables(config));
    }
    spec_of(plan.id, env, device_nodes(&plan.parts, config), mounts(plan, config).iter())
}

/// The name under which a GPU is shown to those that monitor it: no pages, no shim, nothing granted.
pub fn view_id(gpu: &Gpu) -> AllocationId {
    // No resource has a name with a colon, and no claim's share this one.
    AllocationId::of("view:", [gpu.uuid.as_str()])
}

pub fn view_names(gpu: &Gpu, config: &Config) -> Vec<String> {
    let mut names = vec![format!("{KIND}={}", view_id(gpu))];
    if let Some(kind) = &config.cdi.gpu_kind {
        names.push(format!("{kind}={}", gpu_name(gpu, config.cdi.gpu_names)));
    }
    names
}

/// The spec of the sight of a GPU: the driver, and the device where no other spec has it.
pub fn view_spec(gpu: &Gpu, parts: &Parts, config: &Config) -> Value {
    let mounts = parts.libraries.iter().chain(&config.driver.mounts);
    let mut env = vec![format!("{VISIBLE_DEVICES}={VOID}")];
    env.extend(variables(config));
    spec_of(&view_id(gpu), env, device_nodes(parts, config), mounts)
}

fn variables(config: &Config) -> impl Iterator<Item = String> {
    super::driver_env(config).into_iter().map(|(name, value)| format!("{name}={value}"))
}

fn device_nodes(parts: &Parts, config: &Config) -> Vec<Value> {
    let nodes = if config.cdi.gpu_kind.is_none() { parts.nodes.as_slice() } else { &[] };
    let node = |node: &super::driver::Node| {
        let mut value = json!({ "path": node.container, "permissions": "rw" });
        if node.host != node.container {
            value["hostPath"] = json!(node.host);
        }
        value
    };
    nodes.iter().map(node).collect()
}

/// A bind mount, with the options that containerd gives kubelet's mounts.
fn bind(mount: &tessera_config::Mount) -> Value {
    let access = if mount.read_only { "ro" } else { "rw" };
    json!({
        "hostPath": mount.host.to_string_lossy(),
        "containerPath": mount.container.to_string_lossy(),
        "options": ["rbind", "rprivate", access],
    })
}

/// The lowest version in which a device's name may begin with a digit, and a node have another path on the host. A runtime
/// refuses a spec that is newer than itself. (Table "Released versions" of the specification.)
const VERSION: &str = "0.5.0";

/// A spec of our kind. Its edits of a container's OCI specification win over what the pod says: of a variable or a mount
/// that is there already, the runtime keeps only this one. One at least has to be there.
fn spec_of<'m>(
    id: &AllocationId,
    env: Vec<String>,
    device_nodes: Vec<Value>,
    mounts: impl Iterator<Item = &'m tessera_config::Mount>,
) -> Value {
    let mounts: Vec<Value> = mounts.map(bind).collect();
    let edits =
        [("env", json!(env)), ("deviceNodes", json!(device_nodes)), ("mounts", json!(mounts))];
    let edits: BTreeMap<_, _> = edits.into_iter().filter(|(_, list)| *list != json!([])).collect();
    json!({
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [{ "name": id.as_str(), "containerEdits": edits }],
    })
}

/// Before the id in a file's name, as CDI proposes it for specs that come and go: vendor, class.
const PREFIX: &str = "tessera.dev-share_";
/// Runtimes read `.json` and `.yaml` and nothing else.
const SUFFIX: &str = ".json";

/// The reason for a missing spec, and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FileError(String);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    Unchanged,
    Made,
    /// Something else was there.
    Replaced,
}

#[derive(Clone, Debug)]
pub struct Specs {
    directory: PathBuf,
}

impl Specs {
    /// The directory need not exist yet.
    pub fn new(directory: &Path) -> Self {
        Specs { directory: directory.to_owned() }
    }

    pub fn path(&self, id: &AllocationId) -> PathBuf {
        self.directory.join(format!("{PREFIX}{id}{SUFFIX}"))
    }

    pub fn exists(&self, id: &AllocationId) -> bool {
        self.path(id).symlink_metadata().is_ok_and(|meta| meta.is_file())
    }

    pub fn is_whole(&self, id: &AllocationId) -> bool {
        is_ours(&self.path(id))
    }

    /// Where it fails, what was there before is still there.
    pub fn put(&self, id: &AllocationId, spec: &Value) -> Result<Put, FileError> {
        let path = self.path(id);
        let content = format!("{spec:#}\n");
        let is_there = path.symlink_metadata().is_ok();
        // Any runtime may read it, which need not be root. By a file in this directory: of a rename, containerd's
        // watch sees only where the file was. Not durable: after a power cut every file is written again before
        // kubelet knows this plugin.
        match files::put(&path, content.as_bytes(), 0o644, false) {
            Ok(false) => Ok(Put::Unchanged),
            Ok(true) if is_there => Ok(Put::Replaced),
            Ok(true) => Ok(Put::Made),
            Err(error) => Err(self.failed(&path, &error)),
        }
    }

    fn failed(&self, path: &Path, error: &io::Error) -> FileError {
        let (directory, path) = (self.directory.display(), path.display());
        FileError(match error.kind() {
            ErrorKind::DirectoryNotEmpty => {
                format!("{path} is a directory, and Tessera's CDI spec belongs there; remove it")
            }
            ErrorKind::ReadOnlyFilesystem => format!(
                "cdi.directory {directory} is read-only; mount it writable into the plugin, or name another that the \
                 container runtime reads (cdi_spec_dirs in containerd's configuration)"
            ),
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => format!(
                "no room for a CDI spec in cdi.directory {directory}: free some space there"
            ),
            // Mounted or open, it has no name any more.
            ErrorKind::NotFound
                if self.directory.metadata().is_ok_and(|meta| meta.nlink() == 0) =>
            {
                format!(
                    "cdi.directory {directory} was removed from the node, and the plugin's pod still has what is no more; \
                 delete the plugin's pod, so that its next one mounts what is there now"
                )
            }
            _ => format!("cannot write the CDI spec {path}: {error}"),
        })
    }

    pub fn remove(&self, id: &AllocationId) -> io::Result<()> {
        match Dir::holding(&self.path(id)).and_then(|(dir, name)| dir.remove(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes specs of ours that `keep` does not want. Returns the ids of those removed.
    pub fn sweep(&self, keep: impl Fn(&AllocationId) -> bool) -> Vec<AllocationId> {
        let mut removed = Vec::new();
        let Ok(dir) = Dir::open_trusted(&self.directory) else { return removed };
        for name in dir.names().unwrap_or_default() {
            let path = self.directory.join(&name);
            if let Some(id) = id_in(&name)
                && !keep(&id)
                && is_ours(&path)
                && dir.remove(&name).is_ok()
            {
                removed.push(id);
            }
        }
        removed
    }
}

fn id_in(name: &OsString) -> Option<AllocationId> {
    AllocationId::parse(name.to_str()?.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?)
}

fn is_ours(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_file())
        && files::read(path, files::SMALL)
            .ok()
            .and_then(|text| serde_json::from_slice::<Value>(&text).ok())
            .is_some_and(|spec| spec["kind"] == KIND)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::Delivery;
    use crate::delivery::driver::Node;

    fn written(config: &str, id: &str, parts: Parts, by_cdi_alone: bool) -> Value {
        let config = Config::parse(config).unwrap();
        let id = AllocationId::parse(id).unwrap();
        let gpu = Gpu::example("GPU-a", 0);
        let shim =
            Delivery { shim: "/shims/ab/libtessera.so".into(), preload: "/shims/ab/pre".into() };
        let pages = Path::new("/pages/x");
        let gpus = vec![&gpu];
        let plan = DeliveryPlan { id: &id, gpus, pages, shim: &shim, parts, by_cdi_alone };
        spec(&plan, &config)
    }

    const CDI: &str = "[container]\ndevice_list_strategy = \"cdi-cri\"\n";

    fn bound(host: &str, container: &str, access: &str) -> Value {
        json!({
            "hostPath": host,
            "containerPath": container,
            "options": ["rbind", "rprivate", access],
        })
    }

    #[test]
    fn an_allocations_spec_has_pages_and_shim_and_leaves_the_gpu_to_nvidias() {
        let id = "abcdef0123456789abcdef0123456789";
        let nodes = vec![Node { host: "/dev/x".into(), container: "/dev/x".into() }];
        let spec = written(CDI, id, Parts { nodes, ..Parts::default() }, false);
        assert_eq!(
            spec,
            json!({
                "cdiVersion": "0.5.0",
                "kind": "tessera.dev/share",
                "devices": [{
                    "name": id,
                    "containerEdits": {
                        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
                        "mounts": [
                            bound("/pages/x", "/usr/local/tessera/pages/abcdef0123456789abcdef0123456789", "ro"),
                            bound("/pages/x/usage", "/usr/local/tessera/pages/abcdef0123456789abcdef0123456789/usage", "rw"),
                            bound("/shims/ab/libtessera.so", "/usr/local/tessera/libtessera.so", "ro"),
                            bound("/shims/ab/pre", "/etc/ld.so.preload", "ro"),
                        ],
                    },
                }],
            })
        );
    }

    #[test]
    fn a_claims_spec_has_the_variables_that_an_answer_would_have() {
        let config = "[driver]\nlibraries = \"/opt/driver\"\n[driver.env]\nMODE = \"x\"\n";
        let env = |by_cdi_alone| {
            let (config, id) = (format!("{CDI}{config}"), "0".repeat(32));
            let spec = written(&config, &id, Parts::default(), by_cdi_alone);
            spec["devices"][0]["containerEdits"]["env"].clone()
        };
        let void = "NVIDIA_VISIBLE_DEVICES=void";
        assert_eq!(env(false), json!([void]));
        let path = "LD_LIBRARY_PATH=/usr/local/tessera/driver";
        assert_eq!(env(true), json!([void, path, "MODE=x"]));
    }

    #[test]
    fn without_nvidias_spec_ours_has_nodes_libraries_and_the_preload_that_a_pod_cannot_unset() {
        let config = "
        [container]
        inject = [\"env\"]
        device_list_strategy = \"cdi-annotations\"
        [cdi]
        gpu_kind = \"\"
    ";
        let parts = Parts {
            libraries: vec![tessera_config::Mount {
                host: "/run/nvidia/driver/usr/lib64/libcuda.so.550.1".into(),
                container: "/usr/local/tessera/driver/libcuda.so.1".into(),
                read_only: true,
            }],
            nodes: vec![
                Node { host: "/dev/nvidiactl".into(), container: "/dev/nvidiactl".into() },
                Node { host: "/run/d/dev/nvidia0".into(), container: "/dev/nvidia0".into() },
            ],
        };
        let spec = written(config, "0bcdef0123456789abcdef0123456789", parts, false);
        let edits = &spec["devices"][0]["containerEdits"];
        assert_eq!(
            edits["env"],
            json!(["NVIDIA_VISIBLE_DEVICES=void", "LD_PRELOAD=/usr/local/tessera/libtessera.so"])
        );
        assert_eq!(
            edits["deviceNodes"],
            json!([
                { "path": "/dev/nvidiactl", "permissions": "rw" },
                { "path": "/dev/nvidia0", "hostPath": "/run/d/dev/nvidia0", "permissions": "rw" },
            ])
        );
        let mounts = edits["mounts"].as_array().unwrap();
        assert_eq!(mounts.len(), 4, "no ld.so.preload");
        assert_eq!(mounts[3]["containerPath"], "/usr/local/tessera/driver/libcuda.so.1");
    }
}

#[cfg(test)]
mod files_tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::shim_install::tests::Mounted;

    fn id(n: u8) -> AllocationId {
        AllocationId::of("r", [format!("GPU::{n}").as_str()])
    }

    fn spec(id: &AllocationId, value: &str) -> Value {
        spec_of(id, vec![format!("A={value}")], Vec::new(), [].into_iter())
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_spec_is_made_in_a_directory_that_was_missing_and_then_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("run/cdi");
        let (specs, a) = (Specs::new(&directory), id(0));
        assert_eq!(specs.put(&a, &spec(&a, "1")).unwrap(), Put::Made);
        assert_eq!(names(&directory), [format!("tessera.dev-share_{a}.json")]);
        let before = specs.path(&a).metadata().unwrap().modified().unwrap();
        assert_eq!(specs.put(&a, &spec(&a, "1")).unwrap(), Put::Unchanged);
        assert_eq!(specs.path(&a).metadata().unwrap().modified().unwrap(), before);
        assert_eq!(specs.path(&a).metadata().unwrap().permissions().mode() & 0o777, 0o644);
        specs.remove(&a).unwrap();
        specs.remove(&a).unwrap();
        assert_eq!(names(&directory), [""; 0]);
    }

    #[test]
    fn a_directory_with_something_in_it_is_reported_and_left() {
        let dir = tempfile::tempdir().unwrap();
        let (specs, a) = (Specs::new(dir.path()), id(0));
        std::fs::create_dir_all(specs.path(&a).join("theirs")).unwrap();
        let error = specs.put(&a, &spec(&a, "1")).unwrap_err();
        assert!(error.to_string().contains("is a directory, and"), "{error}");
        assert!(specs.path(&a).join("theirs").is_dir());
    }

    #[test]
    fn sweeping_takes_ours_that_nobody_wants_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let specs = Specs::new(dir.path());
        let (wanted, stale, foreign) = (id(0), id(1), id(2));
        for id in [&wanted, &stale] {
            specs.put(id, &spec(id, "1")).unwrap();
        }
        // Another's, by content or by name.
        let theirs = br#"{"cdiVersion":"0.5.0","kind":"other.dev/x","devices":[]}"#;
        std::fs::write(specs.path(&foreign), theirs).unwrap();
        std::fs::write(dir.path().join("nvidia.yaml"), b"kind: nvidia.com/gpu").unwrap();
        std::fs::write(dir.path().join("tessera.dev-share_x.json"), b"{}").unwrap();
        assert_eq!(specs.sweep(|id| *id == wanted), [stale]);
        let mut left = [
            "nvidia.yaml".to_owned(),
            "tessera.dev-share_x.json".to_owned(),
            format!("tessera.dev-share_{wanted}.json"),
            format!("tessera.dev-share_{foreign}.json"),
        ];
        left.sort();
        assert_eq!(names(dir.path()), left);
        // Nothing to do is nothing to do.
        assert!(Specs::new(&dir.path().join("absent")).sweep(|_| false).is_empty());
    }

    #[test]
    fn a_full_or_read_only_directory_is_reported_and_keeps_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let Some(mounted) = Mounted::tmpfs(dir.path(), "size=16k") else {
            return eprintln!("not run: no file system can be mounted here");
        };
        let (specs, a) = (Specs::new(dir.path()), id(0));
        specs.put(&a, &spec(&a, "1")).unwrap();
        let whole = std::fs::read(specs.path(&a)).unwrap();
        let error = specs.put(&a, &spec(&a, &"x".repeat(64 << 10))).unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
        assert_eq!(std::fs::read(specs.path(&a)).unwrap(), whole);
        assert_eq!(names(dir.path()).len(), 1, "half a spec is left");
        mounted.make_read_only();
        assert_eq!(specs.put(&a, &spec(&a, "1")).unwrap(), Put::Unchanged, "it is there");
        let error = specs.put(&a, &spec(&a, "2")).unwrap_err();
        assert!(error.to_string().contains("is read-only"), "{error}");
        assert_eq!(std::fs::read(specs.path(&a)).unwrap(), whole);
    }
}
