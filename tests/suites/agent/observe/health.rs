//! GPUs that fall ill and recover: the plugin as a process, on simulated GPUs, beside the stand-in
//! kubelet. Time limits are short here; what takes how long is for `device/health`'s own tests.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tessera_harness::artefacts;
use tessera_harness::plugin::{GPU, Simulated, bounded, pod, stderr, until};
use tessera_model::audit::{Event, What};
use tessera_store::{Change, Ledger};

const FAST: &str = "replicas = 4\n[health]\nprobe_interval = \"100ms\"\nprobes_failed = 2\n\
                    probes_passed = 2\nrecovery = \"300ms\"\nrecovery_max = \"1s\"\n\
                    suspect_window = \"1h\"";

/// Two simulated GPUs of four replicas.
struct Node(Simulated);

impl Node {
    async fn start() -> Self {
        let mut node = Node(Simulated::new(FAST).await);
        node.0.serve().await;
        node.offers(8).await;
        node
    }

    async fn offers(&self, replicas: usize) {
        bounded(self.0.kubelet.wait_allocatable(GPU, replicas)).await;
    }

    /// Reports XID 95 until it is heard: after a new initialisation events may come a moment later than
    /// the first answers.
    async fn taken_out_by_95(&self, gpu: &str) {
        bounded(async {
            while self.0.kubelet.allocatable(GPU) == 8 {
                self.0.control(&["xid", gpu, "95"]);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        self.offers(4).await;
    }

    /// Waits until a GPU stands like this; gives what `status` says of it.
    async fn stands(&self, gpu: usize, state: &str, waits_for: &str) -> Value {
        until(|| {
            let gpu = self.0.json()["gpus"][gpu].clone();
            let waits = gpu["state_waits_for"].as_str().unwrap_or_default().contains(waits_for);
            (gpu["state"] == state && waits).then_some(gpu)
        })
        .await
    }

    /// Ends the plugin; kubelet forgets it.
    async fn ends(&mut self, how: &str) {
        match how {
            "killed" => self.0.kill(),
            _ => assert_eq!(self.0.terminate().await, Some(0)),
        }
        self.offers(0).await;
    }

    /// The transitions that the history has of a GPU, "from>to", after the plugin's end.
    async fn history(&mut self, gpu: &str) -> String {
        assert_eq!(self.0.terminate().await, Some(0));
        let events = crate::trail(&self.0.dir.path().join("ledger.redb"));
        let transition = |event: &Event| match event.what {
            What::Health { from, to } => Some(format!("{}>{}", from.into_str(), to.into_str())),
            _ => None,
        };
        let of_gpu = events.iter().filter(|event| event.gpu.as_deref() == Some(gpu));
        of_gpu.filter_map(transition).collect::<Vec<_>>().join(" ")
    }
}

#[tokio::test]
async fn contained_errors_make_a_gpu_suspect_then_unhealthy_and_quiet_heals_it() {
    let mut node = Node::start().await;
    let before = node.0.kubelet.run(&pod("before", 1)).await.unwrap().remove(0);
    let uuid = node.0.json()["gpus"][0]["uuid"].as_str().unwrap().to_owned();
    assert!(before.device_ids[0].starts_with(&uuid));

    node.0.control(&["xid", "0", "94"]);
    let gpu = node.stands(0, "suspect", "without trouble").await;
    assert_eq!(gpu["health"], "healthy");
    assert_eq!(gpu["state_reason"], "XID 94");
    assert!(gpu["state_since_unix_ms"].as_i64().unwrap() > 0);
    assert_eq!(node.0.kubelet.allocatable(GPU), 8, "a suspect GPU is sold");
    // Packed would fill the first GPU.
    let second = node.0.kubelet.run(&pod("second", 1)).await.unwrap().remove(0);
    assert!(!second.device_ids[0].starts_with(&uuid), "a suspect GPU is preferred last");
    let text = String::from_utf8(node.0.run(&["status"]).stdout).unwrap();
    assert!(text.contains("GPU 0 is suspect since") && text.contains("XID 94"), "{text}");

    node.0.control(&["xid", "0", "94"]);
    node.0.control(&["xid", "0", "94"]);
    node.offers(4).await;
    let sick = node.0.kubelet.devices(GPU);
    let sick = sick.iter().filter(|device| device.health == "Unhealthy");
    assert_eq!(sick.filter(|device| device.id.starts_with(&uuid)).count(), 4, "all or none");
    node.offers(8).await;
    let allocation = node.0.json()["allocations"].to_string();
    assert!(allocation.contains(&before.device_ids[0]), "its pod is undisturbed: {allocation}");

    let history = node.history(&uuid).await;
    assert_eq!(
        history,
        "healthy>suspect suspect>unhealthy unhealthy>recovering recovering>healthy"
    );
}

#[tokio::test]
async fn a_lost_gpu_comes_back_and_one_that_needs_a_reset_only_after_it() {
    let node = Node::start().await;
    node.0.control(&["lose", "1"]);
    node.offers(4).await;
    let gpu = node.stands(1, "unhealthy", "NVML to find the GPU again").await;
    assert_eq!(gpu["health_reason"], "XID 79");
    assert_eq!(node.0.json()["gpus"][0]["state"], "healthy");
    // NVML is initialised again meanwhile, while the GPU is lost: its events come all the same when it is back.
    tokio::time::sleep(Duration::from_secs(3)).await;
    node.0.control(&["restore", "1"]);
    node.offers(8).await;
    node.taken_out_by_95("1").await;
    // Longer than any recovery time.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    node.stands(1, "unhealthy", "a reset of the GPU, because of XID 95").await;
    node.0.control(&["recovery", "1", "reset"]);
    node.stands(1, "unhealthy", "NVML to say otherwise (NVML: it takes a reset of the GPU)").await;
    node.0.control(&["reset", "1"]);
    node.offers(8).await;
}

#[tokio::test]
async fn a_gpu_whose_events_fail_at_first_has_them_once_they_do_not() {
    for function in ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"] {
        let mut node = Node(Simulated::new(FAST).await);
        node.0.control(&["fail", "1", function, "unknown"]);
        node.0.serve().await;
        node.offers(8).await;
        node.0.control(&["xid", "1", "95"]);
        node.0.control(&["xid", "0", "94"]);
        node.stands(0, "suspect", "without trouble").await;
        node.stands(1, "healthy", "").await;
        node.0.control(&["fail", "1", function, "ok"]);
        node.taken_out_by_95("1").await;
    }
}

#[tokio::test]
async fn memory_that_nvml_calls_broken_keeps_a_gpu_out_while_it_says_so() {
    let node = Node::start().await;
    node.0.control(&["remap", "0", "failed"]);
    node.offers(4).await;
    let gpu = node.stands(0, "unhealthy", "NVML to say otherwise").await;
    assert_eq!(gpu["health_reason"], "NVML: a row of its memory cannot be remapped");
    node.0.control(&["remap", "0", "ok"]);
    node.offers(8).await;
    node.0.control(&["ecc", "1", "1"]);
    let gpu = node.stands(1, "suspect", "without trouble").await;
    assert_eq!(gpu["state_reason"], "uncorrectable ECC errors");
}

#[tokio::test]
async fn a_driver_that_is_loaded_again_brings_its_gpus_back() {
    let node = Node::start().await;
    node.0.control(&["driver", "unload"]);
    node.offers(0).await;
    let gpu = node.stands(0, "unhealthy", "NVML to find the GPU again").await;
    assert!(gpu["health_reason"].as_str().unwrap().starts_with("NVML: "), "{gpu}");
    node.0.control(&["driver", "load"]);
    node.offers(8).await;
    node.taken_out_by_95("0").await;
}

/// A restart heals nothing: what a reset must lift, a reset or a reboot lifts, also one while no plugin runs.
#[tokio::test]
async fn a_restart_of_the_plugin_forgets_no_sick_gpu() {
    let mut node = Node::start().await;
    let held = node.0.start_pod("a", 1).await.ids.remove(0);
    node.0.control(&["ecc", "1", "3"]);
    node.stands(1, "suspect", "without trouble").await;
    for (gpu, xid) in [("0", "74"), ("1", "48")] {
        node.0.control(&["xid", gpu, xid]);
    }
    node.offers(0).await;
    for end in ["terminated", "killed", "killed"] {
        node.ends(end).await;
        node.0.launch();
        for (gpu, xid) in [(0, "XID 74"), (1, "XID 48")] {
            let waits_for = format!("a reset of the GPU, because of {xid}");
            let gpu = node.stands(gpu, "unhealthy", &waits_for).await;
            assert_eq!(gpu["health_reason"], xid, "after it was {end}");
        }
        assert_eq!(node.0.kubelet.allocatable(GPU), 0);
        assert_eq!(node.0.json()["allocations"][0]["replica_ids"][0], held.as_str(), "{end}");
        let text = String::from_utf8(node.0.run(&["status"]).stdout).unwrap();
        assert!(text.contains("XID 74") && text.contains("XID 48"), "{text}");
    }
    // Without a plugin, as `nvidia-smi --gpu-reset` demands it: one is seen by its counter of errors, the other by
    // its energy.
    node.ends("terminated").await;
    node.0.control(&["reset", "1"]);
    node.0.launch();
    node.offers(4).await;
    node.stands(0, "unhealthy", "a reset of the GPU, because of XID 74").await;
    node.ends("killed").await;
    node.0.control(&["reset", "0"]);
    node.0.launch();
    node.offers(8).await;
}

#[tokio::test]
async fn a_reboot_lifts_what_a_reset_lifts() {
    let mut node = Node::start().await;
    node.0.control(&["xid", "0", "74"]);
    node.offers(4).await;
    node.ends("terminated").await;
    let (mut ledger, _) = Ledger::open(&node.0.dir.path().join("ledger.redb"), false).unwrap();
    let known = ledger.health(Default::default).unwrap();
    let locked: Vec<_> = known.values().filter_map(|known| known.locked.as_deref()).collect();
    assert_eq!(locked, ["XID 74"]);
    let rebooted = known.into_iter().map(|(uuid, mut known)| {
        known.at.boot = "another".to_owned();
        (uuid, Some(known))
    });
    let change = Change { health: rebooted.collect(), ..Change::default() };
    ledger.commit(&change).unwrap();
    ledger.close();
    node.0.launch();
    node.offers(8).await;
}

// One GPU of four does not answer a question that the plugin's start asks: the others are sold, it is named with the
// driver's word, and it is sold once it answers. By every function that the simulated NVML exports for a GPU.

/// Settings that make waiting short.
const SHORT: &str = "[health]\nprobe_interval = \"100ms\"\nprobes_failed = 2\nprobes_passed = 2\n\
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
    Simulated::on(&machine, SHORT).await
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
        assert_eq!(warnings.contains(" is lost and not sold"), error == "lost", "{warnings}");
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
    // One without memory of its own is called so.
    node.control(&["fail", "2", "nvmlDeviceGetMemoryInfo", "not-supported"]);
    let (count, notes) = with("");
    assert!(count == 3 && notes.contains("GB10"), "{notes}");
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
    let mut node = Simulated::on(machine, SHORT).await;
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
    let node = Simulated::on(machine, SHORT).await;
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
async fn a_driver_that_writes_longer_lists_than_it_says_is_refused() {
    let machine = "driver_version = \"535.54.03\"\n[[gpu]]\nmemory = \"16GiB\"\n";
    let node = Simulated::on(machine, SHORT).await;
    let output = node.run(&["config", "check"]);
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert!(said.contains("535.104.05"), "{:?}: {said}", output.status);
}
