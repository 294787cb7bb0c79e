//! A reader sees the tenants of the namespaces whose pods the reader may get, and of others only totals: on every
//! route, for every set of namespaces.

use std::collections::BTreeSet;

use http_body_util::BodyExt;
use serde_json::Value;
use tessera_cluster::fixtures::Temper;
use tessera_view::explain::Explanations;
use tessera_view::fleet::Fleet;
use tessera_web::authorise::Times;
use tessera_web::client::{Client, Endpoint, query};
use tessera_web::fixtures::unverified;
use tessera_web::{Route, SourceError, Tls};

use crate::world::{
    NAMESPACES, OPERATORS, World, explanation, hidden, set, short, story, subjects,
};

/// Everything that can be asked of a route. A new route has no place here until somebody gives it one.
fn questions(route: Route) -> Vec<String> {
    let with = |parameters: &[(&str, &str)]| format!("{}{}", route.path(), query(parameters));
    let mut all =
        vec![with(&[]), with(&[("node", "n1")]), with(&[("node", "n2")]), with(&[("node", "n9")])];
    match route {
        Route::Fleet | Route::Trace | Route::Stream => {}
        Route::Recommend | Route::Waste => all.push(with(&[("pod", "ns-alpha pod")])),
        Route::History | Route::Explain => {
            let names = subjects().into_iter().map(|(subject, _)| subject);
            all.extend(
                names.chain(["0".into(), "no-such".into()]).map(|name| with(&[("subject", &name)])),
            );
        }
        // It is everybody's.
        Route::Schema => all.clear(),
    }
    all
}

struct Said {
    status: u16,
    body: String,
}

/// The whole answer, or of a stream the first event.
async fn ask_for(accept: &'static str, client: &Client, path: &str) -> Said {
    let answer = client.ask(path, accept).await.unwrap_or_else(|error| panic!("{path}: {error}"));
    let status = answer.status().as_u16();
    let is_stream =
        answer.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream");
    let mut body = answer.into_body();
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        text.extend_from_slice(frame.unwrap().data_ref().map_or(&[][..], |data| data));
        if is_stream && text.ends_with(b"\n\n") {
            break;
        }
    }
    Said { status, body: String::from_utf8(text).unwrap() }
}

async fn ask(client: &Client, path: &str) -> Said {
    ask_for("application/json", client, path).await
}

fn assert_hidden(said: &Said, seen: &BTreeSet<&str>, path: &str, asked: &str) {
    for mark in hidden(seen) {
        assert!(
            // What was asked for may be repeated to the asker.
            asked.contains(mark) && said.status >= 400 || !said.body.contains(mark),
            "{path}, as a reader of {seen:?}, says {mark}: {}",
            said.body
        );
    }
}

