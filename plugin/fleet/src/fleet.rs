//! All nodes of a cluster that have a plugin.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use tessera_cluster::user::{Context, Finished, UserClient};
use tessera_cluster::{Access, ApiError, Failure};
use tessera_model::clock::unix_ms;
use tessera_system::locks::lock;
use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::explain::Explanation;
use tessera_view::node::Node;
use tessera_view::trace::Trace;
use tessera_view::{API_VERSION, fleet, history};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::ask::{self, AskError, Asker, Question, Why};
use crate::entries::{Entries, by_our_clock};
use crate::merge;
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
    /// The port of the plugin's JSON API; the one that each of its pods names `api` where it is not given.
    pub port: Option<u16>,
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
            port: None,
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
    asker: Asker,
    entries: Mutex<Entries>,
    began: Instant,
}

impl Fleet {
    /// For the cluster that the options and the environment name. Reads the kubeconfig; nothing is asked yet.
    pub fn new(options: Options) -> Result<Self, AskError> {
        let access = Access::of_user(options.kubeconfig.as_deref(), options.context.as_deref());
        let access = access.map_err(|text| Why::Kubeconfig.says(text))?;
        let user = UserClient::new(access, options.limit * 2);
        let context = user.context().map_err(|text| Why::Kubeconfig.says(text))?;
        let asker = Asker {
            user,
            port: options.port,
            namespace: options.namespace.clone().unwrap_or_else(|| context.namespace.clone()),
            limit: options.limit,
            parallel: Arc::new(Semaphore::new(PARALLEL)),
        };
        let (entries, began) = (Mutex::default(), Instant::now());
        Ok(Fleet { inner: Arc::new(Inner { options, context, asker, entries, began }) })
    }

    /// What the kubeconfig says of the context in use.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The API server, with the user's rights.
    pub fn user(&self) -> &UserClient {
        &self.inner.asker.user
    }

    /// Where the plugin's pods are.
    pub fn options(&self) -> &Options {
        &self.inner.options
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        lock(&self.inner.entries)
    }

    fn steady_ms(&self) -> u64 {
        u64::try_from(self.inner.began.elapsed().as_millis()).unwrap_or(u64::MAX)
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
        self.round(&silent, true).detach_all();
        self.round(&others, false).join_all().await;
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

    /// Begins to ask those nodes that are not being asked; with `patience`, not those that failed just now. A task
    /// ends when its node has answered or its time is over.
    pub(crate) fn round(&self, places: &[Place], patience: bool) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        for place in places {
            if !self.entries().begin(&place.node, self.steady_ms(), patience) {
                continue;
            }
            let (fleet, place) = (self.clone(), place.clone());
            tasks.spawn(async move {
                let asker = &fleet.inner.asker;
                let text = asker.text(&place, &Question::fleet()).await;
                let view = text.and_then(|text| ask::node(&place, &text));
                if view.as_ref().is_err_and(|error| error.why == Why::Unauthenticated) {
                    // A token that is renewed outside of this process is read again.
                    asker.user.renew().await;
                }
                fleet.entries().take(&place.node, view, unix_ms(), fleet.steady_ms());
            });
        }
        tasks
    }

    /// Histories by node: of the node that is named, of those where the subject is, or else of all. Instants are by
    /// our clock, also where a node's differs.
    pub async fn histories(
        &self,
        node: &str,
        query: &history::Query,
    ) -> Result<Vec<(String, Result<history::Answer, AskError>)>, AskError> {
        let places = self.places_of(node, &query.namespace, &query.subject).await?;
        self.set_clocks(&places, query.since_unix_ms.max(query.until_unix_ms)).await;
        Ok(self.histories_at(&places, query).await)
    }

    /// Before instants are asked for: how far each node's clock is from ours comes with its view. `at` is such an
    /// instant; 0 where none is asked for.
    async fn set_clocks(&self, places: &[Place], at: i64) {
        if at == 0 {
            return;
        }
        let is_new = |place: &&Place| !self.entries().has_clock(&place.node);
        let new: Vec<Place> = places.iter().filter(is_new).cloned().collect();
        if !new.is_empty() {
            self.entries().add_places(&new);
            self.round(&new, true).join_all().await;
        }
    }

