use std::path::Path;

use serde_json::{Value, json};

use crate::delivery::driver::{Node, Parts};
use crate::delivery::{Delivery, DeliveryPlan, cdi};
use tessera_config::Config;
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
    serde_json::from_slice(&cdi::spec(&plan, &config).to_json()).unwrap()
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
            "cdiVersion": "0.5.0",
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
        cdi::spec(&plan, &config).devices[0].container_edits.env.clone()
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
