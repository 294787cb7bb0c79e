//! Which version of `resource.k8s.io` an API server has, and how slices look in it. Pure.
//!
//! v1 and v1beta2 differ in name alone, as far as slices go. v1beta1 has a device's fields in `basic`.

use k8s_openapi::api::resource::v1::ResourceSlice;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Version;
use crate::answer;

/// The API group.
pub(super) const GROUP: &str = "resource.k8s.io";

impl Version {
    /// As in an object's `apiVersion`.
    pub(super) fn api_version(self) -> String {
        format!("{GROUP}/{self}")
    }

    /// The newest of an `APIGroup` that we know.
    ///
    /// # Errors
    /// What it has instead.
    pub(super) fn newest(group: &[u8]) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Group {
            versions: Vec<Named>,
        }
        #[derive(Deserialize)]
        struct Named {
            version: String,
        }
        let group: Group = answer::read(group).map_err(|error| error.to_string())?;
        let served: Vec<String> = group.versions.into_iter().map(|named| named.version).collect();
        let newest = Version::ALL
            .into_iter()
            .find(|version| served.iter().any(|name| name == version.name()));
        newest.ok_or_else(|| format!("it has {}", served.join(", ")))
    }
}

/// A slice as a request's body.
///
/// # Errors
/// What serde says; there is no such slice.
pub(super) fn written(
    slice: &ResourceSlice,
    version: Version,
) -> Result<Vec<u8>, serde_json::Error> {
    if version == Version::V1 {
        return serde_json::to_vec(slice);
    }
    let mut object = serde_json::to_value(slice)?;
    object["apiVersion"] = json!(version.api_version());
    if version == Version::V1beta1 {
        each_device(&mut object, nested);
    }
    serde_json::to_vec(&object)
}

/// A slice from an answer.
///
/// # Errors
/// Why it is none.
pub(super) fn read(body: &[u8], version: Version) -> Result<ResourceSlice, serde_json::Error> {
    match version {
        Version::V1 => answer::read(body),
        _ => of_object(answer::read(body)?, version),
    }
}

/// The slices of a list.
///
/// # Errors
/// Why it is none.
pub(super) fn read_list(
    body: &[u8],
    version: Version,
) -> Result<Vec<ResourceSlice>, serde_json::Error> {
    #[derive(Deserialize)]
    struct List<T> {
        items: Option<Vec<T>>,
    }
    if version == Version::V1 {
        let list: List<ResourceSlice> = answer::read(body)?;
        return Ok(list.items.unwrap_or_default());
    }
    let list: List<Value> = answer::read(body)?;
    list.items.unwrap_or_default().into_iter().map(|object| of_object(object, version)).collect()
}

fn of_object(mut object: Value, version: Version) -> Result<ResourceSlice, serde_json::Error> {
    object["apiVersion"] = json!(Version::V1.api_version());
    object["kind"] = json!("ResourceSlice");
    if version == Version::V1beta1 {
        each_device(&mut object, flat);
    }
    serde_json::from_value(object)
}

fn each_device(object: &mut Value, change: fn(&mut Map<String, Value>)) {
    let devices = object.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
    devices.into_iter().flatten().filter_map(Value::as_object_mut).for_each(change);
}

fn nested(device: &mut Map<String, Value>) {
    let name = device.remove("name");
    let basic = std::mem::take(device);
    device.extend(name.map(|name| ("name".to_owned(), name)));
    device.insert("basic".to_owned(), Value::Object(basic));
}

fn flat(device: &mut Map<String, Value>) {
    if let Some(Value::Object(basic)) = device.remove("basic") {
        device.extend(basic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice() -> ResourceSlice {
        let object = json!({
            "metadata": { "name": "s", "resourceVersion": "7" },
            "spec": {
                "driver": "gpu.tessera.dev", "nodeName": "n1",
                "pool": { "name": "n1", "generation": 1, "resourceSliceCount": 1 },
                "devices": [{
                    "name": "gpu-a", "allowMultipleAllocations": true,
                    "attributes": { "uuid": { "string": "GPU-a" } },
                    "capacity": { "memory": { "value": "24Gi", "requestPolicy": { "default": "6Gi" } } },
                }, { "name": "gpu-b" }],
            },
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_slice_survives_each_version() {
        for version in Version::ALL {
            let body = written(&slice(), version).unwrap();
            let object: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(object["apiVersion"], format!("resource.k8s.io/{version}"));
            let device = &object["spec"]["devices"][0];
            assert_eq!(device["name"], "gpu-a");
            let fields = if version == Version::V1beta1 { &device["basic"] } else { device };
            assert_eq!(fields["allowMultipleAllocations"], true);
            assert_eq!(fields["capacity"]["memory"]["value"], "24Gi");
            assert_eq!(device.get("basic").is_some(), version == Version::V1beta1);
            assert_eq!(read(&body, version).unwrap(), slice());
            let list = json!({ "items": [object] }).to_string();
            assert_eq!(read_list(list.as_bytes(), version).unwrap(), [slice()]);
            assert_eq!(read_list(b"{\"items\":null}", version).unwrap(), []);
        }
    }

    #[test]
    fn the_newest_version_of_both_is_taken() {
        let newest = |names: &[&str]| {
            let versions: Vec<Value> =
                names.iter().map(|name| json!({ "version": name })).collect();
            Version::newest(json!({ "versions": versions }).to_string().as_bytes())
        };
        assert_eq!(newest(&["v1beta1", "v2", "v1", "v1beta2"]), Ok(Version::V1));
        assert_eq!(newest(&["v1beta2", "v1beta1"]), Ok(Version::V1beta2));
        assert_eq!(newest(&["v1alpha3", "v1beta1"]), Ok(Version::V1beta1));
        assert_eq!(newest(&["v1alpha3"]), Err("it has v1alpha3".to_owned()));
    }
}
