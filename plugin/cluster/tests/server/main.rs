//! The client against an API server on a port: slices, claims, the watch, versions, and servers that are away,
//! silent, slow, forbidding or of another version; a node's labels, users of tokens, broken kubeconfigs.

mod connection;
mod resource;

use std::time::Duration;

use serde_json::{Value, json};
use tessera_cluster::fixtures::{ApiServer, Temper};
use tessera_cluster::k8s_openapi::api::resource::v1::ResourceSlice;
use tessera_cluster::node::NodeLabels;
use tessera_cluster::resource::{ResourceClient, Timing};
use tessera_cluster::user::UserClient;
use tessera_cluster::{Access, ApiError, Client, Failure, Kind, Verb};

const DRIVER: &str = "gpu.tessera.dev";

/// Short pauses. The limit is what a test of a silent server takes, and more than a busy machine needs to answer.
fn timing() -> Timing {
    Timing {
        limit: Duration::from_secs(3),
        watch: Duration::from_secs(60),
        silence: Duration::from_secs(60),
    }
}

/// A server, its client, and the directory of the token.
struct World {
    server: ApiServer,
    client: ResourceClient,
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        World::with(timing())
    }

    fn with(timing: Timing) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::start(dir.path());
        let client = ResourceClient::new(server.access(), DRIVER, "n1", timing);
        World { server, client, dir }
    }
}

/// A slice of a driver on a node, with one shared device.
fn slice_of(driver: &str, node: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": { "generateName": format!("{node}-") },
        "spec": {
            "driver": driver, "nodeName": node,
            "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{
                "name": "gpu-a", "allowMultipleAllocations": true,
                "attributes": { "uuid": { "string": "GPU-a" } },
                "capacity": { "memory": { "value": "24Gi", "requestPolicy": { "default": "6Gi" } } },
                "taints": [{ "key": "tessera.dev/sick", "effect": "NoSchedule" }],
            }],
        },
    })
}

fn slice() -> ResourceSlice {
    serde_json::from_value(slice_of(DRIVER, "n1")).unwrap()
}

async fn until(mut holds: impl FnMut() -> bool) {
    for _ in 0..12_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not within a minute");
}

// === The labels of a node, and their watch ===

const LABEL: &str = "tessera.dev/config";

fn labels(world: &World, watch: Duration) -> NodeLabels {
    NodeLabels::new(world.server.access(), "n1", Duration::from_secs(3), watch)
}

#[tokio::test]
async fn forgotten_changes_are_read_again_and_what_is_forbidden_is_named() {
    let world = World::new();
    let own = labels(&world, Duration::from_secs(60));
    let old = own.get().await.unwrap();
    world.server.with(|store| store.label("n1", LABEL, Some("l4")));
    // What changed between reading and watching is heard, too.
    own.changed(&old).await.unwrap();
    let watched = world.server.asked().pop().unwrap();
    assert!(watched.target.contains("fieldSelector=metadata.name%3Dn1"), "{watched:?}");
    assert!(watched.headers["accept"].contains("PartialObjectMetadata"), "{watched:?}");
    world.server.forget_changes();
    own.changed(&old).await.unwrap();
    world.server.forbid("WATCH", "nodes", true);
    let forbidden = own.changed(&old).await.unwrap_err();
    assert_eq!(forbidden.failure, Failure::Forbidden);
    assert_eq!((forbidden.call.verb, forbidden.call.kind), (Verb::Watch, Kind::NODES));
    world.server.set_temper(Temper::Answers(500, "etcd".into()));
    let busy = Failure::Busy { status: 500, after: None };
    assert_eq!(own.get().await.unwrap_err().failure, busy);
}

// === Users of tokens and their rights ===

fn reviews() -> (ApiServer, Client, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::start(dir.path());
    let client = Client::new(server.access(), Duration::from_secs(3));
    (server, client, dir)
}

