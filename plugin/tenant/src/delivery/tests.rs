use super::driver::Parts;
use super::*;
use tessera_config::CONTAINER_DRIVER_DIR;

const PAGES: &str = "/pages/0123456789abcdef0123456789abcdef";

/// The answer for a container with these GPUs under this configuration, on a host without device nodes.
fn delivered(config: &str, gpus: &[&Gpu]) -> ContainerAllocateResponse {
    delivered_on(tempfile::tempdir().unwrap().path(), config, gpus)
}

/// On a host with the device nodes below `root`.
fn delivered_on(root: &Path, config: &str, gpus: &[&Gpu]) -> ContainerAllocateResponse {
    let config = Config::parse(config).unwrap();
    let id = AllocationId::parse("0123456789abcdef0123456789abcdef").unwrap();
    let shim =
        Delivery { shim: "/shims/ab/libtessera.so".into(), preload: "/shims/ab/preload".into() };
    let parts: Parts = driver::parts_in(&config, gpus, false, root).unwrap();
    let pages = Path::new(PAGES);
    answer(
        &DeliveryPlan {
            id: &id,
            gpus: gpus.to_vec(),
            pages,
            shim: &shim,
            parts,
            by_cdi_alone: false,
        },
        &config,
    )
}

fn strategy(name: &str) -> String {
    format!("[container]\ndevice_list_strategy = \"{name}\"\n")
}

fn mounts(answer: &ContainerAllocateResponse) -> Vec<(&str, &str, bool)> {
    answer
        .mounts
        .iter()
        .map(|m| (m.host_path.as_str(), m.container_path.as_str(), m.read_only))
        .collect()
}

/// The second instance of a GPU, with the ids of its GPU instance and its compute instance.
pub(super) fn instance(uuid: &str, parent_index: u32, ids: (u32, u32)) -> Gpu {
    let mig = tessera_model::mig::MigInstance {
        parent_uuid: "GPU-parent".into(),
        parent_index,
        index: 1,
        gpu_instance: ids.0,
        compute_instance: ids.1,
    };
    Gpu { mig: Some(mig), ..Gpu::example(uuid, parent_index) }
}

/// Pages and shim as plain mounts.
const PLAIN: [(&str, &str, bool); 4] = [
    (PAGES, "/usr/local/tessera/pages/0123456789abcdef0123456789abcdef", true),
    (
        "/pages/0123456789abcdef0123456789abcdef/usage",
        "/usr/local/tessera/pages/0123456789abcdef0123456789abcdef/usage",
        false,
    ),
    ("/shims/ab/libtessera.so", "/usr/local/tessera/libtessera.so", true),
    ("/shims/ab/preload", "/etc/ld.so.preload", true),
];

#[test]
fn the_answer_mounts_pages_read_only_and_the_usage_file_over_them() {
    let gpu = Gpu::example("GPU-a", 0);
    let answer = delivered("", &[&gpu]);
    assert_eq!(mounts(&answer), PLAIN);
    assert_eq!(answer.envs, [("NVIDIA_VISIBLE_DEVICES".into(), "GPU-a".into())].into());
    assert!(answer.devices.is_empty() && answer.annotations.is_empty());
    assert!(answer.cdi_devices.is_empty());
}

fn host_with(nodes: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for node in nodes {
        let path = root.path().join(node.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }
    root
}

fn devices(answer: &ContainerAllocateResponse) -> Vec<(&str, &str, &str)> {
    let device = answer.devices.iter();
    device.map(|d| (&*d.host_path, &*d.container_path, &*d.permissions)).collect()
}

/// A node of which kubelet is not told is closed to the container when its device rules are written again.
#[test]
fn every_node_that_a_container_gets_is_told_to_kubelet_or_stands_in_a_spec() {
    let there = [
        "/dev/nvidia0",
        "/dev/nvidia1",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-modeset",
    ];
    let root = host_with(&there);
    let gpus = [Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1)];
    for strategy in ["envvar", "volume-mounts"].map(strategy) {
        // Its own GPU's, those of all GPUs, and none that is not there (nvidia-uvm-tools).
        let answer = delivered_on(root.path(), &strategy, &[&gpus[1]]);
        let expected = ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset"];
        assert_eq!(devices(&answer), expected.map(|node| (node, node, "rw")), "{strategy}");
        let both = delivered_on(root.path(), &strategy, &gpus.each_ref());
        assert_eq!(both.devices.len(), 5, "{strategy}");
        let off = delivered_on(
            root.path(),
            &format!("{strategy}pass_device_specs = false\n"),
            &[&gpus[1]],
        );
        assert!(off.devices.is_empty(), "{strategy}");
        // A host whose nodes the plugin does not see.
        assert!(delivered(&strategy, &[&gpus[1]]).devices.is_empty(), "{strategy}");
    }
    for strategy in ["cdi-cri", "cdi-annotations", "none"].map(strategy) {
        let answer = delivered_on(root.path(), &strategy, &[&gpus[1]]);
        assert!(answer.devices.is_empty(), "{strategy}");
    }
}

/// The toolkit says what is wrong with an instance; a node fewer is no reason to refuse it.
#[test]
fn a_mig_instance_whose_capability_is_unknown_has_the_nodes_of_its_gpu() {
    let instance = instance("MIG-a", 0, (2, 0));
    let root = host_with(&["/dev/nvidia0", "/dev/nvidiactl"]);
    let answer = delivered_on(root.path(), "", &[&instance]);
    assert_eq!(devices(&answer).len(), 2);
}

