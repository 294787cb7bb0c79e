//! All nodes of a cluster that have a plugin.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::de::DeserializeOwned;
use tessera_cluster::user::{Context, Finished, Proxied, UserClient};
use tessera_cluster::{Access, ApiError, Failure};
use tessera_model::clock::unix_ms;
use tessera_system::locks::lock;
use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::explain::Explanation;
use tessera_view::node::Node;
use tessera_view::trace::Trace;
use tessera_view::{API_VERSION, fleet, history};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

use crate::ask::{self, AskError, Question, VIEWER, Why};
use crate::entries::Entries;
use crate::merge::{self, Answers};
use crate::places::{self, Place};

/// Questions at a time.
const PARALLEL: usize = 32;

/// Where the cluster is, and where in it the plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The kubeconfig that was asked for.
    pub kubeconfig: Option<PathBuf>,
    /// The context that was asked for.
    pub context: Option<String>,
    /// The namespace of the plugin's pods.
    pub plugin_namespace: String,
    /// Labels of the plugin's pods.
    pub labels: String,
    /// The namespace that is asked about where the user is no reader of all; the context's where it is not given.
    pub namespace: Option<String>,
    /// Only these nodes; empty for all.
    pub nodes: BTreeSet<String>,
    /// For one question to one node.
    pub limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            kubeconfig: None,
            context: None,
            plugin_namespace: "tessera".to_owned(),
            labels: "app.kubernetes.io/name=tessera".to_owned(),
            namespace: None,
            nodes: BTreeSet::new(),
            limit: Duration::from_secs(5),
        }
    }
}

/// See the module's text. A clone is the same fleet.
#[derive(Clone, Debug)]
pub struct Fleet {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: Options,
    context: Context,
    user: UserClient,
    /// Questions at a time.
    parallel: Semaphore,
    entries: Mutex<Entries>,
}

impl Fleet {
    /// For the cluster that the options and the environment name. Reads the kubeconfig; nothing is asked yet.
    pub fn new(options: Options) -> Result<Self, AskError> {
        let access = Access::of_user(options.kubeconfig.as_deref(), options.context.as_deref());
        let access = access.map_err(|text| Why::Kubeconfig.says(text))?;
        let user = UserClient::new(access, options.limit * 2);
        let context = user.context().map_err(|text| Why::Kubeconfig.says(text))?;
        let (parallel, entries) = (Semaphore::new(PARALLEL), Mutex::default());
        Ok(Fleet { inner: Arc::new(Inner { options, context, user, parallel, entries }) })
    }

    /// What the kubeconfig says of the context in use.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The API server, with the user's rights.
    pub fn user(&self) -> &UserClient {
        &self.inner.user
    }

    /// Where the plugin's pods are.
    pub fn options(&self) -> &Options {
        &self.inner.options
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        lock(&self.inner.entries)
    }

    /// The nodes that have a plugin, by name.
    pub async fn places(&self) -> Result<Vec<Place>, AskError> {
        let Options { plugin_namespace: namespace, labels, nodes, .. } = &self.inner.options;
        let pods = match self.user().pods(namespace, labels).await {
            Ok(pods) => pods,
            Err(error) => {
                if matches!(error.failure, Failure::Unauthorized | Failure::Unreachable) {
                    self.user().renew().await;
                }
                return Err(explained(error, namespace));
            }
        };
        let mut places = places::of(&pods);
        if places.is_empty() {
            return Err(Why::NoPlugin.says(format!(
                "no pod of the plugin is in namespace {namespace} with {labels}: name its namespace with \
                 --plugin-namespace"
            )));
        }
        for node in nodes {
            places::on(&places, node)?;
        }
        places.retain(|place| nodes.is_empty() || nodes.contains(&place.node));
        Ok(places)
    }

    /// Asks every node, and waits until each has answered or its time is over; not for those that did not answer a moment
    /// ago.
    pub async fn gather(&self) -> Result<fleet::Fleet, AskError> {
        Ok(self.gathered(&self.places().await?).await)
    }

    async fn gathered(&self, places: &[Place]) -> fleet::Fleet {
        self.entries().set_places(places);
        let silent = self.silent();
        let (silent, others): (Vec<Place>, Vec<Place>) =
            places.iter().cloned().partition(|place| silent.contains_key(&place.node));
        drop(self.round(&silent, true));
        let _ = self.round(&others, false).await;
        self.known()
    }

    /// Why no node gives its view, by the last look; `None` where one does, or none was looked at.
    pub fn refusal(&self) -> Option<AskError> {
        let answers = self.entries().answers();
        merge::worst(&answers)
    }

    /// What is known now.
    pub fn known(&self) -> fleet::Fleet {
        fleet::Fleet {
            api_version: API_VERSION.to_owned(),
            name: self.inner.context.name.clone(),
            at_unix_ms: unix_ms(),
            nodes: self.entries().all(),
        }
    }

