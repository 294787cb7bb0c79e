//! What a front end asks for, and what a share of some GPUs comes to, as a claim or `tessera run` asks for it. Pure.

use std::collections::BTreeMap;

use tessera_model::allocation_id::AllocationId;
use tessera_model::origin::Origin;
use tessera_model::record::{Grant, Record};
use tessera_model::sharing::Compute;
use tessera_region::layout;

use crate::allocate::Catalogue;
use crate::refusal::Refusal;

/// What a front end asks for: one tenant's part of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    Replicas {
        resource: String,
        ids: Vec<String>,
    },
    /// So much of each of some GPUs.
    Share(ShareAsk),
    /// What is recorded already, as it is: for a front end that is asked again for it.
    Recorded(AllocationId),
}

impl Ask {
    /// The claim's request that it is for, if it is for a new share of one.
    pub fn request(&self) -> Option<&str> {
        let Ask::Share(ask) = self else { return None };
        Some(ask.origin.claim()?.request.as_str())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareAsk {
    pub id: AllocationId,
    /// The front end, and what it calls the share.
    pub origin: Origin,
    pub parts: Vec<SharePart>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharePart {
    pub uuid: String,
    /// Bytes that all processes of the tenant may hold.
    pub memory_bytes: u64,
    /// Thousandths of the GPU's time, 1 to 1000.
    pub cores_millis: u32,
    pub compute: Compute,
}

/// What a share comes to: a record of no generation, which is not stored yet. Parts of one GPU add up.
pub fn plan(catalogue: &Catalogue, ask: &ShareAsk) -> Result<Record, Refusal> {
    let mut grants: BTreeMap<&str, Grant> = BTreeMap::new();
    for part in &ask.parts {
        let granted = grant(catalogue, part)?;
        grants
            .entry(&part.uuid)
            .and_modify(|sum| {
                sum.memory_limit_bytes =
                    sum.memory_limit_bytes.saturating_add(granted.memory_limit_bytes);
                sum.cores_millis = sum.cores_millis.saturating_add(granted.cores_millis).min(1000);
            })
            .or_insert(granted);
    }
    match grants.len() {
        0 => return Err(Refusal::Empty),
        gpus if gpus > layout::MAX_GPUS => return Err(Refusal::TooManyGpus(gpus)),
        _ => {}
    }
    for Grant { uuid, memory_limit_bytes, context_overhead_bytes, .. } in grants.values() {
        if memory_limit_bytes <= context_overhead_bytes {
            return Err(Refusal::TooSmall {
                uuid: uuid.clone(),
                asked_bytes: *memory_limit_bytes,
                context_bytes: *context_overhead_bytes,
            });
        }
    }
    let grants = grants.into_values().collect();
    let plan = Record { origin: ask.origin.clone(), ..Record::new(ask.id.clone(), 0, grants) };
    catalogue.check_health(&plan)?;
    Ok(plan)
}

fn grant(catalogue: &Catalogue, part: &SharePart) -> Result<Grant, Refusal> {
    let SharePart { uuid, memory_bytes, cores_millis, compute } = part;
    let Some(sold) = catalogue.gpus.get(uuid) else {
        return Err(Refusal::UnknownGpu(uuid.clone()));
    };
    if !(1..=1000).contains(cores_millis) {
        return Err(Refusal::BadCores { uuid: uuid.clone(), cores_millis: *cores_millis });
    }
    Ok(Grant {
        uuid: uuid.clone(),
        memory_limit_bytes: *memory_bytes,
        context_overhead_bytes: sold.context_overhead_bytes,
        cores_millis: *cores_millis,
        compute: *compute,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn part(uuid: &str, gib: u64, cores_millis: u32) -> SharePart {
        let (uuid, memory_bytes) = (uuid.to_owned(), gib * GIB);
        SharePart { uuid, memory_bytes, cores_millis, compute: Compute::Strict }
    }

    fn ask(parts: Vec<SharePart>) -> ShareAsk {
        ShareAsk { id: AllocationId::of("claim:u", ["r"]), origin: Origin::Run, parts }
    }

    #[test]
    fn a_share_is_what_was_asked_and_not_a_multiple_of_replicas() {
        let plan = plan(&Catalogue::example(), &ask(vec![part("GPU-b", 3, 123)])).unwrap();
        let granted: Vec<_> = plan
            .grants
            .iter()
            .map(|g| (g.uuid.as_str(), g.memory_limit_bytes / GIB, g.cores_millis, g.compute))
            .collect();
        assert_eq!(granted, [("GPU-b", 3, 123, Compute::Strict)]);
        assert_eq!((plan.replicas.len(), plan.resource.as_str()), (0, ""));
        assert_eq!(plan.grants[0].context_overhead_bytes, 256 << 20);
    }

    #[test]
    fn parts_of_one_gpu_add_up_and_gpus_stay_apart() {
        let parts = vec![part("GPU-b", 3, 700), part("GPU-a", 1, 100), part("GPU-b", 2, 400)];
        let plan = plan(&Catalogue::example(), &ask(parts)).unwrap();
        let granted: Vec<_> = plan
            .grants
            .iter()
            .map(|g| (g.uuid.as_str(), g.memory_limit_bytes / GIB, g.cores_millis))
            .collect();
        assert_eq!(granted, [("GPU-a", 1, 100), ("GPU-b", 5, 1000)]);
    }

    #[test]
    fn what_cannot_run_is_refused_by_name() {
        let catalogue = Catalogue::example();
        let refused = |parts| plan(&catalogue, &ask(parts)).unwrap_err();
        assert_eq!(refused(vec![]), Refusal::Empty);
        assert_eq!(refused(vec![part("GPU-z", 1, 1)]), Refusal::UnknownGpu("GPU-z".into()));
        let small = SharePart { memory_bytes: 256 << 20, ..part("GPU-a", 0, 100) };
        let text = refused(vec![small]).to_string();
        assert!(text.contains("256 MiB") && text.contains("GPU-a"), "{text}");
        for cores in [0, 1001] {
            let refusal = refused(vec![part("GPU-a", 1, cores)]);
            assert!(matches!(refusal, Refusal::BadCores { .. }), "{refusal}");
        }
    }

    #[test]
    fn a_sick_gpu_gives_nothing() {
        let mut catalogue = Catalogue::example();
        catalogue.gpus.get_mut("GPU-a").unwrap().sick = Some("XID 79".into());
        let wanted = ask(vec![part("GPU-a", 1, 100)]);
        assert!(matches!(plan(&catalogue, &wanted), Err(Refusal::Dead { .. })));
    }
}
