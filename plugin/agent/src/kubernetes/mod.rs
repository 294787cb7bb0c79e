//! Kubernetes Events on pods, where the API server is reachable and lets us. Nothing depends on them: what
//! happens is in the audit trail, and every path here ends in a counter.
//!
//! Lines of the audit trail go into a bounded queue ([`report`]), without waiting. A task of its own makes
//! events of them ([`events`], pure), adds up what repeats, and sends them over one
//! connection that lives no longer than there is something to send ([`tessera_cluster::events`]). A server that
//! is away, slow or hanging costs a timeout and then a pause that doubles; one that forbids it, five minutes.

mod events;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tracing::debug;

use crate::Agent;
use crate::status_board::StatusBoard;
use events::{Events, Series, Subject, words};
pub use tessera_cluster::Server;
use tessera_cluster::events::{EventClient, PodEvent};
use tessera_cluster::{ApiError, Client, Failure, Retry};
use tessera_config::{Config, Events as Wanted};
use tessera_kubelet::foreign_plugins::checkpoint;
use tessera_model::audit::Event;
use tessera_model::record::{Holder, Record};

const TOPIC: &str = "kubernetes";

/// Intervals; tests shorten them.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Longest wait for one request, connecting included.
    pub limit: Duration,
    pub pace: Duration,
    /// The pause after a failure, which doubles, at first and at most; at most also where a person must do something.
    pub pause: [Duration; 2],
    pub server: Option<Server>,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            limit: Duration::from_secs(10),
            pace: Duration::from_millis(200),
            pause: [Duration::from_secs(1), Duration::from_secs(300)],
            server: None,
        }
    }
}

const QUEUE: usize = 128;

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
    let (board, counts) = (&agent.board, &agent.trust.events);
    let mut changes = agent.config.changes();
    let name = node_name().unwrap_or_default();
    let client = EventClient::new(Client::new(server, timing.limit), name);
    let mut events = Events::default();
    let mut rest = Instant::now();
    let mut pause = timing.pause[0];
    loop {
        let wake = events.next().map(|next| next.max(rest));
        let sleep = async {
            match wake {
                Some(wake) => tokio::time::sleep_until(wake.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            line = lines.recv() => {
                let Some(line) = line else { return };
                take(&agent, &mut events, line, counts).await;
                continue;
            }
            () = sleep => {}
            // Its end is the plugin's.
            _ = changes.changed() => {}
        }
        let now = Instant::now();
        if !are_wanted(&changes.borrow_and_update()) {
            // What was not sent when events are switched off is not sent.
            (events, rest, pause) = (Events::default(), now, timing.pause[0]);
            board.set_condition(TOPIC, None);
            continue;
        }
        if now < rest {
            continue;
        }
        let Some(at) = events.take_due(now) else { continue };
        rest = now + timing.pace;
        match send(&client, &mut events, at).await {
            Ok(()) => {
                counts.sent.fetch_add(1, Ordering::Relaxed);
                pause = timing.pause[0];
                board.set_condition(TOPIC, None);
            }
            Err(failure) => {
                counts.failed.fetch_add(1, Ordering::Relaxed);
                debug!(%failure, "an event");
                match retry(&failure) {
                    // Kubernetes has forgotten it: it is made once more.
                    Retry::Reread => events.lost(at),
                    Retry::Never => {
                        events.give_up(at);
                        // The server answers, so an earlier warning about it ends.
                        pause = timing.pause[0];
                        board.set_condition(TOPIC, None);
                        counts.dropped.fetch_add(1, Ordering::Relaxed);
                    }
                    Retry::Soon => {
                        rest = Instant::now() + pause;
                        pause = (pause * 2).min(timing.pause[1]);
                        say(board, &failure, "");
                    }
                    Retry::Later => {
                        rest = Instant::now() + timing.pause[1];
                        let hint = " (docs/trust.md), or set kubernetes.events = \"off\"";
                        say(board, &failure, hint);
                    }
                }
            }
        }
        if events.due(Instant::now()).is_none() {
            client.rest().await;
        }
    }
}

fn say(board: &StatusBoard, failure: &ApiError, hint: &str) {
    let text = format!("pods get no Kubernetes events: {failure}{hint}");
    board.set_condition(TOPIC, Some(text));
}

async fn send(client: &EventClient, events: &mut Events, at: usize) -> Result<(), ApiError> {
    let Some(series) = events.get(at) else { return Ok(()) };
    let name = match &series.sent {
        None => client.create(&event(series)).await?,
        Some(sent) => {
            client.update(&event(series), &sent.name).await.map(|()| sent.name.clone())?
        }
    };
    events.sent(at, name, Instant::now());
    Ok(())
}

fn event(series: &Series) -> PodEvent<'_> {
    let Series { subject, words, .. } = series;
    PodEvent {
        namespace: &subject.namespace,
        pod: &subject.pod,
        uid: subject.uid.as_deref(),
        container: &subject.container,
        reason: words.reason,
        message: &words.message,
        warning: words.warning,
        count: series.count,
        first_unix_ms: series.first_unix_ms,
        last_unix_ms: series.last_unix_ms,
    }
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

/// Makes events of a line, for every pod that it concerns.
async fn take(agent: &Arc<Agent>, events: &mut Events, line: Event, counts: &Counts) {
    let asked = Arc::clone(agent);
    let looked = tokio::task::spawn_blocking(move || {
        let subjects = subjects(&asked, &line);
        (line, subjects)
    });
    let Ok((mut line, subjects)) = looked.await else { return };
    let mut lost = u64::from(subjects.is_empty() && line.id.is_some());
    for subject in subjects {
        // What is said to a pod is said of this pod.
        line.holder = Some(Holder {
            namespace: subject.namespace.clone(),
            pod: subject.pod.clone(),
            container: subject.container.clone(),
        });
        let Some(words) = words(&line) else { continue };
        lost += events.add(subject, words, line.times, line.at_unix_ms, Instant::now());
    }
    counts.dropped.fetch_add(lost, Ordering::Relaxed);
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
