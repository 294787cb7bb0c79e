//! A plan to kubelet's answer: how a container gets its GPU, its pages and the shim. Pure.
//!
//! The GPU itself comes by `container.device_list_strategy`, one file each: [`envvar`],
//! [`device_nodes`].

mod device_nodes;
mod envvar;

use std::path::{Path, PathBuf};

use tessera_kubelet::deviceplugin::{ContainerAllocateResponse, Mount};
use tessera_region::layout;

use crate::allocate::{Catalogue, Plan};
use crate::config::{CONTAINER_DRIVER_DIR, Config, DeviceListStrategy};

/// Where things are on the host.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// The installed shim.
    pub shim: PathBuf,
    /// The file to mount as `/etc/ld.so.preload`.
    pub preload: PathBuf,
}

/// Kubelet's answer: paths only. What the limits are stands in the quota page, because a pod's own
/// environment would override ours.
#[must_use]
pub fn response(
    plan: &Plan,
    pages: &Path,
    delivery: &Delivery,
    config: &Config,
    catalogue: &Catalogue,
) -> ContainerAllocateResponse {
    let mut response = ContainerAllocateResponse::default();
    let mut mount = |host: &Path, container: &str, read_only| {
        response.mounts.push(Mount {
            host_path: host.to_string_lossy().into_owned(),
            container_path: container.to_owned(),
            read_only,
        });
    };
    // The directory first, the writable file over it after; runtimes sort by depth as well.
    mount(pages, layout::CONTAINER_PAGES_DIR, true);
    let usage = format!("{}/{}", layout::CONTAINER_PAGES_DIR, layout::USAGE_FILE);
    mount(&pages.join(layout::USAGE_FILE), &usage, false);
    mount(&delivery.shim, layout::CONTAINER_SHIM, true);
    if config.container.inject_file {
        mount(&delivery.preload, "/etc/ld.so.preload", true);
    }
    if let Some(libraries) = &config.driver.libraries {
        mount(libraries, CONTAINER_DRIVER_DIR, true);
    }
    for extra in &config.driver.mounts {
        mount(&extra.host, &extra.container.to_string_lossy(), extra.read_only);
    }

    if config.driver.libraries.is_some() {
        response.envs.insert("LD_LIBRARY_PATH".into(), CONTAINER_DRIVER_DIR.into());
    }
    if config.container.inject_env {
        response.envs.insert("LD_PRELOAD".into(), layout::CONTAINER_SHIM.into());
    }
    match config.container.device_list_strategy {
        DeviceListStrategy::Envvar => envvar::add(plan, &mut response),
        DeviceListStrategy::DeviceNodes => {
            device_nodes::add(plan, &config.driver, catalogue, &mut response);
        }
        DeviceListStrategy::None => {}
    }
    for (name, value) in &config.driver.env {
        response.envs.insert(name.clone(), value.clone());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocate::plan;

    const GPU: &str = "tessera.dev/gpu";

    fn ids(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    fn delivery() -> Delivery {
        Delivery { shim: "/shims/ab/libtessera.so".into(), preload: "/shims/ab/preload".into() }
    }

    #[test]
    fn the_answer_mounts_pages_read_only_and_the_usage_file_over_them() {
        let (catalogue, config) = (Catalogue::example(), Config::default());
        let plan = plan(&catalogue, GPU, &ids(&["GPU-a::0"])).unwrap();
        let answer = response(&plan, Path::new("/pages/x"), &delivery(), &config, &catalogue);
        let mounts: Vec<_> = answer
            .mounts
            .iter()
            .map(|m| (m.host_path.as_str(), m.container_path.as_str(), m.read_only))
            .collect();
        assert_eq!(
            mounts,
            [
                ("/pages/x", "/usr/local/tessera/pages", true),
                ("/pages/x/usage", "/usr/local/tessera/pages/usage", false),
                ("/shims/ab/libtessera.so", "/usr/local/tessera/libtessera.so", true),
                ("/shims/ab/preload", "/etc/ld.so.preload", true),
            ]
        );
        assert_eq!(answer.envs.len(), 1);
        assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], "GPU-a");
        assert!(answer.devices.is_empty());
    }

    #[test]
    fn device_nodes_and_driver_libraries_serve_where_no_toolkit_is() {
        let config = Config::parse(
            r#"
            [container]
            inject = ["file", "env"]
            device_list_strategy = "device-nodes"
            [driver]
            libraries = "/opt/driver"
            device_nodes = ["/dev/nvidia{minor}", "/dev/nvidiactl"]
            env = { SIMGPU_STATE = "/state" }
            mounts = [{ host = "/var/sim", container = "/state", read_only = false }]
            "#,
        )
        .unwrap();
        let catalogue = Catalogue::example();
        let plan = plan(&catalogue, GPU, &ids(&["GPU-b::0"])).unwrap();
        let answer = response(&plan, Path::new("/pages/x"), &delivery(), &config, &catalogue);
        let nodes: Vec<_> = answer.devices.iter().map(|d| d.host_path.as_str()).collect();
        assert_eq!(nodes, ["/dev/nvidia1", "/dev/nvidiactl"]);
        assert_eq!(answer.envs["LD_PRELOAD"], "/usr/local/tessera/libtessera.so");
        assert_eq!(answer.envs["LD_LIBRARY_PATH"], "/usr/local/tessera/driver");
        assert_eq!(answer.envs["SIMGPU_STATE"], "/state");
        assert!(!answer.envs.contains_key("NVIDIA_VISIBLE_DEVICES"));
        let last = answer.mounts.last().unwrap();
        assert_eq!((last.host_path.as_str(), last.read_only), ("/var/sim", false));
    }
}
