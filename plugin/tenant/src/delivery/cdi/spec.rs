//! A CDI spec (1.1.0 of the specification) of one device.

use serde::Serialize;

use super::KIND;
use tessera_config as config;
use tessera_model::allocation_id::AllocationId;

/// The lowest version in which a device's name may begin with a digit, and a node have another path on the host. A runtime
/// refuses a spec that is newer than itself. (Table "Released versions" of the specification.)
const VERSION: &str = "0.5.0";

/// One spec file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    cdi_version: &'static str,
    kind: &'static str,
    devices: [Device; 1],
}

/// A device, and what a container that asks for it gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    container_edits: ContainerEdits,
}

/// Changes to a container's OCI specification. They win over what the pod says: of a variable or a
/// mount that is there already, the runtime keeps only this one. One at least has to be there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ContainerEdits {
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes; type and number are the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DeviceNode {
    /// In the container.
    pub path: String,
    /// On the host, where that differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Of `r`, `w` and `m`.
    pub permissions: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Mount {
    host_path: String,
    container_path: String,
    /// As `mount(8)` has them.
    options: [&'static str; 3],
}

impl Mount {
    /// A bind mount, with the options that containerd gives kubelet's mounts.
    pub(super) fn bind(mount: &config::Mount) -> Self {
        let access = if mount.read_only { "ro" } else { "rw" };
        Mount {
            host_path: mount.host.to_string_lossy().into_owned(),
            container_path: mount.container.to_string_lossy().into_owned(),
            options: ["rbind", "rprivate", access],
        }
    }
}

impl Spec {
    /// A spec of our kind. Names and paths are what the configuration takes.
    pub(super) fn new(id: &AllocationId, container_edits: ContainerEdits) -> Self {
        let devices = [Device { name: id.to_string(), container_edits }];
        Spec { cdi_version: VERSION, kind: KIND, devices }
    }

    /// The file's content.
    pub(super) fn to_json(&self) -> Vec<u8> {
        // Strings, lists and maps with string keys: there is nothing that JSON lacks.
        let mut json = serde_json::to_vec_pretty(self).unwrap_or_default();
        json.push(b'\n');
        json
    }
}

#[cfg(test)]
mod tests;
