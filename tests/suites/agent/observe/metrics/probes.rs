//! Probes, and clients that mean no good.

use std::time::{Duration, Instant};

use tessera_fake_kubelet::Behaviour;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use tessera_harness::exposition::{Exposition, Format};
use tessera_harness::metrics::{OPEN, address, get, request, say, settings};
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
async fn clients_that_dawdle_or_talk_nonsense_keep_nobody_out() {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let address = address(&node).await;
    // More than may be, none of which says anything, or all of it.
    let mut idle = Vec::new();
    for n in 0..40 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        if n % 2 == 0 {
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: ").await.unwrap();
        }
        idle.push(stream);
        if n % 10 == 9 {
            let began = Instant::now();
            assert_eq!(get(address, "/healthz").await.status, 200);
            assert!(began.elapsed() < Duration::from_secs(5));
        }
    }
    // A request's head is bounded in bytes and fields, and must be one.
    let long = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "y".repeat(1 << 20));
    assert!(say(address, long.as_bytes()).await.is_none_or(|answer| answer.status == 431));
    let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(1000));
    assert!(say(address, many.as_bytes()).await.is_none_or(|answer| answer.status == 431));
    for nonsense in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
    ] {
        let answer = say(address, nonsense).await;
        assert!(answer.is_none_or(|answer| answer.status >= 400), "{nonsense:?}");
    }
    // The oldest were closed to let the others in.
    let mut byte = [0; 1];
    let closed = bounded(idle[0].read(&mut byte)).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    // Kubelet was served all the while.
    node.allocate(&[replica(0, 0)]).await.unwrap();
}

#[tokio::test]
async fn an_address_that_is_taken_is_reported_and_hinders_nothing() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let settings = format!("[metrics]\nlisten = \"127.0.0.1:{port}\"\n{SETTINGS}");
    let node = TestNode::start_with(&settings).await;
    let warning = node
        .status_until(|status| {
            status.warnings.iter().find(|text| text.contains("metrics.listen")).cloned()
        })
        .await;
    assert!(
        warning.starts_with(&format!("metrics and probes are not served: 127.0.0.1:{port}")),
        "{warning}"
    );
    node.allocate(&[replica(0, 0)]).await.unwrap();
}

async fn until_async<T>(mut look: impl AsyncFnMut() -> Option<T>) -> T {
    bounded(async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}
