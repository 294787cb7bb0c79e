//! Which reviews a question costs depends on the question and its asker alone: neither their number nor their kind, and so
//! no time, tells a reader what else is there or was.

use std::time::Duration;

use http_body_util::BodyExt;
use tessera_view::explain::Explanations;
use tessera_web::authorise::Times;
use tessera_web::client::{Client, query};
use tessera_web::{Route, SourceError, Tls};

use crate::common::Script;
use crate::explained;
use crate::world::{NAMESPACES, World, script};

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
        let explanation = explained::explanation(vec![explained::story(PAST)], false);
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
