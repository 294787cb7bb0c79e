//! Advice of a running plugin by what was: the change that it proposes can be made as it stands there, and then
//! there is nothing to propose.

use std::collections::HashSet;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tessera_api::history::options;
use tessera_config::ConfigFile;
use tessera_harness::plugin::{Simulated, stderr, until};
use tessera_harness::{GIB, MIB};
use tessera_history::History;
use tessera_view::status::{Allocation, Holder, Status};
use tessera_view::tenant::{Compute, Use};

const POD: &str = "chat-7c9d8f6b5-x2v4q";
const BEFORE: &str = "chat-7c9d8f6b5-k4m9s";
/// How long another pod of the workload ran before this one, and when that ended, seconds ago.
const DAYS: u64 = 3 * 86_400;
const ENDED: u64 = 3600;

fn json(node: &Simulated, args: &[&str]) -> Value {
    let output = node.run(&[args, &["-o", "json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Days in which a pod with these limits had up to 1 GiB and got a twentieth of the GPU's time.
fn write_past(node: &Simulated, gpu_uuid: &str, limit_bytes: u64, cores_millis: u32) {
    let file = ConfigFile { asked: Some(node.file()) };
    let options = options(&file.start().unwrap().config);
    let _ = std::fs::remove_file(&options.path);
    let history = History::new(options);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let begin = now - ENDED - DAYS;
    for second in (0..=DAYS).step_by(60) {
        let used = Use {
            gpu_uuid: gpu_uuid.into(),
            memory_used_bytes: if second % 3600 < 600 { GIB } else { 700 * MIB },
            memory_limit_bytes: limit_bytes,
            cores_millis,
            ..Use::default()
        };
        let us = second * 50_000;
        let one = Allocation {
            id: "0123456789abcdef0123456789abcdef".into(),
            generation: 1,
            holder: Some(Holder {
                namespace: "default".into(),
                pod: BEFORE.into(),
                container: "main".into(),
            }),
            gpus: vec![used],
            compute: Some(Compute {
                leased_us: us,
                used_us: us,
                measured_us: us,
                ..Compute::default()
            }),
            launches: second,
            ..Allocation::default()
        };
        let at_unix_ms = i64::try_from((begin + second) * 1000).unwrap();
        let status = Status { at_unix_ms, allocations: vec![one], ..Status::default() };
        history.look(&status, &HashSet::new(), second * 1000);
        if second % 600 == 0 {
            history.flush(false).unwrap();
        }
    }
    history.close().unwrap();
}

/// The advice for the workload, once the plugin knows of whom it is.
async fn advice(node: &Simulated, enough: impl Fn(&Value) -> bool) -> Value {
    until(|| {
        let output = node.run(&["recommend", POD, "-o", "json"]);
        let advice: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Some(advice["workloads"][0].clone()).filter(&enough)
    })
    .await
}

#[tokio::test]
async fn the_change_that_is_proposed_leaves_nothing_to_propose() {
    let mut node = Simulated::serving().await;
    node.start_pod(POD, 1).await;
    let status = json(&node, &["status"]);
    let held = &status["allocations"][0]["gpus"][0];
    let limit = held["memory_limit_bytes"].as_u64().unwrap();
    let cores = u32::try_from(held["cores_millis"].as_u64().unwrap()).unwrap();
    assert_eq!(node.terminate().await, Some(0));
    write_past(&node, held["gpu_uuid"].as_str().unwrap(), limit, cores);
    node.serve().await;

    // 1 GiB and 15%, in steps of 64 MiB; a twentieth and 15%, in steps of a hundredth.
    let before = advice(&node, |one| !one["changes"].as_array().is_none_or(Vec::is_empty)).await;
    assert_eq!(before["memory_limit_bytes"], limit);
    assert_eq!(before["memory_bytes"], 1216 * MIB);
    assert_eq!(
        (&before["cores_millis"], &before["recommended_cores_millis"]),
        (&cores.into(), &60.into())
    );
    assert_eq!(before["confidence"], "high", "{before:#}");
    let proposed = before["changes"][0]["text"].as_str().unwrap();
    let text = node.run(&["recommend", POD]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains(&format!("  do: {proposed}\n")), "{text}");

    let words: Vec<&str> = proposed.split(' ').collect();
    assert_eq!(words[..3], ["tessera", "quota", "set"], "{proposed}");
    let set = node.run(&words[1..]);
    assert!(set.status.success(), "{proposed}: {}", stderr(&set));
    let after = advice(&node, |one| one["memory_limit_bytes"] == 1216 * MIB).await;
    assert_eq!(after["cores_millis"], 60);
    assert_eq!(after["changes"].as_array().unwrap().len(), 0, "{after:#}");
    assert_eq!(
        (&after["saves_memory_bytes"], &after["saves_cores_millis"]),
        (&0.into(), &0.into())
    );

    // For 23 of the last 24 hours a quarter was held, of which its memory was used.
    let waste = json(&node, &["waste", "--since", "24h"]);
    let tenants = waste["namespaces"][0]["tenants"].as_array().unwrap();
    let old = tenants.iter().find(|one| one["pod"] == BEFORE).unwrap();
    let (asked, wasted) =
        (old["asked_gpu_hours"].as_f64().unwrap(), old["wasted_gpu_hours"].as_f64().unwrap());
    assert!((asked - 23.0 / 4.0).abs() < 0.1, "{old:#}");
    let used = asked * GIB as f64 / limit as f64;
    assert!((asked - wasted - used).abs() < 0.1, "{old:#}");
    assert_eq!((&old["idle"], &old["live"]), (&false.into(), &false.into()), "{old:#}");
    let text = String::from_utf8(node.run(&["waste"]).stdout).unwrap();
    assert!(text.contains(BEFORE), "{text}");
    assert_eq!(node.terminate().await, Some(0));
}
