//! A scripted source, and a server over it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tessera_view::advice::{Recommendation, Recommendations, Scope, Waste};
use tessera_view::explain::Explanations;
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::history;
use tessera_view::node::Node;
use tessera_view::tenant::Tenant;
use tessera_view::trace::Trace;
use tessera_web::source::Answer;
use tessera_web::{Authorisation, Counts, Options, Server, Source, SourceError, Tls};

/// What a source says.
#[derive(Clone, Default)]
pub struct Script {
    pub fleet: Fleet,
    pub history: history::Answer,
    pub recommendations: Recommendations,
    pub waste: Waste,
    pub trace: Trace,
    /// By subject.
    pub explanations: Vec<(String, Explanations)>,
    /// What every question but the fleet's comes to, where that is set.
    pub error: Option<SourceError>,
    /// What histories were asked for.
    pub queries: Vec<history::Query>,
}

#[derive(Clone, Default)]
pub struct Scripted(pub Arc<Mutex<Script>>);

impl Scripted {
    pub fn new(script: Script) -> Self {
        Scripted(Arc::new(Mutex::new(script)))
    }

    fn say<T: Send + 'static>(&self, get: impl FnOnce(&Script) -> T) -> Answer<'static, T> {
        let script = self.0.lock().unwrap();
        let said = match &script.error {
            Some(error) => Err(error.clone()),
            None => Ok(get(&script)),
        };
        Box::pin(std::future::ready(said))
    }
}

impl Source for Scripted {
    fn fleet(&self) -> Answer<'_, Fleet> {
        let fleet = self.0.lock().unwrap().fleet.clone();
        Box::pin(std::future::ready(Ok(fleet)))
    }

    /// As a node does it: the more series, the longer the buckets.
    fn history<'a>(&'a self, _: &'a str, query: history::Query) -> Answer<'a, history::Answer> {
        self.0.lock().unwrap().queries.push(query.clone());
        self.say(|script| {
            let mut answer = script.history.clone();
            let is_asked =
                |namespace: &str| query.namespace.is_empty() || query.namespace == namespace;
            answer.tenants.retain(|tenant| is_asked(&tenant.namespace));
            answer.step_seconds = match (query.step_seconds, answer.tenants.len()) {
                (0, ..=1) => 10,
                (0, _) => 300,
                (step, _) => step,
            };
            answer
        })
    }

    fn explain<'a>(&'a self, _: &'a str, subject: &'a str) -> Answer<'a, Explanations> {
        let script = self.0.lock().unwrap();
        let found = script.explanations.iter().find(|(name, _)| name == subject);
        let names: Vec<&str> = script.explanations.iter().map(|(name, _)| name.as_str()).collect();
        let found = found.map(|(_, explanation)| explanation.clone());
        let said = found.ok_or_else(|| {
            SourceError::NotFound(format!(
                "nothing is called {subject}; there is {}",
                names.join(", ")
            ))
        });
        Box::pin(std::future::ready(script.error.clone().map_or(said, Err)))
    }

    /// As a node does it: a pod that it does not know has no advice.
    fn recommend(&self, scope: Scope) -> Answer<'_, Recommendations> {
        let mut script = self.0.lock().unwrap().clone();
        let mut advice = std::mem::take(&mut script.recommendations);
        if !scope.pod.is_empty() {
            advice.workloads.retain(|one| one.pods.contains(&scope.pod));
        }
        let said = match (&script.error, advice.workloads.is_empty() && !scope.pod.is_empty()) {
            (Some(error), _) => Err(error.clone()),
            (None, true) => Err(SourceError::NotFound(format!("no pod {} is here", scope.pod))),
            (None, false) => Ok(advice),
        };
        Box::pin(std::future::ready(said))
    }

    fn waste(&self, _: Scope) -> Answer<'_, Waste> {
        self.say(|script| script.waste.clone())
    }

    fn trace<'a>(&'a self, _: &'a str, _: u32) -> Answer<'a, Trace> {
        self.say(|script| script.trace.clone())
    }
}

/// A node with one tenant.
pub fn small() -> Script {
    let tenant = Tenant {
        id: "id-1".into(),
        namespace: "team".into(),
        pod: "chat-0".into(),
        ..Tenant::default()
    };
    let view = Node { node: "n1".into(), tenants: vec![tenant], ..Node::default() };
    let entry = Entry { node: "n1".into(), answers: true, view: Some(view), ..Entry::default() };
    let advice = Recommendation { namespace: "team".into(), ..Recommendation::default() };
    Script {
        fleet: Fleet { nodes: vec![entry], ..Fleet::default() },
        recommendations: Recommendations { workloads: vec![advice], ..Recommendations::default() },
        ..Script::default()
    }
}

/// On a port of this host, to everybody.
pub async fn serve(source: Scripted) -> (Server, SocketAddr) {
    serve_to(source, Authorisation::None, Tls::Plain, Arc::default()).await
}

/// On a port of this host.
pub async fn serve_to(
    source: Scripted,
    authorisation: Authorisation,
    tls: Tls,
    counts: Arc<Counts>,
) -> (Server, SocketAddr) {
    let mut options = Options::new(Arc::new(source));
    options.counts = counts;
    options.listen = vec!["127.0.0.1:0".parse().unwrap()];
    (options.authorisation, options.tls) = (authorisation, tls);
    options.interval = std::time::Duration::from_millis(20);
    let server = Server::start(options).unwrap();
    let address = server.bound().await.unwrap();
    (server, address)
}
