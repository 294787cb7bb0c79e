//! What each route answers. Everything that a source says passes through [`narrowed`] before it is written: what a
//! caller may not see ends here.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use futures_util::stream;
use serde::Serialize;
use tessera_view::explain::Explanations;
use tessera_view::fleet::Fleet;
use tessera_view::narrow::{self, Rights};
use tessera_view::{fleet, history};

use crate::caller::Caller;
use crate::own::{self, Meaning};
use crate::problem::Refusal;
use crate::query::{Parameters, namespace_of};
use crate::routes::{App, Route};
use crate::source::{FleetCache, Source, SourceError};

/// For how long a look at everything serves all that ask.
const FRESH: Duration = Duration::from_millis(250);

/// What a caller without rights on all namespaces reads of anything that is not there for it: whether it exists is
/// not said.
const NOT_YOURS: &str = "nothing of yours is called so here; name a pod as NAMESPACE/POD, and see /api/v1/tenants \
                         for what you may see";

/// As [`NOT_YOURS`], of a history that nothing was named for: a source refuses its window alone.
const TOO_LONG: &str =
    "that is more than an answer has: ask for a shorter window, or for longer buckets";

/// Answers a request for data.
pub(crate) async fn answer(
    route: Route,
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    asked: &Parameters,
) -> Result<Response<Body>, Refusal> {
    let source: &dyn Source = &*app.source;
    let (fleet, rights) = view(&app.fleets, caller, asked, FRESH).await?;
    match route {
        Route::Fleet => {
            let encoded = app.encodings.get(&fleet, &only(&rights, asked), &asked.node);
            Ok(in_pieces(encoded.map_err(|error| broken(&error))?.whole()))
        }
        Route::Gpus => json(&fleet::gpus(narrowed(&fleet, &rights, asked))),
        Route::Tenants => json(&fleet::tenants(narrowed(&fleet, &rights, asked))),
        Route::Node => node(narrowed(&fleet, &rights, asked)),
        Route::History => {
            let means = own::remembered(&fleet, &only(&rights, asked), &asked.subject);
            let answer = remembered(source, &asked.node, asked.history()?, means).await;
            let answer = answer.map_err(|error| match error {
                SourceError::Invalid(_) if rights != Rights::All && asked.subject.is_empty() => {
                    Refusal::new(StatusCode::BAD_REQUEST, TOO_LONG)
                }
                error => said(error, &rights),
            })?;
            let answer = narrow::history(answer, &rights);
            // One pod's history is there for those that may see it; a GPU's totals are everybody's.
            let is_hidden = rights != Rights::All && answer.tenants.is_empty();
            match is_hidden && !asked.subject.is_empty() && !own::is_gpu(&fleet, &asked.subject) {
                true => Err(Refusal::new(StatusCode::NOT_FOUND, NOT_YOURS)),
                false => json(&answer),
            }
        }
        Route::Explain => {
            if asked.subject.is_empty() {
                let text =
                    "say what to explain: ?subject=POD, NAMESPACE/POD, an allocation or a GPU";
                return Err(Refusal::new(StatusCode::BAD_REQUEST, text));
            }
            let means = own::meaning(&fleet, &only(&rights, asked), &asked.subject);
            let answer = explained(source, asked, means).await;
            let answer = answer.map_err(|error| said(error, &rights))?;
            explanation(answer, &rights, headers)
        }
        Route::Recommend => {
            let advice = source.recommend(asked.scope()).await;
            let advice = advice.map_err(|error| said(error, &rights))?;
            let advice = narrow::recommendations(advice, &rights);
            // A source does not answer for a pod that it does not know: one that is another's must look like that.
            let is_hidden = rights != Rights::All && advice.workloads.is_empty();
            match is_hidden && !asked.pod.is_empty() {
                true => Err(Refusal::new(StatusCode::NOT_FOUND, NOT_YOURS)),
                false => json(&advice),
            }
        }
        Route::Waste => {
            let waste = source.waste(asked.scope()).await;
            let waste = waste.map_err(|error| said(error, &rights))?;
            json(&narrow::waste(waste, &rights))
        }
        Route::Trace => {
            let seconds = asked.seconds()?;
            let trace = source.trace(&asked.node, seconds).await;
            let trace = trace.map_err(|error| said(error, &rights))?;
            json(&trace.narrowed(&only(&rights, asked)))
        }
        // Not of a source, or no single answer.
        Route::Schema | Route::Stream => Err(Refusal::new(StatusCode::NOT_FOUND, "not here")),
    }
}

