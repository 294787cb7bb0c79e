//! `[container]`, `[driver]` and `[cdi]`.

use super::super::{Config, choices};
use super::Takes::{NewPods, Restart};
use super::{Key, one, toml};

pub(super) const KEYS: &[Key] = &[
    one(
        "container.inject",
        "list of `file`, `env`; not empty",
        NewPods,
        |c| {
            let words = [(c.container.inject_file, "file"), (c.container.inject_env, "env")];
            let set: Vec<&str> = words.iter().filter(|(set, _)| *set).map(|(_, w)| *w).collect();
            toml::strings(&set)
        },
        "How the shim gets into every process: a read-only `/etc/ld.so.preload`, which a container \
         cannot unset, or `LD_PRELOAD`, which replaces one that the image sets.",
    ),
    one(
        "container.device_list_strategy",
        "`envvar`, `volume-mounts`, `cdi-cri`, `cdi-annotations`, `device-nodes`, `none`",
        NewPods,
        |c| toml::word(&c.container.device_list_strategy, &choices::STRATEGY),
        "How a container gets its GPUs; see \
         [plugin.md](plugin.md#how-a-container-gets-its-gpu).",
    ),
    one(
        "driver.libraries",
        "absolute path, or empty",
        NewPods,
        |c| toml::path(c.driver.libraries.as_deref()),
        "Host directory with libcuda and libnvidia-ml to mount into containers. Empty: NVIDIA's \
         toolkit provides them.",
    ),
    one(
        "driver.root",
        "absolute path, or empty; not together with `driver.libraries`",
        NewPods,
        |c| toml::path(c.driver.root.as_deref()),
        "Instead: root of a driver's installation on the host. The NVML that the plugin itself has \
         loaded from there stays until a restart.",
    ),
    one(
        "driver.device_nodes",
        "list of absolute paths",
        NewPods,
        |c| toml::strings(&c.driver.device_nodes),
        "Device nodes for `device-nodes`, and for the CDI strategies without `cdi.gpu_kind`. \
         `{minor}` is the GPU's minor number.",
    ),
    one(
        "driver.mounts",
        "list of `{ host, container, read_only }`; left out, `read_only` is true",
        NewPods,
        mounts,
        "More mounts for every container.",
    ),
    one(
        "driver.env",
        "table of strings",
        NewPods,
        |c| toml::table(&c.driver.env),
        "More variables for every container. A pod's own win over these.",
    ),
    one(
        "cdi.directory",
        "absolute path",
        Restart(|to, from| to.cdi.directory.clone_from(&from.cdi.directory)),
        |c| toml::path(Some(&c.cdi.directory)),
        "Where specs are written for the CDI strategies: a directory that the container runtime reads.",
    ),
    one(
        "cdi.gpu_kind",
        "`vendor/class`, or empty",
        NewPods,
        |c| toml::string(c.cdi.gpu_kind.as_deref().unwrap_or_default()),
        "Whose spec has the GPU itself: the kind that NVIDIA's toolkit generates. Empty: our own, \
         from `[driver]`.",
    ),
    one(
        "cdi.gpu_names",
        "`uuid`, `index`",
        NewPods,
        |c| toml::word(&c.cdi.gpu_names, &choices::GPU_NAMES),
        "What that spec calls a GPU. An index may be another GPU's after a reboot.",
    ),
];

fn mounts(config: &Config) -> String {
    let mount = |mount: &super::super::Mount| {
        let (host, container) = (toml::path(Some(&mount.host)), toml::path(Some(&mount.container)));
        format!("{{ host = {host}, container = {container}, read_only = {} }}", mount.read_only)
    };
    let mounts: Vec<String> = config.driver.mounts.iter().map(mount).collect();
    format!("[{}]", mounts.join(", "))
}