    /// These are all nodes now.
    pub(crate) fn set_places(&self, places: &[Place]) {
        self.entries().set_places(places);
    }

    /// Nothing can be asked, and why.
    pub(crate) fn fail(&self, error: &AskError) {
        self.entries().fail(&error.to_string());
    }

    /// Begins to ask those nodes that are not being asked; with `patience`, not those that failed just now. Done when each
    /// has answered or its time is over; it goes on also when nobody waits for it any more.
    pub(crate) fn round(&self, places: &[Place], patience: bool) -> JoinHandle<()> {
        let mut tasks = JoinSet::new();
        for place in places {
            if !self.entries().begin(&place.node, Instant::now(), patience) {
                continue;
            }
            let (fleet, place) = (self.clone(), place.clone());
            tasks.spawn(async move {
                let text = fleet.text(&place, &Question::fleet()).await;
                let view = text.and_then(|text| ask::node(&place, &text));
                if view.as_ref().is_err_and(|error| error.why == Why::Unauthenticated) {
                    // A token that is renewed outside of this process is read again.
                    fleet.user().renew().await;
                }
                fleet.entries().take(&place.node, view, unix_ms(), Instant::now());
            });
        }
        tokio::spawn(async move {
            tasks.join_all().await;
        })
    }

    /// Histories by node: of the node that is named, of those where the subject is, or else of all. Instants are by
    /// each node's clock.
    pub async fn histories(
        &self,
        node: &str,
        query: &history::Query,
    ) -> Result<Answers<history::Answer>, AskError> {
        let places = self.places_of(node, &query.namespace, &query.subject).await?;
        Ok(self.all(&places, &Question::history(query)).await)
    }

    /// The node of each of these places with its history.
    async fn seen(&self, places: &[Place], query: &history::Query) -> Answers<merge::Seen> {
        let _ = self.round(places, false).await;
        let mut views: BTreeMap<String, Node> = (self.known().nodes.into_iter())
            .filter_map(|entry| Some((entry.node, entry.view.filter(|_| entry.answers)?)))
            .collect();
        let histories = self.all(places, &Question::history(query)).await;
        let both = |(node, history): (String, Result<history::Answer, AskError>)| {
            let silent = || Why::Silent.says("it does not answer".to_owned());
            let view = views.remove(&node).ok_or_else(silent);
            (node, view.and_then(|view| Ok((view, history?))))
        };
        histories.into_iter().map(both).collect()
    }

    /// Explanations by node: of the node that is named, of those where the subject is, or else of all that know it.
    pub async fn explanations(
        &self,
        node: &str,
        asked: &str,
    ) -> Result<Answers<Explanation>, AskError> {
        let (namespace, _) = asked.split_once('/').unwrap_or(("", asked));
        let places = self.places_of(node, namespace, asked).await?;
        Ok(self.all(&places, &Question::explain(asked, namespace)).await)
    }

    /// Traces by node, of the node that is named or of all: of tenants of this namespace alone, or of all where it is
    /// empty.
    pub async fn traces(
        &self,
        node: &str,
        namespace: &str,
        seconds: u32,
    ) -> Result<Answers<Trace>, AskError> {
        let places = self.places_of(node, "", "").await?;
        Ok(self.all(&places, &Question::trace(namespace, seconds)).await)
    }

    /// Advice of all nodes together, and why some gave none.
    pub async fn recommendations(&self, scope: &Scope) -> Result<Recommendations, AskError> {
        let mut places = self.places().await?;
        // The workload of a pod may have others on nodes that do not know this one.
        let all = Scope { pod: String::new(), ..scope.clone() };
        let answers = self.all(&places, &Question::of_scope("recommend", &all)).await;
        somebody(&answers)?;
        self.entries().set_places(&places);
        let by_node = merge::ByNode::of(answers, scope);
        let (nodes, since_unix_ms) = by_node.needed();
        places.retain(|place| nodes.contains(&place.node));
        let namespace = scope.namespace.clone();
        let query = history::Query { namespace, since_unix_ms, ..history::Query::default() };
        let seen = self.seen(&places, &query).await;
        Ok(by_node.judged(seen, scope, unix_ms()))
    }

    /// What is asked and not used on all nodes together, and why some said nothing.
    pub async fn waste(&self, scope: &Scope) -> Result<Waste, AskError> {
        let places = self.places().await?;
        let answers = self.all(&places, &Question::of_scope("waste", scope)).await;
        somebody(&answers)?;
        Ok(merge::waste(answers, scope.since_unix_ms, unix_ms()))
    }

