//! `container.device_list_strategy` on a real kubelet and runtime, as far as it needs no toolkit.

use std::env;

use anyhow::{Result, ensure};
use serde_json::json;

use super::delivery::check_fill;
use crate::deploy::SHARE_BYTES;
use crate::host::CONFIG;
use crate::pods::{Container, Pod, Restart, manifest};
use crate::suite::Suite;

/// Below what the plugin's pod has mounted, and [`Suite::on_node`] as well.
const ROOT: &str = "/var/lib/kubelet/plugins/tessera.dev/driver";
const INSIDE: &str = "/usr/local/tessera/driver";

/// Runs `then` with the plugin under another configuration.
fn under(suite: &Suite<'_>, config: &str, then: impl FnOnce() -> Result<()>) -> Result<()> {
    suite.reconfigure(Some(config))?;
    let outcome = then();
    // Its containers would be restarted by what they were given.
    suite.remove_tenants()?;
    suite.reconfigure(None)?;
    outcome
}

/// One share of the first GPU; the simulated driver shows the others as well where no toolkit hides
/// them.
fn tenant(name: &str) -> Container {
    let until_asked = ["sh", "-c", "until [ -e /end ]; do sleep 0.2; done"];
    Container::new(name, 1, &until_asked).env("CUDA_VISIBLE_DEVICES", "0")
}

fn check_quota(pod: &Pod<'_>) -> Result<()> {
    let gpu = pod.gpu()?;
    ensure!(gpu.total == SHARE_BYTES, "{gpu:?}");
    check_fill(pod.fill(SHARE_BYTES)?, SHARE_BYTES)
}

/// The toolkit is disabled, whatever image and pod say.
fn check_void(pod: &Pod<'_>) -> Result<()> {
    let visible = pod.exec(&["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"])?;
    ensure!(visible == "void\n", "NVIDIA_VISIBLE_DEVICES={visible}");
    Ok(())
}

