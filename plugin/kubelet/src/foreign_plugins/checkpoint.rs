//! What kubelet's device checkpoint says of other plugins.
//!
//! Kubelets before 1.23 have no GetAllocatableResources, or have it switched off. They write the healthy
//! devices of every resource to `kubelet_internal_checkpoint` in the device-plugin directory whenever a
//! plugin lists its devices or a pod gets some (`pkg/kubelet/cm/devicemanager/manager.go`). The format is
//! kubelet's own, so this is a hint: what cannot be read is no answer. A plugin that has gone
//! stays in it until kubelet writes it again, at the latest when it forgets the plugin, after 5 minutes.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::foreign_plugins::Offer;
use tessera_model::allocation_id::AllocationId;
use tessera_system::files;

pub const FILE: &str = "kubelet_internal_checkpoint";
/// Largest file; 1,024 replicas take some 60 KiB.
const MAX_BYTES: u64 = 16 << 20;

/// Each of its parts is read by itself, whatever kubelet wrote the rest.
#[derive(Deserialize)]
struct Checkpoint<T> {
    #[serde(rename = "Data")]
    data: T,
}

#[derive(Deserialize)]
struct Registered {
    /// `null` before the first plugin.
    #[serde(default, rename = "RegisteredDevices")]
    devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Deserialize)]
struct Held {
    #[serde(default, rename = "PodDeviceEntries")]
    entries: Option<Vec<Entry>>,
}

/// A container's devices of one resource, with the one thing that PodResources leaves out.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Entry {
    /// The pod's UID; of a static pod the hash of its manifest.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    #[serde(rename = "ContainerName")]
    pub container: String,
    #[serde(rename = "ResourceName")]
    pub resource: String,
    /// Device ids, sorted.
    #[serde(default, rename = "DeviceIDs", deserialize_with = "ids")]
    pub device_ids: Vec<String>,
}

impl Entry {
    /// The allocation that these devices are, if they are ours.
    pub fn allocation(&self) -> AllocationId {
        AllocationId::of(&self.resource, self.device_ids.iter().map(String::as_str))
    }
}

/// By NUMA node, from kubelet 1.20 on.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    ByNode(BTreeMap<String, Option<Vec<String>>>),
    Flat(Vec<String>),
}

fn ids<'de, D: Deserializer<'de>>(read: D) -> Result<Vec<String>, D::Error> {
    let mut ids: Vec<String> = match Option::deserialize(read)? {
        Some(Ids::ByNode(nodes)) => nodes.into_values().flatten().flatten().collect(),
        Some(Ids::Flat(ids)) => ids,
        None => Vec::new(),
    };
    ids.sort();
    Ok(ids)
}

/// The devices that kubelet wrote down as healthy. Blocking.
pub fn offers(dir: &Path) -> Result<Vec<Offer>, String> {
    let registered: Registered = read(dir)?;
    let offer = |(resource, ids): (_, Option<_>)| Offer {
        resource,
        device_ids: ids.unwrap_or_default(),
        holder: None,
    };
    Ok(registered.devices.unwrap_or_default().into_iter().map(offer).collect())
}

/// Which pods' containers hold what. Entries of pods that have ended may still be among them. Blocking.
pub fn entries(dir: &Path) -> Result<Vec<Entry>, String> {
    let held: Held = read(dir)?;
    Ok(held.entries.unwrap_or_default())
}

fn read<T: DeserializeOwned>(dir: &Path) -> Result<T, String> {
    let path = dir.join(FILE);
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = files::text(&path, MAX_BYTES).map_err(|error| wrong(&error))?;
    let read: Checkpoint<T> = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
    Ok(read.data)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What both readers say of a file.
    fn parse(text: &str) -> (Result<Vec<Offer>, String>, Result<Vec<Entry>, String>) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), text).unwrap();
        (offers(dir.path()), entries(dir.path()))
    }

    #[test]
    fn registered_devices_are_read_whatever_kubelet_wrote_the_rest() {
        // As kubelet 1.20 writes it: device ids of pods by NUMA node.
        let text = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c",
            "ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-a"]},"AllocResp":""}],
            "RegisteredDevices":{"nvidia.com/gpu":["GPU-a","GPU-b"],"example.com/none":null}},
            "Checksum":17}"#;
        let found = parse(text).0.unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].device_ids, Vec::<String>::new());
        assert_eq!(found[1].resource, "nvidia.com/gpu");
        assert_eq!(found[1].device_ids, ["GPU-a", "GPU-b"]);
        let empty = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":1}"#;
        assert_eq!(parse(empty), (Ok(vec![]), Ok(vec![])));
    }

    #[test]
    fn pods_are_read_by_uid_in_both_formats() {
        let text = r#"{"Data":{"PodDeviceEntries":[
            {"PodUID":"u","ContainerName":"c","ResourceName":"r",
             "DeviceIDs":{"-1":["b"],"0":["a"]},"AllocResp":"CAE="},
            {"PodUID":"v","ContainerName":"d","ResourceName":"r","DeviceIDs":["x"]},
            {"PodUID":"w","ContainerName":"e","ResourceName":"r","DeviceIDs":null}],
            "RegisteredDevices":null},"Checksum":17}"#;
        let found = parse(text).1.unwrap();
        assert_eq!(found[0].device_ids, ["a", "b"]);
        assert_eq!((found[1].pod_uid.as_str(), found[1].device_ids.len()), ("v", 1));
        assert_eq!(found[2].device_ids, [""; 0]);
    }

    #[test]
    fn what_is_no_checkpoint_is_no_answer() {
        for text in ["", "{}"] {
            let (offers, entries) = parse(text);
            assert!(offers.is_err() && entries.is_err(), "{text}");
        }
        let (offered, held) = parse(r#"{"Data":{"RegisteredDevices":7}}"#);
        assert!(offered.is_err() && held.is_ok(), "each part is read by itself");
        let error = offers(Path::new("/nowhere")).unwrap_err();
        assert!(error.contains("kubelet_internal_checkpoint"), "{error}");
    }
}
