//! What a claim has on disk: ledger, pages and CDI files.

use std::path::PathBuf;

use tessera_cluster::k8s_openapi::api::resource::v1::DeviceRequestAllocationResult as DeviceResult;

use super::support::{Node, bounded, named};
use crate::fixtures::{claim, share};

const GIB: u64 = 1 << 30;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_has_pages_a_cdi_file_and_a_record_from_prepare_to_unprepare() {
    let node = Node::new();
    let plugin = node.plugin().await;
    let results = vec![
        share("chat", "gpu-a", "s1", "6Gi", "30"),
        share("draft", "gpu-a", "s2", "2560Mi", "10"),
    ];
    let pair = claim("pair", "u1", results);
    node.cluster.put(&[&pair]);
    let devices = bounded(node.kubelet.prepare("pod", &[named(&pair)])).await.unwrap().remove(0);
    let records = node.agent.claims();
    assert_eq!(records.len(), 2);
    for (device, request, bytes, cores) in
        [(&devices[0], "chat", 6 * GIB, 300), (&devices[1], "draft", 5 * GIB / 2, 100)]
    {
        let record = records
            .iter()
            .find(|record| record.origin.claim().is_some_and(|claim| claim.request == request));
        let record = record.unwrap();
        assert_eq!(record.grants[0].memory_limit_bytes, bytes);
        assert_eq!(record.grants[0].cores_millis, cores);
        // The share's own name first: kubelet shows it in the pod's status.
        let share = format!("tessera.dev/share={}", record.id);
        assert_eq!(device.cdi_devices, [share, "nvidia.com/gpu=GPU-a".to_owned()]);
        let spec = node.files("cdi").into_iter().find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().contains(record.id.as_str()))
        });
        let spec = std::fs::read_to_string(spec.unwrap()).unwrap();
        assert!(spec.contains(&format!("pages/{}", record.id)), "{spec}");
        assert!(node.root.path().join("pages").join(record.id.as_str()).join("quota").exists());
    }
    // A full GPU says with which numbers.
    let large = claim("large", "u2", vec![share("gpu", "gpu-a", "s3", "14Gi", "10")]);
    node.cluster.put(&[&large]);
    let answer = bounded(node.kubelet.call_prepare(&[named(&large)])).await.unwrap();
    let error = answer["u2"].as_ref().unwrap_err();
    assert!(error.contains("claim team/large") && error.contains("14 GiB"), "{error}");
    // The plugin starts again after its node: CDI files are gone, and are there before the socket is.
    plugin.stop().await;
    std::fs::remove_dir_all(node.root.path().join("cdi")).unwrap();
    let node = node.reboot();
    let _plugin = node.plugin().await;
    assert_eq!(node.files("cdi").len(), 2);
    let again = bounded(node.kubelet.call_prepare(&[named(&pair)])).await.unwrap();
    assert_eq!(again["u1"].as_ref().unwrap(), &devices);
    bounded(node.kubelet.unprepare("pod")).await.unwrap();
    assert!(node.agent.claims().is_empty());
    assert_eq!(node.files("cdi"), Vec::<PathBuf>::new());
    assert_eq!(node.pages(), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_monitor_is_shown_gpus_without_a_quota_and_keeps_them_over_a_restart() {
    let node = Node::new();
    let plugin = node.plugin().await;
    let view = |device| DeviceResult {
        admin_access: Some(true),
        ..share("all", device, "", "16Gi", "100")
    };
    let monitor = claim("monitor", "u1", vec![view("gpu-a"), view("gpu-b")]);
    node.cluster.put(&[&monitor]);
    let devices = bounded(node.kubelet.prepare("pod", &[named(&monitor)])).await.unwrap().remove(0);
    assert_eq!(devices[1].cdi_devices[1], "nvidia.com/gpu=GPU-b");
    assert!(node.agent.claims().is_empty() && node.pages().is_empty());
    let specs = node.files("cdi");
    assert_eq!(specs.len(), 2);
    for spec in &specs {
        let spec = std::fs::read_to_string(spec).unwrap();
        assert!(!spec.contains("pages") && !spec.contains("ld.so.preload"), "{spec}");
    }
    plugin.stop().await;
    assert_eq!(node.reboot().files("cdi"), specs, "its pod may start again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cdi_directory_that_cannot_be_written_is_named_and_nothing_stays() {
    let node = Node::new();
    let _plugin = node.plugin().await;
    let cdi = node.root.path().join("cdi");
    let _ = std::fs::remove_dir_all(&cdi);
    std::fs::write(&cdi, "in the way").unwrap();
    let chat = claim("chat", "u1", vec![share("gpu", "gpu-a", "s", "6Gi", "30")]);
    node.cluster.put(&[&chat]);
    let answer = bounded(node.kubelet.call_prepare(&[named(&chat)])).await.unwrap();
    let error = answer["u1"].as_ref().unwrap_err();
    assert!(error.contains("claim team/chat") && error.contains("cdi"), "{error}");
    assert!(node.agent.claims().is_empty());
    std::fs::remove_file(&cdi).unwrap();
    bounded(node.kubelet.call_prepare(&[named(&chat)]))
        .await
        .unwrap()
        .remove("u1")
        .unwrap()
        .unwrap();
    assert_eq!(node.agent.claims().len(), 1);
}
