//! Claims through kubelet's calls: what is enforced, refused, repeated and forgotten, and what is on disk: ledger, pages and
//! CDI files.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use tessera_cluster::fixtures::Temper;
use tessera_cluster::k8s_openapi::api::resource::v1::DeviceRequestAllocationResult as DeviceResult;
use tessera_fake_kubelet::dra::{ClaimName, PreparedDevice};

use super::support::{Node, bounded, cordon, fall_ill, named, recover};
use crate::fixtures::{GET_CLAIM, claim, compute, configured, fails, forbids, parameters, share};
use crate::prepare::Sweeping;

const GIB: u64 = 1 << 30;

#[tokio::test]
async fn one_bad_claim_of_a_batch_is_the_only_one_that_fails() {
    let (node, _plugin) = Node::served().await;
    let good = claim("good", "u1", vec![share("gpu", "gpu-a", "s1", "6Gi", "30")]);
    let large = claim("large", "u2", vec![share("gpu", "gpu-a", "s2", "12Gi", "10")]);
    let gone = claim("gone", "u3", vec![]);
    let other = claim("other", "u4", vec![share("gpu", "gpu-b", "s4", "24Gi", "100")]);
    let unknown = claim("unknown", "u5", vec![share("gpu", "gpu-z", "s5", "1Gi", "1")]);
    let saying = |name: &str, uid: &str, said| {
        let results = vec![share("gpu", "gpu-a", uid, "1Gi", "1")];
        configured(name, uid, results, &[parameters(said, false, &[])])
    };
    let odd = saying("odd", "u6", json!({ "kind": "Nonsense" }));
    let free = saying("free", "u7", compute("none"));
    let all = [&good, &large, &gone, &other, &unknown, &odd, &free];
    node.cluster.put(&all);
    node.cluster.remove_claim("gone");
    let mut batch: Vec<ClaimName> = all.iter().map(|claim| named(claim)).collect();
    // Kubelet asks for each once; two identical requests get one answer.
    batch.push(named(&good));
    let answer = bounded(node.kubelet.call_prepare(&batch)).await.unwrap();
    assert_eq!(answer.len(), 7);
    assert!(answer["u1"].is_ok() && answer["u4"].is_ok(), "{answer:?}");
    for (uid, words) in [
        // With numbers.
        ("u2", ["claim team/large", "12 GiB", "6 GiB", "16 GiB"]),
        ("u3", ["claim team/gone", "not exist", "pod", "deleted"]),
        ("u5", ["claim team/unknown", "request gpu", "gpu-z", "not on this node"]),
        ("u6", ["claim team/odd", "config[0]", "missing field", "apiVersion"]),
        (
            "u7",
            ["claim team/free", "compute: none", "configuration of node", "write burst or strict"],
        ),
    ] {
        let error = answer[uid].as_ref().unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{uid}: {error}");
    }
    assert_eq!(node.recorded().len(), 2);
    // All of them, known or not, are unprepared.
    let answer = bounded(node.kubelet.call_unprepare(&batch)).await.unwrap();
    assert!(answer.len() == 7 && answer.values().all(String::is_empty), "{answer:?}");
    assert!(node.agent.claims().is_empty());
}

#[tokio::test]
async fn a_claim_that_was_made_again_is_another() {
    let (node, _plugin) = Node::served().await;
    let old = node.claim("chat", "u1", "10Gi", "30");
    node.run("old", &[&old]).await;
    let new = node.claim("chat", "u2", "10Gi", "30");
    // The old pod runs on; kubelet keeps the name for it, and there is no room for both.
    let error = bounded(node.kubelet.prepare("new", &[named(&new)])).await.unwrap_err();
    assert!(error.to_string().contains("different UID"), "{error}");
    let error = node.ask(&new).await.unwrap_err();
    assert!(error.contains("do not fit"), "{error}");
    let error = node.ask(&old).await.unwrap_err();
    assert!(error.contains("made again"), "{error}");
    node.end("old").await;
    node.run("new", &[&new]).await;
    assert_eq!(node.recorded(), [("chat".into(), "gpu".into(), 10 * GIB, 300)]);
}

#[tokio::test]
async fn a_claim_that_is_allocated_again_has_what_it_was_given_last() {
    let (node, _plugin) = Node::served().await;
    let first = node.claim("chat", "u1", "10Gi", "30");
    node.ask(&first).await.unwrap();
    // Kubelet never unprepared it.
    let again = claim("chat", "u1", vec![share("gpu", "gpu-a", "t", "12Gi", "40")]);
    node.cluster.put(&[&again]);
    node.ask(&again).await.unwrap();
    assert_eq!(node.recorded(), [("chat".into(), "gpu".into(), 12 * GIB, 400)]);
}

