//! Which reviews a question costs depends on the question and its asker alone: neither their number nor their kind, and so
//! no time, tells a reader what else is there or was.

use std::collections::BTreeMap;
use std::time::Duration;

use http_body_util::BodyExt;
use tessera_cluster::fixtures::Temper;
use tessera_view::explain::Explanations;
use tessera_web::authorise::Times;
use tessera_web::client::{Client, Endpoint, query};
use tessera_web::{Route, SourceError, Tls};

use crate::common::Script;
use crate::world::{NAMESPACES, World, explanation, script, short, story};

/// No tenant has one of these.
const ABSENT: &str = "ns-nowhere";
/// Somebody had a share from there.
const PAST: &str = "ns-past";

/// Questions that name a namespace, alone or by a pod, a container or a claim in it.
fn named(route: Route, namespace: &str) -> Vec<String> {
    let of = |parameters: &[(&str, &str)]| format!("{}{}", route.path(), query(parameters));
    let mut all = vec![of(&[("namespace", namespace)])];
    for name in ["pod", "gone", "never", "pod/main"] {
        let name = format!("{namespace}/{name}");
        match route {
            Route::Explain | Route::History => {
                all.push(of(&[("subject", &name)]));
                all.push(of(&[("subject", &name), ("namespace", namespace)]));
            }
            Route::Recommend | Route::Waste => all.push(of(&[("pod", &name)])),
            _ => {}
        }
    }
    all
}

/// Questions that name no namespace.
fn unnamed(route: Route) -> Vec<String> {
    let of = |parameters: &[(&str, &str)]| format!("{}{}", route.path(), query(parameters));
    let mut all = vec![of(&[])];
    for name in ["pod", "gone", "never", "unnamed", "GPU-0", "0", &"0c1d".repeat(8)] {
        match route {
            Route::Explain | Route::History => all.push(of(&[("subject", name)])),
            Route::Recommend | Route::Waste => all.push(of(&[("pod", name)])),
            _ => {}
        }
    }
    all
}

fn routes() -> impl Iterator<Item = Route> {
    Route::ALL.into_iter().filter(|route| *route != Route::Schema)
}

/// The reviews that a question costs: the kind, and the namespace of one of access.
async fn cost(world: &World, client: &Client, path: &str) -> Vec<String> {
    let before = world.cluster.asked().len();
    let answer = client.ask(path, "application/json").await.unwrap();
    // The first frame of a stream is enough.
    answer.into_body().frame().await.unwrap().unwrap();
    let asked = world.cluster.asked().split_off(before);
    let mut reviews: Vec<String> = asked
        .iter()
        .map(|one| {
            let of = &one.body["spec"]["resourceAttributes"]["namespace"];
            format!("{} {}", one.target, of.as_str().unwrap_or_default())
        })
        .collect();
    reviews.sort();
    reviews
}

/// Nothing that is kept expires while a test waits for the machine.
async fn with(script: Script) -> World {
    let hour = Duration::from_secs(3600);
    let times =
        Times { token: hour, unknown: hour, allowed: hour, denied: hour, ..Times::default() };
    let world = World::new(times, Tls::Plain).await;
    *world.source.0.lock().unwrap() = script;
    world
}

/// A node where nothing is and was.
fn empty() -> Script {
    let mut script = script();
    for entry in &mut script.fleet.nodes {
        entry.view.iter_mut().for_each(|view| view.tenants.clear());
    }
    Script {
        fleet: script.fleet,
        error: Some(SourceError::NotFound("nothing is here".to_owned())),
        ..Script::default()
    }
}

/// As the node is, with much that was before.
fn remembering() -> Script {
    let mut script = script();
    let past = |script: &Script| script.history.tenants[0].clone();
    let mut tenant = past(&script);
    (tenant.namespace, tenant.pod) = (PAST.into(), "gone".into());
    script.history.tenants.push(tenant);
    let mut advice = script.recommendations.workloads[0].clone();
    (advice.namespace, advice.pods) = (PAST.into(), vec!["gone".into()]);
    script.recommendations.workloads.push(advice);
    let mut waste = script.waste.namespaces[0].clone();
    waste.namespace = PAST.into();
    script.waste.namespaces.push(waste);
    let subjects = ["gone".to_owned(), format!("{PAST}/gone"), "0c1d".repeat(8)];
    script.explanations.extend(subjects.map(|subject| {
        let explanation = explanation(vec![story(PAST)], false);
        (subject, Explanations::of(vec![("n1".to_owned(), explanation)]))
    }));
    script
}

const TOKENS: [&str; 4] = ["token-0", "token-5", "token-robot", "token-all"];

#[tokio::test]
async fn a_question_that_names_a_namespace_costs_the_same_whatever_is_there() {
    for token in TOKENS {
        for guess in [NAMESPACES[0], NAMESPACES[1], PAST, ABSENT] {
            let mut costs = Vec::new();
            for script in [script(), remembering(), empty()] {
                let world = with(script).await;
                let client = world.client(token);
                // As much as the reader may learn beforehand.
                for route in routes() {
                    for path in unnamed(route) {
                        cost(&world, &client, &path).await;
                    }
                }
                let mut all = Vec::new();
                for path in routes().flat_map(|route| named(route, guess)) {
                    all.push((path.clone(), cost(&world, &client, &path).await));
                }
                costs.push(all);
            }
            assert_eq!(costs[0], costs[2], "{token}: a full and an empty node");
            assert_eq!(costs[0], costs[1], "{token}: with and without a past");
        }
    }
}