/// The fleet, and what the caller may see of it: known before a source is asked where the question names a namespace, and
/// then without a look at which namespaces are there.
///
/// # Errors
/// The caller may see nothing, or not what is named; or that is not known now.
pub(crate) async fn view(
    fleets: &FleetCache,
    caller: &Caller,
    asked: &Parameters,
    age: Duration,
) -> Result<(Arc<Fleet>, Rights), Refusal> {
    let named = asked.namespaces();
    if !named.is_empty() {
        let rights = caller.rights_on_named(&named).await?;
        may_see(caller, &rights, asked)?;
        let fleet = fleets.get(age).await.map_err(|error| said(error, &rights))?;
        return Ok((fleet, rights));
    }
    let fleet = fleets.get(age).await;
    let views = fleet.iter().flat_map(|fleet| &fleet.nodes).filter_map(|entry| entry.view.as_ref());
    let tenants = views.flat_map(|view| &view.tenants);
    let found = tenants.map(|tenant| tenant.namespace.clone()).collect();
    let rights = caller.rights_on_found(found).await?;
    // What is amiss is said to those that may know something.
    let fleet = fleet.map_err(|error| said(error, &rights))?;
    Ok((fleet, rights))
}

/// Refuses what is named and may not be seen, whether or not it is there: a pod or a claim as one that is not.
fn may_see(caller: &Caller, rights: &Rights, asked: &Parameters) -> Result<(), Refusal> {
    let is_hidden =
        |name: &str| namespace_of(name).is_some_and(|namespace| !rights.may_see(namespace));
    if is_hidden(&asked.subject) {
        return Err(Refusal::new(StatusCode::NOT_FOUND, NOT_YOURS));
    }
    if !asked.namespace.is_empty() && !rights.may_see(&asked.namespace) {
        return Err(caller.refused(&asked.namespace));
    }
    match is_hidden(&asked.pod) {
        true => Err(Refusal::new(StatusCode::NOT_FOUND, NOT_YOURS)),
        false => Ok(()),
    }
}

/// Rights on one namespace, where one is asked for: it is shown as to a reader of that namespace alone.
pub(crate) fn only(rights: &Rights, asked: &Parameters) -> Rights {
    match asked.namespace.as_str() {
        "" => rights.clone(),
        namespace if rights.may_see(namespace) => Rights::Namespaces([namespace.to_owned()].into()),
        _ => Rights::Namespaces(BTreeSet::new()),
    }
}

/// The part of a fleet that was asked for and may be seen.
fn narrowed(fleet: &Fleet, rights: &Rights, asked: &Parameters) -> Fleet {
    let is_asked = |node: &str| asked.node.is_empty() || asked.node == node;
    let nodes = fleet.nodes.iter().filter(|entry| is_asked(&entry.node)).cloned();
    let part = Fleet {
        api_version: fleet.api_version.clone(),
        name: fleet.name.clone(),
        at_unix_ms: fleet.at_unix_ms,
        nodes: nodes.collect(),
    };
    narrow::fleet(part, &only(rights, asked))
}

fn node(fleet: Fleet) -> Result<Response<Body>, Refusal> {
    let names: Vec<&str> = fleet.nodes.iter().map(|entry| entry.node.as_str()).take(8).collect();
    match fleet.nodes.as_slice() {
        [entry] => match &entry.view {
            Some(view) => json(view),
            None => Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, entry.error.clone())),
        },
        [] => Err(Refusal::new(StatusCode::NOT_FOUND, "no node is called so; see /api/v1/fleet")),
        _ => {
            let text = format!(
                "there are several nodes; choose one with ?node=, of {}, …",
                names.join(", ")
            );
            Err(Refusal::new(StatusCode::BAD_REQUEST, text))
        }
    }
}

fn explanation(
    answer: Explanations,
    rights: &Rights,
    headers: &HeaderMap,
) -> Result<Response<Body>, Refusal> {
    let Some(answer) = narrow::explanations(answer, rights) else {
        return Err(Refusal::new(StatusCode::NOT_FOUND, NOT_YOURS));
    };
    if wants_text(headers) {
        return Ok(with_type("text/plain; charset=utf-8", answer.text()));
    }
    match answer.nodes.as_slice() {
        [one] => json(&one.explanation),
        _ => json(&answer),
    }
}

