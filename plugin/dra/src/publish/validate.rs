//! Kubernetes' limits for slices, so that a mistake here is said by the driver and not by the API server.

use std::collections::BTreeSet;

use tessera_cluster::k8s_openapi::api::resource::v1::{
    Device, DeviceAttribute, DeviceCapacity, DeviceTaint, ResourceSlice,
};
use tessera_cluster::k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::pool::{MOST, MOST_TAINTED};

/// What the API server would refuse of a slice, each with its field.
pub fn problems(slice: &ResourceSlice) -> Vec<String> {
    let mut found = Vec::new();
    let spec = &slice.spec;
    let mut check = |holds: bool, field: &str, rule: &str| {
        if !holds {
            found.push(format!("{field}: {rule}"));
        }
    };
    check(
        is_subdomain(&spec.driver, 63),
        "spec.driver",
        "must be a DNS name of at most 63 characters",
    );
    let is_pool = spec.pool.name.len() <= 253
        && spec.pool.name.split('/').all(|part| is_subdomain(part, 253));
    check(is_pool, "spec.pool.name", "must be DNS names of at most 253 characters together");
    check(spec.pool.generation >= 0, "spec.pool.generation", "must not be negative");
    check(
        spec.pool.resource_slice_count > 0,
        "spec.pool.resourceSliceCount",
        "must be more than 0",
    );
    let nodes = [
        spec.node_name.is_some(),
        spec.node_selector.is_some(),
        spec.all_nodes == Some(true),
        spec.per_device_node_selection == Some(true),
    ];
    let one = nodes.iter().filter(|is| **is).count() == 1;
    check(one, "spec.nodeName", "exactly one way to name nodes is needed");
    let devices = spec.devices.as_deref().unwrap_or_default();
    let tainted =
        devices.iter().any(|device| device.taints.as_ref().is_some_and(|t| !t.is_empty()));
    let most = if tainted { MOST_TAINTED } else { MOST };
    check(devices.len() <= most, "spec.devices", &format!("must be at most {most}"));
    let names: BTreeSet<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    check(names.len() == devices.len(), "spec.devices", "names must be different");
    for (i, one) in devices.iter().enumerate() {
        device(one, &mut |holds, field, rule| {
            check(holds, &format!("spec.devices[{i}] ({}){field}", one.name), rule);
        });
    }
    found
}

type Check<'c> = &'c mut dyn FnMut(bool, &str, &str);

fn device(device: &Device, check: Check<'_>) {
    let name = &device.name;
    let is_label = !name.contains('.') && is_subdomain(name, 63);
    check(is_label, ".name", "must be a DNS label");
    let attributes = device.attributes.iter().flatten();
    let capacities = device.capacity.iter().flatten();
    let names: Vec<&String> = attributes
        .clone()
        .map(|(name, _)| name)
        .chain(capacities.clone().map(|(name, _)| name))
        .collect();
    check(names.len() <= 32, ".attributes", "attributes and capacities must be at most 32");
    for name in names {
        check(
            is_qualified(name),
            &format!("[{name}]"),
            "must be a C identifier, after a DNS name and a slash if any",
        );
    }
    for (name, value) in attributes {
        check(
            is_attribute(value),
            &format!(".attributes[{name}]"),
            "must be one value of at most 64 bytes",
        );
    }
    for (name, value) in capacities {
        capacity(device, value, &mut |holds, rule| {
            check(holds, &format!(".capacity[{name}]"), rule)
        });
    }
    let taints = device.taints.as_deref().unwrap_or_default();
    check(taints.len() <= 16, ".taints", "must be at most 16");
    let keys: BTreeSet<_> = taints.iter().map(|taint| (&taint.key, &taint.effect)).collect();
    check(keys.len() == taints.len(), ".taints", "keys and effects must be different");
    check(
        taints.iter().all(is_taint),
        ".taints",
        "must have a label's key and value, and a known effect",
    );
}

