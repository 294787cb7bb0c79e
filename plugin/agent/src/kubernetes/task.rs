//! From lines of the audit trail to requests: the task that waits, and what it does about failures.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use super::Counts;
use super::client::{Client, Failure, Server};
use super::series::{Events, Subject};
use super::words;
use crate::Agent;
use crate::status_board::StatusBoard;
use tessera_kubelet::foreign_plugins::checkpoint;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::Event;
use tessera_model::record::{Holder, Record};

/// Topic of what is amiss.
pub(super) const TOPIC: &str = "kubernetes";

/// Intervals; tests shorten them.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Longest wait for one request, connecting included.
    pub limit: Duration,
    /// Least time between two requests.
    pub pace: Duration,
    /// The pause after a failure, which doubles, at first and at most.
    pub pause: [Duration; 2],
    /// The pause after it was forbidden.
    pub forbidden: Duration,
    /// Another API server than the pod's own.
    pub server: Option<Server>,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            limit: Duration::from_secs(10),
            pace: Duration::from_millis(200),
            pause: [Duration::from_secs(1), Duration::from_secs(300)],
            forbidden: Duration::from_secs(300),
            server: None,
        }
    }
}

/// Tells the API server, until there are no more lines.
pub(super) async fn run(
    agent: Arc<Agent>,
    board: Arc<StatusBoard>,
    server: Server,
    mut lines: mpsc::Receiver<Event>,
    counts: Arc<Counts>,
    timing: Timing,
) {
    let name = std::env::var("NODE_NAME").ok().or_else(hostname).unwrap_or_default();
    let mut client = Client::new(server, name, timing.limit);
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
                take(&agent, &mut events, line, &counts).await;
                continue;
            }
            () = sleep => {}
        }
        let now = Instant::now();
        let Some(at) = events.due(now).filter(|_| now >= rest) else { continue };
        rest = now + timing.pace;
        match send(&mut client, &mut events, at).await {
            Ok(()) => {
                counts.sent.fetch_add(1, Ordering::Relaxed);
                pause = timing.pause[0];
                if board.set_condition(TOPIC, None) {
                    info!("the API server takes events");
                }
            }
            Err(failure) => {
                counts.failed.fetch_add(1, Ordering::Relaxed);
                debug!(%failure, "an event");
                match verdict(&failure) {
                    Verdict::Again => events.lost(at),
                    Verdict::Never => {
                        counts.dropped.fetch_add(1, Ordering::Relaxed);
                        events.give_up(at);
                    }
                    Verdict::Later => {
                        rest = Instant::now() + pause;
                        pause = (pause * 2).min(timing.pause[1]);
                        say(&board, &failure, "");
                    }
                    Verdict::Forbidden => {
                        rest = Instant::now() + timing.forbidden;
                        say(
                            &board,
                            &failure,
                            "; grant it (docs/trust.md), or set kubernetes.events = \"off\"",
                        );
                    }
                }
            }
        }
        if events.due(Instant::now()).is_none() {
            client.rest();
        }
    }
}

fn say(board: &StatusBoard, failure: &Failure, hint: &str) {
    let text =
        format!("pods are not told of what concerns them by Kubernetes events: {failure}{hint}");
    if board.set_condition(TOPIC, Some(text.clone())) {
        warn!("{text}");
    }
}

async fn send(client: &mut Client, events: &mut Events, at: usize) -> Result<(), Failure> {
    let Some(event) = events.get(at).cloned() else { return Ok(()) };
    let name = match &event.name {
        None => client.create(&event).await?,
        Some(name) => client.update(&event, name).await.map(|()| name.clone())?,
    };
    events.sent(at, name, Instant::now());
    Ok(())
}

enum Verdict {
    /// Kubernetes has forgotten it, or has one of that name: it is made anew.
    Again,
    /// It will never be taken.
    Never,
    /// It may be taken another time.
    Later,
    /// We may not.
    Forbidden,
}