#[tokio::test]
async fn an_api_server_that_does_not_answer_keeps_pods_from_starting_and_not_from_ending() {
    let (node, _plugin) = Node::served().await;
    let chat = node.claim("chat", "u1", "6Gi", "30");
    for (temper, words) in [
        (Temper::Away, "cannot be reached"),
        (fails(), "busy or failing"),
        (forbids(), "resourceclaims"),
        (Temper::Silent, "did not answer"),
    ] {
        node.cluster.server.set_temper(temper.clone());
        let error = node.ask(&chat).await.unwrap_err();
        assert!(error.contains("claim team/chat") && error.contains(words), "{temper:?}: {error}");
    }
    assert!(node.agent.claims().is_empty());
    node.cluster.server.set_temper(Temper::Slow(Duration::from_millis(100)));
    node.ask(&chat).await.unwrap();
    node.cluster.server.set_temper(Temper::Away);
    let before = node.cluster.server.count("");
    let answer = bounded(node.kubelet.call_unprepare(&[named(&chat)])).await.unwrap();
    assert_eq!(answer["u1"], "");
    assert!(node.agent.claims().is_empty());
    assert_eq!(node.cluster.server.count(""), before, "unprepare needs no API server");
}

#[tokio::test]
async fn gpus_that_are_sick_or_cordoned_take_nothing_new_and_keep_what_they_have() {
    let (node, _plugin) = Node::served().await;
    let old = claim("old", "u1", vec![share("gpu", "gpu-a", "s", "1Gi", "10")]);
    let new = claim("new", "u2", vec![share("gpu", "gpu-a", "t", "1Gi", "10")]);
    node.cluster.put(&[&old, &new]);
    let before = node.ask(&old).await.unwrap();
    fall_ill(&node.agent, "GPU-a");
    let error = node.ask(&new).await.unwrap_err();
    assert!(error.contains("claim team/new") && error.contains("XID 79"), "{error}");
    assert_eq!(node.ask(&old).await.unwrap(), before);
    bounded(recover(&node.agent, "GPU-a")).await;
    cordon(&node.agent, "GPU-a", true);
    let error = node.ask(&new).await.unwrap_err();
    assert!(error.contains("request gpu: ") && error.contains("a new fan"), "{error}");
    assert_eq!(node.ask(&old).await.unwrap(), before);
    cordon(&node.agent, "GPU-a", false);
    node.ask(&new).await.unwrap();
}