fn capacity(device: &Device, capacity: &DeviceCapacity, check: &mut dyn FnMut(bool, &str)) {
    let Some(value) = units(&capacity.value) else {
        return check(false, "value must be a whole quantity");
    };
    let Some(policy) = &capacity.request_policy else { return };
    let shared = device.allow_multiple_allocations == Some(true);
    check(shared, "requestPolicy needs allowMultipleAllocations");
    let Some(default) = policy.default.as_ref().and_then(units) else {
        return check(false, "requestPolicy.default is needed");
    };
    check(default <= value, "requestPolicy.default must be at most the value");
    match (&policy.valid_values, &policy.valid_range) {
        (Some(values), None) => {
            let values: Vec<u64> = values.iter().filter_map(units).collect();
            check((1..=10).contains(&values.len()), "validValues must be 1 to 10");
            check(
                values.is_sorted() && values.windows(2).all(|w| w[0] != w[1]),
                "validValues must rise",
            );
            check(values.contains(&default), "validValues must have the default");
            check(values.iter().all(|one| *one <= value), "validValues must be at most the value");
        }
        (None, Some(range)) => {
            let Some(min) = units(&range.min) else {
                return check(false, "validRange.min must be a whole quantity");
            };
            let max = range.max.as_ref().and_then(units).unwrap_or(value);
            check(
                min <= default && default <= max && max <= value,
                "min ≤ default ≤ max ≤ value must hold",
            );
            if let Some(step) = range.step.as_ref().and_then(units) {
                check(step > 0 && min + step <= value, "there must be room for one step");
                let fits = |units: u64| step > 0 && (units - min.min(units)).is_multiple_of(step);
                check(fits(default), "the default must be min and some steps");
                check(range.max.is_none() || fits(max), "max must be min and some steps");
            }
        }
        _ => check(false, "requestPolicy needs either validValues or validRange"),
    }
}

fn units(quantity: &Quantity) -> Option<u64> {
    let parsed = tessera_model::quantity::Quantity::parse(&quantity.0).ok()?;
    parsed.units().ok()
}

fn is_attribute(attribute: &DeviceAttribute) -> bool {
    let DeviceAttribute { bool, int, string, version, .. } = attribute;
    let set = [bool.is_some(), int.is_some(), string.is_some(), version.is_some()];
    let fits = |text: &Option<String>| text.as_ref().is_none_or(|text| text.len() <= 64);
    set.iter().filter(|is| **is).count() == 1
        && fits(string)
        && fits(version)
        && version.as_deref().is_none_or(is_semver)
}

/// Three numbers without leading zeros: what the driver writes of Semantic Versioning.
fn is_semver(text: &str) -> bool {
    let number = |part: &str| {
        let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        digits && (part == "0" || !part.starts_with('0'))
    };
    text.split('.').count() == 3 && text.split('.').all(number)
}

fn is_taint(taint: &DeviceTaint) -> bool {
    let value = taint.value.as_deref().unwrap_or_default();
    let edge = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let is_value = value.len() <= 63
        && edge(value.as_bytes().first())
        && edge(value.as_bytes().last())
        && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    let is_key = taint
        .key
        .split_once('/')
        .is_some_and(|(domain, name)| is_subdomain(domain, 253) && is_subdomain(name, 63));
    is_key && is_value && matches!(taint.effect.as_str(), "None" | "NoSchedule" | "NoExecute")
}

fn is_qualified(name: &str) -> bool {
    let (domain, identifier) = name.split_once('/').map_or((None, name), |(d, i)| (Some(d), i));
    let first = identifier.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    let rest = identifier.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    first && rest && identifier.len() <= 32 && domain.is_none_or(|domain| is_subdomain(domain, 63))
}

