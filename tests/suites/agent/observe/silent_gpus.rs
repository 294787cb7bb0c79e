//! One GPU of four does not answer a question that the plugin's start asks: the others are sold, it is named with the
//! driver's word, and it is sold once it answers. By every function that the simulated NVML exports for a GPU.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;
use tessera_harness::artefacts;
use tessera_harness::plugin::{GPU, Simulated, bounded, pod, stderr, until};

/// Settings that make waiting short.
const FAST: &str = "[health]\nprobe_interval = \"100ms\"\nprobes_failed = 2\nprobes_passed = 2\n\
                    recovery = \"300ms\"\nrecovery_max = \"1s\"\n";

/// What a GPU may answer instead of an answer: the simulator's words, and NVML's as the plugin shows them.
const ERRORS: [&str; 8] = [
    "unknown",
    "not-supported",
    "lost",
    "timeout",
    "insufficient-power",
    "irq-issue",
    "no-permission",
    "not-found",
];

/// Without an answer to these a GPU cannot be sold. `nvmlDeviceGetMinorNumber` and `nvmlDeviceGetMigMode` may be
/// unknown to a driver, which says something else then.
const NEEDED: [&str; 5] = [
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
];

/// Four whole GPUs of two replicas.
async fn four() -> Simulated {
    let gpu =
        |n: u32| format!("[[gpu]]\nmemory = \"16GiB\"\npci_bus_id = \"0000:{}:00.0\"\n", n + 20);
    let machine: String = (0..4).map(gpu).collect();
    Simulated::on(&machine, FAST).await
}

fn uuid(gpu: usize) -> String {
    format!("GPU-5e55e4a0-0000-4000-8000-{gpu:012}")
}

