//! What a reader of one namespace learns of a node that others share: of all that is another's, no name and no reason,
//! on any route.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use tessera_agent::incidents::{Incidents, Seen, Time};
use tessera_cluster::fixtures::ApiServer;
use tessera_fake_kubelet::{Container, Pod};
use tessera_harness::plugin::{
    GIB, GPU, TestNode, admin, bounded, connect, id_of, target, until, until_async,
};
use tessera_model::audit::{Actor, Behind, Event, What};
use tessera_model::record::Record;
use tessera_store::Trail;
use tessera_view::change::{CordonRequest, SetQuotaRequest};
use tessera_web::client::{Client, Endpoint, query};
use tessera_web::{Authorisation, Options, Route, Server};

/// In every name that is the reader's own.
const MINE: &str = "mine";
/// In every name that is another's.
const THEIRS: &str = "theirs";
/// In all that operators are called and say.
const OPERATORS: &str = "operators";

/// A node on which two namespaces share a GPU, wait behind each other, are refused memory, and operators steer both.
struct Stage {
    node: TestNode,
    client: Client,
    ids: Vec<String>,
    _sessions: Vec<OwnedFd>,
    _cluster: ApiServer,
    _server: Server,
}

fn pod(mark: &str, name: &str) -> Pod {
    let container = Container::new(&format!("container-{mark}")).asking(GPU, 1);
    Pod::new(&format!("ns-{mark}"), name).with(container)
}

fn operator(command: &str) -> Actor {
    let (user, login) = (Some("root".to_owned()), Some(format!("alice-of-{OPERATORS}")));
    let command = command.to_owned();
    Actor::Admin { uid: 0, pid: 7, login_uid: Some(7), user, login, command }
}

/// It waited for its GPU while another had the lease, as housekeeping finds it.
fn waited(mine: &Record, other: &Record) -> Vec<Event> {
    let holder = other.holder.clone();
    let behind = Behind::Allocation { id: other.id.to_string(), holder };
    let seen = |waited_ns, behind| {
        let time = Time { asked_millis: 500, waited_ns, behind, ..Time::default() };
        vec![(mine, Seen { time: Some(time), ..Seen::default() })]
    };
    let (mut incidents, round) = (Incidents::default(), Duration::from_secs(10));
    let now = tessera_model::clock::unix_ms();
    incidents.update(seen(0, Behind::Nobody), 0, round, now);
    incidents.update(seen(9_000_000_000, behind), 0, round, now)
}

/// Lines of the trail that concern one, and in which another or an operator is named.
fn tell(node: &TestNode, mine: &Record, other: &Record) {
    let (agent, now) = (node.agent(), tessera_model::clock::unix_ms());
    agent.journal.audit(waited(mine, other));
    let after = mine.grants.iter().map(Into::into).collect();
    let quota = What::QuotaSet { before: Vec::new(), after, forced: false };
    let command =
        format!("quota set {} --reason \"{OPERATORS}: room for {}\"", mine.name(), other.name());
    let said = format!("{OPERATORS}: room for {}", other.name());
    agent.journal.audit([Event::of(mine, quota, now).by(operator(&command)).because(said)]);
}

