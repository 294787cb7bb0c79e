//! Probes, and what each client is served.

use tessera_fake_kubelet::Behaviour;

use tessera_harness::exposition::{Exposition, Format};
use tessera_harness::metrics::{OPEN, address, get, request, settings};
use tessera_harness::plugin::*;

#[tokio::test]
async fn ready_means_registered_and_watched() {
    let mut node = TestNode::without_plugin(&settings(SETTINGS)).await;
    node.kubelet.set_behaviour(Behaviour { open_stream: false, ..Behaviour::default() });
    node.launch_plugin();
    let address = address(&node).await;
    // It lives, but kubelet does not look.
    let text = until_async(async || {
        let answer = get(address, "/readyz").await;
        (answer.status == 503 && answer.body.contains("does not watch")).then_some(answer.body)
    })
    .await;
    assert!(
        text.starts_with("tessera.dev/gpu: registered, but kubelet does not watch it"),
        "{text}"
    );
    assert_eq!(get(address, "/healthz").await.body, "ok\n");

    node.kubelet.set_behaviour(Behaviour::default());
    node.kubelet.restart().await.unwrap();
    until_async(async || (get(address, "/readyz").await.status == 200).then_some(())).await;
    // Kubelet goes: it lives, and is not ready.
    node.kubelet.stop().await;
    until_async(async || (get(address, "/readyz").await.status == 503).then_some(())).await;
    assert_eq!(get(address, "/healthz").await.status, 200);
    node.stop_plugin().await;
}

#[tokio::test]
async fn without_gpus_it_lives_and_says_what_it_waits_for() {
    let mut node = TestNode::without_plugin(&settings(SETTINGS)).await;
    node.gpus.gpus.lock().unwrap().clear();
    node.launch_plugin();
    let address = address(&node).await;
    let answer = until_async(async || {
        let answer = get(address, "/readyz").await;
        answer.body.contains("waiting for GPUs").then_some(answer)
    })
    .await;
    assert_eq!(answer.status, 503);
    assert_eq!(get(address, "/healthz").await.status, 200);
    // There is something to scrape from the first moment.
    let answer = request(address, "GET", "/metrics", OPEN).await;
    let metrics = Exposition::parse(&answer.body, Format::Open);
    assert_eq!(metrics.sum("tessera_ready", &[]), 0.0);
    assert_eq!(metrics.of("tessera_build_info").count(), 1);
    node.stop_plugin().await;
}

#[tokio::test]
async fn each_client_gets_its_format_and_nothing_else_is_served() {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let address = address(&node).await;
    let open = request(address, "GET", "/metrics", OPEN).await;
    assert_eq!(
        open.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    let classic = get(address, "/metrics").await;
    assert_eq!(classic.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    // The same second: the same figures.
    let open = Exposition::parse(&open.body, Format::Open);
    let classic = Exposition::parse(&classic.body, Format::Classic);
    assert_eq!(open.samples, classic.samples);
    assert!(open.samples.len() > 50, "{}", open.samples.len());

    let head = request(address, "HEAD", "/metrics", "*/*").await;
    assert!(head.status == 200 && head.body.is_empty());
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/debug/pprof", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
        ("GET", "/metrics?name[]=x", 200),
    ] {
        assert_eq!(request(address, method, path, "*/*").await.status, status, "{method} {path}");
    }
}

#[tokio::test]
async fn an_address_that_is_taken_is_reported_and_hinders_nothing() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let settings = format!("[metrics]\nlisten = \"127.0.0.1:{port}\"\n{SETTINGS}");
    let node = TestNode::start_with(&settings).await;
    let warning = node.warned("metrics.listen").await;
    assert!(
        warning.starts_with(&format!("metrics and probes are not served: 127.0.0.1:{port}")),
        "{warning}"
    );
    node.allocate(&[replica(0, 0)]).await.unwrap();
}