    /// Runs `tessera` with these arguments in the plugin's pod of a node.
    pub async fn run_on(&self, place: &Place, args: &[String]) -> Result<Finished, AskError> {
        if !place.away.is_empty() {
            return Err(Why::NoPlugin.says(place.away.clone()));
        }
        let mut command = vec!["tessera".to_owned()];
        command.extend_from_slice(args);
        Ok(self.user().exec(&place.namespace, &place.pod, "tessera", &command).await?)
    }

    /// The answers of all of these nodes, in their order. One that did not answer a moment ago is not waited for
    /// again, unless it is the only one that is asked.
    async fn all<T: DeserializeOwned + Send>(
        &self,
        places: &[Place],
        question: &Question,
    ) -> Answers<T> {
        let mut silent = if places.len() > 1 { self.silent() } else { BTreeMap::new() };
        let answers = places.iter().map(|place| {
            let silent = silent.remove(&place.node);
            async move {
                let answer = match silent {
                    Some(why) => Err(Why::Silent.says(why)),
                    None => self.text(place, question).await.and_then(|text| ask::read(&text)),
                };
                (place.node.clone(), answer)
            }
        });
        join_all(answers).await
    }

    /// The body of a successful answer. A reader without rights on the whole is one of a namespace.
    async fn text(&self, place: &Place, question: &Question) -> Result<Vec<u8>, AskError> {
        let answer = self.once(place, question).await;
        let Inner { options, context, .. } = &*self.inner;
        let namespace = options.namespace.as_ref().unwrap_or(&context.namespace);
        let is_narrow = question.is_of_namespace() || namespace.is_empty();
        match answer {
            Err(AskError { why: Why::NoRights, .. }) if !is_narrow => {
                self.once(place, &question.of_namespace(namespace)).await
            }
            answer => answer,
        }
    }

    async fn once(&self, place: &Place, question: &Question) -> Result<Vec<u8>, AskError> {
        if !place.away.is_empty() {
            return Err(Why::Silent.says(place.away.clone()));
        }
        // Never closed.
        let _permit = self.inner.parallel.acquire().await;
        let proxied = Proxied {
            namespace: place.namespace.clone(),
            pod: place.pod.clone(),
            port: place.port,
            target: question.target(),
        };
        let limit = self.inner.options.limit + question.lasts;
        let passed = self.user().through_pod(&proxied, VIEWER, limit, question.largest()).await;
        let viewer = format!("{}/{VIEWER}", place.namespace);
        let passed = passed.map_err(|error| ask::failed(error, &viewer))?;
        ask::body(place, &passed)
    }

    /// Nodes that did not answer a moment ago, and why.
    fn silent(&self) -> BTreeMap<String, String> {
        self.entries().silent(Instant::now())
    }

    /// Allocations that live and whose id is written so, in full or by its beginning, as far as the user's rights show
    /// them: their nodes' places and their ids.
    pub async fn allocations(&self, written: &str) -> Result<Vec<(Place, String)>, AskError> {
        let places = self.places().await?;
        let found = places::allocations(&self.gathered(&places).await, written).into_iter();
        let place = |node: &str| places.iter().find(|place| place.node == node).cloned();
        Ok(found.filter_map(|(node, id)| Some((place(&node)?, id))).collect())
    }

    /// The nodes that a question is for.
    async fn places_of(
        &self,
        node: &str,
        namespace: &str,
        asked: &str,
    ) -> Result<Vec<Place>, AskError> {
        let mut places = self.places().await?;
        if !node.is_empty() {
            return Ok(vec![places::on(&places, node)?.clone()]);
        }
        if asked.is_empty() {
            return Ok(places);
        }
        let nodes = places::nodes(&self.gathered(&places).await, namespace, asked);
        // Of what is gone, only the nodes themselves know.
        if !nodes.is_empty() {
            places.retain(|place| nodes.contains(&place.node));
        }
        Ok(places)
    }
}

/// What no node says anything of: where all refuse, or do not answer, an empty answer would say that nothing is there.
/// Where a node knows of no such thing, others have nothing to add.
fn somebody<T>(answers: &Answers<T>) -> Result<(), AskError> {
    let is_said =
        |answer: &Result<T, AskError>| answer.as_ref().err().is_none_or(|e| e.why == Why::Unknown);
    match answers.iter().any(|(_, answer)| is_said(answer)) {
        true => Ok(()),
        false => merge::worst(answers).map_or(Ok(()), Err),
    }
}

/// Why the plugin's pods cannot be listed.
fn explained(error: ApiError, namespace: &str) -> AskError {
    match error.failure {
        Failure::Forbidden => Why::Forbidden.says(format!(
            "you may not see the plugin's pods: {}; ask for `list` on pods and `get` on pods/proxy in namespace \
             {namespace} (docs/views.md, \"Readers\"), or name another with --plugin-namespace",
            error.message
        )),
        _ => error.into(),
    }
}
