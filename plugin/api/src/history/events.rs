//! Lines of the audit trail as events of an answer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::RangeInclusive;

use tessera_history::{Key, Series};
use tessera_model::audit::{self, What};
use tessera_model::record::Holder;
use tessera_store::{Filter, HISTORY_KEPT, Lines};
use tessera_view::history::{Answer, Event, Query};

use crate::explain::line;

/// Most events of an answer, the newest.
const MOST: usize = 1000;

/// The lines that [`add`] needs for an answer.
pub fn filter(answer: &Answer, query: &Query) -> Filter {
    let filter = match is_of_all(query) {
        true => Filter::all(),
        false => Filter::mentioning(answer.tenants.iter().map(|one| one.id.as_bytes()))
            .or_without_allocation(),
    };
    filter.written(window(answer, query))
}

/// What the lines call these tenants, by id and generation. A later line counts.
pub(super) fn names(trail: &Lines, of: &BTreeSet<(String, u64)>) -> Vec<Series> {
    let named = trail.events.iter().filter_map(|event| {
        let (id, holder) = (event.id.as_ref()?.to_string(), event.holder.clone()?);
        let key = Key { id, generation: event.generation, gpu_uuid: String::new() };
        let is_asked = of.contains(&(key.id.clone(), key.generation));
        let Holder { namespace, pod, container } = holder;
        is_asked.then(|| (key.clone(), Series { key, namespace, pod, container }))
    });
    named.collect::<BTreeMap<Key, Series>>().into_values().collect()
}

/// Whether the answer is of everything on the node.
fn is_of_all(query: &Query) -> bool {
    query.subject.trim().is_empty() && query.namespace.is_empty()
}

/// The time that events are of, Unix milliseconds.
fn window(answer: &Answer, query: &Query) -> RangeInclusive<i64> {
    let since = match query.since_unix_ms {
        0 => answer.since_unix_ms,
        since => since,
    };
    match query.until_unix_ms {
        0 => since..=i64::MAX,
        until => since..=until,
    }
}

/// Adds to an answer what happened meanwhile to what is in it: of a tenant its own lines, of a GPU its own and the
/// node's. `trail` has at least those that [`filter`] takes. That the trail begins later than the answer is remarked.
pub fn add(answer: &mut Answer, query: &Query, trail: &Lines) {
    let pods: HashMap<(&str, u64), (&str, &str)> = answer
        .tenants
        .iter()
        .map(|one| ((one.id.as_str(), one.generation), (one.namespace.as_str(), one.pod.as_str())))
        .collect();
    let is_all = is_of_all(query);
    let window = window(answer, query);
    let mut events = Vec::new();
    for event in trail.events.iter().filter(|event| window.contains(&event.at_unix_ms)) {
        let known = match &event.id {
            Some(id) => match pods.get(&(id.as_str(), event.generation)) {
                Some(pod) => Some(*pod),
                None if is_all => None,
                None => continue,
            },
            None => {
                let on = event.gpu.as_deref();
                let is_its = match on {
                    Some(uuid) => answer.gpus.iter().any(|gpu| gpu.gpu_uuid == uuid),
                    // Of the node: with a GPU's, or everything's.
                    None => !answer.gpus.is_empty(),
                };
                if !is_its && !is_all {
                    continue;
                }
                None
            }
        };
        events.push(described(event, known));
    }
    events.drain(..events.len().saturating_sub(MOST));
    if let Some(first) = trail.since_unix_ms
        && first > *window.start()
        && answer.since_unix_ms < first
        && trail.kept as u64 >= HISTORY_KEPT
    {
        let first = tessera_model::time_format::utc(first);
        answer.remarks.push(format!("events before {first} are no longer in the audit trail"));
    }
    answer.events = events;
}

/// A line in words, as `explain` has it.
fn described(event: &audit::Event, pod: Option<(&str, &str)>) -> Event {
    let line = line(event);
    let holder =
        event.holder.as_ref().map(|holder| (holder.namespace.as_str(), holder.pod.as_str()));
    let pod = holder.or(pod.filter(|(_, pod)| !pod.is_empty()));
    let is_operators = matches!(event.by, Some(audit::Actor::Admin { .. }));
    let event = Event {
        at_unix_ms: event.at_unix_ms,
        what: line.what,
        tenant: line.allocation_id,
        pod: pod.map(|(namespace, pod)| format!("{namespace}/{pod}")).unwrap_or_default(),
        gpu_uuid: match &event.what {
            What::QuotaSet { after, .. } | What::QuotaReset { after, .. } if after.len() == 1 => {
                after[0].uuid.clone()
            }
            _ => line.gpu_uuid,
        },
        text: String::new(),
        happened: line.text,
        reason: line.reason,
        reason_is_own: line.reason_is_own,
        behind: line.behind,
        by: if is_operators { line.by } else { String::new() },
    };
    Event { text: event.sentence(), ..event }
}