#[tokio::test]
async fn a_reader_never_learns_of_tenants_of_other_namespaces() {
    let world = World::new(Times::default(), Tls::Plain).await;
    let whole: Fleet = world.client("token-all").get("/api/v1/fleet").await.unwrap();
    let all = whole.nodes[0].view.clone().unwrap();
    assert_eq!((all.tenants.len(), all.others.len(), all.warnings.len()), (10, 0, 1));
    for bits in 0..1 << NAMESPACES.len() {
        let (client, seen) = (world.client(&format!("token-{bits}")), set(bits));
        for route in Route::ALL {
            for path in questions(route) {
                for accept in ["application/json", "text/plain"] {
                    let said = ask_for(accept, &client, &path).await;
                    assert_hidden(&said, &seen, &path, &path);
                    // What is named and may not be seen looks like what is not there.
                    let refused = if path.contains("%2F") { 404 } else { 403 };
                    assert!(bits > 0 || said.status == refused, "{path}: {}", said.status);
                }
            }
            for namespace in NAMESPACES {
                let path = format!("{}{}", route.path(), query(&[("namespace", namespace)]));
                if route != Route::Schema {
                    assert_hidden(&ask(&client, &path).await, &seen, &path, &path);
                }
            }
        }
        if bits == 0 {
            continue;
        }
        // What may be seen is seen, and nothing is lost: seen and others are all.
        let fleet: Fleet = client.get("/api/v1/fleet").await.unwrap();
        let view = fleet.nodes[0].view.clone().unwrap();
        assert!(view.tenants.iter().all(|tenant| seen.contains(tenant.namespace.as_str())));
        assert_eq!(view.tenants.len(), 2 * seen.len());
        // One on two GPUs is one.
        assert_eq!(view.tenants.len() + view.hidden_tenants as usize, all.tenants.len());
        for gpu in &all.gpus {
            let of = |tenants: &[tessera_view::tenant::Tenant]| -> u64 {
                let uses = tenants.iter().flat_map(|tenant| &tenant.gpus);
                uses.filter(|used| used.gpu_uuid == gpu.uuid)
                    .map(|used| used.memory_limit_bytes)
                    .sum()
            };
            let others = view.others.iter().filter(|other| other.gpu_uuid == gpu.uuid);
            let others: u64 = others.map(|other| other.memory_limit_bytes).sum();
            assert_eq!(of(&view.tenants) + others, of(&all.tenants), "{} for {seen:?}", gpu.uuid);
        }
        for (subject, namespaces) in subjects() {
            let path = format!("/api/v1/explain{}", query(&[("subject", &subject)]));
            let own = namespaces.iter().filter(|namespace| seen.contains(**namespace)).count();
            let text = ask_for("text/plain", &client, &path).await;
            assert_eq!(text.status, if own > 0 { 200 } else { 404 }, "{path}");
            assert_eq!(text.body.contains(" container)"), own > 0, "{path}: {}", text.body);
            // That others had the lease is said, and not which.
            let is_said = text.body.contains("another pod had the lease");
            assert_eq!(is_said, own > 0, "{path}: {}", text.body);
            let json = ask(&client, &path).await;
            let json: Value = serde_json::from_str(&json.body).unwrap();
            let stories = json["allocations"].as_array().map_or(0, Vec::len);
            assert_eq!(stories, own, "{path}");
        }
    }
}

#[tokio::test]
async fn a_bare_pod_name_is_the_readers_own_whatever_others_call_theirs() {
    let world = World::new(Times::default(), Tls::Plain).await;
    {
        let mut script = world.source.0.lock().unwrap();
        let view = script.fleet.nodes[0].view.as_mut().unwrap();
        view.tenants.iter_mut().for_each(|tenant| tenant.pod = "chat".into());
        let answer_of = |namespace: &str| {
            let explanation = explanation(vec![story(namespace)], false);
            Explanations::of(vec![("n1".to_owned(), explanation)])
        };
        // A source knows the first few: here of none of the reader's.
        script.explanations = vec![
            ("chat".into(), answer_of("ns-beta")),
            ("ns-alpha/chat".into(), answer_of("ns-alpha")),
        ];
    }
    let (alpha, all) = (world.client("token-1"), world.client("token-all"));
    for (client, path) in [
        (&alpha, "/api/v1/explain?subject=chat"),
        (&alpha, "/api/v1/explain?subject=chat&namespace=ns-alpha"),
        (&all, "/api/v1/explain?subject=chat&namespace=ns-alpha"),
    ] {
        let answer = ask(client, path).await;
        let json: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(
            json["allocations"][0]["holder"]["namespace"], "ns-alpha",
            "{path}: {}",
            answer.body
        );
    }
}

