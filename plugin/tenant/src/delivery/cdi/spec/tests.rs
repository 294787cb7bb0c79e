use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::delivery::driver::{Node, Parts};
use crate::delivery::{Delivery, DeliveryPlan, cdi};
use tessera_config::{Config, Inject};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;

fn written(config: &str, id: &str, parts: Parts) -> Value {
    let config = Config::parse(config).unwrap();
    let id = AllocationId::parse(id).unwrap();
    let gpu = Gpu::example("GPU-a", 0);
    let shim = Delivery { shim: "/shims/ab/libtessera.so".into(), preload: "/shims/ab/pre".into() };
    let pages = Path::new("/pages/x");
    let plan =
        DeliveryPlan { id: &id, gpus: vec![&gpu], pages, shim: &shim, parts, by_cdi_alone: false };
    serde_json::from_slice(&cdi::spec(&plan, &config).unwrap().to_json()).unwrap()
}

const CDI: &str = "[container]\ndevice_list_strategy = \"cdi-cri\"\n";

fn mount(host: &str, container: &str, access: &str) -> Value {
    json!({
        "hostPath": host,
        "containerPath": container,
        "options": ["rbind", "rprivate", access],
    })
}

#[test]
fn an_allocations_spec_has_pages_and_shim_and_leaves_the_gpu_to_nvidias() {
    let id = "abcdef0123456789abcdef0123456789";
    let nodes = vec![Node { host: "/dev/x".into(), container: "/dev/x".into() }];
    let spec = written(CDI, id, Parts { nodes, ..Parts::default() });
    assert_eq!(
        spec,
        json!({
            "cdiVersion": "0.3.0",
            "kind": "tessera.dev/share",
            "devices": [{
                "name": id,
                "containerEdits": {
                    "env": ["NVIDIA_VISIBLE_DEVICES=void"],
                    "mounts": [
                        mount("/pages/x", "/usr/local/tessera/pages/abcdef0123456789abcdef0123456789", "ro"),
                        mount("/pages/x/usage", "/usr/local/tessera/pages/abcdef0123456789abcdef0123456789/usage", "rw"),
                        mount("/shims/ab/libtessera.so", "/usr/local/tessera/libtessera.so", "ro"),
                        mount("/shims/ab/pre", "/etc/ld.so.preload", "ro"),
                    ],
                },
            }],
        })
    );
}

#[test]
fn a_claims_spec_has_the_variables_that_an_answer_would_have() {
    let config = "[driver]\nlibraries = \"/opt/driver\"\n[driver.env]\nMODE = \"x\"\n";
    let config = Config::parse(&format!("{CDI}{config}")).unwrap();
    let (id, gpu) = (AllocationId::of("a", ["b"]), Gpu::example("GPU-a", 0));
    let shim = Delivery { shim: "/shims/ab/libtessera.so".into(), preload: "/shims/ab/pre".into() };
    let (pages, parts) = (Path::new("/pages/x"), Parts::default());
    let env = |by_cdi_alone| {
        let parts = parts.clone();
        let plan =
            DeliveryPlan { id: &id, gpus: vec![&gpu], pages, shim: &shim, parts, by_cdi_alone };
        cdi::spec(&plan, &config).unwrap().devices[0].container_edits.env.clone()
    };
    let void = "NVIDIA_VISIBLE_DEVICES=void";
    assert_eq!(env(false), [void]);
    let path = "LD_LIBRARY_PATH=/usr/local/tessera/driver";
    assert_eq!(env(true), [void, path, "MODE=x"]);
}