/// What `config check` offers, by UUID, and what it notes but that a test's kubelet is elsewhere.
fn offered(node: &Simulated) -> (BTreeSet<String>, String) {
    let output = node.run(&["config", "check"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.split_whitespace().filter(|word| word.contains('-'));
    let uuids = words.filter(|word| word.starts_with("GPU-") || word.starts_with("MIG-"));
    let notes = stderr(&output);
    let notes = notes.lines().filter(|line| !line.contains("paths.kubelet:"));
    (uuids.map(str::to_owned).collect(), notes.collect())
}

/// Functions that the simulated NVML exports for a GPU.
fn functions() -> BTreeSet<String> {
    let library = std::fs::read(artefacts().libnvml()).unwrap();
    let mut found = BTreeSet::new();
    for name in library.split(|byte| !(byte.is_ascii_alphanumeric() || *byte == b'_')) {
        let name = String::from_utf8_lossy(name);
        let base = name.rsplit_once("_v").map_or(&*name, |(base, _)| base);
        if base.starts_with("nvmlDeviceGet") || base.starts_with("nvmlDeviceIs") {
            found.insert(base.to_owned());
        }
    }
    found
}

#[tokio::test]
async fn no_function_that_fails_for_one_gpu_takes_the_others() {
    let node = four().await;
    let functions = functions();
    assert!(functions.len() > 40 && NEEDED.iter().all(|name| functions.contains(*name)));
    let check = |function: &str, error: &str| {
        node.control(&["fail", "2", function, error]);
        let (sold, notes) = offered(&node);
        node.control(&["fail", "2", function, "ok"]);
        for gpu in [0, 1, 3] {
            assert!(sold.contains(&uuid(gpu)), "{function} {error}: {sold:?} {notes}");
        }
        let is_named = notes.contains("GPU 2 ");
        assert_ne!(sold.contains(&uuid(2)), is_named, "{function} {error}: {notes}");
        is_named
    };
    for function in &functions {
        check(function, "unknown");
    }
    for function in NEEDED {
        for error in ERRORS {
            assert!(check(function, error), "{function} {error}: it is sold");
        }
    }
    for function in ["nvmlDeviceGetMinorNumber", "nvmlDeviceGetMigMode"] {
        for error in ERRORS.into_iter().filter(|error| *error != "not-supported") {
            assert!(check(function, error), "{function} {error}: it is sold");
        }
    }
    check("all", "lost");
    assert_eq!(offered(&node), ((0..4).map(uuid).collect(), String::new()));
}

#[tokio::test]
async fn a_gpu_that_does_not_answer_at_the_start_is_named_and_sold_when_it_does() {
    let mut node = four().await;
    for (function, error) in [
        ("nvmlDeviceGetHandleByIndex", "unknown"),
        ("nvmlDeviceGetMemoryInfo", "not-supported"),
        ("nvmlDeviceGetUUID", "lost"),
    ] {
        node.control(&["fail", "2", function, error]);
        node.launch();
        bounded(node.kubelet.wait_allocatable(GPU, 6)).await;
        // By index, by what else NVML tells of it, and by its word.
        let asked = match function {
            "nvmlDeviceGetHandleByIndex" => "handle",
            "nvmlDeviceGetMemoryInfo" => "memory",
            _ => "UUID",
        };
        let status =
            until(|| Some(node.json()).filter(|s| s["gpus"].as_array().unwrap().len() == 4));
        let status: Value = status.await;
        let gpu = &status["gpus"][2];
        assert_eq!((&gpu["index"], &gpu["state"]), (&2.into(), &"unhealthy".into()), "{gpu}");
        assert!(gpu["state_reason"].as_str().unwrap().contains(asked), "{gpu}");
        let known = gpu["uuid"].as_str().unwrap();
        assert_eq!(known == uuid(2), asked == "memory", "{gpu}");
        let warnings = status["warnings"].to_string();
        assert!(warnings.contains("GPU 2 ") && warnings.contains(asked), "{warnings}");
        let text = String::from_utf8(node.run(&["status"]).stdout).unwrap();
        assert!(text.contains("ATTENTION: 1 thing") && text.contains("GPU 2 "), "{text}");

        node.control(&["fail", "2", function, "ok"]);
        bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
        let warnings = until(|| {
            Some(node.json()["warnings"].clone()).filter(|w| w == &Value::from(Vec::<Value>::new()))
        });
        warnings.await;
        node.kill();
        // Kubelet forgets them with the plugin.
        bounded(node.kubelet.wait_until(|kubelet| kubelet.allocatable(GPU) == 0)).await;
    }
    let log = std::fs::read_to_string(node.dir.path().join("log")).unwrap();
    assert!(log.contains("GPU 2 ") && log.contains("answers again"), "{log}");
}

/// Crashed containers of running pods start again, whichever GPU they are on.
#[tokio::test]
async fn allocations_stay_known_beside_a_gpu_that_does_not_answer() {
    let mut node = four().await;
    node.serve().await;
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    // All of GPU 0 and the half of GPU 1.
    let (one, two) = (pod("first", 2), pod("second", 1));
    let first = node.kubelet.run(&one).await.unwrap().remove(0);
    let second = node.kubelet.run(&two).await.unwrap().remove(0);
    assert!(first.device_ids.iter().all(|id| id.starts_with(&uuid(0))), "{:?}", first.device_ids);
    assert!(second.device_ids[0].starts_with(&uuid(1)), "{:?}", second.device_ids);
    let before = node.json()["allocations"].as_array().unwrap().len();
    node.kill();
    node.control(&["fail", "0", "all", "unknown"]);
    node.launch();
    bounded(node.kubelet.wait_until(|kubelet| kubelet.allocatable(GPU) == 6)).await;
    let allocations = node.json()["allocations"].clone();
    assert_eq!(allocations.as_array().unwrap().len(), before, "{allocations}");
    bounded(node.kubelet.start_container(&two, &second.container)).await.unwrap();
    node.control(&["fail", "0", "all", "ok"]);
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
    bounded(node.kubelet.start_container(&one, &first.container)).await.unwrap();
}

#[tokio::test]
async fn filters_come_before_questions() {
    let node = four().await;
    let config = node.file();
    let text = std::fs::read_to_string(&config).unwrap();
    let with = |gpus: &str| {
        std::fs::write(&config, text.replace("[gpus]\n", &format!("[gpus]\n{gpus}\n"))).unwrap();
        let (sold, notes) = offered(&node);
        (sold.len(), notes)
    };
    node.control(&["fail", "2", "nvmlDeviceGetMemoryInfo", "unknown"]);
    for name in ["2", &uuid(2), "0000:22:00.0", "00000000:22:00.0"] {
        assert_eq!(with(&format!("exclude = [\"{name}\"]")), (3, String::new()), "{name}");
    }
    node.control(&["fail", "2", "all", "unknown"]);
    assert_eq!(with("exclude = [\"2\"]"), (3, String::new()));
    assert_eq!(with("include = [\"1\", \"3\"]"), (2, String::new()));
    // It may be the one that is meant.
    let (count, notes) = with(&format!("include = [\"1\", \"{}\"]", uuid(2)));
    assert!(count == 1 && notes.contains("GPU 2 ") && notes.lines().count() == 1, "{notes}");
}

#[tokio::test]
async fn one_instance_that_does_not_answer_leaves_its_neighbours_sold() {
    let machine = "[[gpu]]\nmemory = \"16GiB\"\nmig = [\"1g.4gb\", \"2g.4gb\", \"3g.8gb\"]\n\
                   [[gpu]]\nmemory = \"16GiB\"\n";
    let mut node = Simulated::on(machine, FAST).await;
    for function in [
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetComputeInstanceId",
    ] {
        node.control(&["fail", "0:1", function, "unknown"]);
        let (sold, notes) = offered(&node);
        assert_eq!(sold.len(), 3, "{function}: {sold:?} {notes}");
        assert!(notes.contains("GPU 0:1 "), "{function}: {notes}");
        node.control(&["fail", "0:1", function, "ok"]);
    }
    for function in ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount"] {
        for error in ERRORS {
            node.control(&["fail", "0", function, error]);
            let (sold, notes) = offered(&node);
            assert_eq!(sold.len(), 1, "{function} {error}: {sold:?} {notes}");
            assert!(notes.contains("GPU 0 "), "{function} {error}: {notes}");
            node.control(&["fail", "0", function, "ok"]);
        }
    }
    node.control(&["fail", "0:1", "all", "unknown"]);
    node.launch();
    bounded(node.kubelet.wait_allocatable(GPU, 6)).await;
    node.control(&["fail", "0:1", "all", "ok"]);
    bounded(node.kubelet.wait_allocatable(GPU, 8)).await;
}

#[tokio::test]
async fn a_command_is_held_beside_a_gpu_that_does_not_answer() {
    let node = four().await;
    node.control(&["fail", "2", "nvmlDeviceGetUUID", "unknown"]);
    let run = |args: &[&str]| {
        let mut command: Command = node.command();
        command.args(["run", "--memory", "2Gi"]).args(args).args(["--", "env"]);
        command.env("TMPDIR", node.dir.path()).output().unwrap()
    };
    let output = run(&["--gpu", "1"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let output = run(&["--gpu", "2"]);
    let text = stderr(&output);
    assert!(!output.status.success() && text.contains("GPU 2 ") && text.contains("UUID"), "{text}");
    // Without a name it has all that answer, and CUDA is shown no other.
    let output = run(&[]);
    let shown = format!("CUDA_VISIBLE_DEVICES={},{},{}\n", uuid(0), uuid(1), uuid(3));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains(&shown), "{text} {}", stderr(&output));
    assert!(stderr(&output).contains("GPU 2 "), "{}", stderr(&output));
}

#[tokio::test]
async fn a_virtual_gpu_is_sold_only_by_name() {
    let machine = "[[gpu]]\nmemory = \"16GiB\"\n[[gpu]]\nmemory = \"16GiB\"\nvgpu = true\n";
    let node = Simulated::on(machine, FAST).await;
    let (sold, notes) = offered(&node);
    assert_eq!(sold, [uuid(0)].into());
    assert!(notes.contains("GPU 1 ") && notes.contains("vGPU"), "{notes}");
    let config = node.file();
    let text = std::fs::read_to_string(&config).unwrap();
    for (include, count) in [("\"*\", \"1\"", 2), ("\"0\"", 1)] {
        let gpus = format!("[gpus]\ninclude = [{include}]\n");
        std::fs::write(&config, text.replace("[gpus]\n", &gpus)).unwrap();
        let (sold, notes) = offered(&node);
        assert_eq!((sold.len(), notes), (count, String::new()), "{include}");
    }
}

#[tokio::test]
async fn a_gpu_without_memory_of_its_own_is_called_so() {
    let node = four().await;
    node.control(&["fail", "2", "nvmlDeviceGetMemoryInfo", "not-supported"]);
    let (sold, notes) = offered(&node);
    assert!(sold.len() == 3 && notes.contains("GB10"), "{notes}");
}

#[tokio::test]
async fn a_driver_that_writes_longer_lists_than_it_says_is_refused() {
    let machine = "driver_version = \"535.54.03\"\n[[gpu]]\nmemory = \"16GiB\"\n";
    let node = Simulated::on(machine, FAST).await;
    let output = node.run(&["config", "check"]);
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert!(said.contains("535.104.05"), "{:?}: {said}", output.status);
}