#[tokio::test]
async fn a_right_is_asked_for_with_all_that_is_known_of_the_user() {
    let (server, client, _dir) = reviews();
    server.with(|store| {
        store.users.accept("a", "ann", &["dev"]);
        store.users.allow("dev", "team");
    });
    let ann = client.user("a").await.unwrap().unwrap();
    for (namespace, may) in [("team", true), ("other", false), ("", false)] {
        assert_eq!(client.may_get(&ann, namespace).await.unwrap(), may, "{namespace}");
    }
    // What an authenticator said goes with each question: webhooks judge by it.
    let asked = server.asked().pop().unwrap();
    let spec = &asked.body["spec"];
    assert_eq!((&spec["user"], &spec["uid"]), (&"ann".into(), &"uid-of-ann".into()));
    assert!(spec["extra"].get("authentication.kubernetes.io/credential-id").is_some());
}

#[tokio::test]
async fn a_server_that_is_away_silent_or_forbids_is_an_error_without_the_token() {
    let (server, client, _dir) = reviews();
    server.forbid("POST", "tokenreviews", true);
    let error = client.user("s3cret").await.unwrap_err();
    assert_eq!(error.failure, Failure::Forbidden);
    let text = error.to_string();
    assert!(text.contains("{apiGroups: [\"authentication.k8s.io\"], resources: [\"tokenreviews\"], verbs: [\"create\"]}"));
    assert!(!text.contains("s3cret"), "{text}");
    server.forbid("POST", "tokenreviews", false);
    for temper in
        [Temper::Silent, Temper::Answers(500, "no".into()), Temper::Answers(200, "no".into())]
    {
        server.set_temper(temper);
        let error = client.user("s3cret").await.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("s3cret"), "{error}");
    }
    drop(server);
    assert_eq!(client.user("s3cret").await.unwrap_err().failure, Failure::Unreachable);
}

// === Kubeconfigs with a mistake: each names its file, and nothing is asked; a server that is away is no mistake ===

/// A kubeconfig of these fields in a directory with files that its fields may name.
async fn asked(world: &World, cluster: &str, user: &str) -> Result<(), ApiError> {
    let file = world.dir.path().join("broken");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: s, cluster: {{{cluster}}}}}]\n\
         users: [{{name: u, user: {{{user}}}}}]\ncontexts: [{{name: c, context: {{cluster: s, user: u}}}}]\n"
    );
    std::fs::write(&file, text).unwrap();
    let user = UserClient::new(Access::Kubeconfig(vec![file], None), Duration::from_secs(3));
    user.pods("team", "").await.map(drop)
}

#[tokio::test]
async fn a_broken_kubeconfig_names_its_file_and_a_server_that_is_away_is_none() {
    let world = World::new();
    let access = world.server.access();
    let server = format!("server: 'http://{}:{}'", access.host, access.port);
    asked(&world, &server, "token: secret").await.unwrap();
    let before = world.server.asked().len();
    let plugin = |more: &str| {
        format!(
            "exec: {{apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never{more}}}"
        )
    };
    let token = "token: secret";
    for (cluster, user, says) in [
        ("", token, "url"),
        ("server: 'ftp://k'", token, "is not an address: write https://HOST:PORT"),
        ("server: 'https://k', certificate-authority: absent", token, "absent"),
        (&server, "tokenFile: absent", "absent"),
        (&server, "client-certificate: absent, client-key: absent", "absent"),
        (&server, "token: secret, as: \"two\\nwords\"", "header"),
        (&server, &plugin(", command: /nowhere/login"), "unable to run auth exec"),
        (&server, &plugin(", command: 'false'"), "failed with status"),
        (&server, &plugin(""), "command"),
    ] {
        let error = asked(&world, cluster, user).await.unwrap_err();
        let file = format!("{}: ", world.dir.path().join("broken").display());
        assert_eq!(error.failure, Failure::Kubeconfig, "{error}");
        assert!(error.message.starts_with(&file) && error.message.contains(says), "{error}");
        assert!(!error.message.contains("secret"), "{error}");
    }
    assert_eq!(world.server.asked().len(), before);
    let away = asked(&world, "server: 'http://127.0.0.1:1'", token).await;
    assert_eq!(away.unwrap_err().failure, Failure::Unreachable);
}