pub fn driver_root_and_device_nodes_serve_without_a_toolkit(suite: &Suite<'_>) -> Result<()> {
    // As a container that installs the driver leaves it: links that are right inside its root.
    suite.on_node(&format!(
        "mkdir -p {ROOT}/usr/lib64 {ROOT}/dev
         for f in libcuda libnvidia-ml; do
             cp /opt/simgpu/$f.so.1 {ROOT}/usr/lib64/$f.so.1.2.3
             ln -sf /usr/lib64/$f.so.1.2.3 {ROOT}/usr/lib64/$f.so.1
         done
         cd {ROOT}/dev; rm -f nvidia*
         mknod nvidia0 c 1 3; mknod nvidia1 c 1 3; mknod nvidiactl c 1 5"
    ))?;
    let (mounts, env) = CONFIG.split_once("# Where NVIDIA's toolkit").unwrap_or((CONFIG, ""));
    let hardware = env.split_once("# The simulated hardware").map_or("", |(_, rest)| rest);
    let config = format!(
        "{mounts}
[container]
device_list_strategy = \"device-nodes\"
[driver]
root = \"{ROOT}\"
device_nodes = [\"/dev/nvidia{{minor}}\", \"/dev/nvidiactl\"]
#{hardware}"
    );
    let outcome = under(suite, &config, || {
        let pod = Pod::start(suite.kubectl, "bare", tenant("main"))?;
        let numbers = pod.exec(&["stat", "-c", "%t:%T %F", "/dev/nvidia0", "/dev/nvidiactl"])?;
        let device = "character special file";
        ensure!(numbers == format!("1:3 {device}\n1:5 {device}\n"), "{numbers}");
        let other = pod.try_exec(&["test", "-e", "/dev/nvidia1"])?;
        ensure!(other.code != Some(0), "another GPU's node is there");
        let libraries = pod.exec(&["ls", INSIDE])?;
        let wanted = "libcuda.so.1\nlibcuda.so.1.2.3\nlibnvidia-ml.so.1\nlibnvidia-ml.so.1.2.3\n";
        ensure!(libraries == wanted, "{libraries}");
        let toolkits = pod.try_exec(&["test", "-e", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"])?;
        ensure!(toolkits.code != Some(0), "the driver is there twice");
        check_void(&pod)?;
        check_quota(&pod)
    });
    suite.on_node(&format!("rm -rf {ROOT}"))?;
    outcome
}

/// With a runtime that knows CDI a container gets all by it; with one that does not, nothing: no
/// pages, no driver, no GPU. Never a GPU without a quota. `TESSERA_E2E_CDI` says that it must.
pub fn cdi_annotations_give_all_or_nothing(suite: &Suite<'_>) -> Result<()> {
    let config = CONFIG.replace(
        "[paths]",
        "[container]\ndevice_list_strategy = \"cdi-annotations\"\n\
         [cdi]\ngpu_kind = \"\"\n[driver]\ndevice_nodes = []\n[paths]",
    );
    under(suite, &config, || {
        let pod = Pod::start(suite.kubectl, "by-name", tenant("main"))?;
        let spec = suite.plugin.exec(&["sh", "-c", "cat /var/run/cdi/tessera.dev-share_*.json"])?;
        ensure!(spec.contains("\"kind\": \"tessera.dev/share\""), "{spec}");
        check_void(&pod)?;
        let has = |path: &str| anyhow::Ok(pod.try_exec(&["test", "-e", path])?.code == Some(0));
        if !has("/usr/local/tessera/pages")? {
            ensure!(env::var_os("TESSERA_E2E_CDI").is_none(), "the runtime ignores CDI");
            println!(
                "     this runtime knows no CDI: all that can be seen is that it stays closed"
            );
            for path in ["/usr/local/tessera", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"] {
                ensure!(!has(path)?, "{path} is there");
            }
            ensure!(pod.gpu().is_err(), "a GPU without a quota");
            return Ok(());
        }
        check_quota(&pod)?;
        let preload = pod.exec(&["cat", "/etc/ld.so.preload"])?;
        ensure!(preload == "/usr/local/tessera/libtessera.so\n", "{preload:?}");
        // Not every shell expands a pattern after `>>`.
        let append =
            |page: &str| format!("for f in /usr/local/tessera/pages/*/{page}; do : >> $f; done");
        let refused = pod.try_exec(&["sh", "-c", &append("quota")])?;
        ensure!(refused.code != Some(0), "the quota page can be written");
        pod.exec(&["sh", "-c", &append("usage")])?;

        // As after a reboot: the container starts again from the name that kubelet remembers.
        suite.plugin.exec(&["sh", "-c", "rm /var/run/cdi/tessera.dev-share_*"])?;
        let (restarts, _) = pod.incarnation()?;
        pod.exec(&["touch", "/end"])?;
        pod.wait_for_restart(restarts)?;
        check_quota(&pod)?;

        // What a pod mounts over the pages, or says of the variable, is not what counts.
        let shadowing = shadowing_pod(suite)?;
        shadowing.wait_until_running()?;
        let quota = shadowing.exec(&["sh", "-c", "head -c 8 /usr/local/tessera/pages/*/quota"])?;
        ensure!(quota == "TSRQUOTA", "a pod's volume lies over the pages");
        check_void(&shadowing)?;
        check_quota(&shadowing)
    })
}

fn shadowing_pod<'a>(suite: &Suite<'a>) -> Result<Pod<'a>> {
    let mut pod = manifest("shadowing", Restart::Always, &[], &[tenant("main")]);
    let container = &mut pod["spec"]["containers"][0];
    container["env"] = json!([
        {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
    ]);
    container["volumeMounts"] = json!([{"name": "mine", "mountPath": "/usr/local/tessera/pages"}]);
    pod["spec"]["volumes"] = json!([{"name": "mine", "emptyDir": {}}]);
    suite.kubectl.create_pod(&pod)?;
    Ok(Pod::named(suite.kubectl, "shadowing"))
}