fn verdict(failure: &Failure) -> Verdict {
    match failure {
        Failure::Unreachable(_) | Failure::Slow(_) => Verdict::Later,
        // A namespace that is being deleted takes nothing new.
        Failure::Refused { status: 403, message } if message.contains("being terminated") => {
            Verdict::Never
        }
        Failure::Refused { status: 401 | 403, .. } => Verdict::Forbidden,
        Failure::Refused { status: 404, message } if message.contains("namespaces") => {
            Verdict::Never
        }
        Failure::Refused { status: 404, .. } => Verdict::Again,
        Failure::Refused { status: 408 | 429 | 500.., .. } => Verdict::Later,
        Failure::Refused { .. } => Verdict::Never,
    }
}

/// Makes events of a line, for every pod that it concerns.
async fn take(agent: &Arc<Agent>, events: &mut Events, line: Event, counts: &Counts) {
    let Some(words) = words::words(&line) else { return };
    let asked = Arc::clone(agent);
    let (line, subjects) = match tokio::task::spawn_blocking(move || {
        let subjects = subjects(&asked, &line);
        (line, subjects)
    })
    .await
    {
        Ok(found) => found,
        Err(_) => return,
    };
    if subjects.is_empty() && line.id.is_some() {
        counts.dropped.fetch_add(1, Ordering::Relaxed);
    }
    for subject in subjects {
        let given_up =
            events.add(subject, words.clone(), line.times, line.at_unix_ms, Instant::now());
        counts.dropped.fetch_add(given_up, Ordering::Relaxed);
    }
}

/// Whom a line concerns: the container that it names, or all pods on its GPU. Blocking.
fn subjects(agent: &Agent, line: &Event) -> Vec<Subject> {
    let entries = checkpoint::entries(&agent.allocations().paths().kubelet).unwrap_or_default();
    let uid = |record: &Record, holder: &Holder| {
        // What kubelet gave this container; two of one name are two generations.
        let ids = entries.iter().filter(|entry| {
            entry.container == holder.container
                && entry.resource == record.resource
                && AllocationId::of(&entry.resource, entry.device_ids.iter().map(String::as_str))
                    == record.id
        });
        let uids: BTreeSet<&str> = ids.map(|entry| entry.pod_uid.as_str()).collect();
        match uids.len() {
            1 => uids.first().map(|uid| (*uid).to_owned()),
            _ => agent.trust().uid(&holder.namespace, &holder.pod),
        }
    };
    let subject = |holder: &Holder, uid: Option<String>, container: &str| Subject {
        namespace: holder.namespace.clone(),
        pod: holder.pod.clone(),
        uid,
        container: container.to_owned(),
    };
    match (&line.id, &line.holder) {
        (Some(id), named) => {
            let record = agent.allocations().record(id);
            let current = record.as_ref().filter(|record| record.generation == line.generation);
            let holder = named.clone().or_else(|| current.and_then(|r| r.holder.clone()));
            let Some(holder) = holder else { return Vec::new() };
            let uid = match current {
                Some(record) => uid(record, &holder),
                None => agent.trust().uid(&holder.namespace, &holder.pod),
            };
            vec![subject(&holder, uid, &holder.container)]
        }
        (None, Some(holder)) => {
            let uid = agent.trust().uid(&holder.namespace, &holder.pod);
            vec![subject(holder, uid, &holder.container)]
        }
        (None, None) => {
            let Some(gpu) = &line.gpu else { return Vec::new() };
            // One of a pod, however many of its containers have shares.
            let mut seen = BTreeSet::new();
            let on = |record: &Record| {
                record.is_live() && record.grants.iter().any(|grant| grant.uuid == *gpu)
            };
            let records = agent.allocations().with_regions().into_iter().map(|(record, _)| record);
            records
                .filter(|record| on(record))
                .filter_map(|record| {
                    let holder = record.holder.clone()?;
                    let new = seen.insert((holder.namespace.clone(), holder.pod.clone()));
                    new.then(|| subject(&holder, uid(&record, &holder), ""))
                })
                .collect()
        }
    }
}

fn hostname() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned())
}