impl Stage {
    async fn set() -> Self {
        let node = TestNode::start().await;
        let (mut ids, mut sessions) = (Vec::new(), Vec::new());
        for mark in [MINE, THEIRS] {
            let pod = pod(mark, &format!("pod-{mark}"));
            let replicas = bounded(node.kubelet.run(&pod)).await.unwrap().remove(0).device_ids;
            ids.push(id_of(&replicas).to_string());
            let session = connect(&node.pages(&replicas));
            crate::refused(&session, 9 * GIB);
            sessions.push(session);
        }
        node.all_named().await;
        until(|| {
            node.agent().note_incidents();
            let lines = node.agent().journal.read_trail(Trail::read).unwrap();
            let is_refusal = |event: &&Event| matches!(event.what, What::RefusedMemory { .. });
            (lines.events.iter().filter(is_refusal).count() >= 2).then_some(())
        })
        .await;
        let records = node.agent().allocations.records();
        let of = |mark: &str| records.iter().find(|record| record.name().contains(mark)).unwrap();
        tell(&node, of(MINE), of(THEIRS));
        tell(&node, of(THEIRS), of(MINE));
        let root = admin(node.dir.path());
        let memory_limit_bytes = Some(9 * GIB);
        let change = |mark: &str, other: &str| SetQuotaRequest {
            target: target(&format!("pod-{mark}")),
            memory_limit_bytes,
            reason: format!("{OPERATORS}: as ns-{other}/pod-{other}"),
            ..Default::default()
        };
        root.call(&change(MINE, THEIRS)).await.unwrap();
        root.call(&change(THEIRS, MINE)).await.unwrap();
        let reason = format!("{OPERATORS}: ns-{THEIRS} harms ns-{MINE}");
        let cordon = CordonRequest { all: true, reason, ..Default::default() };
        root.call(&cordon).await.unwrap();

        let cluster = ApiServer::start(node.dir.path());
        cluster.with(|store| {
            for mark in [MINE, THEIRS] {
                store.users.accept(mark, mark, &["system:authenticated"]);
                store.users.allow(mark, &format!("ns-{mark}"));
            }
            store.users.accept("none", "none", &["system:authenticated"]);
            // It has rights, and no tenant here.
            store.users.accept("idle", "system:serviceaccount:ns-idle:robot", &[]);
            store.users.allow("system:serviceaccount:ns-idle:robot", "ns-idle");
        });
        let reviews = tessera_cluster::Client::new(cluster.access(), Duration::from_secs(5));
        let mut options = Options::new(Arc::new(node.source()));
        options.listen = vec!["127.0.0.1:0".parse().unwrap()];
        options.authorisation = Authorisation::kubernetes(reviews, Arc::default());
        let server = Server::start(options).unwrap();
        let address = bounded(server.bound()).await.unwrap();
        let client = Client::new(Endpoint::Plain(address));
        Stage { node, client, ids, _sessions: sessions, _cluster: cluster, _server: server }
    }

    /// Everything that can be asked of a route. A new route has no place here until somebody gives it one.
    fn questions(&self, route: Route) -> Vec<String> {
        let with = |parameters: &[(&str, &str)]| format!("{}{}", route.path(), query(parameters));
        let mut all = vec![with(&[])];
        for mark in [MINE, THEIRS] {
            all.push(with(&[("namespace", &format!("ns-{mark}"))]));
        }
        match route {
            Route::Fleet | Route::Stream => {}
            Route::Recommend | Route::Waste => {
                all.extend([MINE, THEIRS].map(|mark| with(&[("pod", &format!("pod-{mark}"))])));
            }
            Route::History | Route::Explain => {
                let names = ["ns-M/pod-M", "pod-M", "container-M", "ns-M/pod-M/container-M"];
                let names = names
                    .iter()
                    .flat_map(|name| [MINE, THEIRS].map(|mark| name.replace('M', mark)));
                let ids = self.ids.iter().flat_map(|id| [id.clone(), id[..4].to_owned()]);
                let others = ["0", "1", "GPU-0", "GPU-", "absent"].map(str::to_owned);
                all.extend(names.chain(ids).chain(others).map(|name| with(&[("subject", &name)])));
            }
            Route::Trace => all = vec![with(&[("seconds", "1")])],
            Route::Schema => all.clear(),
        }
        all
    }

    /// Status, and headers and body together; of a stream two events, between which a quota has changed.
    async fn ask(&self, token: &str, path: &str, accept: &'static str) -> (u16, String) {
        let answer = self.client.clone().with_token(token).ask(path, accept).await.unwrap();
        let status = answer.status().as_u16();
        let mut text = format!("{:?}\n", answer.headers());
        let is_stream = text.contains("text/event-stream");
        let (mut body, mut events) = (answer.into_body(), 0);
        while let Some(frame) = bounded(body.frame()).await {
            text += std::str::from_utf8(frame.unwrap().data_ref().map_or(&[][..], |data| data))
                .unwrap();
            if is_stream && text.matches("\nevent: ").count() > events {
                events += 1;
                if events == 2 {
                    break;
                }
                // A figure of another's: what comes next is said because of it.
                let bytes = (10 + token.len() as u64) * GIB;
                let change = SetQuotaRequest {
                    target: target(&format!("pod-{THEIRS}")),
                    memory_limit_bytes: Some(bytes),
                    ..Default::default()
                };
                admin(self.node.dir.path()).call(&change).await.unwrap();
            }
        }
        (status, text)
    }
}

