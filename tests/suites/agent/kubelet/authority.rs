//! What kubelets before 1.26 send as `:authority`, and calls that no kubelet should make, against the real server.

use std::path::PathBuf;
use std::time::Duration;

use tessera_harness::http2::{Answer, Client};
use tessera_harness::scripted::{GPU, Node, bounded};
use tessera_kubelet_api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, DevicePluginOptions, Empty,
};
use tokio::net::UnixStream;

const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
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
