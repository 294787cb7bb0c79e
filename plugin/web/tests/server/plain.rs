//! Without authorisation: root's socket and loopback.

use std::sync::Arc;

use axum::routing::post;
use axum::{Extension, Json, Router};
use serde_json::Value;
use tessera_view::change::{Call, CordonRequest, CordonResponse};
use tessera_view::explain::{Explanation, Explanations, Story};
use tessera_view::fleet::Fleet;
use tessera_web::client::{Client, ClientError, Endpoint, query};
use tessera_web::{Listener, Options, Peer, RootSocket, Route, Server};

use crate::common::{Scripted, serve, small};

#[tokio::test]
async fn every_route_answers_json_with_its_version_on_both_listeners() {
    let dir = tempfile::tempdir().unwrap();
    let source = Scripted::new(small());
    let story = Story { resource_name: "tessera.dev/gpu".into(), ..Story::default() };
    let explanation = Explanation { allocations: vec![story], ..Explanation::default() };
    let explanation = Explanations::of(vec![("n1".into(), explanation)]);
    source.0.lock().unwrap().explanations.push(("chat-0".into(), explanation));
    let mut options = Options::new(Arc::new(source));
    options.listen = vec!["127.0.0.1:0".parse().unwrap()];
    let socket = dir.path().join("admin.sock");
    options.socket = Some(RootSocket::bind(&socket).unwrap());
    let server = Server::start(options).unwrap();
    let address = server.bound().await.unwrap();
    for endpoint in [Endpoint::Plain(address), Endpoint::Socket(socket)] {
        let client = Client::new(endpoint);
        for route in Route::ALL.into_iter().filter(|route| *route != Route::Stream) {
            let path = format!("{}{}", route.path(), query(&[("subject", "chat-0"), ("node", "")]));
            let answer: Value = client.get(&path).await.unwrap_or_else(|e| panic!("{path}: {e}"));
            assert!(answer.is_object(), "{path}: {answer}");
        }
        let fleet: Fleet = client.get("/api/v1/fleet").await.unwrap();
        assert_eq!(fleet.nodes[0].view.as_ref().unwrap().tenants[0].pod, "chat-0");
        let text = client.bytes("/api/v1/explain?subject=chat-0", "text/plain").await.unwrap();
        let text = String::from_utf8_lossy(&text);
        assert!(text.starts_with("a container that kubelet has not named: gone\n"), "{text}");
        let missing = client.get::<Value>("/api/v1/explain?subject=nope").await.unwrap_err();
        assert_eq!((missing.exit(), missing.to_string().contains("there is chat-0")), (1, true));
    }
}

/// Over TCP there is no way to change anything, whoever asks.
#[tokio::test]
async fn what_root_alone_asks_is_served_at_the_socket_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new(Arc::new(Scripted::new(small())));
    options.listen = vec!["127.0.0.1:0".parse().unwrap()];
    let socket = dir.path().join("admin.sock");
    options.socket = Some(RootSocket::bind(&socket).unwrap());
    let handler = |Extension(peer): Extension<Peer>, Json(asked): Json<CordonRequest>| async move {
        let running = peer.pid;
        Json(CordonResponse { changed: vec![asked.gpu], running, ..CordonResponse::default() })
    };
    options.root = Router::new().route(CordonRequest::PATH, post(handler));
    let server = Server::start(options).unwrap();
    let request = CordonRequest { gpu: "0".into(), ..CordonRequest::default() };
    let network = Client::new(Endpoint::Plain(server.bound().await.unwrap()));
    assert_eq!(network.call(&request).await.unwrap_err().code(), Some(404));
    let answer = Client::at(&socket).call(&request).await.unwrap();
    assert_eq!((answer.changed, answer.running), (vec!["0".to_owned()], std::process::id()));
}

#[tokio::test]
async fn each_listener_is_reported_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    // A file where the socket's directory is to be.
    let later = dir.path().join("later");
    std::fs::write(&later, "").unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (send, mut reports) = tokio::sync::mpsc::unbounded_channel();
    let mut options = Options::new(Arc::new(Scripted::new(small())));
    options.listen = vec![taken.local_addr().unwrap()];
    options.socket = Some(RootSocket::at(later.join("admin.sock")));
    options.report = Arc::new(move |listener, problem| {
        let _ = send.send((listener, problem.is_some()));
    });
    let _server = Server::start(options).unwrap();
    // The port is tried again and again.
    while reports.recv().await.unwrap() != (Listener::Socket, true) {}
    // One is mended, and that says nothing of the other.
    std::fs::remove_file(&later).unwrap();
    loop {
        match reports.recv().await.unwrap() {
            (Listener::Network, is_amiss) => assert!(is_amiss, "the port is taken"),
            (Listener::Socket, is_amiss) => {
                assert!(!is_amiss);
                break;
            }
        }
    }
    drop(taken);
    while reports.recv().await.unwrap() != (Listener::Network, false) {}
}

#[tokio::test]
async fn what_has_no_answer_says_what_there_is_and_every_answer_has_its_headers() {
    let (_server, address) = serve(Scripted::new(small())).await;
    let client = Client::new(Endpoint::Plain(address));
    for (path, status, kind) in [
        ("/", 200, "text/html; charset=utf-8"),
        ("/assets/app.js", 200, "text/javascript; charset=utf-8"),
        ("/assets/style.css", 200, "text/css; charset=utf-8"),
        ("/assets/..%2f..%2fetc%2fpasswd", 404, "application/json"),
        ("/assets/../index.html", 404, "application/json"),
        ("/api/v1/../../etc/passwd", 404, "application/json"),
        ("/api/v1%2ffleet", 404, "application/json"),
        ("/api/v2/fleet", 404, "application/json"),
        ("/api/v1/explain", 400, "application/json"),
        ("/api/v1/fleet?nope=1", 400, "application/json"),
        ("/api/v1/history?step_seconds=x", 400, "application/json"),
        ("/api/v1/history?since_unix_ms=99999999999999999999", 400, "application/json"),
        ("/api/v1/explain?subject=%ff%fe%00", 404, "application/json"),
    ] {
        let answer = client.ask(path, "application/json").await.unwrap();
        assert_eq!(answer.status(), status, "{path}");
        assert_eq!(answer.headers()["content-type"], kind, "{path}");
        let policy = answer.headers()["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'"), "{path}");
        assert_eq!(answer.headers()["x-content-type-options"], "nosniff", "{path}");
        assert_eq!(answer.headers()["referrer-policy"], "no-referrer", "{path}");
        let caching = if status == 200 { "no-cache" } else { "no-store" };
        assert_eq!(answer.headers()["cache-control"], caching, "{path}");
        if status != 200 {
            let error = client.get::<Value>(path).await.unwrap_err();
            let ClientError::Refused(problem) = error else { panic!("{path}: {error}") };
            assert_eq!((problem.api_version.as_str(), problem.code), ("tessera.dev/v1", status));
            assert!(problem.error.len() > 10, "{path}: {}", problem.error);
        }
    }
}
