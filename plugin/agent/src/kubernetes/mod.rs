//! Kubernetes Events on pods, where the API server is reachable and lets us. Nothing depends on them: what
//! happens is in the audit trail, and every path here ends in a counter.
//!
//! Lines of the audit trail go into a bounded queue ([`report`]), without waiting. A task of its own makes
//! events of them ([`events`], pure), counts what repeats, and sends them one after the other over one
//! connection that lives no longer than there is something to send ([`tessera_cluster::events`]). A server that
//! is away, slow or hanging costs a timeout and then a pause that doubles; one that forbids it, five minutes. What the
//! queue has no room for is dropped, and counted.

mod events;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tracing::debug;

use crate::Agent;
use crate::status_board::StatusBoard;
use events::{Events, Sent, Subject, Words, words};
pub use tessera_cluster::Server;
use tessera_cluster::events::{EventClient, PodEvent};
use tessera_cluster::{ApiError, Client, Failure, Retry};
use tessera_config::{Config, Events as Wanted};
use tessera_kubelet::checkpoint;
use tessera_model::audit::Event;
use tessera_model::record::{Holder, Record};
use tessera_peers::TokenBucket;

const TOPIC: &str = "kubernetes";

/// Intervals; tests shorten them.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Longest wait for one request, connecting included.
    pub limit: Duration,
    /// The pause after a failure, which doubles, at first and at most; at most also where a person must do something.
    pub pause: [Duration; 2],
    pub server: Option<Server>,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            limit: Duration::from_secs(10),
            pause: [Duration::from_secs(1), Duration::from_secs(300)],
            server: None,
        }
    }
}

const QUEUE: usize = 128;
/// Requests of the node at once, and how often there may be another.
const NODE: (u32, Duration) = (60, Duration::from_secs(1));

#[derive(Debug, Default)]
pub struct Counts {
    pub sent: AtomicU64,
    pub failed: AtomicU64,
    pub dropped: AtomicU64,
}

impl Counts {
    pub fn all(&self) -> [(&'static str, u64); 3] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("sent", read(&self.sent)),
            ("failed", read(&self.failed)),
            ("dropped", read(&self.dropped)),
        ]
    }
}

fn are_wanted(config: &Config) -> bool {
    config.kubernetes.events != Wanted::Off
}

