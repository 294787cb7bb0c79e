//! What a reader may see: tenants of some namespaces whole, of others only totals.

use std::collections::{BTreeMap, BTreeSet};

use crate::explain::{Behind, Explanation, Explanations, Limit, Story, TrailLine, originator};
use crate::fleet::Entry;
use crate::node::{Node, Others};
use crate::{advice, history};

/// What a reader may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Everything.
    All,
    /// Tenants of these namespaces, and totals of the others.
    Namespaces(BTreeSet<String>),
}

impl Rights {
    /// Whether tenants of a namespace may be seen. A tenant that nobody named is nobody's: only [`Rights::All`]
    /// sees it.
    pub fn may_see(&self, namespace: &str) -> bool {
        match self {
            Rights::All => true,
            Rights::Namespaces(some) => !namespace.is_empty() && some.contains(namespace),
        }
    }
}

/// Leaves out of a node what the reader may not see. Holders of a shared claim are in one namespace, as the claim.
pub fn node(mut node: Node, rights: &Rights) -> Node {
    if *rights == Rights::All {
        return node;
    }
    let (seen, hidden) =
        node.tenants.into_iter().partition(|tenant| rights.may_see(&tenant.namespace));
    node.tenants = seen;
    let count = u32::try_from(hidden.len()).unwrap_or(u32::MAX);
    node.hidden_tenants = node.hidden_tenants.saturating_add(count);
    let mut others: BTreeMap<String, Others> = BTreeMap::new();
    // What was left out before stays left out.
    for other in node.others {
        others.insert(other.gpu_uuid.clone(), other);
    }
    for tenant in &hidden as &Vec<crate::tenant::Tenant> {
        let got = tenant.compute.as_ref().map_or(0, |compute| compute.got_10s_millis);
        for used in &tenant.gpus {
            let other = others
                .entry(used.gpu_uuid.clone())
                .or_insert_with(|| Others { gpu_uuid: used.gpu_uuid.clone(), ..Others::default() });
            other.tenants = other.tenants.saturating_add(1);
            other.memory_limit_bytes =
                other.memory_limit_bytes.saturating_add(used.memory_limit_bytes);
            other.memory_charged_bytes =
                other.memory_charged_bytes.saturating_add(used.memory_charged_bytes);
            other.cores_millis = other.cores_millis.saturating_add(used.cores_millis);
            other.got_10s_millis = other.got_10s_millis.saturating_add(got);
        }
    }
    node.others = others.into_values().collect();
    // Sentences name tenants, files and callers.
    node.warnings.clear();
    node.plugin.config_error.clear();
    node.plugin.amiss.clear();
    for gpu in &mut node.gpus {
        gpu.narrow();
        if let Some(lease) = &mut gpu.lease
            && !node.tenants.iter().any(|tenant| tenant.id == lease.holder)
        {
            lease.holder.clear();
        }
    }
    node
}

/// As [`node`], of an entry of a fleet.
pub fn entry(mut entry: Entry, rights: &Rights) -> Entry {
    entry.view = entry.view.map(|view| node(view, rights));
    if *rights != Rights::All && !entry.error.is_empty() {
        entry.error = "it does not answer".to_owned();
    }
    entry
}

/// Leaves out of a history what the reader may not see: other tenants, and what happened to them.
pub fn history(mut answer: history::Answer, rights: &Rights) -> history::Answer {
    if *rights == Rights::All {
        return answer;
    }
    answer.tenants.retain(|tenant| rights.may_see(&tenant.namespace));
    answer.events.retain_mut(|event| match event.pod.split_once('/') {
        Some((namespace, _)) => rights.may_see(namespace),
        None => false,
    });
    for event in &mut answer.events {
        apart(&mut event.reason, event.reason_is_own, &mut event.behind, rights);
        event.by = originator(&event.by).to_owned();
        event.text = event.sentence();
    }
    answer.remarks.clear();
    answer
}

/// Leaves out advice for others.
pub fn recommendations(
    mut advice: advice::Recommendations,
    rights: &Rights,
) -> advice::Recommendations {
    if *rights != Rights::All {
        advice.workloads.retain(|workload| rights.may_see(&workload.namespace));
        // Sentences name files, nodes and tenants.
        advice.remarks.clear();
    }
    advice
}

