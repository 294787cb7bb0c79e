//! What each route answers. Everything that a source says passes through [`narrow`] before it is written: what a
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
use tessera_model::written_name::is_written;
use tessera_view::explain::{Explanation, Explanations};
use tessera_view::fleet::Fleet;
use tessera_view::narrow::{self, Rights};
use tessera_view::tenant::Tenant;
use tessera_view::{SourceError, history};

use crate::caller::Caller;
use crate::query::{Parameters, namespace_of};
use crate::routes::{App, Route};
use crate::source::{FleetCache, Refusal, Source};

/// For how long a look at everything serves all that ask.
const FRESH: Duration = Duration::from_millis(250);

/// What a caller without rights on all namespaces reads of anything that is not there for it: whether it exists is
/// not said.
const NOT_YOURS: &str = "nothing of yours is called so here; name a pod as NAMESPACE/POD, and see /api/v1/fleet for \
                         what you may see";

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
        Route::History => {
            let means = meaning_then(&fleet, &only(&rights, asked), &asked.subject);
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
            match is_hidden && !asked.subject.is_empty() && !is_gpu(&fleet, &asked.subject) {
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
            let means = meaning(&fleet, &only(&rights, asked), &asked.subject);
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
    joined(&asked.subject, answers, both)
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

/// Namespaces that are looked through for what is not held now, at most.
const NAMESPACES: usize = 8;

/// How a source is asked for a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Meaning {
    AsWritten,
    /// As something in each of these namespaces. With none of them it is not there.
    In(Vec<String>),
}

/// What `subject` means to a reader with `rights`: a bare name, to a reader of some namespaces, one of the reader's own,
/// whatever others call theirs. So another's name neither hides what is the reader's nor shows by what it hides that it is
/// there.
fn meaning(fleet: &Fleet, rights: &Rights, subject: &str) -> Meaning {
    let Rights::Namespaces(namespaces) = rights else { return Meaning::AsWritten };
    // A whole name is not mistaken for another.
    if subject.is_empty() || subject.contains('/') {
        return Meaning::AsWritten;
    }
    let is_called_so = |tenant: &&Tenant| {
        let claim = tenant.claim.split_once('/').map(|(_, name)| name);
        [Some(tenant.pod.as_str()), claim, Some(tenant.container.as_str())].contains(&Some(subject))
            || is_written(&tenant.id, subject)
    };
    let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let own =
        views.flat_map(|view| &view.tenants).filter(|tenant| rights.may_see(&tenant.namespace));
    let called_so = own.filter(is_called_so).map(|tenant| tenant.namespace.clone());
    let found: BTreeSet<String> = called_so.collect();
    if !found.is_empty() {
        return Meaning::In(found.into_iter().collect());
    }
    if is_gpu(fleet, subject) {
        return Meaning::AsWritten;
    }
    let named = named(namespaces);
    match named.len() {
        ..=NAMESPACES => Meaning::In(named),
        _ => Meaning::In(Vec::new()),
    }
}

/// As [`meaning`], of a history. Everything, and a GPU's history, are asked for by the reader's namespaces: the length of
/// buckets and what of the events is kept would tell how much others have there. A reader of many namespaces is not asked
/// for one by one.
fn meaning_then(fleet: &Fleet, rights: &Rights, subject: &str) -> Meaning {
    let means = meaning(fleet, rights, subject);
    let Rights::Namespaces(namespaces) = rights else { return means };
    let is_of_all = subject.is_empty() || is_gpu(fleet, subject);
    let named = named(namespaces);
    match means {
        Meaning::AsWritten if is_of_all && named.len() <= NAMESPACES => Meaning::In(named),
        means => means,
    }
}

/// Tenants that nobody named are in none.
fn named(namespaces: &BTreeSet<String>) -> Vec<String> {
    namespaces.iter().filter(|namespace| !namespace.is_empty()).cloned().collect()
}

/// Whether a subject is a GPU by UUID, a beginning of it, or index.
fn is_gpu(fleet: &Fleet, subject: &str) -> bool {
    let views = fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    let mut gpus = views.flat_map(|view| &view.gpus);
    gpus.any(|gpu| gpu.index.to_string() == subject || is_written(&gpu.uuid, subject))
}

/// Two explanations as one.
fn both(mut all: Explanations, more: Explanations) -> Explanations {
    for one in more.nodes {
        let Some(same) = all.nodes.iter_mut().find(|same| same.node == one.node) else {
            all.nodes.push(one);
            continue;
        };
        let Explanation { allocations, gpus, left_out, remarks, .. } = one.explanation;
        let into = &mut same.explanation;
        into.allocations.extend(allocations);
        into.gpus.extend(gpus);
        into.left_out = into.left_out.saturating_add(left_out);
        let new = remarks.into_iter().filter(|remark| !into.remarks.contains(remark));
        let new: Vec<String> = new.collect();
        into.remarks.extend(new);
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tessera_view::fleet::Entry;
    use tessera_view::gpu::Gpu;
    use tessera_view::node::Node;

    use super::*;

    const NAMES: &[&str] = &["main", "chat", "chat-0", "0", "GPU-aaaa", "GPU-", "0c1d", "abcd"];

    fn tenant(namespace: &'static [&'static str]) -> impl Strategy<Value = Tenant> {
        let name = || prop::sample::select(NAMES).prop_map(str::to_owned);
        let id = prop::sample::select(&["0c1d", "abcd", "0c1e"][..]);
        (prop::sample::select(namespace), name(), name(), name(), id).prop_map(
            |(namespace, pod, container, claim, id)| Tenant {
                namespace: namespace.into(),
                id: format!("{id}{:0>28}", container.len()),
                claim: format!("{namespace}/{claim}"),
                pod,
                container,
                ..Tenant::default()
            },
        )
    }

    fn fleet(tenants: Vec<Tenant>) -> Fleet {
        let gpus = vec![Gpu { uuid: "GPU-aaaa-1".into(), ..Gpu::default() }];
        let view = Some(Node { tenants, gpus, ..Node::default() });
        Fleet { nodes: vec![Entry { view, ..Entry::default() }], ..Fleet::default() }
    }

    proptest! {
        #[test]
        fn what_others_call_theirs_changes_nothing(
            own in prop::collection::vec(tenant(&["ann", "bob"]), 0..6),
            others in prop::collection::vec(tenant(&["eve", "mallory", ""]), 0..12),
            subject in prop::sample::select(NAMES),
        ) {
            let rights = Rights::Namespaces(["ann".to_owned(), "bob".to_owned()].into());
            let alone = meaning(&fleet(own.clone()), &rights, subject);
            let all = others.into_iter().chain(own).collect();
            prop_assert_eq!(&meaning(&fleet(all), &rights, subject), &alone);
            if let Meaning::In(namespaces) = alone {
                prop_assert!(namespaces.iter().all(|one| one == "ann" || one == "bob"));
            }
        }
    }

    #[test]
    fn what_is_the_readers_own_goes_before_gpus() {
        let rights = Rights::Namespaces(["ann".to_owned()].into());
        let of =
            |tenants: &[Tenant], subject: &str| meaning(&fleet(tenants.to_vec()), &rights, subject);
        let id = format!("0c1d{}", "0".repeat(28));
        let one = Tenant {
            namespace: "ann".into(),
            pod: "chat".into(),
            container: "0".into(),
            id: id.clone(),
            ..Tenant::default()
        };
        let own = Meaning::In(vec!["ann".to_owned()]);
        let tenants = [one];
        assert_eq!(of(&tenants, "chat"), own);
        assert_eq!(of(&tenants, "0"), own, "a container before GPU 0");
        assert_eq!(of(&[], "0"), Meaning::AsWritten, "GPU 0");
        assert_eq!((of(&tenants, "0c1d"), of(&tenants, &id)), (own.clone(), own.clone()));
        assert_eq!(of(&[], &id), own, "it may have been the reader's");
        assert_eq!(of(&tenants, "gone-0"), own, "it may have been the reader's");
        assert_eq!(of(&tenants, "eve/pod"), Meaning::AsWritten);
        assert_eq!(meaning(&fleet(vec![]), &Rights::All, "chat"), Meaning::AsWritten);
    }
}