#[cfg(test)]
mod tests {
    use tessera_model::allocation_id::AllocationId;
    use tessera_model::audit::Event as Line;
    use tessera_store::{Change, Ledger};
    use tessera_view::history::{GpuSeries, TenantSeries};

    use super::*;

    fn answer() -> Answer {
        let tenant = TenantSeries {
            id: "a".repeat(32),
            generation: 2,
            namespace: "ns".into(),
            pod: "p".into(),
            ..TenantSeries::default()
        };
        Answer { tenants: vec![tenant], since_unix_ms: 10, ..Answer::default() }
    }

    fn line(id: &str, generation: u64, at_unix_ms: i64) -> Line {
        let id = AllocationId::parse(&id.repeat(32));
        Line { id, generation, ..Line::of_node(What::Started, at_unix_ms) }
    }

    /// By the lines of a ledger that the answer needs.
    fn add_from(answer: &mut Answer, query: &Query, trail: &[Line]) {
        let dir = tempfile::tempdir().unwrap();
        let (mut ledger, _) = Ledger::open(&dir.path().join("ledger.redb"), false).unwrap();
        ledger.commit(&Change { events: trail.to_vec(), ..Change::default() }).unwrap();
        let lines = ledger.lines(&filter(answer, query)).unwrap();
        add(answer, query, &lines);
    }

    fn found(answer: &Answer) -> Vec<(&str, i64, &str)> {
        let events = answer.events.iter();
        events.map(|event| (event.what.as_str(), event.at_unix_ms, event.pod.as_str())).collect()
    }

    #[test]
    fn a_tenants_answer_has_its_own_lines_of_its_window() {
        let trail = [
            line("a", 2, 5),
            line("a", 1, 20),
            line("a", 2, 30),
            line("b", 2, 30),
            Line::of_node(What::Cordoned, 30),
        ];
        let mut one = answer();
        add_from(&mut one, &Query { subject: "p".into(), ..Query::default() }, &trail);
        assert_eq!(found(&one), [("started", 30, "ns/p")]);
        let mut all = answer();
        add_from(&mut all, &Query::default(), &trail);
        assert_eq!(all.events.len(), 4);
        let until = Query { since_unix_ms: 1, until_unix_ms: 9, ..Query::default() };
        add_from(&mut all, &until, &trail);
        assert_eq!(found(&all), [("started", 5, "ns/p")]);
    }

    #[test]
    fn the_last_line_that_names_a_tenant_names_it() {
        let named = |id: &str, generation, pod: &str| {
            let holder =
                Holder { namespace: "ns".into(), pod: pod.into(), container: "main".into() };
            Line { holder: Some(holder), ..line(id, generation, 1) }
        };
        let events = vec![
            named("a", 1, "first"),
            named("a", 2, "other"),
            line("a", 2, 1),
            named("a", 2, "job-0"),
            named("b", 2, "job-1"),
        ];
        let trail = Lines { events, ..Lines::default() };
        let found = names(&trail, &[("a".repeat(32), 2), ("c".repeat(32), 1)].into());
        let found: Vec<_> = found.iter().map(|one| (&*one.namespace, &*one.pod)).collect();
        assert_eq!(found, [("ns", "job-0")]);
    }

    #[test]
    fn a_gpus_answer_has_the_nodes_lines_and_a_namespaces_has_none_of_others() {
        let gpu = GpuSeries { gpu_uuid: "GPU-a".into(), ..GpuSeries::default() };
        let mut one = Answer { gpus: vec![gpu], ..answer() };
        let sick = |uuid: &str| Line::of_gpu(uuid, What::Cordoned, "XID 79".into(), 40);
        let trail =
            [sick("GPU-a"), sick("GPU-b"), Line::of_node(What::Cordoned, 41), line("b", 1, 50)];
        add_from(&mut one, &Query { subject: "0".into(), ..Query::default() }, &trail);
        assert_eq!(found(&one), [("cordoned", 40, ""), ("cordoned", 41, "")]);
        assert!(one.events[0].text.ends_with("do not get it: XID 79"), "{}", one.events[0].text);
        let mut narrow = answer();
        add_from(&mut narrow, &Query { namespace: "ns".into(), ..Query::default() }, &trail);
        assert_eq!(found(&narrow), []);
    }
}
