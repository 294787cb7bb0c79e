//! Who asks at root's socket, and what is asked nowhere else.

use tessera_harness::plugin::{TestNode, admin, bounded};
use tessera_store::Filter;
use tessera_view::change::{Call, CordonRequest, PlanRequest};
use tessera_view::status::{LIVE, STATUS, Status};

#[tokio::test]
async fn the_audit_trail_names_the_caller_as_the_kernel_does() {
    let mut node = TestNode::start().await;
    let request = CordonRequest { all: true, reason: "a test".into(), ..Default::default() };
    bounded(admin(node.dir.path()).call(&request)).await.unwrap();
    node.stop_plugin().await;
    let mut ledger = tessera_store::Ledger::open(&node.ledger(), false).unwrap().0;
    let by = format!("{:?}", ledger.lines(&Filter::all()).unwrap().events);
    assert!(by.contains(&std::process::id().to_string()), "{by}");
}

/// What an HTTP client of one's own may send.
#[tokio::test]
async fn what_cannot_be_read_is_refused_and_changes_nothing() {
    use std::io::{Read, Write};
    let node = TestNode::start().await;
    let socket = node.dir.path().join("admin.sock");
    let ask = move |method: &str, path: &str, body: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: \r\nConnection: close\r\n");
        // What is too large is refused before it has all come.
        let _ = write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    };
    tokio::task::spawn_blocking(move || {
        let unknown = ask("POST", CordonRequest::PATH, "{\"all\": true, \"raeson\": \"fans\"}");
        assert!(unknown.starts_with("HTTP/1.1 400 ") && unknown.contains("raeson"), "{unknown}");
        for body in ["", "{", "[]", "null", "{\"all\": 7}"] {
            let answer = ask("POST", CordonRequest::PATH, body);
            assert!(answer.starts_with("HTTP/1.1 400 "), "{body}: {answer}");
        }
        let large = " ".repeat(5 << 20);
        let answer = ask("POST", PlanRequest::PATH, &large);
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        assert!(ask("GET", CordonRequest::PATH, "").starts_with("HTTP/1.1 405 "));
        assert!(ask("POST", STATUS, "{}").starts_with("HTTP/1.1 405 "));
        assert!(ask("GET", LIVE, "").starts_with("HTTP/1.1 200 "));
    })
    .await
    .unwrap();
    let status: Status = admin(node.dir.path()).get(STATUS).await.unwrap();
    assert!(status.gpus.iter().all(|gpu| gpu.cordon.is_empty()));
}
