//! GPUs that fall ill and recover: the plugin as a process, on simulated GPUs, beside the stand-in
//! kubelet. Time limits are short here; what takes how long is for `device/health`'s own tests.

use std::time::Duration;

use serde_json::Value;
use tessera_harness::plugin::{GPU, Simulated, bounded, pod, until};
use tessera_model::audit::{Event, What};
use tessera_store::{Change, Filter, Ledger};

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
        let (mut ledger, _) = Ledger::open(&self.0.dir.path().join("ledger.redb"), false).unwrap();
        let events = ledger.lines(&Filter::all()).unwrap().events;
        let transition = |event: &Event| match event.what {
            What::Health { from, to } => Some(format!("{}>{}", from.name(), to.name())),
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

#[tokio::test]
async fn a_gpu_that_is_lost_when_the_plugin_starts_is_left_out_and_said_so() {
    let mut node = Node(Simulated::new(FAST).await);
    node.0.control(&["lose", "0"]);
    node.0.serve().await;
    node.offers(4).await;
    let warnings = node.0.json()["warnings"].to_string();
    assert!(warnings.contains("GPU 0 is lost"), "{warnings}");
}
