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
use tessera_view::{history, list};

use crate::caller::Caller;
use crate::fleet_cache::FleetCache;
use crate::own::{self, Meaning};
use crate::problem::Refusal;
use crate::query::Parameters;
use crate::routes::{App, Route};
use crate::source::{Source, SourceError};

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
        Route::Gpus => json(&list::gpus(narrowed(&fleet, &rights, asked))),
        Route::Tenants => json(&list::tenants(narrowed(&fleet, &rights, asked))),
        Route::Node => node(narrowed(&fleet, &rights, asked)),
        Route::History => {
            caller.must_see(&rights, &asked.namespace)?;
            let means = own::remembered(&fleet, &only(&rights, asked), &asked.subject);
            let answer = remembered(source, &asked.node, asked.history()?, means).await;
            let answer = answer.map_err(|error| match error {
                SourceError::Invalid(_) if rights != Rights::All && asked.subject.is_empty() => {
                    Refusal::new(StatusCode::BAD_REQUEST, TOO_LONG)
                }
                error => said(error, &rights),
            })?;
            let mut namespaces: BTreeSet<String> =
                answer.tenants.iter().map(|tenant| tenant.namespace.clone()).collect();
            let of_events = answer.events.iter().filter_map(|event| event.pod.split_once('/'));
            namespaces.extend(of_events.map(|(namespace, _)| namespace.to_owned()));
            let behind = answer.events.iter().filter_map(|event| event.behind.as_ref());
            namespaces.extend(behind.map(|other| other.namespace.clone()));
            let rights = more(caller, rights, namespaces).await?;
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
            let rights = more(caller, rights, answer.namespaces()).await?;
            explanation(answer, &rights, headers)
        }
        Route::Recommend => {
            caller.must_see(&rights, &asked.namespace)?;
            let advice = source.recommend(asked.scope()).await;
            let advice = advice.map_err(|error| said(error, &rights))?;
            let namespaces = advice.workloads.iter().map(|one| one.namespace.clone());
            let rights = more(caller, rights, namespaces).await?;
            let advice = narrow::recommendations(advice, &rights);
            // A source does not answer for a pod that it does not know: one that is another's must look like that.
            let is_hidden = rights != Rights::All && advice.workloads.is_empty();
            match is_hidden && !asked.pod.is_empty() {
                true => Err(Refusal::new(StatusCode::NOT_FOUND, NOT_YOURS)),
                false => json(&advice),
            }
        }
        Route::Waste => {
            caller.must_see(&rights, &asked.namespace)?;
            let waste = source.waste(asked.scope()).await;
            let waste = waste.map_err(|error| said(error, &rights))?;
            let namespaces = waste.namespaces.iter().map(|one| one.namespace.clone());
            let rights = more(caller, rights, namespaces).await?;
            json(&narrow::waste(waste, &rights))
        }
        // Not of a source, or no single answer.
        Route::Schema | Route::Stream => Err(Refusal::new(StatusCode::NOT_FOUND, "not here")),
    }
}

/// The fleet, and what the caller may see of it.
pub(crate) async fn view(
    fleets: &FleetCache,
    caller: &Caller,
    asked: &Parameters,
    age: Duration,
) -> Result<(Arc<Fleet>, Rights), Refusal> {
    let fleet = fleets.get(age).await;
    let mut namespaces = BTreeSet::new();
    if let Ok(fleet) = &fleet {
        let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
        let tenants = views.flat_map(|view| &view.tenants);
        namespaces.extend(tenants.map(|tenant| tenant.namespace.clone()));
    }
    namespaces.insert(asked.namespace.clone());
    let rights = caller.some_rights(&namespaces, &asked.namespace).await?;
    // What is amiss is said to those that may know something.
    let fleet = fleet.map_err(|error| said(error, &rights))?;
    Ok((fleet, rights))
}

/// Rights on one namespace, where one is asked for: it is shown as to a reader of that namespace alone.
pub(crate) fn only(rights: &Rights, asked: &Parameters) -> Rights {
    match asked.namespace.as_str() {
        "" => rights.clone(),
        namespace if rights.may_see(namespace) => Rights::Namespaces([namespace.to_owned()].into()),
        _ => Rights::Namespaces(BTreeSet::new()),
    }
}

/// Rights, with those on namespaces that only this answer has.
async fn more(
    caller: &Caller,
    rights: Rights,
    namespaces: impl IntoIterator<Item = String>,
) -> Result<Rights, Refusal> {
    let Rights::Namespaces(some) = &rights else { return Ok(rights) };
    let namespaces: BTreeSet<String> = namespaces.into_iter().chain(some.iter().cloned()).collect();
    caller.rights(&namespaces).await
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
        Meaning::Allocations(ids) => ids,
    };
    let mut all = Joined::new(&asked.subject, own::explained);
    for subject in subjects {
        all.add(source.explain(&asked.node, &subject).await)?;
    }
    all.whole()
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
        Meaning::Allocations(ids) => {
            let of = |subject| history::Query { subject, ..query.clone() };
            ids.into_iter().map(of).collect()
        }
    };
    let mut step_seconds = query.step_seconds;
    loop {
        let mut steps = BTreeSet::new();
        let mut all =
            Joined::new(&query.subject, |one, other| history::Answer::joined([one, other]));
        for query in &queries {
            let query = history::Query { step_seconds, ..query.clone() };
            let answer = source.history(node, query).await;
            steps.extend(answer.iter().map(|answer| answer.step_seconds));
            all.add(answer)?;
        }
        // Each has as many buckets as its own series allow; those of one answer have one length.
        match steps.last() {
            Some(longest) if steps.len() > 1 && step_seconds == 0 => step_seconds = *longest,
            _ => return all.whole(),
        }
    }
}

/// The answers to several questions as one: what is not there for one of them may be there for another.
struct Joined<A> {
    found: Option<A>,
    /// The answer where nothing is there for any.
    missing: SourceError,
    join: fn(A, A) -> A,
}

impl<A> Joined<A> {
    fn new(subject: &str, join: fn(A, A) -> A) -> Self {
        let text = format!("nothing is called {subject:?} here");
        Joined { found: None, missing: SourceError::NotFound(text), join }
    }

    /// # Errors
    /// The source could not say.
    fn add(&mut self, answer: Result<A, SourceError>) -> Result<(), SourceError> {
        match answer {
            Ok(answer) => {
                self.found = Some(match self.found.take() {
                    Some(before) => (self.join)(before, answer),
                    None => answer,
                });
                Ok(())
            }
            Err(error @ SourceError::NotFound(_)) => {
                self.missing = error;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// # Errors
    /// Nothing is there for any question.
    fn whole(self) -> Result<A, SourceError> {
        self.found.ok_or(self.missing)
    }
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
        SourceError::Unavailable(_) => {
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
