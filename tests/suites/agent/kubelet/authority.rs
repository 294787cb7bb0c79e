//! What kubelets before 1.26 send as `:authority`, against the real server, and what nobody should
//! send.

use std::path::PathBuf;
use std::time::Duration;

use tessera_harness::http2::{Answer, Client};
use tessera_harness::scripted::{GPU, Node, bounded};
use tessera_kubelet::Phase;
use tessera_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use tessera_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, DevicePluginOptions, Empty,
    ListAndWatchResponse, RegisterRequest,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
const LIST: &str = "/v1beta1.DevicePlugin/ListAndWatch";
const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";
/// As grpc-go writes the path of the Unix socket that it dials.
const ENCODED_PATH: &[u8] = b"%2Fvar%2Flib%2Fkubelet%2Fdevice-plugins%2Ftessera.sock";

async fn node_with_plugin() -> (Node, tessera_harness::scripted::Plugin, PathBuf) {
    let node = Node::new().await;
    let plugin = node.plugin(2);
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    let socket = node.kubelet.device_plugins_dir().join(node.kubelet.endpoint(GPU).unwrap());
    (node, plugin, socket)
}

/// The control: without the adaptor, the server resets such requests. Should this fail one day, the
/// adaptor can go.
#[tokio::test]
async fn a_plain_server_resets_requests_with_a_path_as_authority() {
    struct Nobody;
    #[tonic::async_trait]
    impl Registration for Nobody {
        async fn register(
            &self,
            _: tonic::Request<RegisterRequest>,
        ) -> Result<tonic::Response<Empty>, tonic::Status> {
            Ok(tonic::Response::new(Empty {}))
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("plain.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
    tokio::spawn(
        tonic::transport::Server::builder()
            .serve_with_incoming(RegistrationServer::new(Nobody), incoming),
    );
    let call = |authority| {
        let socket = socket.clone();
        async move {
            let mut client = Client::connect(&socket, authority).await;
            let request = RegisterRequest::default();
            client.call::<Empty>("/v1beta1.Registration/Register", &request, 64).await
        }
    };
    assert_eq!(bounded(call(b"localhost")).await, Answer::Ok(Empty {}));
    assert_eq!(bounded(call(ENCODED_PATH)).await, Answer::Reset(1));
}

#[tokio::test]
async fn calls_with_any_authority_are_answered() {
    let (_node, plugin, socket) = node_with_plugin().await;
    let raw_path: &[u8] = b"/var/lib/kubelet/device-plugins/tessera.sock";
    for authority in [ENCODED_PATH, raw_path, b"localhost", b"", b"a b\xff", b"[::1"] {
        let mut client = bounded(Client::connect(&socket, authority)).await;
        // From the second call on, the client refers to its dynamic table.
        for piece in [4096, 4096, 7, 3] {
            let options: Answer<DevicePluginOptions> =
                bounded(client.call(OPTIONS, &Empty {}, piece)).await;
            let Answer::Ok(options) = options else { panic!("{authority:?}: {options:?}") };
            assert!(options.pre_start_required && options.get_preferred_allocation_available);
        }
        let request = ContainerAllocateRequest { device_ids: vec!["replica-1".into()] };
        let request = AllocateRequest { container_requests: vec![request] };
        let answer: Answer<AllocateResponse> = bounded(client.call(ALLOCATE, &request, 64)).await;
        let Answer::Ok(answer) = answer else { panic!("{authority:?}: {answer:?}") };
        assert_eq!(answer.container_responses[0].envs["REPLICAS"], "replica-1");
        assert_eq!(plugin.calls().last().unwrap(), "allocate replica-1");
    }
}

#[tokio::test]
async fn the_device_stream_goes_on_beside_other_calls() {
    let (_node, plugin, socket) = node_with_plugin().await;
    let mut client = bounded(Client::connect(&socket, ENCODED_PATH)).await;
    let stream = bounded(client.request(LIST, &Empty {}, 64)).await;
    let healthy = |answer: Answer<ListAndWatchResponse>| match answer {
        Answer::Ok(list) => list.devices.iter().filter(|device| device.health == "Healthy").count(),
        other => panic!("{other:?}"),
    };
    assert_eq!(healthy(bounded(client.message(stream)).await), 2);
    let options: Answer<DevicePluginOptions> = bounded(client.call(OPTIONS, &Empty {}, 64)).await;
    assert!(matches!(options, Answer::Ok(_)));
    plugin.set_healthy(1, 2);
    assert_eq!(healthy(bounded(client.message(stream)).await), 1);
    // Its end is a status, not a torn connection.
    let stop = plugin.stop();
    let end = async { bounded(client.message::<ListAndWatchResponse>(stream)).await };
    let ((), end) = tokio::join!(stop, end);
    assert_eq!(end, Answer::Status("0".into(), String::new()));
}

#[tokio::test]
async fn garbage_on_the_socket_ends_only_its_own_connection() {
    let (node, plugin, socket) = node_with_plugin().await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let with_preface = |frame: &[u8]| [&preface[..], frame].concat();
    let garbage = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 100_000],
        // Index 62 of an empty dynamic table.
        with_preface(b"\0\0\x01\x01\x05\0\0\0\x01\xbe"),
        // A header block of 16 MiB, and a CONTINUATION of nothing.
        with_preface(b"\xff\xff\xff\x01\x00\0\0\0\x01"),
        with_preface(b"\0\0\0\x09\x04\0\0\0\x01"),
    ];
    for bytes in garbage {
        let mut stream = UnixStream::connect(&socket).await.unwrap();
        // The server may close before it has read everything.
        let _ = stream.write_all(&bytes).await;
        let mut rest = vec![];
        let _ = bounded(stream.read_to_end(&mut rest)).await;
    }
    let half = UnixStream::connect(&socket).await.unwrap();
    drop(half);
    assert_eq!(plugin.readiness().report().phase, Phase::Live);
    assert_eq!((node.kubelet.allocatable(GPU), node.kubelet.registrations()), (2, 1));
    let mut client = bounded(Client::connect(&socket, ENCODED_PATH)).await;
    let options: Answer<DevicePluginOptions> = bounded(client.call(OPTIONS, &Empty {}, 64)).await;
    assert!(matches!(options, Answer::Ok(_)));
}

#[tokio::test]
async fn silent_connections_do_not_hold_up_the_end() {
    let node = Node::new().await;
    let plugin = node.plugin_with(2, |options| {
        options.timing.drain_timeout = Duration::from_millis(300);
    });
    bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
    let socket = node.kubelet.device_plugins_dir().join(node.kubelet.endpoint(GPU).unwrap());
    let _silent = UnixStream::connect(&socket).await.unwrap();
    let _idle = bounded(Client::connect(&socket, ENCODED_PATH)).await;
    plugin.stop().await;
}

#[tokio::test]
async fn a_negative_request_is_refused_and_unknown_calls_are_unimplemented() {
    use tessera_kubelet_api::deviceplugin::{
        ContainerPreferredAllocationRequest, PreferredAllocationRequest,
        PreferredAllocationResponse,
    };
    let (_node, plugin, socket) = node_with_plugin().await;
    let mut client = bounded(Client::connect(&socket, ENCODED_PATH)).await;
    let container =
        ContainerPreferredAllocationRequest { allocation_size: -1, ..Default::default() };
    let request = PreferredAllocationRequest { container_requests: vec![container] };
    let path = "/v1beta1.DevicePlugin/GetPreferredAllocation";
    let answer: Answer<PreferredAllocationResponse> =
        bounded(client.call(path, &request, 64)).await;
    assert!(matches!(answer, Answer::Status(status, _) if status == "3"));
    let answer: Answer<Empty> = bounded(client.call("/v9.Other/Call", &Empty {}, 64)).await;
    assert!(matches!(answer, Answer::Status(status, _) if status == "12"));
    assert_eq!(plugin.calls(), [] as [String; 0]);
}