/// What the source explains of all that a subject means.
async fn explained(
    source: &dyn Source,
    asked: &Parameters,
    means: Meaning,
) -> Result<Explanations, SourceError> {
    let subjects = match means {
        Meaning::AsWritten => vec![asked.subject.clone()],
        Meaning::In(namespaces) => {
            namespaces.iter().map(|namespace| format!("{namespace}/{}", asked.subject)).collect()
        }
    };
    let mut answers = Vec::new();
    for subject in subjects {
        answers.push(source.explain(&asked.node, &subject).await);
    }
    joined(&asked.subject, answers, own::explained)
}

/// What the source remembers of all that a subject means.
async fn remembered(
    source: &dyn Source,
    node: &str,
    query: history::Query,
    means: Meaning,
) -> Result<history::Answer, SourceError> {
    let queries = match means {
        Meaning::AsWritten => vec![query.clone()],
        Meaning::In(namespaces) => {
            let of = |namespace| history::Query { namespace, ..query.clone() };
            namespaces.into_iter().map(of).collect()
        }
    };
    let mut step_seconds = query.step_seconds;
    loop {
        let mut answers = Vec::new();
        for query in &queries {
            let query = history::Query { step_seconds, ..query.clone() };
            answers.push(source.history(node, query).await);
        }
        let steps: BTreeSet<u32> = answers.iter().flatten().map(|one| one.step_seconds).collect();
        // Each has as many buckets as its own series allow; those of one answer have one length.
        match steps.last() {
            Some(longest) if steps.len() > 1 && step_seconds == 0 => step_seconds = *longest,
            _ => {
                let join = |one, other| history::Answer::joined([one, other]);
                return joined(&query.subject, answers, join);
            }
        }
    }
}

/// The answers to several questions as one: what is not there for one of them may be there for another.
fn joined<A>(
    subject: &str,
    answers: Vec<Result<A, SourceError>>,
    join: fn(A, A) -> A,
) -> Result<A, SourceError> {
    let mut all = Err(SourceError::NotFound(format!("nothing is called {subject:?} here")));
    for answer in answers {
        all = match (all, answer) {
            (Ok(before), Ok(answer)) => Ok(join(before, answer)),
            (Ok(found), Err(SourceError::NotFound(_))) => Ok(found),
            (Err(_), answer @ (Ok(_) | Err(SourceError::NotFound(_)))) => answer,
            (_, Err(error)) => return Err(error),
        };
    }
    all
}

fn wants_text(headers: &HeaderMap) -> bool {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = |part: &str| part.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    // The first that we have, as it was listed.
    accept.split(',').map(kind).find(|kind| kind == "text/plain" || kind == "application/json")
        == Some("text/plain".to_owned())
}

/// A source's refusal, in words that name nobody to callers that may not see all.
fn said(error: SourceError, rights: &Rights) -> Refusal {
    if *rights == Rights::All {
        return error.into();
    }
    match error {
        // "Several begin so" names them.
        SourceError::NotFound(_) | SourceError::Invalid(_) => {
            Refusal::new(StatusCode::NOT_FOUND, NOT_YOURS)
        }
        SourceError::Conflict(_) | SourceError::NoRoom(_) | SourceError::Unavailable(_) => {
            let text = "that is not known now; try again, or ask whoever runs Tessera here";
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text)
        }
    }
}

pub(crate) fn json(value: &impl Serialize) -> Result<Response<Body>, Refusal> {
    let text = serde_json::to_vec(value).map_err(|error| broken(&error))?;
    Ok(with_type("application/json", text))
}

/// JSON in pieces that answers share: however slowly it is read, there is one of each.
fn in_pieces(pieces: Vec<Bytes>) -> Response<Body> {
    let length = pieces.iter().map(Bytes::len).sum::<usize>();
    let body = Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, Infallible>)));
    let mut response = with_type("application/json", body);
    response.headers_mut().insert(CONTENT_LENGTH, length.into());
    response
}

pub(crate) fn with_type(kind: &'static str, text: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(text.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub(crate) fn broken(error: &serde_json::Error) -> Refusal {
    tracing::error!(%error, "an answer cannot be written");
    Refusal::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "the answer cannot be written; see the plugin's log",
    )
}
