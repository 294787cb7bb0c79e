//! A CDI spec, checked by the rules of the specification (1.1.0) when it is made. Knows nothing of
//! allocations: it takes a name and what a container of that name gets.

use serde::{Deserialize, Serialize};

use tessera_config as config;
use tessera_model::cdi_name;
use tessera_model::cdi_name::NameError;

/// One spec file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    cdi_version: String,
    kind: String,
    devices: Vec<Device>,
}

/// A device, and what a container that asks for it gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Unique within the kind.
    pub name: String,
    /// Must not be empty.
    pub container_edits: ContainerEdits,
}

/// Changes to a container's OCI specification. They win over what the pod says: of a variable or a
/// mount that is there already, the runtime keeps only this one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes; type and number are the host's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// In the container.
    pub path: String,
    /// On the host, where that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Of `r`, `w` and `m`.
    pub permissions: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    pub host_path: String,
    pub container_path: String,
    /// As `mount(8)` has them.
    pub options: Vec<String>,
}

/// What CDI cannot express.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    #[error(transparent)]
    Name(#[from] NameError),
    /// A runtime refuses the whole file.
    #[error("a CDI spec needs at least one device, each of another name, and none without edits")]
    Devices,
    /// A variable without a name, or with a NUL.
    #[error("\"{0}\" cannot be a variable of a container")]
    Variable(String),
    /// A relative path, or one with a NUL.
    #[error("\"{0}\" is not an absolute path")]
    Path(String),
    /// Something beside `r`, `w` and `m`.
    #[error("\"{0}\" is no combination of r, w and m")]
    Permissions(String),
}

impl Mount {
    /// A bind mount, with the options that containerd gives kubelet's mounts.
    pub(super) fn bind(mount: &config::Mount) -> Self {
        let access = if mount.read_only { "ro" } else { "rw" };
        Mount {
            host_path: mount.host.to_string_lossy().into_owned(),
            container_path: mount.container.to_string_lossy().into_owned(),
            options: ["rbind", "rprivate", access].map(str::to_owned).to_vec(),
        }
    }
}

impl Spec {
    /// A spec of that kind.
    pub fn new(kind: &str, devices: Vec<Device>) -> Result<Self, SpecError> {
        cdi_name::kind(kind)?;
        let mut names = std::collections::BTreeSet::new();
        for device in &devices {
            cdi_name::device(&device.name)?;
            if !names.insert(&device.name) || device.container_edits == ContainerEdits::default() {
                return Err(SpecError::Devices);
            }
            device.container_edits.check()?;
        }
        if devices.is_empty() {
            return Err(SpecError::Devices);
        }
        let cdi_version = lowest_version(kind, &devices).to_owned();
        Ok(Spec { cdi_version, kind: kind.to_owned(), devices })
    }

    /// The file's content.
    pub fn to_json(&self) -> Vec<u8> {
        // Strings, lists and maps with string keys: there is nothing that JSON lacks.
        let mut json = serde_json::to_vec_pretty(self).unwrap_or_default();
        json.push(b'\n');
        json
    }

    pub fn kind(&self) -> &str {
        &self.kind
    }
}

impl ContainerEdits {
    fn check(&self) -> Result<(), SpecError> {
        for variable in &self.env {
            let named = variable.find('=').is_some_and(|at| at > 0);
            if !named || variable.contains('\0') {
                return Err(SpecError::Variable(variable.clone()));
            }
        }
        let nodes =
            self.device_nodes.iter().flat_map(|node| [Some(&node.path), node.host_path.as_ref()]);
        let mounts = self.mounts.iter().flat_map(|m| [Some(&m.host_path), Some(&m.container_path)]);
        for path in nodes.chain(mounts).flatten() {
            if !path.starts_with('/') || path.contains('\0') {
                return Err(SpecError::Path(path.clone()));
            }
        }
        for DeviceNode { permissions, .. } in &self.device_nodes {
            if permissions.is_empty() || permissions.bytes().any(|byte| !b"rwm".contains(&byte)) {
                return Err(SpecError::Permissions(permissions.clone()));
            }
        }
        Ok(())
    }
}

/// The lowest version that has everything used: a runtime refuses a spec that is newer than itself, and
/// one that uses what its version lacks. (Table "Released versions" of the specification.)
fn lowest_version(kind: &str, devices: &[Device]) -> &'static str {
    let digit = |device: &Device| device.name.starts_with(|c: char| c.is_ascii_digit());
    let host_path = |device: &Device| {
        device.container_edits.device_nodes.iter().any(|node| node.host_path.is_some())
    };
    if kind.split_once('/').is_some_and(|(_, class)| class.contains('.')) {
        "0.6.0"
    } else if devices.iter().any(|device| digit(device) || host_path(device)) {
        "0.5.0"
    } else {
        "0.3.0"
    }
}

#[cfg(test)]
mod tests;