#[test]
fn without_nvidias_spec_ours_has_nodes_libraries_and_the_preload_that_a_pod_cannot_unset() {
    let config = "
        [container]
        inject = [\"env\"]
        device_list_strategy = \"cdi-annotations\"
        [cdi]
        gpu_kind = \"\"
    ";
    let parts = Parts {
        libraries: vec![tessera_config::Mount {
            host: "/run/nvidia/driver/usr/lib64/libcuda.so.550.1".into(),
            container: "/usr/local/tessera/driver/libcuda.so.1".into(),
            read_only: true,
        }],
        nodes: vec![
            Node { host: "/dev/nvidiactl".into(), container: "/dev/nvidiactl".into() },
            Node { host: "/run/d/dev/nvidia0".into(), container: "/dev/nvidia0".into() },
        ],
    };
    let spec = written(config, "0bcdef0123456789abcdef0123456789", parts);
    // A name that begins with a digit, and a node that has another path on the host.
    assert_eq!(spec["cdiVersion"], "0.5.0");
    let edits = &spec["devices"][0]["containerEdits"];
    assert_eq!(
        edits["env"],
        json!(["NVIDIA_VISIBLE_DEVICES=void", "LD_PRELOAD=/usr/local/tessera/libtessera.so"])
    );
    assert_eq!(
        edits["deviceNodes"],
        json!([
            { "path": "/dev/nvidiactl", "permissions": "rw" },
            { "path": "/dev/nvidia0", "hostPath": "/run/d/dev/nvidia0", "permissions": "rw" },
        ])
    );
    let mounts = edits["mounts"].as_array().unwrap();
    assert_eq!(mounts.len(), 4, "no ld.so.preload");
    assert_eq!(mounts[3]["containerPath"], "/usr/local/tessera/driver/libcuda.so.1");
}

#[test]
fn what_a_runtime_would_refuse_is_no_spec() {
    let edits = |env: &str| ContainerEdits { env: vec![env.into()], ..Default::default() };
    let device = |name: &str| Device { name: name.into(), container_edits: edits("A=b") };
    let refused = |kind: &str, devices| Spec::new(kind, devices).unwrap_err();
    assert!(matches!(refused("share", vec![device("a")]), SpecError::Name(_)));
    assert!(matches!(refused("a.b/c", vec![device("a=b")]), SpecError::Name(_)));
    assert_eq!(refused("a.b/c", vec![]), SpecError::Devices);
    assert_eq!(refused("a.b/c", vec![device("a"), device("a")]), SpecError::Devices);
    let empty = Device { name: "a".into(), container_edits: ContainerEdits::default() };
    assert_eq!(refused("a.b/c", vec![empty]), SpecError::Devices);
    let with = |container_edits| vec![Device { name: "a".into(), container_edits }];
    assert!(matches!(refused("a.b/c", with(edits("=b"))), SpecError::Variable(_)));
    let path =
        |path: &str| DeviceNode { path: path.into(), host_path: None, permissions: "rw".into() };
    let node = |node| ContainerEdits { device_nodes: vec![node], ..Default::default() };
    assert!(matches!(refused("a.b/c", with(node(path("dev/x")))), SpecError::Path(_)));
    let odd = DeviceNode { permissions: "rx".into(), ..path("/dev/x") };
    assert!(matches!(refused("a.b/c", with(node(odd))), SpecError::Permissions(_)));
    // Dots in a class came with 0.6.0.
    let dotted = Spec::new("a.b/c.d", vec![device("a")]).unwrap();
    assert_eq!(dotted.cdi_version, "0.6.0");
}

/// The rules of the specification and of its JSON schema (1.1.0), by hand and apart from the writer.
fn problems(spec: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    let mut need = |holds: bool, what: &str| {
        if !holds {
            problems.push(what.to_owned());
        }
    };
    let only = |value: &Value, keys: &[&str]| {
        value.as_object().is_some_and(|map| map.keys().all(|key| keys.contains(&key.as_str())))
    };
    let strings = |value: &Value| {
        value.is_null() || value.as_array().is_some_and(|list| list.iter().all(Value::is_string))
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let inner = |c: char, extra: &str| c.is_ascii_alphanumeric() || extra.contains(c);
    let ends = |name: &str| name.ends_with(|c: char| c.is_ascii_alphanumeric());

    need(only(spec, &["cdiVersion", "kind", "devices"]), "keys of the spec");
    let known = ["0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"];
    let version = known.iter().position(|known| text(&spec["cdiVersion"]) == *known);
    need(version.is_some(), "cdiVersion");
    let at_least = |wanted: &str| known.iter().position(|v| *v == wanted) <= version;
    let kind = text(&spec["kind"]);
    let (vendor, class) = kind.split_once('/').unwrap_or_default();
    for part in [vendor, class] {
        need(part.starts_with(|c: char| c.is_ascii_alphabetic()) && ends(part), "kind");
        need(part.chars().all(|c| inner(c, "-_.")), "characters of the kind");
    }
    need(class.len() <= 63 && vendor.len() <= 253, "length of the kind");
    need(!class.contains('.') || at_least("0.6.0"), "a dot before 0.6.0");
    let devices = spec["devices"].as_array().cloned().unwrap_or_default();
    need(!devices.is_empty(), "a device");
    for device in devices {
        need(only(&device, &["name", "containerEdits"]), "keys of a device");
        let name = text(&device["name"]);
        need(name.starts_with(|c: char| c.is_ascii_alphanumeric()) && ends(&name), "name");
        need(name.chars().all(|c| inner(c, "-_.:")), "characters of the name");
        let digit = name.starts_with(|c: char| c.is_ascii_digit());
        need(!digit || at_least("0.5.0"), "a digit first before 0.5.0");
        let edits = &device["containerEdits"];
        need(only(edits, &["env", "deviceNodes", "mounts"]), "keys of the edits");
        need(edits.as_object().is_some_and(|edits| !edits.is_empty()), "edits");
        need(strings(&edits["env"]), "env");
        for variable in edits["env"].as_array().into_iter().flatten() {
            need(text(variable).find('=').is_some_and(|at| at > 0), "a variable");
        }
        for node in edits["deviceNodes"].as_array().into_iter().flatten() {
            need(only(node, &["path", "hostPath", "permissions"]), "keys of a node");
            need(text(&node["path"]).starts_with('/'), "path of a node");
            let host = &node["hostPath"];
            need(host.is_null() || text(host).starts_with('/'), "hostPath of a node");
            need(host.is_null() || at_least("0.5.0"), "hostPath before 0.5.0");
            let permissions = text(&node["permissions"]);
            need(permissions.chars().all(|c| "rwm".contains(c)), "permissions");
        }
        for mount in edits["mounts"].as_array().into_iter().flatten() {
            need(only(mount, &["hostPath", "containerPath", "options"]), "keys of a mount");
            need(text(&mount["hostPath"]).starts_with('/'), "hostPath of a mount");
            need(text(&mount["containerPath"]).starts_with('/'), "containerPath");
            need(strings(&mount["options"]), "options");
            // runc takes it for a file system otherwise.
            let options = mount["options"].as_array().cloned().unwrap_or_default();
            need(options.contains(&json!("rbind")), "a bind mount");
        }
    }
    problems
}

#[test]
fn the_check_of_these_tests_sees_mistakes() {
    let good = written(CDI, "abcdef0123456789abcdef0123456789", Parts::default());
    assert_eq!(problems(&good), [""; 0]);
    let broken = |pointer: &str, value: Value| {
        let mut spec = good.clone();
        *spec.pointer_mut(pointer).unwrap() = value;
        assert_ne!(problems(&spec), [""; 0], "{pointer}");
    };
    broken("/cdiVersion", json!("0.9"));
    broken("/kind", json!("tessera.dev/7"));
    broken("/kind", json!("tessera.dev/a.b"));
    broken("/devices", json!([]));
    broken("/devices/0/name", json!("0bc"));
    broken("/devices/0/containerEdits", json!({}));
    broken("/devices/0/containerEdits/env", json!(["A"]));
    broken("/devices/0/containerEdits/mounts/0/options", json!(["ro"]));
    broken("/devices/0/containerEdits/mounts/0/hostPath", json!("x"));
}

prop_compose! {
    fn parts()(
        libraries in prop::collection::vec("/[a-z0-9 ./\"\\\\é]{0,40}", 0..4),
        nodes in prop::collection::vec(("/dev/[a-z0-9-]{1,20}", "/dev/[a-z0-9-]{1,20}"), 0..6),
    ) -> Parts {
        let mount = |path: String| tessera_config::Mount {
            host: path.clone().into(), container: path.into(), read_only: true,
        };
        Parts {
            libraries: libraries.into_iter().map(mount).collect(),
            nodes: nodes.into_iter().map(|(host, container)| Node { host, container }).collect(),
        }
    }
}

proptest! {
    #[test]
    fn any_allocation_gives_a_valid_spec_and_valid_names(
        replicas in prop::collection::btree_set("GPU-[0-9a-f]{8}::[0-9]{1,3}", 1..6),
        resource in "[a-z0-9.]{1,20}/[a-zA-Z0-9._-]{1,20}",
        uuids in prop::collection::btree_set("(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}", 1..4),
        pages in "/[a-zA-Z0-9 ./_\"\\\\é-]{0,60}",
        parts in parts(),
        (own, env, index, annotations) in any::<(bool, bool, bool, bool)>(),
    ) {
        let mut config = Config::parse(CDI).unwrap();
        config.container.inject =
            [Inject::File].into_iter().chain(env.then_some(Inject::Env)).collect();
        if own {
            config.cdi.gpu_kind = None;
        }
        if index {
            config.cdi.gpu_names = tessera_config::GpuNames::Index;
        }
        if annotations {
            config.container.device_list_strategy = tessera_config::DeviceListStrategy::CdiAnnotations;
        }
        let id = AllocationId::of(&resource, replicas.iter().map(String::as_str));
        let gpus: Vec<Gpu> = uuids.iter().map(|uuid| Gpu::example(uuid, 7)).collect();
        let shim = Delivery { shim: "/s/libtessera.so".into(), preload: "/s/pre".into() };
        let plan = DeliveryPlan {
            id: &id, gpus: gpus.iter().collect(), pages: Path::new(&pages), shim: &shim, parts,
            by_cdi_alone: false,
        };
        let spec = cdi::spec(&plan, &config).unwrap();
        let json = spec.to_json();
        prop_assert_eq!(problems(&serde_json::from_slice(&json).unwrap()), Vec::<String>::new());
        prop_assert_eq!(serde_json::from_slice::<Spec>(&json).unwrap(), spec);

        let answer = crate::delivery::answer(&plan, &config);
        let listed = answer.annotations.into_values().flat_map(|value| {
            value.split(',').map(str::to_owned).collect::<Vec<_>>()
        });
        let named = answer.cdi_devices.into_iter().map(|device| device.name);
        let names: Vec<String> = listed.chain(named).collect();
        prop_assert_eq!(names.len(), if own { 1 } else { 1 + gpus.len() });
        prop_assert!(names.contains(&cdi::name(&id)));
        for name in names {
            let (kind, device) = name.split_once('=').unwrap();
            prop_assert!(cdi_name::kind(kind).is_ok() && cdi_name::device(device).is_ok());
        }
    }
}