/// What stands in the text around a mark.
fn around<'t>(text: &'t str, mark: &str) -> Option<&'t str> {
    let at = text.find(mark)?;
    let near = |at: usize| (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    Some(&text[near(at.saturating_sub(160))..near((at + 80).min(text.len()))])
}

#[tokio::test(flavor = "multi_thread")]
async fn no_route_names_to_a_reader_what_belongs_to_others() {
    let stage = Stage::set().await;
    let mut said = Vec::new();
    let readers: [(&str, &[&str]); 4] = [
        (MINE, &[THEIRS, OPERATORS]),
        (THEIRS, &[MINE, OPERATORS]),
        ("none", &[MINE, THEIRS, OPERATORS]),
        ("idle", &[MINE, THEIRS, OPERATORS]),
    ];
    for (token, hidden) in readers {
        for route in Route::ALL.into_iter().filter(|route| *route != Route::Stream) {
            for path in stage.questions(route) {
                for accept in ["application/json", "text/plain"] {
                    let (status, text) = stage.ask(token, &path, accept).await;
                    // A subject that names a namespace is looked for there alone.
                    let refused = if path.contains("%2F") { 404 } else { 403 };
                    assert!(token != "none" || status == refused, "{path}: {status}");
                    // What was asked for may be repeated to the asker.
                    let found = hidden.iter().filter(|mark| status < 400 || !path.contains(**mark));
                    said.extend(found.filter_map(|mark| {
                        Some(format!("{token} {path} {accept}: …{}…", around(&text, mark)?))
                    }));
                }
            }
        }
    }
    for (token, hidden) in readers.into_iter().filter(|(token, _)| *token != "none") {
        let (_, text) = stage.ask(token, Route::Stream.path(), "text/event-stream").await;
        said.extend(hidden.iter().filter_map(|mark| around(&text, mark).map(str::to_owned)));
    }
    assert!(said.is_empty(), "{} answers name others:\n{}", said.len(), said.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_is_still_explained_what_is_its_own_and_root_everything() {
    let stage = Stage::set().await;
    let path = format!("{}{}", Route::Explain.path(), query(&[("subject", "pod-mine")]));
    let (status, text) = stage.ask(MINE, &path, "text/plain").await;
    assert_eq!(status, 200, "{text}");
    for says in [
        "ns-mine/pod-mine (container-mine)",
        "device memory were in use",
        "waited 9.0 s in 10.0 s for its part of GPU time: it got 0% of the 50% that it asks for",
        "another pod had the lease",
        "by an operator",
        "cordoned",
    ] {
        assert!(text.contains(says), "no {says:?} in {text}");
    }
    let history = format!("{}{}", Route::History.path(), query(&[("subject", "pod-mine")]));
    // The history hears of a pod and of its incidents with its next samples.
    until_async(async || {
        let text = stage.ask(MINE, &history, "application/json").await.1;
        let has_both =
            text.contains("another pod had the lease") && text.contains("by an operator");
        has_both.then_some(())
    })
    .await;

    let root = Stage { client: admin(stage.node.dir.path()), ..stage };
    let (_, text) = root.ask("", &path, "text/plain").await;
    for says in [
        "ns-theirs/pod-theirs had the lease",
        "room for ns-theirs",
        "alice-of-operators",
        "operators: ns-theirs harms",
    ] {
        assert!(text.contains(says), "no {says:?} in {text}");
    }
    let (_, text) = root.ask("", &history, "application/json").await;
    assert!(text.contains("ns-theirs/pod-theirs had the lease"), "{text}");
}
