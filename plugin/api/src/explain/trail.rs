//! The lines of the audit trail that an answer about one subject needs. The trail may have thousands of others.

use std::collections::BTreeSet;

use super::Facts;
use super::subject::{self, Unknown};
use tessera_model::audit::Event;
use tessera_model::written_name::BEGINNING;
use tessera_store::{Filter, Lines};

/// Reads into `facts` what [`super::answer`] needs about `subject` and no more; `waiting`: what happened and is not in
/// the trail yet. The answer is that which the whole trail would give, except for the names that it proposes where
/// nothing is called so: of those that are gone, only such as are like the subject.
///
/// # Errors
/// Those of `read`.
pub(crate) fn add<E>(
    facts: &mut Facts,
    subject: &str,
    waiting: &[Event],
    mut read: impl FnMut(&Filter) -> Result<Lines, E>,
) -> Result<(), E> {
    let mut take = |facts: &mut Facts, filter: &Filter| {
        let mut lines = read(filter)?;
        lines.events.extend_from_slice(waiting);
        facts.trail = lines;
        Ok(())
    };
    let subject = subject.trim();
    let mut words = names(subject);
    take(facts, &Filter::mentioning(&words))?;
    // A line names the holder at its time; the present holder follows from all lines of the allocation.
    let named = facts.trail.events.iter().filter_map(|event| event.id.as_ref());
    let mut ids: BTreeSet<String> = named.map(|id| quoted(id.as_str())).collect();
    let mut is_whole = ids.is_empty();
    let found = loop {
        let found = subject::find(facts, subject);
        let allocations = found.as_ref().map(|named| named.allocations.as_slice());
        for key in allocations.unwrap_or_default() {
            is_whole &= !ids.insert(quoted(&key.id));
        }
        if is_whole {
            break found;
        }
        take(facts, &Filter::mentioning(words.iter().chain(&ids)))?;
        is_whole = true;
    };
    words.extend(ids);
    match found {
        Ok(named) if !named.gpus.is_empty() => {
            words.extend(named.gpus.iter().map(|uuid| quoted(uuid)));
            let on = facts.records.iter().filter(|record| {
                record.grants.iter().any(|grant| named.gpus.contains(&grant.uuid))
            });
            words.extend(on.map(|record| quoted(record.id.as_str())));
            take(facts, &Filter::mentioning(&words).or_without_allocation())?;
            // Lines without a holder, of which others of their allocation may have one.
            let nameless = facts.trail.events.iter().filter(|event| event.holder.is_none());
            let ids = nameless.filter_map(|event| Some(quoted(event.id.as_ref()?.as_str())));
            let others: BTreeSet<String> = ids.filter(|id| !words.contains(id)).collect();
            if !others.is_empty() {
                words.extend(others);
                take(facts, &Filter::mentioning(&words).or_without_allocation())?;
            }
        }
        Err(Unknown::Nothing { .. }) => {
            let last = subject.rsplit('/').next().unwrap_or_default();
            if !last.is_empty() {
                words.push(last.to_owned());
                take(facts, &Filter::like(&words))?;
            }
        }
        Ok(_) | Err(Unknown::Several(_)) => {}
    }
    Ok(())
}

/// What a line has in it that names the subject: its pod, its container, or the beginning of its allocation.
fn names(subject: &str) -> Vec<String> {
    let parts: Vec<&str> = subject.split('/').collect();
    let beginning = |written: &str| match written.len() {
        ..BEGINNING => quoted(written),
        _ => format!("\"{written}"),
    };
    match parts.as_slice() {
        [_, id] if id.bytes().all(|byte| byte.is_ascii_hexdigit()) => vec![beginning(id)],
        [_, pod] | [_, pod, _] => vec![quoted(pod), beginning(subject)],
        _ => vec![beginning(subject)],
    }
}