#[tokio::test]
async fn what_is_not_yours_and_what_is_not_there_look_alike() {
    let world = World::new(Times::default(), Tls::Plain).await;
    let alpha = world.client("token-1");
    for route in ["/api/v1/explain", "/api/v1/history"] {
        let there = format!("{route}?subject=ns-beta%2Fpod");
        let absent = format!("{route}?subject=ns-beta%2Fnone");
        // A history of somebody else's pod alone.
        if route.ends_with("history") {
            let mut script = world.source.0.lock().unwrap();
            script.history.tenants.retain(|tenant| tenant.namespace == "ns-beta");
        }
        let there = ask(&alpha, &there).await;
        if route.ends_with("history") {
            world.source.0.lock().unwrap().error =
                Some(SourceError::NotFound(format!("no, but {OPERATORS}")));
        }
        let absent = ask(&alpha, &absent).await;
        assert_eq!((there.status, &there.body), (absent.status, &absent.body), "{route}");
        assert_eq!(there.status, 404);
        world.source.0.lock().unwrap().error = None;
    }
    // Of whom advice and waste are, and since when, says no more.
    for (route, status) in [("/api/v1/recommend", 404), ("/api/v1/waste", 200)] {
        for since in ["", "&since_unix_ms=1"] {
            let of = |pod: &str| format!("{route}{}{since}", query(&[("pod", pod)]));
            let there = ask(&alpha, &of("ns-beta pod")).await;
            let absent = ask(&alpha, &of("ns-beta none")).await;
            assert_eq!((there.status, &there.body), (absent.status, &absent.body), "{route}");
            assert_eq!(there.status, status, "{route}");
        }
    }
    let own = format!("/api/v1/recommend{}", query(&[("pod", "ns-alpha pod")]));
    assert_eq!(ask(&alpha, &own).await.status, 200);
    // A GPU's totals are everybody's.
    let gpu = ask(&alpha, "/api/v1/history?subject=GPU-0").await;
    assert_eq!(gpu.status, 200, "{}", gpu.body);
}

/// How many others have a history shows by nothing: neither by the length of buckets nor by what is left out.
#[tokio::test]
async fn a_history_is_the_same_whatever_others_did() {
    let world = World::new(Times::default(), Tls::Plain).await;
    let alpha = world.client("token-1");
    for parameters in ["", "?subject=GPU-0", "?namespace=ns-alpha"] {
        let path = format!("/api/v1/history{parameters}");
        let before = ask(&alpha, &path).await;
        assert_eq!(before.status, 200, "{path}: {}", before.body);
        let history = world.source.0.lock().unwrap().history.clone();
        let others = history.tenants.iter().filter(|one| one.namespace == "ns-beta");
        let others: Vec<_> = others.cloned().cycle().take(50).collect();
        assert!(!others.is_empty());
        world.source.0.lock().unwrap().history.tenants.extend(others);
        let after = ask(&alpha, &path).await;
        assert_eq!(before.body, after.body, "{path}");
        world.source.0.lock().unwrap().history = history;
    }
    let queries = std::mem::take(&mut world.source.0.lock().unwrap().queries);
    assert!(queries.iter().all(|query| query.namespace == "ns-alpha"), "{queries:?}");
    // A namespace that may not be seen is refused, as advice and waste of it are.
    let refused = ask(&alpha, "/api/v1/history?namespace=ns-beta").await;
    let waste = ask(&alpha, "/api/v1/waste?namespace=ns-beta").await;
    assert_eq!((refused.status, &refused.body), (403, &waste.body));
    // Several namespaces of a reader have buckets of one length.
    let some = world.client("token-3");
    let of = |namespace: &str| {
        let script = world.source.0.lock().unwrap();
        script.history.tenants.iter().find(|one| one.namespace == namespace).cloned().unwrap()
    };
    let tenants = vec![of("ns-alpha"), of("ns-alpha"), of("ns-beta")];
    world.source.0.lock().unwrap().history.tenants = tenants;
    let answer = ask(&some, "/api/v1/history").await;
    let answer: Value = serde_json::from_str(&answer.body).unwrap();
    let queries = std::mem::take(&mut world.source.0.lock().unwrap().queries);
    assert_eq!(answer["step_seconds"], 300);
    let steps: Vec<u32> = queries.iter().map(|query| query.step_seconds).collect();
    assert_eq!(steps, [0, 0, 300, 300]);
}

#[tokio::test]
async fn a_question_that_makes_no_sense_is_said_to_be_one_whoever_asks() {
    let world = World::new(Times::default(), Tls::Plain).await;
    let bad = ["step_seconds=7", "since_unix_ms=9&until_unix_ms=8", "step_seconds=7&subject=x"];
    for parameters in bad {
        let path = format!("/api/v1/history?{parameters}");
        for token in ["token-1", "token-all"] {
            let said = ask(&world.client(token), &path).await;
            assert_eq!(said.status, 400, "{path} as {token}: {}", said.body);
        }
    }
}

