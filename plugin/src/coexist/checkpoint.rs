//! What kubelet's device checkpoint says of other plugins.
//!
//! Kubelets before 1.23 have no GetAllocatableResources, or have it switched off. They write the healthy
//! devices of every resource to `kubelet_internal_checkpoint` in the device-plugin directory whenever a
//! plugin lists its devices or a pod gets some (`pkg/kubelet/cm/devicemanager/manager.go`). The format is
//! kubelet's own affair, so this is a hint: what cannot be read is no answer. A plugin that has gone
//! stays in it until kubelet writes it again, at the latest when it forgets the plugin, after 5 minutes.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::Offer;

/// The file's name in kubelet's device-plugin directory.
pub const FILE: &str = "kubelet_internal_checkpoint";
/// Largest file; 1,024 replicas take some 60 KiB.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// `null` before the first plugin.
    #[serde(default)]
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// The devices that kubelet wrote down as healthy. Blocking.
///
/// # Errors
/// The file cannot be read, or is none that this knows.
pub fn offers(dir: &Path) -> Result<Vec<Offer>, String> {
    use std::io::Read;
    let path = dir.join(FILE);
    let mut text = String::new();
    std::fs::File::open(&path)
        .and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&text).map_err(|error| format!("{}: {error}", path.display()))
}

fn parse(text: &str) -> Result<Vec<Offer>, serde_json::Error> {
    let checkpoint: Checkpoint = serde_json::from_str(text)?;
    let devices = checkpoint.data.registered_devices.unwrap_or_default();
    Ok(devices
        .into_iter()
        .map(|(resource, ids)| Offer {
            resource,
            device_ids: ids.unwrap_or_default(),
            holder: None,
        })
        .collect())
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
    fn what_is_no_checkpoint_is_no_answer() {
        assert!(parse("").is_err());
        assert!(parse("{}").is_err());
        assert!(parse(r#"{"Data":{"RegisteredDevices":7}}"#).is_err());
        let dir = tempfile::tempdir().unwrap();
        let error = offers(dir.path()).unwrap_err();
        assert!(error.contains("kubelet_internal_checkpoint"), "{error}");
    }
}