fn is_subdomain(name: &str, longest: usize) -> bool {
    let label = |label: &str| {
        let edge =
            |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        let bytes = label.as_bytes();
        edge(bytes.first())
            && edge(bytes.last())
            && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
    };
    name.len() <= longest && name.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tessera_config::Config;

    use super::super::fixtures::{MIB, gpu, mig};
    use super::super::pool::{self, Node};
    use super::super::{Offer, Published};
    use super::*;
    use tessera_agent::front_end::dra::DraGpu;

    fn good() -> ResourceSlice {
        let node = Node { name: "n1".to_owned(), uid: "u".to_owned() };
        let gpu = DraGpu { cordon: Some("x".to_owned()), ..gpu("GPU-a", 0) };
        let published = Published { gpu, pcie_root: Some("pci0000:00".to_owned()) };
        let slice =
            pool::slice(&node, &Offer::new(&[published], &Config::default()).shared, 0, 1, 1);
        assert_eq!(problems(&slice), Vec::<String>::new());
        slice
    }

    #[test]
    fn each_rule_is_broken_once() {
        type Break = fn(&mut ResourceSlice);
        fn device(slice: &mut ResourceSlice) -> &mut Device {
            &mut slice.spec.devices.as_mut().unwrap()[0]
        }
        fn memory(slice: &mut ResourceSlice) -> &mut DeviceCapacity {
            device(slice).capacity.as_mut().unwrap().get_mut("memory").unwrap()
        }
        fn attribute(slice: &mut ResourceSlice, name: &str, attribute: DeviceAttribute) {
            device(slice).attributes.as_mut().unwrap().insert(name.to_owned(), attribute);
        }
        let string = |text: &str| DeviceAttribute {
            string: Some(text.to_owned()),
            ..DeviceAttribute::default()
        };
        let _ = string("");
        let cases: [(&str, Break); 18] = [
            ("spec.driver", |s| s.spec.driver = "Gpu".to_owned()),
            ("spec.pool.name", |s| s.spec.pool.name = "n_1".to_owned()),
            ("resourceSliceCount", |s| s.spec.pool.resource_slice_count = 0),
            ("generation", |s| s.spec.pool.generation = -1),
            ("spec.nodeName", |s| s.spec.node_name = None),
            ("spec.nodeName", |s| s.spec.all_nodes = Some(true)),
            ("names must be different", |s| {
                let twin = device(s).clone();
                s.spec.devices.as_mut().unwrap().push(twin);
            }),
            ("at most 64", |s| {
                let one = device(s).clone();
                let more = (0..64).map(|i| Device { name: format!("gpu-{i}"), ..one.clone() });
                s.spec.devices = Some(more.chain([one.clone()]).collect());
            }),
            ("DNS label", |s| device(s).name = "gpu.a".to_owned()),
            ("C identifier", |s| {
                let value = DeviceAttribute { int: Some(1), ..DeviceAttribute::default() };
                attribute(s, "product-name", value);
            }),
            ("one value", |s| {
                let value =
                    DeviceAttribute { string: Some("x".repeat(65)), ..DeviceAttribute::default() };
                attribute(s, "long", value);
            }),
            ("one value", |s| {
                let value = DeviceAttribute {
                    version: Some("580.65.06".to_owned()),
                    ..DeviceAttribute::default()
                };
                attribute(s, "driverVersion", value);
            }),
            ("at most 32", |s| {
                for i in 0..32 {
                    let value = DeviceAttribute { int: Some(i), ..DeviceAttribute::default() };
                    attribute(s, &format!("a{i}"), value);
                }
            }),
            ("allowMultipleAllocations", |s| device(s).allow_multiple_allocations = None),
            ("steps", |s| {
                let policy = memory(s).request_policy.as_mut().unwrap();
                policy.default = Some(Quantity("1000Mi".to_owned()));
            }),
            ("min ≤ default", |s| {
                let policy = memory(s).request_policy.as_mut().unwrap();
                policy.default = Some(Quantity("64Mi".to_owned()));
            }),
            ("known effect", |s| device(s).taints.as_mut().unwrap()[0].effect = "Evict".to_owned()),
            ("known effect", |s| {
                device(s).taints.as_mut().unwrap()[0].value = Some("a b".to_owned())
            }),
        ];
        for (part, break_it) in cases {
            let mut slice = good();
            break_it(&mut slice);
            let found = problems(&slice);
            assert!(found.iter().any(|problem| problem.contains(part)), "{part}: {found:?}");
        }
    }

    fn any_gpu() -> impl Strategy<Value = Published> {
        let text = || prop_oneof![r"[A-Za-z0-9 _.:/-]{0,80}", r"\PC{0,30}"];
        let ids = (
            prop_oneof![r"(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}", r"\PC{1,90}"],
            0u32..20,
            any::<bool>(),
        );
        let words = (text(), text(), prop_oneof![r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}", r"\PC{0,20}"]);
        let sizes = (0u64..200 << 30, 0u64..200 << 30, 0u32..=1000, 0u64..8 << 30);
        let troubles = (
            prop::option::of(text()),
            prop::option::of(text()),
            prop::option::of(text()),
            any::<bool>(),
        );
        (ids, words, sizes, troubles).prop_map(|(ids, words, sizes, troubles)| {
            let mut one = if ids.2 { mig(&ids.0, ids.1) } else { gpu(&ids.0, ids.1) };
            (one.gpu.name, one.gpu.pci_bus_id) = (words.0, words.1);
            one.driver_version = Some(words.2);
            one.context_bytes = sizes.3;
            (one.memory_bytes, one.default_memory_bytes, one.default_cores_millis) =
                (sizes.0, sizes.1, sizes.2);
            one.sick = troubles.0;
            one.cordon = troubles.1;
            one.moving = troubles.3;
            one.free_bytes = sizes.0 / 2;
            one.grown_bytes = sizes.1 / 2;
            Published { gpu: one, pcie_root: troubles.2 }
        })
    }

    proptest! {
        /// Whatever GPUs and configurations there are, the API server takes what is published of them.
        #[test]
        fn what_is_published_is_valid(
            gpus in prop::collection::vec(any_gpu(), 0..40),
            step in 1u64..4096, replicas in 1u32..=256, packed in any::<bool>(), evict in any::<bool>(),
            node in r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?){0,3}",
        ) {
            let placement = if packed { "packed" } else { "distributed" };
            let evict = if evict { "\"unhealthy\", \"cordoned\"" } else { "" };
            let config = Config::parse(&format!(
                "[share]\nreplicas = {replicas}\nplacement = \"{placement}\"\n[dra]\nmemory_step = \"{step}Mi\"\n\
                 no_execute = [{evict}]\n"
            )).unwrap();
            let node = Node { name: node, uid: "u".to_owned() };
            let offer = Offer::new(&gpus, &config);
            for devices in [&offer.shared, &offer.fixed] {
                let parts = pool::cut(devices);
                for (i, part) in parts.iter().enumerate() {
                    let slice = pool::slice(&node, part, i, parts.len(), 1);
                    prop_assert_eq!(problems(&slice), Vec::<String>::new());
                }
            }
            // Shares of fixed size never add up to more than their GPU.
            for published in &gpus {
                let name = crate::names::device(&published.gpu.gpu.uuid);
                let shares = offer.fixed.iter().filter(|device| crate::names::parts(&device.name).0 == name);
                let sum = |key: &str| -> u64 {
                    let own = shares.clone().filter_map(|device| units(&device.capacity.as_ref()?[key].value));
                    own.sum()
                };
                let most = gpus.iter().filter(|other| crate::names::device(&other.gpu.gpu.uuid) == name);
                let most = most.map(|other| other.gpu.memory_bytes).max().unwrap();
                prop_assert!(sum("memory") <= most && sum("cores") <= 100, "{}", name);
                prop_assert!(sum("memory") % MIB == 0);
            }
        }
    }
}