#[tokio::test]
async fn what_a_source_says_of_errors_is_for_those_that_may_see_all() {
    let world = World::new(Times::default(), Tls::Plain).await;
    let errors = [SourceError::NotFound, SourceError::Invalid, SourceError::Unavailable];
    for error in errors.map(|kind| kind(format!("see {OPERATORS}"))) {
        world.source.0.lock().unwrap().error = Some(error.clone());
        for path in
            ["/api/v1/history", "/api/v1/explain?subject=x", "/api/v1/recommend", "/api/v1/waste"]
        {
            let some = ask(&world.client("token-3"), path).await;
            assert!(some.status >= 400 && !some.body.contains(OPERATORS), "{path}: {}", some.body);
            let all = ask(&world.client("token-all"), path).await;
            assert!(all.status >= 400 && all.body.contains(OPERATORS), "{path}: {}", all.body);
            // An operator that asks for one namespace is still one.
            let one =
                format!("{path}{}namespace=ns-beta", if path.contains('?') { '&' } else { '?' });
            let all = ask(&world.client("token-all"), &one).await;
            assert!(all.body.contains(OPERATORS), "{one}: {}", all.body);
        }
    }
}

#[tokio::test]
async fn one_namespace_is_shown_as_its_readers_see_it() {
    let world = World::new(Times::default(), Tls::Plain).await;
    let beta: Fleet = world.client("token-2").get("/api/v1/fleet").await.unwrap();
    let tenants = &beta.nodes[0].view.as_ref().unwrap().tenants;
    assert!(tenants.len() == 2 && tenants.iter().all(|one| one.namespace == "ns-beta"));
    // Of all or of two that may be seen, one is asked for; one is asked for that may not be seen.
    for token in ["token-all", "token-3"] {
        let one: Fleet = world.client(token).get("/api/v1/fleet?namespace=ns-beta").await.unwrap();
        assert_eq!(one, beta, "{token}");
    }
    for namespace in ["ns-beta", "ns-nowhere"] {
        for route in Route::ALL.into_iter().filter(|route| *route != Route::Schema) {
            let path = format!("{}?namespace={namespace}&subject=pod", route.path());
            let said = ask(&world.client("token-1"), &path).await;
            assert_eq!(said.status, 403, "{path}: {}", said.body);
            let says = format!("may not get pods in {namespace}");
            assert!(said.body.contains(&says), "{path}: {}", said.body);
        }
    }
}

#[tokio::test]
async fn rights_on_a_namespace_without_tenants_here_give_totals() {
    let world = World::new(Times::default(), Tls::Plain).await;
    // A service account's own namespace is asked for.
    let fleet: Fleet = world.client("token-robot").get("/api/v1/fleet").await.unwrap();
    let view = fleet.nodes[0].view.as_ref().unwrap();
    assert_eq!((view.tenants.len(), view.others.len()), (0, 2));
    // A user names it.
    world.cluster.with(|store| store.users.allow("user-0", "ns-omega"));
    let user = world.client("token-0");
    let error = user.get::<Fleet>("/api/v1/fleet").await.unwrap_err();
    assert!(error.to_string().contains("?namespace=NAME") && error.exit() == 77, "{error}");
    let fleet: Fleet = user.get("/api/v1/fleet?namespace=ns-omega").await.unwrap();
    assert_eq!(fleet.nodes[0].view.as_ref().unwrap().tenants.len(), 0);
    // What is no namespace's name is never asked for.
    for name in ["", "-", "A", "x/y", "..", &"x".repeat(64), "<script>"] {
        let path = format!("/api/v1/fleet{}", query(&[("namespace", name)]));
        assert_eq!(ask(&user, &path).await.status, 403, "{name}");
    }
    let asked = world.cluster.asked();
    let asked: BTreeSet<&str> = asked
        .iter()
        .filter_map(|one| one.body["spec"]["resourceAttributes"]["namespace"].as_str())
        .collect();
    assert!(asked.iter().all(|name| name.starts_with("ns-")), "{asked:?}");
}

