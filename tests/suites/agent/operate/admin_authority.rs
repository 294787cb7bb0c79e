//! Clients of the admin socket whose gRPC sends the socket's path as `:authority`.

use tessera_kubelet_api::admin::{LiveRequest, LiveResponse, StatusRequest, StatusResponse};

use tessera_harness::http2::{Answer, Client};
use tessera_harness::plugin::{TestNode, bounded};
use tessera_store::Filter;

const LIVE: &str = "/tessera.admin.v1.Admin/Live";
const STATUS: &str = "/tessera.admin.v1.Admin/Status";

#[tokio::test]
async fn the_admin_socket_answers_whatever_the_authority_is() {
    let node = TestNode::start().await;
    let socket = node.dir.path().join("admin.sock");
    let encoded = socket.display().to_string().replace('/', "%2F");
    let raw = socket.display().to_string();
    for authority in [encoded.as_bytes(), raw.as_bytes(), b"localhost", b"", b"a b\xff", b"[::1"] {
        let mut client = bounded(Client::connect(&socket, authority)).await;
        for piece in [4096, 7, 3] {
            let answer: Answer<LiveResponse> =
                bounded(client.call(LIVE, &LiveRequest {}, piece)).await;
            assert_eq!(answer, Answer::Ok(LiveResponse {}), "{authority:?}");
        }
        let answer: Answer<StatusResponse> =
            bounded(client.call(STATUS, &StatusRequest::default(), 64)).await;
        assert!(matches!(answer, Answer::Ok(status) if status.plugin.is_some()), "{authority:?}");
    }
}

/// The caller is still identified by the kernel.
#[tokio::test]
async fn the_audit_trail_names_the_caller_behind_any_authority() {
    use tessera_kubelet_api::admin::{CordonRequest, CordonResponse};
    let mut node = TestNode::start().await;
    let socket = node.dir.path().join("admin.sock");
    let mut client = bounded(Client::connect(&socket, b"%2Fadmin.sock")).await;
    let request = CordonRequest { all: true, reason: "a test".into(), ..Default::default() };
    let answer: Answer<CordonResponse> =
        bounded(client.call("/tessera.admin.v1.Admin/Cordon", &request, 64)).await;
    assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
    node.stop_plugin().await;
    let mut ledger = tessera_store::Ledger::open(&node.ledger(), false).unwrap().0;
    let by = format!("{:?}", ledger.lines(&Filter::all()).unwrap().events);
    assert!(by.contains(&std::process::id().to_string()), "{by}");
}
