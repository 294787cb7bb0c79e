//! A container that asks for two of our resources. It has one mount point for pages, so it would be
//! held to one of its quotas and waste the other. Kubelet allocates each resource by itself and says
//! nothing of the container; PodResources says what each container holds. Pure.
//!
//! To refuse a container that asks for one would be worse than to miss one that asks for two, and
//! PodResources may be stale: before Kubernetes 1.34 it lists finished pods, and it never lists ordinary
//! init containers. So everything must speak for it: the allocations were made one right after the
//! other, as kubelet makes those of one container, and before a container of either started; and every
//! container that is listed with the one holds the other too. Init containers are missed.

use std::sync::Arc;

use tessera_model::allocation_id::AllocationId;
use tessera_model::holding::Holding;
use tessera_model::record::Record;

/// Live allocations of other resources that kubelet may have made for the same container as `record`.
/// Empty for nearly all: only then is PodResources worth asking.
///
/// Kubelet starts no container before it has all its devices: `had_started` says whether one of the first
/// allocation was about to start when the second was made. No clock is asked: one admission may take as long
/// as it likes.
pub fn siblings<'a>(
    record: &Record,
    records: impl Iterator<Item = &'a Arc<Record>>,
    resources: usize,
    had_started: &dyn Fn(&Record, &Record) -> bool,
) -> Vec<AllocationId> {
    // How far apart the generations of one container's allocations may be.
    let near = u64::try_from(resources.saturating_sub(1)).unwrap_or(u64::MAX);
    let may_be = |other: &&Arc<Record>| {
        other.generation.abs_diff(record.generation) <= near
            && other.is_live()
            && other.resource != record.resource
            && match other.generation < record.generation {
                true => !had_started(other, record),
                false => !had_started(record, other),
            }
    };
    records.filter(may_be).map(|other| other.id.clone()).collect()
}

/// Whether the holder of the allocation `id` holds one of its `siblings` as well: a sentence for its owner.
pub fn find(id: &AllocationId, siblings: &[AllocationId], holdings: &[Holding]) -> Option<String> {
    let with_ids: Vec<(AllocationId, &Holding)> =
        holdings.iter().map(|holding| (holding.allocation(), holding)).collect();
    let mut found = None;
    for (_, holder) in with_ids.iter().filter(|(held, _)| held == id) {
        let others = with_ids.iter().filter(|(held, other)| {
            siblings.contains(held)
                && (&other.namespace, &other.pod, &other.container)
                    == (&holder.namespace, &holder.pod, &holder.container)
        });
        let mut resources: Vec<String> =
            others.map(|(_, other)| other.resource_name.clone()).collect();
        if resources.is_empty() {
            // It may be this one that starts.
            return None;
        }
        resources.push(holder.resource_name.clone());
        resources.sort();
        resources.dedup();
        let Holding { namespace, pod, container, .. } = holder;
        found.get_or_insert_with(|| {
            format!(
                "container {container} of pod {namespace}/{pod} asks for {}: a container has one quota, so it can hold \
                 only one of Tessera's resources; ask for several of one of them, or use a container for each",
                resources.join(" and ")
            )
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::record::State;

    fn record(resource: &str, generation: u64, at: i64) -> Record {
        let replicas = vec!["GPU-a::0".to_owned()];
        Record {
            resource: resource.into(),
            replicas,
            allocated_unix_ms: at,
            ..Record::new(AllocationId::of(resource, ["GPU-a::0"]), generation, Vec::new())
        }
    }

    fn holds(pod: &str, container: &str, resource: &str) -> Holding {
        Holding {
            namespace: "ns".into(),
            pod: pod.into(),
            container: container.into(),
            resource_name: resource.into(),
            device_ids: vec!["GPU-a::0".into()],
        }
    }

    fn judge(large: &Record, small: &Record, holdings: &[Holding]) -> Option<String> {
        judge_after(large, small, holdings, u64::MAX)
    }

    /// Where those of a generation up to `started` had started before any later one was made.
    fn judge_after(
        large: &Record,
        small: &Record,
        holdings: &[Holding],
        started: u64,
    ) -> Option<String> {
        let records = [large, small].map(|record| Arc::new(record.clone()));
        let had_started =
            |a: &Record, b: &Record| a.generation <= started && b.generation > started;
        find(&large.id, &siblings(large, records.iter(), 2, &had_started), holdings)
    }

    #[test]
    fn a_container_with_two_of_ours_is_found_whichever_came_first() {
        let holdings =
            [holds("p", "c", "x/large"), holds("p", "c", "x/small"), holds("p", "c", "y/nic")];
        for (large, small) in [(5, 6), (6, 5)] {
            // However long it took, and wherever the clock was set meanwhile.
            let (large, small) = (record("x/large", large, 1000), record("x/small", small, 99_003));
            let text = judge(&large, &small, &holdings).unwrap();
            assert!(
                text.starts_with("container c of pod ns/p asks for x/large and x/small:"),
                "{text}"
            );
        }
    }

    #[test]
    fn two_containers_of_a_pod_with_one_each_are_not() {
        let (large, small) = (record("x/large", 5, 1000), record("x/small", 6, 1003));
        let holdings = [holds("p", "a", "x/large"), holds("p", "b", "x/small")];
        assert_eq!(judge(&large, &small, &holdings), None);
    }

    #[test]
    fn an_answer_that_does_not_know_the_container_refuses_nobody() {
        let (large, small) = (record("x/large", 5, 1000), record("x/small", 6, 1003));
        assert_eq!(judge(&large, &small, &[]), None);
        assert_eq!(judge(&large, &small, &[holds("p", "c", "x/small")]), None);
        // The devices of another generation.
        let other = Holding { device_ids: vec!["GPU-a::1".into()], ..holds("p", "c", "x/large") };
        assert_eq!(judge(&large, &small, &[other, holds("p", "c", "x/small")]), None);
    }

    #[test]
    fn a_finished_pod_that_held_two_does_not_speak_for_its_successor() {
        let old = [holds("old", "c", "x/large"), holds("old", "c", "x/small")];
        // The successor is listed, with one.
        let (large, small) = (record("x/large", 6, 1000), record("x/small", 5, 900));
        let listed = [&old[..], &[holds("new", "c", "x/large")]].concat();
        assert_eq!(judge(&large, &small, &listed), None);
        // It is an init container, and is not: but it was admitted later than the old pod.
        assert_eq!(judge(&record("x/large", 8, 1000), &small, &old), None);
        assert_eq!(judge_after(&large, &small, &old, 5), None);
    }

    #[test]
    fn parked_allocations_and_those_of_one_resource_are_no_siblings() {
        let (large, mut small) = (record("x/large", 5, 1000), record("x/small", 6, 1000));
        let of = |small: &Record| {
            let records = [&large, small].map(|record| Arc::new(record.clone()));
            siblings(&large, records.iter(), 2, &|_, _| false).len()
        };
        assert_eq!(of(&small), 1);
        small.state = State::Parked;
        assert_eq!(of(&small), 0);
    }
}