/// Keeps what happens from now on, and sends it for as long as it is polled, where there is an API server to send to. What
/// happens while the configuration in force wants no events is not sent.
pub fn report(agent: Arc<Agent>, timing: Timing) -> impl Future<Output = ()> + Send {
    let server = timing.server.clone().or_else(Server::of_pod);
    let (queue, lines) = mpsc::channel(QUEUE);
    if server.is_some() {
        let (current, counts) = (agent.config.clone(), Arc::clone(&agent.trust.events));
        agent.journal.set_listener(Box::new(move |line: &Event| {
            let is_wanted = are_wanted(&current.get()) && events::concerns_pods(&line.what);
            if is_wanted && queue.try_send(line.clone()).is_err() {
                counts.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    async move {
        match server {
            Some(server) => run(agent, server, lines, timing).await,
            None => std::future::pending().await,
        }
    }
}

async fn run(agent: Arc<Agent>, server: Server, mut lines: mpsc::Receiver<Event>, timing: Timing) {
    let mut changes = agent.config.changes();
    let name = node_name().unwrap_or_default();
    let client = EventClient::new(Client::new(server, timing.limit), name);
    let bucket = TokenBucket::every(NODE.0, NODE.1, Instant::now());
    let mut sender = Sender { client, bucket, events: Events::default(), timing };
    loop {
        tokio::select! {
            () = sender.deliver_all(&agent, &mut lines) => return,
            () = switched_off(&mut changes) => {}
        }
        // What was not sent when events are switched off is not sent.
        while lines.try_recv().is_ok() {}
        agent.board.set_condition(TOPIC, None);
        sender.client.rest().await;
        // An error is the plugin's end.
        if changes.wait_for(|config| are_wanted(config)).await.is_err() {
            return;
        }
    }
}

async fn switched_off(changes: &mut watch::Receiver<Arc<Config>>) {
    // An error is the plugin's end.
    if changes.wait_for(|config| !are_wanted(config)).await.is_err() {
        std::future::pending().await
    }
}

struct Sender {
    client: EventClient,
    bucket: TokenBucket,
    events: Events,
    timing: Timing,
}

impl Sender {
    /// Sends the events of all lines, until there are no more to come.
    async fn deliver_all(&mut self, agent: &Arc<Agent>, lines: &mut mpsc::Receiver<Event>) {
        let (board, counts) = (&agent.board, &agent.trust.events);
        while let Some(line) = lines.recv().await {
            let Some((line, told)) = told(agent, line, counts).await else { continue };
            for (subject, words) in told {
                self.deliver(&subject, &words, &line, (board, counts)).await;
            }
            if lines.is_empty() {
                self.client.rest().await;
            }
        }
    }

    /// Sends an event, however often that has to be tried, unless somebody must do something first.
    async fn deliver(
        &mut self,
        subject: &Subject,
        words: &Words,
        line: &Event,
        (board, counts): (&StatusBoard, &Counts),
    ) {
        let [mut pause, longest] = self.timing.pause;
        loop {
            while let Err(wait) = self.bucket.take(Instant::now()) {
                tokio::time::sleep(wait).await;
            }
            let sent = self.send(subject, words, line).await;
            let counter = if sent.is_ok() { &counts.sent } else { &counts.failed };
            counter.fetch_add(1, Ordering::Relaxed);
            let Err(failure) = sent else { break };
            debug!(%failure, "an event");
            match retry(&failure) {
                Retry::Never => {
                    counts.dropped.fetch_add(1, Ordering::Relaxed);
                    break;
                }
                Retry::Soon | Retry::Reread => {
                    say(board, &failure, "");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(longest);
                }
                Retry::Later => {
                    let hint = " (docs/trust.md), or set kubernetes.events = \"off\"";
                    say(board, &failure, hint);
                    tokio::time::sleep(longest).await;
                    // It may be this namespace alone that takes none.
                    counts.dropped.fetch_add(1, Ordering::Relaxed);
                    return;
                }
            }
        }
        // The server answers.
        board.set_condition(TOPIC, None);
    }

    /// Makes an event, or counts it with the one of before.
    async fn send(
        &mut self,
        subject: &Subject,
        words: &Words,
        line: &Event,
    ) -> Result<(), ApiError> {
        let (key, now) = ((subject.clone(), words.reason), Instant::now());
        let new =
            Sent { name: String::new(), count: 0, first_unix_ms: line.at_unix_ms, began: now };
        let before = self.events.get(&key, now);
        let mut sent = before.clone().unwrap_or(new);
        sent.count = sent.count.saturating_add(line.times);
        let event = PodEvent {
            namespace: &subject.namespace,
            pod: &subject.pod,
            uid: subject.uid.as_deref(),
            container: &subject.container,
            reason: words.reason,
            message: &words.message,
            warning: words.warning,
            count: sent.count,
            first_unix_ms: sent.first_unix_ms,
            last_unix_ms: line.at_unix_ms,
        };
        let updated = match before {
            Some(before) => self.client.update(&event, &before.name).await.map(|()| before.name),
            None => self.client.create(&event).await,
        };
        sent.name = match updated {
            // Kubernetes has forgotten it: it is made once more.
            Err(failure) if retry(&failure) == Retry::Reread => self.client.create(&event).await?,
            name => name?,
        };
        self.events.put(key, sent);
        Ok(())
    }
}

fn say(board: &StatusBoard, failure: &ApiError, hint: &str) {
    let text = format!("pods get no Kubernetes events: {failure}{hint}");
    board.set_condition(TOPIC, Some(text));
}

fn retry(failure: &ApiError) -> Retry {
    // A namespace that is gone, or is being deleted, takes nothing new.
    let says = |word| failure.message.contains(word);
    match failure.failure {
        Failure::Forbidden if says("being terminated") => Retry::Never,
        Failure::NotFound if says("namespaces") => Retry::Never,
        _ => failure.retry(),
    }
}

/// The events of a line, one for every pod that it concerns.
async fn told(
    agent: &Arc<Agent>,
    line: Event,
    counts: &Counts,
) -> Option<(Event, Vec<(Subject, Words)>)> {
    let asked = Arc::clone(agent);
    let looked = tokio::task::spawn_blocking(move || {
        let subjects = subjects(&asked, &line);
        (line, subjects)
    });
    let (line, subjects) = looked.await.ok()?;
    let lost = u64::from(subjects.is_empty() && line.id.is_some());
    counts.dropped.fetch_add(lost, Ordering::Relaxed);
    let told = |subject: Subject| {
        let Subject { namespace, pod, container, .. } = subject.clone();
        // What is said to a pod is said of this pod.
        let line = Event { holder: Some(Holder { namespace, pod, container }), ..line.clone() };
        Some((subject, words(&line)?))
    };
    let told = subjects.into_iter().filter_map(told).collect();
    Some((line, told))
}

/// Whom a line concerns: the container that it names, or all pods on its GPU (on any where it names none). Blocking.
fn subjects(agent: &Agent, line: &Event) -> Vec<Subject> {
    let entries = checkpoint::entries(&agent.allocations.paths.kubelet).unwrap_or_default();
    let uid = |record: &Record, holder: &Holder| {
        // What kubelet gave this container; two of one name are two generations.
        let ids = entries.iter().filter(|entry| {
            entry.container == holder.container
                && entry.resource == record.resource
                && entry.allocation() == record.id
        });
        let uids: BTreeSet<&str> = ids.map(|entry| entry.pod_uid.as_str()).collect();
        match uids.len() {
            1 => uids.first().map(|uid| (*uid).to_owned()),
            _ => agent.trust.uid(&holder.namespace, &holder.pod),
        }
    };
    let subject = |holder: &Holder, uid: Option<String>, container: &str| Subject {
        namespace: holder.namespace.clone(),
        pod: holder.pod.clone(),
        uid,
        container: container.to_owned(),
        gpu: line.gpu.clone().unwrap_or_default(),
    };
    match (&line.id, &line.holder) {
        (Some(id), named) => {
            let record = agent.allocations.record(id);
            let current = record.as_ref().filter(|record| record.generation == line.generation);
            let holder = named.clone().or_else(|| current.and_then(|r| r.holder.clone()));
            let Some(holder) = holder else { return Vec::new() };
            let uid = match current {
                Some(record) => uid(record, &holder),
                None => agent.trust.uid(&holder.namespace, &holder.pod),
            };
            vec![subject(&holder, uid, &holder.container)]
        }
        (None, Some(holder)) => {
            let uid = agent.trust.uid(&holder.namespace, &holder.pod);
            vec![subject(holder, uid, &holder.container)]
        }
        (None, None) if events::concerns_neighbours(&line.what) => {
            // One of a pod, however many of its containers have shares.
            let mut seen = BTreeSet::new();
            let is_it = |uuid: &String| line.gpu.as_ref().is_none_or(|gpu| gpu == uuid);
            let on = |record: &Record| {
                record.is_live() && record.grants.iter().any(|grant| is_it(&grant.uuid))
            };
            let records = agent.allocations.with_regions().into_iter().map(|(record, _)| record);
            records
                .filter(|record| on(record))
                .filter_map(|record| {
                    let holder = record.holder.clone()?;
                    let new = seen.insert((holder.namespace.clone(), holder.pod.clone()));
                    new.then(|| subject(&holder, uid(&record, &holder), ""))
                })
                .collect()
        }
        (None, None) => Vec::new(),
    }
}

/// The node's name in the cluster: as the pod is given it, or else the host's, which kubelet takes by default.
pub fn node_name() -> Option<String> {
    let named = std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty());
    let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let named = named.or_else(|| Some(host()?.trim().to_lowercase()));
    named.filter(|name| !name.is_empty())
}
