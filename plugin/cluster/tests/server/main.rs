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
use tessera_cluster::reviews::ReviewClient;
use tessera_cluster::user::UserClient;
use tessera_cluster::{Access, ApiError, Client, Failure, Kind, Verb};
use tessera_model::printable;

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

fn reviews() -> (ApiServer, ReviewClient, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::start(dir.path());
    let client = ReviewClient::new(Client::new(server.access(), Duration::from_secs(3)));
    (server, client, dir)
}

#[tokio::test]
async fn rights_are_of_a_user_or_a_group_in_one_namespace_or_all() {
    let (server, client, _dir) = reviews();
    server.with(|store| {
        store.users.accept("a", "ann", &["dev"]);
        store.users.allow("dev", "team");
        store.users.accept("o", "ops", &[]);
        store.users.allow("ops", "");
    });
    let ann = client.user("a").await.unwrap().unwrap();
    let ops = client.user("o").await.unwrap().unwrap();
    for (user, namespace, may) in [
        (&ann, "team", true),
        (&ann, "other", false),
        (&ann, "", false),
        (&ops, "other", true),
        (&ops, "", true),
    ] {
        assert_eq!(
            client.may(user, Verb::Get, namespace).await.unwrap(),
            may,
            "{} {namespace}",
            user.name
        );
    }
    assert!(!client.may(&ann, Verb::Delete, "team").await.unwrap());
    // What an authenticator said goes with each question: webhooks judge by it.
    let asked =
        server.asked().into_iter().rfind(|asked| asked.target.contains("subjectaccessreviews"));
    let spec = &asked.unwrap().body["spec"];
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

fn address(world: &World) -> String {
    let access = world.server.access();
    format!("server: 'http://{}:{}'", access.host, access.port)
}

/// A kubeconfig of these fields in a directory with files that its fields may name.
async fn asked(world: &World, context: &str, cluster: &str, user: &str) -> Result<(), ApiError> {
    let dir = world.dir.path();
    let file = dir.join("broken");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: s, cluster: {{{cluster}}}}}]\n\
         users: [{{name: u, user: {{{user}}}}}]\ncontexts: [{{name: c, context: {{{context}}}}}]\n"
    );
    std::fs::write(&file, text).unwrap();
    let user = UserClient::new(Access::Kubeconfig(vec![file], None), Duration::from_secs(3), 4);
    user.pods("team", "").await.map(drop)
}

#[tokio::test]
async fn every_broken_kubeconfig_is_one_and_names_its_file() {
    let world = World::new();
    let dir = world.dir.path();
    std::fs::write(dir.join("lines"), "two\nwords\n").unwrap();
    let (used, token, server) = ("cluster: s, user: u", "token: secret", address(&world));
    asked(&world, used, &server, token).await.unwrap();
    let before = world.server.asked().len();
    let exec = "apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never";
    let plugin = |more: &str| format!("exec: {{{exec}, {more}}}");
    let hint = plugin("command: tessera-no-such-login, installHint: get it at k.example");
    let mut missed = Vec::new();
    for (context, cluster, user, says) in [
        ("cluster: k, user: u", server.as_str(), token, "k"),
        ("user: u", &server, token, "missing field `cluster`"),
        ("cluster: s, user: v", &server, token, "names the user \"v\""),
        (used, "", token, "url"),
        (used, "server: 'a b'", token, "url"),
        (used, "server: 'ftp://k'", token, "is not an address: write https://HOST:PORT"),
        (used, "server: 'https://k', certificate-authority: absent", token, "absent"),
        (used, "server: 'https://k', certificate-authority-data: '!'", token, "base64"),
        (used, "server: 'https://k', proxy-url: 'a b'", token, "proxy"),
        (used, &server, "tokenFile: absent", "absent"),
        (used, &server, "tokenFile: lines", "is not a token, which is one word"),
        (used, &server, "token: \"two\\nwords\"", "one word"),
        (used, &server, "client-certificate: absent, client-key: absent", "absent"),
        (used, &server, "auth-provider: {name: azure, config: {}}", "azure"),
        (used, &server, "token: secret, as: \"two\\nwords\"", "header"),
        (used, &server, &plugin("command: /nowhere/login"), "or correct the path"),
        (used, &server, &hint, "install it: get it at k.example"),
        (used, &server, &format!("exec: {{{exec}}}"), "command"),
        (used, &server, &plugin("command: echo"), "prints no ExecCredential"),
    ] {
        let case = format!("{context} / {cluster} / {user}");
        let file = format!("{}: ", dir.join("broken").display());
        match asked(&world, context, cluster, user).await {
            Err(ApiError { failure: Failure::Kubeconfig, message, .. })
                if message.starts_with(&file)
                    && message.contains(says)
                    && !message.contains("secret")
                    && !message.contains('\n') => {}
            other => missed.push(format!("{case}: {other:?}")),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    assert_eq!(world.server.asked().len(), before);
}

#[tokio::test]
async fn a_server_that_is_away_and_a_login_that_fails_are_no_mistakes_of_the_kubeconfig() {
    let world = World::new();
    let context = "cluster: s, user: u";
    let away = asked(&world, context, "server: 'http://127.0.0.1:1'", "token: secret").await;
    assert_eq!(away.unwrap_err().failure, Failure::Unreachable);
    let failing = "exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: 'false'}";
    let failed = asked(&world, context, "server: 'http://127.0.0.1:1'", failing).await;
    let failed = failed.unwrap_err();
    assert!(failed.message.contains("to see why"), "{failed}");
    assert_eq!(failed.failure, Failure::Login("false".to_owned()));
    let dir = world.dir.path();
    let server = address(&world);
    // As `kubectl create token` writes it.
    std::fs::write(dir.join("token"), "secret\n").unwrap();
    let file = format!("tokenFile: '{}'", dir.join("token").display());
    asked(&world, context, &server, &file).await.unwrap();
}

#[tokio::test]
async fn a_login_that_fails_or_leaves_something_running_is_said_in_one_line_and_not_waited_for() {
    let world = World::new();
    let server = address(&world);
    let login = |script: &str| {
        let exec =
            "apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: sh";
        format!("exec: {{{exec}, args: ['-c', '{script}']}}")
    };
    let context = "cluster: s, user: u";
    let says = r#"{"kind": "ExecCredential", "status": {"token": "secret"}}"#;
    std::fs::write(world.dir.path().join("credential"), says).unwrap();
    let credential = format!("cat {}", world.dir.path().join("credential").display());
    asked(&world, context, &server, &login(&format!("sleep 4000 & {credential}"))).await.unwrap();
    for script in ["printf \"\\033[2Jgone\\rall\" >&2; exit 1", "printf \"\\033[2Jgone\\rall\""] {
        let error = asked(&world, context, &server, &login(script)).await.unwrap_err().to_string();
        assert_eq!(printable::line(&error), error, "{error}");
        assert!(error.contains("\"sh\""), "{error}");
    }
}
