//! Credentials, connections and servers that do not answer.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use tessera_cluster::events::{EventClient, PodEvent};
use tessera_cluster::fixtures::Temper;
use tessera_cluster::resource::ResourceClient;
use tessera_cluster::user::{Proxied, UserClient};
use tessera_cluster::{Access, Client, Failure, Retry, Server};

use super::{DRIVER, World, timing, until};

#[tokio::test]
async fn a_token_that_the_server_does_not_take_is_read_again() {
    let world = World::new();
    let token = world.dir.path().join("token");
    std::fs::write(&token, "expired").unwrap();
    let error = world.client.node_uid().await.unwrap_err();
    assert_eq!((&error.failure, error.retry()), (&Failure::Unauthorized, Retry::Later));
    std::fs::write(&token, "secret").unwrap();
    world.client.node_uid().await.unwrap();
    std::fs::remove_file(&token).unwrap();
    let client = ResourceClient::new(world.server.access(), DRIVER, "n1", timing());
    let error = client.node_uid().await.unwrap_err();
    assert_eq!(error.failure, Failure::Unreachable);
    assert!(error.message.contains("/token"), "{error}");
    std::fs::write(&token, "no\nword").unwrap();
    let text = client.node_uid().await.unwrap_err().to_string();
    assert!(text.contains("invalid bearer token"), "{text}");
}

#[tokio::test]
async fn a_server_that_is_silent_slow_or_away_costs_the_limit_of_time_and_not_more() {
    let world = World::new();
    world.server.set_temper(Temper::Silent);
    let begun = Instant::now();
    let error = world.client.own_slices().await.unwrap_err();
    assert_eq!(error.failure, Failure::Slow(timing().limit));
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    world.server.set_temper(Temper::Slow(Duration::from_millis(20)));
    assert_eq!(world.client.own_slices().await.unwrap().0, []);
    world.server.set_temper(Temper::Answers(503, "etcd is away".into()));
    let error = world.client.own_slices().await.unwrap_err();
    assert_eq!(error.failure, Failure::Busy { status: 503, after: None });
    assert_eq!(error.retry(), Retry::Soon);
    // Nobody listens there.
    let nobody = Server { port: 1, ..world.server.access() };
    let client = ResourceClient::new(nobody, DRIVER, "n1", timing());
    let error = client.own_slices().await.unwrap_err();
    assert_eq!(error.failure, Failure::Unreachable);
    assert!(error.message.contains("refused"), "{error}");
}

#[tokio::test]
async fn requests_share_a_connection_which_does_not_outlive_its_use() {
    let world = World::new();
    for _ in 0..20 {
        world.client.node_uid().await.unwrap();
    }
    assert_eq!((world.server.connections(), world.server.open()), (1, 1));
    let events = EventClient::new(Client::new(world.server.access(), timing().limit), "n1".into());
    events.create(&event()).await.unwrap();
    assert_eq!(world.server.open(), 2);
    events.rest().await;
    until(|| world.server.open() == 1).await;
    // The server answers nothing on the old one; the next request has one of its own.
    world.server.set_temper(Temper::Silent);
    world.client.node_uid().await.unwrap_err();
    until(|| world.server.open() == 0).await;
    world.server.set_temper(Temper::Works);
    world.client.node_uid().await.unwrap();
    assert_eq!(world.server.connections(), 3);
}

fn event() -> PodEvent<'static> {
    PodEvent {
        namespace: "team",
        pod: "chat",
        uid: None,
        container: "main",
        reason: "GPUMemoryRefused",
        message: "m",
        warning: true,
        count: 1,
        first_unix_ms: 1_795_340_700_000,
        last_unix_ms: 1_795_340_700_000,
    }
}