#[tokio::test]
async fn shares_of_claims_that_are_gone_end_and_those_that_may_live_stay() {
    let sweeping =
        Sweeping { interval: Duration::from_millis(30), grace: Duration::from_millis(60) };
    let node = Node { sweeping, ..Node::new() };
    let _plugin = node.plugin().await;
    let gone = claim("gone", "u1", vec![share("gpu", "gpu-a", "s", "6Gi", "30")]);
    let kept = claim("kept", "u2", vec![share("gpu", "gpu-b", "t", "6Gi", "30")]);
    node.cluster.put(&[&gone, &kept]);
    node.run("pod", &[&gone, &kept]).await;
    // Kubelet loses its state, and the pods' claims end without it. The API server is away first.
    node.kubelet.forget();
    let server = &node.cluster.server;
    server.set_temper(Temper::Away);
    node.cluster.remove_claim("gone");
    let before = server.count(GET_CLAIM);
    let wait_calls = |more: usize| async move {
        while server.count(GET_CLAIM) < before + more {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    bounded(wait_calls(20)).await;
    assert_eq!(node.recorded().len(), 2, "an error says nothing");
    server.set_temper(Temper::Works);
    let emptied = async {
        while node.recorded().len() > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    bounded(emptied).await;
    bounded(wait_calls(40)).await;
    assert_eq!(node.recorded(), [("kept".into(), "gpu".into(), 6 * GIB, 300)]);
}

#[tokio::test]
async fn a_claim_that_finds_no_room_makes_the_driver_look_for_the_dead() {
    let sweeping =
        Sweeping { interval: Duration::from_secs(900), grace: Duration::from_millis(50) };
    let node = Node { sweeping, ..Node::new() };
    let _plugin = node.plugin().await;
    let gone = node.claim("gone", "u1", "12Gi", "30");
    node.run("gone", &[&gone]).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    node.kubelet.forget();
    node.cluster.remove_claim("gone");
    let new = node.claim("new", "u2", "12Gi", "30");
    // Kubelet tries again until it works.
    let prepared = async {
        while node.kubelet.prepare("new", &[named(&new)]).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    bounded(prepared).await;
    assert_eq!(node.recorded(), [("new".into(), "gpu".into(), 12 * GIB, 300)]);
}

#[tokio::test]
async fn sixteen_claims_are_one_call_and_the_api_server_is_asked_for_all_at_once() {
    let (node, _plugin) = Node::served().await;
    let claims: Vec<_> = (0..16)
        .map(|n| {
            let results = vec![share("gpu", "gpu-a", &format!("s{n}"), "1Gi", "5")];
            claim(&format!("c{n}"), &format!("u{n}"), results)
        })
        .collect();
    node.cluster.put(&claims.iter().collect::<Vec<_>>());
    node.cluster.server.set_temper(Temper::Slow(Duration::from_millis(300)));
    let began = Instant::now();
    let names: Vec<_> = claims.iter().map(named).collect();
    let devices = bounded(node.kubelet.prepare("pod", &names)).await.unwrap();
    assert_eq!(devices.len(), 16);
    assert!(began.elapsed() < Duration::from_millis(16 * 300), "{:?}", began.elapsed());
    assert_eq!(node.cluster.server.count(GET_CLAIM), 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_has_pages_a_cdi_file_and_a_record_from_prepare_to_unprepare() {
    let (node, plugin) = Node::served().await;
    let results = vec![
        share("chat", "gpu-a", "s1", "6Gi", "30"),
        share("draft/small", "gpu-a", "s2", "2560Mi", "10"),
        share("chat", "gpu-b", "s3", "6Gi", "30"),
    ];
    let pair = claim("pair", "u1", results);
    node.cluster.put(&[&pair]);
    let devices = node.run("pod", &[&pair]).await.remove(0);
    let of = |d: &PreparedDevice| (d.request_names[0].clone(), d.cdi_device_ids.len());
    // Requests as pods name them; each share, named once, and its GPUs.
    let want = [("chat", 3), ("draft", 2), ("chat", 0)];
    let want = want.map(|(request, ids)| (request.to_owned(), ids));
    assert_eq!(devices.iter().map(of).collect::<Vec<_>>(), want);
    let recorded = [
        ("pair".into(), "chat".into(), 12 * GIB, 600),
        ("pair".into(), "draft/small".into(), 5 * GIB / 2, 100),
    ];
    assert_eq!(node.recorded(), recorded);
    let records = node.agent.claims();
    for (device, request, bytes, cores) in
        [(&devices[0], "chat", 6 * GIB, 300), (&devices[1], "draft/small", 5 * GIB / 2, 100)]
    {
        let record = records
            .iter()
            .find(|record| record.origin.claim().is_some_and(|claim| claim.request == request));
        let record = record.unwrap();
        assert_eq!(record.grants[0].memory_limit_bytes, bytes);
        assert_eq!(record.grants[0].cores_millis, cores);
        // The share's own name first: kubelet shows it in the pod's status.
        let share = format!("tessera.dev/share={}", record.id);
        assert_eq!(device.cdi_device_ids[..2], [share, "nvidia.com/gpu=GPU-a".to_owned()]);
        let spec = node.files("cdi").into_iter().find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().contains(record.id.as_str()))
        });
        let spec = std::fs::read_to_string(spec.unwrap()).unwrap();
        assert!(spec.contains(&format!("pages/{}", record.id)), "{spec}");
        assert!(node.root.path().join("pages").join(record.id.as_str()).join("quota").exists());
    }
    // A full GPU says with which numbers.
    let large = node.claim("large", "u2", "14Gi", "10");
    let error = node.ask(&large).await.unwrap_err();
    assert!(error.contains("claim team/large") && error.contains("14 GiB"), "{error}");
    // The plugin starts again after its node: CDI files are gone, and are there before the socket is.
    plugin.stop().await;
    std::fs::remove_dir_all(node.root.path().join("cdi")).unwrap();
    let node = node.reboot();
    let _plugin = node.plugin().await;
    assert_eq!(node.files("cdi").len(), 2);
    assert_eq!(node.ask(&pair).await.unwrap(), devices);
    node.end("pod").await;
    assert!(node.agent.claims().is_empty());
    assert_eq!(node.files("cdi"), Vec::<PathBuf>::new());
    assert_eq!(node.pages(), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_monitor_is_shown_gpus_without_a_quota_and_keeps_them_over_a_restart() {
    let (node, plugin) = Node::served().await;
    let view = |device| DeviceResult {
        admin_access: Some(true),
        ..share("all", device, "", "16Gi", "100")
    };
    let monitor = claim("monitor", "u1", vec![view("gpu-a"), view("gpu-b")]);
    node.cluster.put(&[&monitor]);
    let devices = node.run("pod", &[&monitor]).await.remove(0);
    assert_eq!(devices[1].cdi_device_ids[1], "nvidia.com/gpu=GPU-b");
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