/// A whole string in a line.
fn quoted(text: &str) -> String {
    format!("\"{text}\"")
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;
    use tessera_model::allocation_id::AllocationId;
    use tessera_model::audit::{Behind, What};
    use tessera_model::record::{Grant, Holder, Record};
    use tessera_store::{Change, Ledger};

    use super::*;
    use crate::explain::tests::facts as known;
    use crate::explain::{answer, subject::Unknown};

    /// Names that are each other's beginnings, ends and escapes.
    const NAMES: &[&str] =
        &["llama-0", "llama", "LLAMA-0", "a\"b", "a\\b", "a", "é\n", "0", "GPU-aaaa", "server", ""];

    fn id(n: u8) -> AllocationId {
        AllocationId::of("r", [n.to_string().as_str()])
    }

    fn holder() -> impl Strategy<Value = Option<Holder>> {
        let name = || proptest::sample::select(NAMES).prop_map(str::to_owned);
        proptest::option::of(
            (name(), name(), name()).prop_map(|(namespace, pod, container)| Holder {
                namespace,
                pod,
                container,
            }),
        )
    }

    fn line() -> impl Strategy<Value = Event> {
        let gpu = proptest::option::of(proptest::sample::select(&["GPU-aaaa", "GPU-b"][..]));
        let id = proptest::option::of(0..6u8);
        (id, 0..3u64, holder(), gpu, holder(), 0..4u8).prop_map(
            |(n, generation, holder, gpu, other, what)| {
                let what = match what {
                    0 => What::Allocated,
                    1 => What::Started,
                    2 => What::Released,
                    _ => {
                        let behind = Behind::Allocation { id: id_text(n), holder: other };
                        What::Delayed { waited_ms: 1, within_ms: 2, behind }
                    }
                };
                Event {
                    id: n.map(self::id),
                    generation,
                    holder,
                    gpu: gpu.map(str::to_owned),
                    ..Event::of_node(what, 5)
                }
            },
        )
    }

    /// Of a neighbour.
    fn id_text(n: Option<u8>) -> String {
        id(n.unwrap_or(0) + 1).to_string()
    }

    fn ledger(events: Vec<Event>) -> (tempfile::TempDir, Ledger) {
        let dir = tempfile::tempdir().unwrap();
        let (mut ledger, _) = Ledger::open(&dir.path().join("ledger.redb"), false).unwrap();
        ledger.commit(&Change { events, ..Change::default() }).unwrap();
        (dir, ledger)
    }

    /// Lines decoded for an answer.
    fn add_from(ledger: &mut Ledger, facts: &mut Facts, subject: &str, waiting: &[Event]) -> usize {
        let mut decoded = 0;
        let read = |filter: &Filter| {
            let lines = ledger.lines(filter).unwrap();
            decoded += lines.decoded;
            Ok::<_, Infallible>(lines)
        };
        let Ok(()) = add(facts, subject, waiting, read);
        decoded
    }

    proptest! {
        #[test]
        fn what_is_said_of_a_subject_is_what_the_whole_trail_says(
            trail in proptest::collection::vec(line(), 0..40),
            waiting in proptest::collection::vec(line(), 0..3),
            living in proptest::collection::vec((0..6u8, 0..3u64, holder()), 0..3),
            namespace in proptest::option::of(proptest::sample::select(NAMES)),
            name in prop_oneof![
                proptest::sample::select(NAMES).prop_map(str::to_owned),
                (0..7u8, 1..33usize).prop_map(|(n, length)| id(n).as_str()[..length].to_owned()),
            ],
        ) {
            let subject = namespace.map_or(name.clone(), |namespace| format!("{namespace}/{name}"));
            let mut facts = known();
            facts.records = living.into_iter().map(|(n, generation, holder)| {
                let grant = Grant { uuid: "GPU-aaaa".into(), ..facts.records[0].grants[0].clone() };
                Record { generation, holder, grants: vec![grant], ..Record::new(id(n), 1, Vec::new()) }.into()
            }).collect();
            let (_dir, mut ledger) = ledger(trail);
            let mut quick = facts.clone();
            add_from(&mut ledger, &mut quick, &subject, &waiting);
            facts.trail = ledger.lines(&Filter::all()).unwrap();
            facts.trail.events.extend(waiting);
            match (answer(&quick, &subject), answer(&facts, &subject)) {
                (Err(Unknown::Nothing { .. }), Err(Unknown::Nothing { .. })) => {}
                (quick, whole) => prop_assert_eq!(quick, whole),
            }
        }
    }

    #[test]
    fn an_answer_takes_no_more_work_for_what_happened_to_others() {
        let of = |n: u8, pod: &str, what: What| {
            let (namespace, container) = ("ns".to_owned(), "main".to_owned());
            let holder = Some(Holder { namespace, pod: pod.to_owned(), container });
            Event { id: Some(id(n)), generation: n.into(), holder, ..Event::of_node(what, 5) }
        };
        let others = (0..4000).flat_map(|n: u32| {
            let pod = format!("batch-{n}");
            [of((n % 100) as u8, &pod, What::Allocated), of((n % 100) as u8, &pod, What::Released)]
        });
        let ours = [of(200, "llama-7", What::Allocated), of(200, "llama-7", What::Started)];
        let (_dir, mut ledger) = ledger(others.chain(ours).collect());
        let id = id(200);
        for subject in ["llama-7", "ns/llama-7", &id.as_str()[..8], "llama", "nothing", "0"] {
            let mut facts = known();
            let decoded = add_from(&mut ledger, &mut facts, subject, &[]);
            assert!(decoded <= 6, "{subject}: {decoded} lines");
            assert_eq!(facts.trail.kept, 4097, "{subject}");
        }
    }
}
