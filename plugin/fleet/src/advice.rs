//! Advice of several nodes as one: a workload on one node is judged there, one on several by the series of all. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tessera_advice::{Observed, Question};
use tessera_config::Advice;
use tessera_view::advice::{Change, Recommendation, Recommendations, Settings};
use tessera_view::node::Node;
use tessera_view::{API_VERSION, history};
use tessera_web::source::Scope;

use crate::answer::AskError;
use crate::merge::split;

/// Namespace, workload, container, and which of the container's allocations.
type Key = (String, String, String, String);

/// What nodes advise, each by its own pods.
#[derive(Debug, Default)]
pub struct ByNode {
    /// Of workloads that one node knows.
    single: BTreeMap<Key, Recommendation>,
    /// Of workloads that several know: the nodes, and the earliest beginning of their windows.
    spread: BTreeMap<Key, (BTreeSet<String>, i64)>,
    settings: Vec<Settings>,
    remarks: Vec<String>,
}

/// A node as it is, and what was there.
pub type Seen = (Node, history::Answer);

fn key(one: &Recommendation) -> Key {
    (one.namespace.clone(), one.workload.clone(), one.container.clone(), one.part.clone())
}

/// Whether one of these pods is asked for, as `pod` or `namespace/pod`; empty for all.
fn is_asked(asked: &str, namespace: &str, pods: &[String]) -> bool {
    let pod = match asked.split_once('/') {
        Some((of, pod)) if of == namespace => pod,
        Some(_) => return false,
        None => asked,
    };
    asked.is_empty() || pods.iter().any(|one| one == pod)
}

impl ByNode {
    /// Of what every node advises for all its workloads; `pod` is the one whose workload is asked for.
    pub fn of(answers: Vec<(String, Result<Recommendations, AskError>)>, pod: &str) -> Self {
        let (answers, remarks) = split(answers);
        let mut all = ByNode { remarks, ..ByNode::default() };
        let mut by_key: BTreeMap<Key, Vec<(String, Recommendation)>> = BTreeMap::new();
        for (node, answer) in answers {
            let named = answer.remarks.into_iter().map(|remark| format!("node {node}: {remark}"));
            all.remarks.extend(named);
            all.settings.extend(answer.settings);
            for one in answer.workloads {
                by_key.entry(key(&one)).or_default().push((node.clone(), one));
            }
        }
        for (key, mut advised) in by_key {
            if !advised.iter().any(|(_, one)| is_asked(pod, &key.0, &one.pods)) {
                continue;
            }
            if advised.len() > 1 {
                let since = advised.iter().map(|(_, one)| one.since_unix_ms).min().unwrap_or(0);
                let nodes = advised.into_iter().map(|(node, _)| node).collect();
                all.spread.insert(key, (nodes, since));
            } else if let Some((_, one)) = advised.pop() {
                all.single.insert(key, one);
            }
        }
        all
    }

    /// Nodes whose series are needed, and since when.
    pub fn needed(&self) -> (BTreeSet<String>, i64) {
        let nodes = self.spread.values().flat_map(|(nodes, _)| nodes.iter().cloned()).collect();
        let since = self.spread.values().map(|(_, since)| *since).min().unwrap_or(0);
        (nodes, since)
    }

    /// The advice, with what was seen on the nodes that were needed.
    pub fn judged(
        mut self,
        seen: Vec<(String, Result<Seen, AskError>)>,
        scope: &Scope,
        now_unix_ms: i64,
    ) -> Recommendations {
        let (_, since_unix_ms) = self.needed();
        let (seen, silent) = split(seen);
        let left_out = |text| format!("{text}; workloads on several nodes are judged without it");
        self.remarks.extend(silent.into_iter().map(left_out));
        let mut settings = self.settings.clone();
        settings.dedup();
        let careful = careful(&settings);
        if settings.len() > 1 && !self.spread.is_empty() {
            let text = "nodes have different settings in [advice]: workloads on several nodes are judged by the \
                        largest of each";
            self.remarks.push(text.to_owned());
        }
        let observed: Vec<Observed<'_>> =
            seen.iter().map(|(_, (node, history))| Observed { node, history }).collect();
        // Its pod is not asked for: which workloads are is known, and a node need not know that pod.
        let question =
            Question { namespace: &scope.namespace, pod: "", since_unix_ms, now_unix_ms };
        let judged = tessera_advice::recommend(&observed, &careful, &question);
        let wanted = judged.workloads.into_iter().map(|one| (key(&one), one));
        let wanted = wanted.filter(|(key, _)| self.spread.contains_key(key));
        self.single.extend(wanted);
        // Written for where people sit, and from figures and names alone.
        for change in self.single.values_mut().flat_map(|one| &mut one.changes) {
            *change = Change::written(change.what.clone(), "kubectl tessera");
        }
        Recommendations {
            api_version: API_VERSION.to_owned(),
            at_unix_ms: now_unix_ms,
            settings: settings.pop().filter(|_| settings.is_empty()),
            workloads: self.single.into_values().collect(),
            remarks: self.remarks,
        }
    }
}

/// What leaves the most room of all settings; the defaults where no node says them.
fn careful(all: &[Settings]) -> Advice {
    let most = |of: fn(&Settings) -> u32, or: u32| all.iter().map(of).max().unwrap_or(or);
    let default = Advice::default();
    Advice {
        memory_percentile: most(|one| one.memory_percentile, default.memory_percentile),
        memory_margin: most(|one| one.memory_margin, default.memory_margin),
        cores_percentile: most(|one| one.cores_percentile, default.cores_percentile),
        cores_margin: most(|one| one.cores_margin, default.cores_margin),
        ..default
    }
}

#[cfg(test)]
mod tests;