    /// Histories of these nodes, by our clock.
    async fn histories_at(
        &self,
        places: &[Place],
        query: &history::Query,
    ) -> Vec<(String, Result<history::Answer, AskError>)> {
        let question = |place: &Place| {
            let ahead = self.entries().ahead_ms(&place.node);
            Question::history(&history::Query {
                since_unix_ms: shifted(query.since_unix_ms, ahead),
                until_unix_ms: shifted(query.until_unix_ms, ahead),
                ..query.clone()
            })
        };
        let mut answers: Vec<(String, Result<history::Answer, AskError>)> =
            self.all(places, question).await;
        for (node, answer) in &mut answers {
            if let Ok(answer) = answer {
                answer.node.clone_from(node);
                by_our_clock(answer, unix_ms());
            }
        }
        answers
    }

    /// The node of each of these places with its history.
    async fn seen(
        &self,
        places: &[Place],
        query: &history::Query,
    ) -> Vec<(String, Result<merge::Seen, AskError>)> {
        // With the views come the differences of clocks.
        self.round(places, false).join_all().await;
        let mut views: BTreeMap<String, Node> = (self.known().nodes.into_iter())
            .filter_map(|entry| Some((entry.node, entry.view.filter(|_| entry.answers)?)))
            .collect();
        let histories = self.histories_at(places, query).await;
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
    ) -> Result<Vec<(String, Result<Explanation, AskError>)>, AskError> {
        let (namespace, _) = asked.split_once('/').unwrap_or(("", asked));
        let places = self.places_of(node, namespace, asked).await?;
        Ok(self.all(&places, |_| Question::explain(asked, namespace)).await)
    }

    /// Traces by node, of the node that is named or of all: of tenants of this namespace alone, or of all where it is
    /// empty.
    pub async fn traces(
        &self,
        node: &str,
        namespace: &str,
        seconds: u32,
    ) -> Result<Vec<(String, Result<Trace, AskError>)>, AskError> {
        let places = self.places_of(node, "", "").await?;
        let mut asker = self.inner.asker.clone();
        asker.limit += Duration::from_secs(seconds.into());
        Ok(asker.all(&places, |_| Question::trace(namespace, seconds)).await)
    }

    /// Advice of all nodes together, and why some gave none.
    pub async fn recommendations(&self, scope: &Scope) -> Result<Recommendations, AskError> {
        let mut places = self.places().await?;
        // The workload of a pod may have others on nodes that do not know this one.
        let all = Scope { pod: String::new(), ..scope.clone() };
        self.set_clocks(&places, all.since_unix_ms).await;
        let answers = self.all(&places, |place| self.scoped("recommend", place, &all)).await;
        somebody(&answers)?;
        self.entries().set_places(&places);
        let by_node = merge::ByNode::of(answers, &scope.pod);
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
        self.set_clocks(&places, scope.since_unix_ms).await;
        let answers = self.all(&places, |place| self.scoped("waste", place, scope)).await;
        somebody(&answers)?;
        Ok(merge::waste(answers, scope.since_unix_ms, unix_ms()))
    }

    fn scoped(&self, what: &'static str, place: &Place, scope: &Scope) -> Question {
        let ahead = self.entries().ahead_ms(&place.node);
        let since_unix_ms = shifted(scope.since_unix_ms, ahead);
        Question::of_scope(what, &Scope { since_unix_ms, ..scope.clone() })
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
    async fn all<T: DeserializeOwned + Send + 'static>(
        &self,
        places: &[Place],
        question: impl Fn(&Place) -> Question,
    ) -> Vec<(String, Result<T, AskError>)> {
        let silent = if places.len() > 1 { self.silent() } else { BTreeMap::new() };
        let asked: Vec<Place> =
            places.iter().filter(|place| !silent.contains_key(&place.node)).cloned().collect();
        let mut answers = self.inner.asker.all(&asked, question).await.into_iter();
        let answer = |place: &Place| match silent.get(&place.node) {
            Some(why) => Some((place.node.clone(), Err(Why::Silent.says(why.clone())))),
            None => answers.next(),
        };
        places.iter().filter_map(answer).collect()
    }

    /// Nodes that did not answer a moment ago, and why.
    fn silent(&self) -> BTreeMap<String, String> {
        self.entries().silent(self.steady_ms())
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

/// An instant by a clock that is ahead; 0 stands for none.
fn shifted(at: i64, ahead_ms: i64) -> i64 {
    if at == 0 { 0 } else { at.saturating_add(ahead_ms).max(1) }
}

/// What no node says anything of: where all refuse, or do not answer, an empty answer would say that nothing is there.
/// Where a node knows of no such thing, others have nothing to add.
fn somebody<T>(answers: &[(String, Result<T, AskError>)]) -> Result<(), AskError> {
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
