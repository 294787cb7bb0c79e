//! Which pods hold what, with their UIDs, by kubelet's device checkpoint.
//!
//! Kubelet writes `kubelet_internal_checkpoint` in the device-plugin directory whenever a plugin lists its devices or a pod
//! gets some (`pkg/kubelet/cm/devicemanager/manager.go`). The format is kubelet's own, so this is a hint: from a
//! file that cannot be read nothing is learnt.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Deserializer};

use tessera_model::allocation_id::AllocationId;
use tessera_system::files;

const FILE: &str = "kubelet_internal_checkpoint";
/// Largest file; 1,024 replicas take some 60 KiB.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Deserialize)]
struct Checkpoint {
    #[serde(rename = "Data")]
    data: Held,
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

/// They come by NUMA node.
fn ids<'de, D: Deserializer<'de>>(read: D) -> Result<Vec<String>, D::Error> {
    let nodes: Option<BTreeMap<String, Option<Vec<String>>>> = Option::deserialize(read)?;
    let ids = nodes.unwrap_or_default().into_values().flatten().flatten();
    Ok(ids.collect::<BTreeSet<_>>().into_iter().collect())
}

/// Which pods' containers hold what. Entries of pods that have ended may still be among them. Blocking.
pub fn entries(dir: &Path) -> Result<Vec<Entry>, String> {
    let path = dir.join(FILE);
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = files::text(&path, MAX_BYTES).map_err(|error| wrong(&error))?;
    let read: Checkpoint = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
    Ok(read.data.entries.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Entry>, String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), text).unwrap();
        entries(dir.path())
    }

    #[test]
    fn pods_are_read_by_uid() {
        let text = r#"{"Data":{"PodDeviceEntries":[
            {"PodUID":"u","ContainerName":"c","ResourceName":"r",
             "DeviceIDs":{"-1":["b"],"0":["a"]},"AllocResp":"CAE="},
            {"PodUID":"w","ContainerName":"e","ResourceName":"r","DeviceIDs":null}],
            "RegisteredDevices":{"r":["a"]}},"Checksum":17}"#;
        let found = parse(text).unwrap();
        assert_eq!(found[0].device_ids, ["a", "b"]);
        assert_eq!((found[1].pod_uid.as_str(), found[1].device_ids.len()), ("w", 0));
        assert_eq!(parse(r#"{"Data":{"PodDeviceEntries":null},"Checksum":1}"#), Ok(vec![]));
    }

    #[test]
    fn what_is_no_checkpoint_is_no_answer() {
        for text in ["", "{}", r#"{"Data":{"PodDeviceEntries":7}}"#] {
            assert!(parse(text).is_err(), "{text}");
        }
        let error = entries(Path::new("/nowhere")).unwrap_err();
        assert!(error.contains("kubelet_internal_checkpoint"), "{error}");
    }
}