/// Leaves out the waste of others.
pub fn waste(mut waste: advice::Waste, rights: &Rights) -> advice::Waste {
    if *rights != Rights::All {
        waste.namespaces.retain(|namespace| rights.may_see(&namespace.namespace));
        waste.remarks.clear();
    }
    waste
}

/// Leaves out of explanations what the reader may not see; none where nothing is left.
pub fn explanations(mut all: Explanations, rights: &Rights) -> Option<Explanations> {
    if *rights != Rights::All {
        all.nodes.retain_mut(|one| explanation(&mut one.explanation, rights));
    }
    (!all.nodes.is_empty()).then_some(all)
}

/// Whether anything is left.
fn explanation(one: &mut Explanation, rights: &Rights) -> bool {
    one.allocations.retain(|story| rights.may_see(story.namespace()));
    one.allocations.iter_mut().for_each(|story| narrow(story, rights));
    // A GPU's story is that of all its tenants and of the node.
    one.gpus.clear();
    // They may be others'.
    one.left_out = 0;
    // Sentences name files.
    one.remarks.clear();
    one.refusals.retain(|refusal| rights.may_see(&refusal.namespace));
    !one.allocations.is_empty() || !one.refusals.is_empty()
}

fn narrow(story: &mut Story, rights: &Rights) {
    if let Some(now) = &mut story.now {
        now.holder = now.holder.take().filter(|holder| rights.may_see(&holder.namespace));
        now.other_holders.retain(|holder| rights.may_see(&holder.namespace));
        now.claim = now.claim.take().filter(|claim| rights.may_see(&claim.namespace));
    }
    if let Some(placement) = &mut story.placement {
        placement.stands.iter_mut().for_each(|gpu| {
            gpu.narrow();
            gpu.lease = None;
        });
    }
    story.limits.iter_mut().for_each(limit);
    for other in &mut story.neighbours {
        other.who = std::mem::take(&mut other.who).narrowed(rights);
    }
    if let Some(how) = &mut story.enforcement {
        how.warnings.clear();
    }
    for incident in &mut story.incidents {
        apart(&mut incident.reason, incident.reason_is_own, &mut incident.behind, rights);
    }
    story.trail.iter_mut().for_each(|line| trail_line(line, rights));
}

fn limit(limit: &mut Limit) {
    if limit.set_unix_ms != 0 {
        limit.set_by = originator(&limit.set_by).to_owned();
        limit.memory_origin = Limit::set(limit.set_unix_ms, &limit.set_by);
        limit.cores_origin.clone_from(&limit.memory_origin);
    }
}

fn trail_line(line: &mut TrailLine, rights: &Rights) {
    apart(&mut line.reason, line.reason_is_own, &mut line.behind, rights);
    line.by = originator(&line.by).to_owned();
    line.holder = line.holder.take().filter(|holder| rights.may_see(&holder.namespace));
}

/// A reason that is not only about the tenant itself is dropped; another that the reader may not see has no name.
fn apart(reason: &mut String, is_own: bool, behind: &mut Option<Behind>, rights: &Rights) {
    if !is_own {
        reason.clear();
    }
    *behind = behind.take().map(|other| other.narrowed(rights));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant::{Tenant, Use};

    fn tenant(namespace: &str, id: &str) -> Tenant {
        let used = Use { gpu_uuid: "GPU-a".into(), memory_limit_bytes: 10, ..Use::default() };
        Tenant {
            id: id.into(),
            namespace: namespace.into(),
            pod: format!("pod-{id}"),
            gpus: vec![used],
            ..Tenant::default()
        }
    }

    #[test]
    fn others_are_totals_and_nothing_names_them() {
        let node = Node {
            tenants: vec![tenant("mine", "1"), tenant("theirs", "2"), tenant("", "3")],
            warnings: vec![crate::node::Warning { text: "pod-2".into(), ..Default::default() }],
            ..Node::default()
        };
        let rights = Rights::Namespaces(["mine".to_owned(), String::new()].into());
        let narrowed = super::node(node, &rights);
        assert_eq!(narrowed.tenants.len(), 1);
        assert_eq!(narrowed.others[0].tenants, 2);
        assert_eq!(narrowed.others[0].memory_limit_bytes, 20);
        let text = serde_json::to_string(&narrowed).unwrap();
        assert!(!text.contains("pod-2") && !text.contains("pod-3"), "{text}");
        // What is narrowed twice is not counted twice.
        assert_eq!(super::node(narrowed.clone(), &rights), narrowed);
    }
}