#[test]
fn cuda_sees_the_containers_mig_instance() {
    let instance = instance("MIG-a", 0, (2, 0));
    for strategy in ["envvar", "volume-mounts", "cdi-cri"].map(strategy) {
        assert_eq!(delivered(&strategy, &[&instance]).envs["CUDA_VISIBLE_DEVICES"], "MIG-a");
    }
    assert!(!delivered("", &[&Gpu::example("GPU-a", 0)]).envs.contains_key("CUDA_VISIBLE_DEVICES"));
}

#[test]
fn volume_mounts_list_the_gpus_where_no_variable_can() {
    let (a, b) = (Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1));
    let answer = delivered(&strategy("volume-mounts"), &[&a, &b]);
    let list = "/var/run/nvidia-container-devices";
    assert_eq!(answer.envs, [("NVIDIA_VISIBLE_DEVICES".into(), list.into())].into());
    let all = mounts(&answer);
    let (ours, theirs) = all.split_at(4);
    assert_eq!(ours, PLAIN);
    let path = |uuid| format!("{list}/{uuid}");
    assert_eq!(
        theirs,
        [("/dev/null", &*path("GPU-a"), false), ("/dev/null", &*path("GPU-b"), false)]
    );
}

#[test]
fn the_cdi_strategies_name_devices_and_mount_nothing_themselves() {
    let gpus = [Gpu::example("GPU-a", 3), Gpu::example("GPU-b", 4)];
    let ours = "tessera.dev/share=0123456789abcdef0123456789abcdef";
    let both = gpus.each_ref();
    let answer = delivered(&strategy("cdi-cri"), &both);
    let names: Vec<_> = answer.cdi_devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b", ours]);
    assert!(answer.mounts.is_empty() && answer.annotations.is_empty());
    assert_eq!(answer.envs, [("NVIDIA_VISIBLE_DEVICES".into(), "void".into())].into());

    let answer = delivered(&strategy("cdi-annotations"), &both);
    let key = "cdi.k8s.io/tessera.share_0123456789abcdef0123456789abcdef";
    let value = format!("nvidia.com/gpu=GPU-a,nvidia.com/gpu=GPU-b,{ours}");
    assert_eq!(answer.annotations, [(key.to_owned(), value)].into());
    assert!(answer.mounts.is_empty() && answer.cdi_devices.is_empty());
    // A longer name is no annotation's.
    assert!(key.len() - "cdi.k8s.io/".len() <= 63);

    let by_index = format!("{}[cdi]\ngpu_names = \"index\"\n", strategy("cdi-cri"));
    let answer = delivered(&by_index, &both);
    assert_eq!(answer.cdi_devices[0].name, "nvidia.com/gpu=3");
    let instance = instance("MIG-x", 3, (5, 0));
    assert_eq!(delivered(&by_index, &[&instance]).cdi_devices[0].name, "nvidia.com/gpu=3:1");
    let by_uuid = delivered(&strategy("cdi-cri"), &[&instance]);
    assert_eq!(by_uuid.cdi_devices[0].name, "nvidia.com/gpu=MIG-x");
    let alone = format!("{}[cdi]\ngpu_kind = \"\"\n", strategy("cdi-cri"));
    let answer = delivered(&alone, &both);
    assert_eq!(answer.cdi_devices.len(), 1, "our own spec has the GPUs");
    assert!(answer.devices.is_empty());
}

#[test]
fn device_nodes_and_driver_libraries_serve_where_no_toolkit_is() {
    let gpu = Gpu::example("GPU-b", 1);
    let answer = delivered(
        r#"
        [container]
        inject = ["file", "env"]
        device_list_strategy = "device-nodes"
        [driver]
        libraries = "/opt/driver"
        device_nodes = ["/dev/nvidia{minor}", "/dev/nvidiactl"]
        env = { SIMGPU_STATE = "/state" }
        mounts = [{ host = "/var/sim", container = "/state", read_only = false }]
        "#,
        &[&gpu],
    );
    let nodes: Vec<_> = answer.devices.iter().map(|d| d.host_path.as_str()).collect();
    assert_eq!(nodes, ["/dev/nvidia1", "/dev/nvidiactl"]);
    assert_eq!(answer.envs["LD_PRELOAD"], "/usr/local/tessera/libtessera.so");
    assert_eq!(answer.envs["LD_LIBRARY_PATH"], CONTAINER_DRIVER_DIR);
    assert_eq!(answer.envs["SIMGPU_STATE"], "/state");
    // An image that asks the toolkit for all GPUs gets none of it.
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], "void");
    assert_eq!(
        mounts(&answer)[4..],
        [("/opt/driver", CONTAINER_DRIVER_DIR, true), ("/var/sim", "/state", false)]
    );
}

#[test]
fn without_a_strategy_there_are_pages_and_shim_alone() {
    let gpu = Gpu::example("GPU-a", 0);
    let answer = delivered(&strategy("none"), &[&gpu]);
    assert_eq!(mounts(&answer), PLAIN);
    assert!(answer.envs.is_empty() && answer.devices.is_empty());
}
