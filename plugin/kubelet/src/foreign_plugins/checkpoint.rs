//! What kubelet's device checkpoint says of other plugins.
//!
//! Kubelets before 1.23 have no GetAllocatableResources, or have it switched off. They write the healthy
//! devices of every resource to `kubelet_internal_checkpoint` in the device-plugin directory whenever a
//! plugin lists its devices or a pod gets some (`pkg/kubelet/cm/devicemanager/manager.go`). The format is
//! kubelet's own, so this is a hint: what cannot be read is no answer. A plugin that has gone
//! stays in it until kubelet writes it again, at the latest when it forgets the plugin, after 5 minutes.

use std::collections::BTreeMap;
use std::path::Path;

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
    read(dir, parse)
}

/// Which pods' containers hold what. Entries of pods that have ended may still be among them. Blocking.
pub fn entries(dir: &Path) -> Result<Vec<Entry>, String> {
    read(dir, parse_entries)
}

fn read<T>(dir: &Path, parse: fn(&str) -> Result<T, serde_json::Error>) -> Result<T, String> {
    let path = dir.join(FILE);
    let text =
        files::text(&path, MAX_BYTES).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&text).map_err(|error| format!("{}: {error}", path.display()))
}

fn parse_entries(text: &str) -> Result<Vec<Entry>, serde_json::Error> {
    let held: Checkpoint<Held> = serde_json::from_str(text)?;
    Ok(held.data.entries.unwrap_or_default())
}

fn parse(text: &str) -> Result<Vec<Offer>, serde_json::Error> {
    let checkpoint: Checkpoint<Registered> = serde_json::from_str(text)?;
    let devices = checkpoint.data.devices.unwrap_or_default().into_iter();
    let offer = |(resource, ids): (_, Option<_>)| Offer {
        resource,
        device_ids: ids.unwrap_or_default(),
        holder: None,
    };
    Ok(devices.map(offer).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_devices_are_read_whatever_kubelet_wrote_the_rest() {
        // As kubelet 1.20 writes it: device ids of pods by NUMA node.
        let text = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c",
            "ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-a"]},"AllocResp":""}],
            "RegisteredDevices":{"nvidia.com/gpu":["GPU-a","GPU-b"],"example.com/none":null}},
            "Checksum":17}"#;
        let found = parse(text).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].device_ids, Vec::<String>::new());
        assert_eq!(found[1].resource, "nvidia.com/gpu");
        assert_eq!(found[1].device_ids, ["GPU-a", "GPU-b"]);
        let empty = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":1}"#;
        assert_eq!(parse(empty).unwrap(), []);
    }

    #[test]
    fn pods_are_read_by_uid_in_both_formats() {
        let text = r#"{"Data":{"PodDeviceEntries":[
            {"PodUID":"u","ContainerName":"c","ResourceName":"r",
             "DeviceIDs":{"-1":["b"],"0":["a"]},"AllocResp":"CAE="},
            {"PodUID":"v","ContainerName":"d","ResourceName":"r","DeviceIDs":["x"]},
            {"PodUID":"w","ContainerName":"e","ResourceName":"r","DeviceIDs":null}],
            "RegisteredDevices":null},"Checksum":17}"#;
        let found = parse_entries(text).unwrap();
        assert_eq!(found[0].device_ids, ["a", "b"]);
        assert_eq!((found[1].pod_uid.as_str(), found[1].device_ids.len()), ("v", 1));
        assert_eq!(found[2].device_ids, [""; 0]);
        let empty = r#"{"Data":{"PodDeviceEntries":null},"Checksum":1}"#;
        assert_eq!(parse_entries(empty).unwrap(), []);
        assert!(parse_entries("{}").is_err());
    }

    #[test]
    fn what_is_no_checkpoint_is_no_answer() {
        assert!(parse("").is_err());
        assert!(parse("{}").is_err());
        assert!(parse(r#"{"Data":{"RegisteredDevices":7}}"#).is_err());
        let dir = tempfile::tempdir().unwrap();
        let error = offers(dir.path()).unwrap_err();
        assert!(error.contains("kubelet_internal_checkpoint"), "{error}");
    }
}