#[tokio::test]
async fn a_namespace_that_is_there_costs_what_another_costs() {
    for route in routes() {
        let mut costs = Vec::new();
        for guess in [NAMESPACES[1], NAMESPACES[2], PAST, ABSENT] {
            let world = with(remembering()).await;
            let reader = world.client("token-1");
            for path in routes().flat_map(unnamed) {
                cost(&world, &reader, &path).await;
            }
            let mut all = Vec::new();
            for path in named(route, guess) {
                all.push(cost(&world, &reader, &path).await.len());
            }
            costs.push((guess, all));
        }
        assert!(costs.iter().all(|(_, all)| *all == costs[0].1), "{}: {costs:?}", route.path());
    }
}

#[tokio::test]
async fn a_question_that_names_none_costs_the_same_whatever_was_there() {
    for token in TOKENS {
        let mut costs = Vec::new();
        for script in [script(), remembering()] {
            let world = with(script).await;
            let client = world.client(token);
            let mut all = Vec::new();
            for path in routes().flat_map(unnamed) {
                all.push((path.clone(), cost(&world, &client, &path).await));
            }
            costs.push(all);
        }
        assert_eq!(costs[0], costs[1], "{token}");
        // Of what was asked about, nothing is asked: the first question has asked for all.
        assert!(costs[0][1..].iter().all(|(_, reviews)| reviews.is_empty()), "{:?}", costs[0]);
    }
}

/// The world's counters, as metrics have them.
fn counted(world: &World) -> BTreeMap<String, u64> {
    let requests =
        world.counts.requests().into_iter().map(|(code, count)| (code.to_string(), count));
    let reviews = world.counts.reviews().into_iter();
    let reviews = reviews.map(|(review, outcome, count)| (format!("{review} {outcome}"), count));
    requests.chain(reviews).collect()
}

#[tokio::test]
async fn each_answer_is_counted_by_its_code_and_each_review_by_its_outcome() {
    let world = World::new(short(), Tls::Plain).await;
    assert_eq!(world.counts.listening(), Some(true));
    assert_eq!(world.counts.reviews().len(), 6, "each is there from the start");
    assert!(world.counts.requests().contains(&(503, 0)), "and each common code");
    let path = "/api/v1/fleet";
    let unreachable = Temper::Answers(500, "etcd is away".into());
    // Token, what the API server does, path; code of the answer, and how each kind of question ended.
    let cases = [
        (Some("token-all"), Temper::Works, path, 200, [Some("ok"), Some("ok")]),
        (Some("token-1"), Temper::Works, "/api/v1/history?since=nonsense", 400, [Some("ok"), None]),
        (None, Temper::Works, path, 401, [None, None]),
        (Some("token-of-nobody"), Temper::Works, path, 401, [Some("refused"), None]),
        (Some("token-0"), Temper::Works, path, 403, [Some("ok"), Some("refused")]),
        (Some("token-all"), Temper::Works, "/api/v1/nothing", 404, [None, None]),
        (Some("token-all"), unreachable, path, 503, [Some("unreachable"), None]),
    ];
    for (token, temper, path, code, outcomes) in cases {
        // What was asked before is forgotten.
        tokio::time::sleep(short().token * 3).await;
        world.cluster.set_temper(temper);
        let before = counted(&world);
        let client = Client::new(Endpoint::Plain(world.address));
        let client = token.map_or(client.clone(), |token| client.with_token(token));
        let answer = client.ask(path, "application/json").await.unwrap();
        let what = format!("{path} of {token:?}");
        assert_eq!(answer.status().as_u16(), code, "{what}");
        let now = counted(&world);
        let was = |name: &String| before.get(name).copied().unwrap_or(0);
        let grown: Vec<&String> = now.keys().filter(|name| now[*name] > was(name)).collect();
        let reviews = ["access", "token"].into_iter().zip(outcomes.into_iter().rev());
        let reviews = reviews.filter_map(|(review, how)| Some(format!("{review} {}", how?)));
        let code = code.to_string();
        assert_eq!(now[&code], was(&code) + 1, "{what}");
        let expected: Vec<String> = [code].into_iter().chain(reviews).collect();
        assert_eq!(grown, expected.iter().collect::<Vec<_>>(), "{what}");
    }
    // What is given up counts as nothing: any client may hang up at any time.
    tokio::time::sleep(short().token * 3).await;
    world.cluster.set_temper(Temper::Silent);
    let before = counted(&world);
    let client = world.client("token-all");
    let asking = client.ask(path, "application/json");
    assert!(tokio::time::timeout(short().token, asking).await.is_err());
    tokio::time::sleep(short().limit).await;
    let before = before.iter().filter(|(name, _)| name.contains(' '));
    let now = counted(&world);
    assert!(before.clone().all(|(name, count)| now[name] == *count), "{now:?}");
}