#[tokio::test]
async fn an_event_is_made_once_and_counted_after() {
    let world = World::new();
    let events = EventClient::new(Client::new(world.server.access(), timing().limit), "n1".into());
    let name = events.create(&event()).await.unwrap();
    // The first answer came too late: it is there already.
    world.server.set_temper(Temper::Answers(409, "already exists".into()));
    assert_eq!(events.create(&event()).await.unwrap(), name);
    world.server.set_temper(Temper::Works);
    events.update(&PodEvent { count: 7, ..event() }, &name).await.unwrap();
    let asked = world.server.asked();
    let update = asked.last().unwrap();
    assert_eq!(asked[0].target, "/api/v1/namespaces/team/events?");
    assert_eq!(update.target, format!("/api/v1/namespaces/team/events/{name}?"));
    assert_eq!((update.method.as_str(), &update.body["count"]), ("PATCH", &serde_json::json!(7)));
    assert_eq!(update.headers["content-type"], "application/merge-patch+json");
    world.server.set_temper(Temper::Answers(403, "events is forbidden".into()));
    let error = events.create(&event()).await.unwrap_err();
    assert!(error.to_string().contains("403: events is forbidden; grant it"), "{error}");
}

#[tokio::test]
async fn a_kubeconfig_serves_as_well_and_one_that_is_absent_is_named() {
    let world = World::new();
    let file = world.dir.path().join("config");
    let client = |files: Vec<PathBuf>| {
        ResourceClient::new(Access::Kubeconfig(files, None), DRIVER, "n1", timing())
    };
    std::fs::write(&file, world.server.kubeconfig()).unwrap();
    assert_eq!(client(vec![file.clone()]).node_uid().await.unwrap(), "uid-of-n1");
    // As kubectl merges them.
    let empty = world.dir.path().join("empty");
    std::fs::write(&empty, "apiVersion: v1\nkind: Config\n").unwrap();
    assert_eq!(client(vec![empty, file.clone()]).node_uid().await.unwrap(), "uid-of-n1");
    let absent = world.dir.path().join("absent");
    let error = client(vec![absent]).node_uid().await.unwrap_err().to_string();
    assert!(error.contains("/absent: "), "{error}");
}

/// A user of this kubeconfig, whose requests may take a second.
fn user(world: &World, kubeconfig: &str) -> UserClient {
    let file = world.dir.path().join("user");
    std::fs::write(&file, kubeconfig).unwrap();
    UserClient::new(Access::Kubeconfig(vec![file], None), Duration::from_secs(1))
}

#[tokio::test]
async fn a_list_in_parts_is_whole() {
    let world = World::new();
    world.server.with(|store| {
        for n in 0..1200 {
            let name = format!("p{n:04}");
            let pod = serde_json::json!({ "metadata": { "name": name, "namespace": "team" } });
            store.pods.insert(("team".to_owned(), name), pod);
        }
    });
    let user = UserClient::new(world.server.access().into(), Duration::from_secs(60));
    let pods = user.pods("team", "").await.unwrap();
    let names: Vec<String> = pods.into_iter().map(|pod| pod.metadata.name).collect();
    assert_eq!((names.len(), names[1199].as_str()), (1200, "p1199"));
    assert_eq!(world.server.count("GET /api/v1/namespaces/team/pods"), 3);
}

#[tokio::test]
async fn a_credential_plugin_may_wait_for_a_person() {
    let world = World::new();
    let slow = r#"{exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: sh, args: ["-c",
        "sleep 2; echo '{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\"status\":{\"token\":\"secret\"}}'"]}}"#;
    let user = user(&world, &world.server.kubeconfig().replace("{token: secret}", slow));
    let (place, limit) = (place(0), Duration::from_secs(1));
    // The server has no pods, and says so: that is an answer.
    user.through_pod(&place, "tessera-viewer", limit, 1 << 20).await.unwrap();
}

fn place(pod: usize) -> Proxied {
    Proxied {
        namespace: "tessera".into(),
        pod: format!("tessera-{pod}"),
        port: 9481,
        target: "/api/v1/fleet".into(),
    }
}

#[tokio::test]
async fn a_refused_viewers_token_is_asked_for_once_for_all_nodes() {
    let world = World::new();
    let user = user(&world, &world.server.kubeconfig().replace("{token: secret}", "{}"));
    world.server.forbid("POST", "serviceaccounts", true);
    for pod in 0..20 {
        let limit = Duration::from_secs(1);
        user.through_pod(&place(pod), "tessera-viewer", limit, 1 << 20).await.unwrap_err();
    }
    assert_eq!(world.server.count("POST /api/v1/namespaces/tessera/serviceaccounts"), 1);
}