#[tokio::test]
async fn without_a_token_that_is_accepted_there_is_nothing() {
    let world = World::new(Times::default(), Tls::SelfSigned).await;
    let bare = Client::new(Endpoint::Secure(world.address, unverified()));
    for route in Route::ALL.into_iter().filter(|route| *route != Route::Schema) {
        for (client, says) in [
            (bare.clone(), "a token is needed"),
            (bare.clone().with_token("token-expired"), "expired"),
            (bare.clone().with_token("two words"), "one token"),
        ] {
            let said = ask(&client, route.path()).await;
            assert_eq!(said.status, 401, "{}", route.path());
            assert!(
                said.body.contains(says) && said.body.contains("kubectl create token"),
                "{}",
                said.body
            );
            assert_hidden(&said, &BTreeSet::new(), route.path(), "");
        }
    }
    let over_tls: Fleet = bare.clone().with_token("token-all").get("/api/v1/fleet").await.unwrap();
    assert_eq!(over_tls.nodes.len(), 2);
    assert_eq!(ask(&bare, "/api/v1/schema").await.status, 200);
    // Plain HTTP gets nothing from a port with TLS.
    let plain = Client::new(Endpoint::Plain(world.address)).with_token("token-all");
    assert_eq!(plain.get::<Value>("/api/v1/fleet").await.unwrap_err().exit(), 69);
}

#[tokio::test]
async fn an_api_server_that_does_not_answer_shuts_the_door() {
    let world = World::new(short(), Tls::Plain).await;
    let some = world.client("token-3");
    let forbid =
        |method: &str, resource: &str, yes: bool| world.cluster.forbid(method, resource, yes);
    let failures: [(&str, &dyn Fn(bool)); 4] = [
        ("silent", &|yes| {
            world.cluster.set_temper(if yes { Temper::Silent } else { Temper::Works })
        }),
        ("failing", &|yes| {
            let failing = Temper::Answers(500, "etcd is away".into());
            world.cluster.set_temper(if yes { failing } else { Temper::Works });
        }),
        ("forbidding tokens", &|yes| forbid("POST", "tokenreviews", yes)),
        ("forbidding access", &|yes| forbid("POST", "subjectaccessreviews", yes)),
    ];
    for (name, fails) in failures {
        assert_eq!(ask(&some, "/api/v1/fleet").await.status, 200, "before {name}");
        fails(true);
        let said = loop {
            // What was answered a moment ago still holds.
            let said = ask(&some, "/api/v1/fleet").await;
            if said.status != 200 {
                break said;
            }
        };
        assert_eq!(said.status, 503, "{name}: {}", said.body);
        assert!(
            said.body.contains("TokenReview") && !said.body.contains("ns-"),
            "{name}: {}",
            said.body
        );
        fails(false);
    }
}

#[tokio::test]
async fn a_stream_ends_with_the_rights_that_it_began_with() {
    let world = World::new(short(), Tls::Plain).await;
    for (token, user) in [("token-1", "user-1"), ("token-2", "user-2")] {
        let stream = world.client(token).ask("/api/v1/stream", "text/event-stream").await.unwrap();
        let mut body = stream.into_body();
        let mut text = String::new();
        let mut taken = false;
        while let Some(frame) = body.frame().await {
            let frame = frame.unwrap();
            text.push_str(
                std::str::from_utf8(frame.data_ref().map_or(&[][..], |data| data)).unwrap(),
            );
            if !taken && text.contains("event: fleet") {
                taken = true;
                world.cluster.with(|store| match user {
                    "user-1" => store.users.expire(token),
                    _ => store.users.deny(user, "ns-beta"),
                });
            }
        }
        assert!(text.contains("event: error"), "{text}");
        let code = if user == "user-1" { "401" } else { "403" };
        assert!(text.contains(&format!("\"code\":{code}")), "{text}");
    }
}

#[tokio::test]
async fn the_api_server_is_asked_once_for_what_many_ask() {
    let world = World::new(Times::default(), Tls::Plain).await;
    let client = world.client("token-5");
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let client = client.clone();
        asking.spawn(async move { client.get::<Fleet>("/api/v1/fleet").await.map(drop) });
    }
    while let Some(done) = asking.join_next().await {
        done.unwrap().unwrap();
    }
    let asked = world.cluster.asked();
    let count = |what: &str| asked.iter().filter(|one| one.target.contains(what)).count();
    // For all namespaces, and for the four that have tenants here.
    assert_eq!((count("tokenreviews"), count("subjectaccessreviews")), (1, 5));
}
