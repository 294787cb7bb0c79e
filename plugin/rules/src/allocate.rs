//! What is asked for comes to a record of no generation, which is not stored yet, or to a refusal. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tessera_config::Config;
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::{ContextSource, Gpu};
use tessera_model::printable;
use tessera_model::quantity::{format_bytes, format_compared};
use tessera_model::record::{Grant, Record};
use tessera_model::replica::Replica;
use tessera_model::sharing::Split;
use tessera_region::layout;

use crate::shares::{self, FrontEnd, Share, Terms, front_end_of};

#[derive(Clone, Debug)]
pub struct AdvertisedGpu {
    pub gpu: Gpu,
    pub seller: FrontEnd,
    /// What it is cut into for the device plugin, in the configuration's order.
    pub shares: Vec<Share>,
    /// One of equal replicas: what a claim gets that states no size.
    pub default_share: Share,
    pub context_overhead_bytes: u64,
    pub context_source: ContextSource,
    pub sick: Option<String>,
}

impl AdvertisedGpu {
    pub fn share(&self, resource: &str) -> Option<&Share> {
        self.shares.iter().find(|share| share.resource == resource)
    }
}

#[derive(Clone, Debug)]
pub struct Catalogue {
    pub resources: BTreeMap<String, Terms>,
    /// Grows with every configuration that takes the place of another.
    pub edition: u64,
    pub reserve_bytes: u64,
    pub gpus: BTreeMap<String, AdvertisedGpu>,
}

impl Catalogue {
    pub fn new(gpus: &[Gpu], config: &Config) -> Self {
        let sold = |gpu: &Gpu| {
            let (context_overhead_bytes, context_source) =
                gpu.context_constant(config.gpus.context_overhead_bytes);
            AdvertisedGpu {
                seller: front_end_of(gpu, config),
                shares: shares::cut(gpu, config),
                default_share: shares::equal(gpu, config),
                gpu: gpu.clone(),
                context_overhead_bytes,
                context_source,
                sick: None,
            }
        };
        let gpus: BTreeMap<_, _> = gpus.iter().map(|gpu| (gpu.uuid.clone(), sold(gpu))).collect();
        let names = gpus.values().flat_map(|sold| &sold.shares).map(|share| &share.resource);
        let resources = names.map(|name| (name.clone(), shares::terms(name, config))).collect();
        let reserve_bytes = config.gpus.reserve_bytes;
        Catalogue { resources, edition: 0, reserve_bytes, gpus }
    }

    /// The GPUs, in NVML's order.
    pub fn devices(&self) -> Vec<Gpu> {
        let mut gpus: Vec<Gpu> = self.gpus.values().map(|sold| sold.gpu.clone()).collect();
        gpus.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        gpus
    }

    fn check_health(&self, plan: &Record) -> Result<(), Refusal> {
        for Grant { uuid, .. } in &plan.grants {
            if let Some(reason) = self.gpus.get(uuid).and_then(|sold| sold.sick.clone()) {
                return Err(Refusal::Dead { uuid: uuid.clone(), reason });
            }
        }
        Ok(())
    }
}

/// What a front end asks for: one tenant's part of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    Replicas {
        resource: String,
        ids: Vec<String>,
    },
    /// So much of each of some GPUs, in any order, for whom the origin says; see [`plan_share`].
    Share(Box<Record>),
    /// What is recorded already, as it is: for a front end that is asked again for it.
    Recorded(AllocationId),
}

impl Ask {
    /// The claim's request that it is for, if it is for a new share of one.
    pub fn request(&self) -> Option<&str> {
        let Ask::Share(share) = self else { return None };
        Some(share.origin.claim()?.request.as_str())
    }
}

const LONGEST_ID: usize = 160;

/// What `ids` of `resource` come to: a record of no generation, which is not stored yet.
///
/// Errors: Ids that are unknown or retired, a dead GPU, a split that is not allowed. *Not* a replica that is
/// in use: kubelet owns assignment (an init container's replicas are allocated again to the next
/// container, a deleted pod's to its successor at once).
pub fn plan(catalogue: &Catalogue, resource: &str, ids: &[String]) -> Result<Record, Refusal> {
    let plan = plan_for_running(catalogue, resource, ids)?;
    catalogue.check_health(&plan)?;
    let split = catalogue.resources.get(resource).map_or(Split::Reject, |terms| terms.split);
    let (count, gpus) = (plan.replicas.len(), plan.grants.len());
    match split {
        Split::Reject if gpus > 1 => {
            Err(Refusal::Split { resource: resource.to_owned(), count, gpus })
        }
        Split::Distinct if gpus < count => {
            Err(Refusal::NotDistinct { resource: resource.to_owned(), count, gpus })
        }
        Split::Reject | Split::Spread | Split::Distinct => Ok(plan),
    }
}

/// As [`plan`], for a container that kubelet has already admitted: whatever Allocate would say of the
/// GPU's health and of splits today is no reason to take its quota away.
pub fn plan_for_running(
    catalogue: &Catalogue,
    resource: &str,
    ids: &[String],
) -> Result<Record, Refusal> {
    let mut shares: BTreeMap<&str, (&AdvertisedGpu, &Share, u32)> = BTreeMap::new();
    let replicas: BTreeSet<&String> = ids.iter().collect();
    for id in &replicas {
        let known = Replica::split(id)
            .and_then(|(uuid, index)| Some((index, catalogue.gpus.get_key_value(uuid)?)));
        let Some((index, (uuid, sold))) = known else {
            return Err(Refusal::Unknown(printable::brief(id, LONGEST_ID).into_owned()));
        };
        let share = sold.share(resource);
        let Some(share) = share.filter(|share| index < share.count) else {
            return Err(Refusal::Retired {
                id: (*id).clone(),
                resource: resource.to_owned(),
                replicas: share.map_or(0, |share| share.count),
            });
        };
        shares.entry(uuid).or_insert((sold, share, 0)).2 += 1;
    }
    check_count(shares.len())?;
    let grants = shares.iter().map(|(uuid, (sold, share, count))| Grant {
        uuid: (*uuid).to_owned(),
        memory_limit_bytes: share.memory_bytes.saturating_mul(u64::from(*count)),
        context_overhead_bytes: sold.context_overhead_bytes,
        cores_millis: share.cores_millis.saturating_mul(*count).min(1000),
        compute: share.compute,
    });
    let id = AllocationId::of(resource, ids.iter().map(String::as_str));
    Ok(Record {
        resource: resource.to_owned(),
        replicas: replicas.into_iter().cloned().collect(),
        ..Record::new(id, 0, grants.collect())
    })
}

fn check_count(gpus: usize) -> Result<(), Refusal> {
    match gpus {
        0 => Err(Refusal::Empty),
        gpus if gpus > layout::MAX_GPUS => Err(Refusal::TooManyGpus(gpus)),
        _ => Ok(()),
    }
}

/// What a share comes to, as a claim or `tessera run` asks for it. Grants of one GPU add up; what a context takes of each
/// is the catalogue's to say.
pub fn plan_share(catalogue: &Catalogue, asked: &Record) -> Result<Record, Refusal> {
    let mut grants: BTreeMap<&str, Grant> = BTreeMap::new();
    for grant in &asked.grants {
        let Grant { uuid, memory_limit_bytes, cores_millis, .. } = grant;
        let Some(sold) = catalogue.gpus.get(uuid) else {
            return Err(Refusal::UnknownGpu(uuid.clone()));
        };
        let context_overhead_bytes = sold.context_overhead_bytes;
        grants
            .entry(uuid)
            .and_modify(|sum| {
                sum.memory_limit_bytes = sum.memory_limit_bytes.saturating_add(*memory_limit_bytes);
                sum.cores_millis = sum.cores_millis.saturating_add(*cores_millis).min(1000);
            })
            .or_insert_with(|| Grant { context_overhead_bytes, ..grant.clone() });
    }
    check_count(grants.len())?;
    for Grant { uuid, memory_limit_bytes, context_overhead_bytes, .. } in grants.values() {
        if memory_limit_bytes <= context_overhead_bytes {
            return Err(Refusal::TooSmall {
                uuid: uuid.clone(),
                asked_bytes: *memory_limit_bytes,
                context_bytes: *context_overhead_bytes,
            });
        }
    }
    let plan = Record { grants: grants.into_values().collect(), ..asked.clone() };
    catalogue.check_health(&plan)?;
    Ok(plan)
}

/// Why a front end is refused. The message reaches a pod's events, so it says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("no replicas were asked for")]
    Empty,
    #[error(
        "unknown replica {0}: no GPU of this node has it; was the GPU replaced, or does another \
         plugin serve this resource name?"
    )]
    Unknown(String),
    #[error(
        "replica {id} of {resource} is retired: the configuration gives that GPU {replicas} of them \
         now; delete the pod, so that it is scheduled again"
    )]
    Retired { id: String, resource: String, replicas: u32 },
    #[error("GPU {uuid} is unhealthy ({reason}); the pod can run when another GPU has room")]
    Dead { uuid: String, reason: String },
    #[error("GPU {uuid} is {reason}; the pod can run when another GPU has room")]
    Cordoned { uuid: String, reason: String },
    #[error(
        "GPU {uuid} has no room for this allocation beside the limits of those that live there: \
         kubelet had not yet heard of a change; the pod can run when it is scheduled again"
    )]
    NoRoom { uuid: String },
    /// The capacity rule, for a container that starts with what others were given meanwhile.
    #[error(
        "the limits of others on GPU {uuid} have taken the room of this container since it was allocated: it starts \
         when one of them ends, or is lowered (`tessera status` lists them, `tessera quota set` changes one)"
    )]
    RoomTaken { uuid: String },
    #[error(
        "the {count} replicas of {resource} lie on {gpus} GPUs and share.split = \"reject\": no \
         single GPU had that many free; ask for fewer, or set share.split = \"spread\" (or split \
         in the resource's [[layout]]) if the program can use several GPUs"
    )]
    Split { resource: String, count: usize, gpus: usize },
    #[error(
        "the {count} replicas of {resource} lie on {gpus} of this node's GPUs and share.split = \"distinct\": there were \
         no {count} GPUs with one free; ask for fewer, or set share.split = \"spread\" (or split in the \
         resource's [[layout]]) if several shares of one GPU will do"
    )]
    NotDistinct { resource: String, count: usize, gpus: usize },
    #[error("{0} GPUs in one container; at most {max} are possible", max = layout::MAX_GPUS)]
    TooManyGpus(usize),
    #[error("allocation {0} has ended meanwhile; the pod can run when it is scheduled again")]
    Ended(AllocationId),
    #[error(
        "GPU {0} is not shared on this node; was it replaced, or does the configuration leave it out \
         (gpus.include, gpus.exclude)?"
    )]
    UnknownGpu(String),
    #[error(
        "{} of GPU {uuid} is not more than one CUDA context takes there ({}): nothing could run; ask for \
         more memory",
        format_compared(*.asked_bytes, *.context_bytes)[0],
        format_compared(*.asked_bytes, *.context_bytes)[1]
    )]
    TooSmall { uuid: String, asked_bytes: u64, context_bytes: u64 },
    #[error(
        "GPU {uuid} has {} to share, of which others hold {}{}: {} do not fit; the pod can run when \
         something of it ends, or on another GPU",
        format_bytes(*.sellable_bytes),
        format_bytes(*.held_bytes),
        by_quota(*.grown_bytes),
        format_bytes(*.asked_bytes)
    )]
    MemoryOversold {
        uuid: String,
        asked_bytes: u64,
        held_bytes: u64,
        grown_bytes: u64,
        sellable_bytes: u64,
    },
    #[error(
        "{} % of the time of GPU {uuid} are allocated to others: {} % do not fit; the pod can run when \
         something of it ends, or on another GPU",
        f64::from(*.held_millis) / 10.0,
        f64::from(*.asked_millis) / 10.0
    )]
    CoresOversold { uuid: String, asked_millis: u32, held_millis: u32 },
    #[error(
        "GPU {uuid} is sold by {seller} on this node, as the configuration says (dra.gpus); the pod can \
         run when it asks there"
    )]
    OtherFrontEnd { uuid: String, seller: &'static str },
    #[error(
        "GPU {uuid} is moving from {from} to another front end, and {from} still has {live} of it \
         allocated; the pod can run when these have ended"
    )]
    Moving { uuid: String, from: &'static str, live: String },
}

/// What of the memory that others hold was not allocated to them.
fn by_quota(grown_bytes: u64) -> String {
    match grown_bytes {
        0 => String::new(),
        bytes => {
            format!(
                " ({} of it by `tessera quota set`, which `tessera quota reset` takes back)",
                format_bytes(bytes)
            )
        }
    }
}

#[cfg(test)]
impl Catalogue {
    /// Two GPUs for tests, `GPU-a` and `GPU-b`, with four replicas of 8 GiB each.
    pub(crate) fn example() -> Self {
        let config =
            Config::parse("[gpus]\ncontext_overhead = \"256Mi\"\n[share]\nmemory = \"8Gi\"\n");
        let gpus = [Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1)];
        Catalogue::new(&gpus, &config.expect("a valid configuration"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tessera_model::sharing::Compute;

    const GPU: &str = "tessera.dev/gpu";

    fn catalogue() -> Catalogue {
        Catalogue::example()
    }

    /// `GPU-a` as one large and two small, `GPU-b` as two small of another size.
    fn unequal() -> Catalogue {
        let config = Config::parse(
            "[gpus]\nreserve = 0\n[[layout]]\ngpus = [\"GPU-a\"]\nshares = [\n\
             { resource = \"x.dev/large\", memory = \"50%\", cores = \"50%\" },\n\
             { resource = \"x.dev/small\", count = 2, memory = \"25%\", cores = \"25%\", split = \"spread\" },\n]\n\
             [[layout]]\ngpus = [\"GPU-b\"]\nshares = [\n\
             { resource = \"x.dev/small\", count = 3, memory = \"10%\", cores = \"10%\", split = \"spread\" },\n]\n",
        );
        let gpus = [Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1)];
        Catalogue::new(&gpus, &config.unwrap())
    }

    fn ids(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_bad_request_is_distinguished() {
        let mut catalogue = catalogue();
        let refused =
            |catalogue: &Catalogue, list: &[&str]| plan(catalogue, GPU, &ids(list)).unwrap_err();
        assert_eq!(refused(&catalogue, &[]), Refusal::Empty);
        assert_eq!(refused(&catalogue, &["GPU-z::0"]), Refusal::Unknown("GPU-z::0".into()));
        assert_eq!(refused(&catalogue, &["nonsense"]), Refusal::Unknown("nonsense".into()));
        assert_eq!(
            refused(&catalogue, &["GPU-a::4"]),
            Refusal::Retired { id: "GPU-a::4".into(), resource: GPU.into(), replicas: 4 }
        );
        assert_eq!(
            refused(&catalogue, &["GPU-a::0", "GPU-b::0"]),
            Refusal::Split { resource: GPU.into(), count: 2, gpus: 2 }
        );
        catalogue.gpus.get_mut("GPU-a").unwrap().sick = Some("XID 79".into());
        assert_eq!(
            refused(&catalogue, &["GPU-a::0"]),
            Refusal::Dead { uuid: "GPU-a".into(), reason: "XID 79".into() }
        );
        assert!(plan_for_running(&catalogue, GPU, &ids(&["GPU-a::0"])).is_ok());
    }

    #[test]
    fn each_resource_has_its_own_replicas_and_limits() {
        let catalogue = unequal();
        let of = |resource: &str, list: &[&str]| plan(&catalogue, resource, &ids(list));
        let large = of("x.dev/large", &["GPU-a::0"]).unwrap();
        assert_eq!((large.resource.as_str(), large.grants[0].cores_millis), ("x.dev/large", 500));
        assert_eq!(large.grants[0].memory_limit_bytes >> 30, 40);
        let small = of("x.dev/small", &["GPU-a::0"]).unwrap();
        assert_eq!(small.grants[0].memory_limit_bytes >> 30, 20);
        assert_ne!(small.id, large.id, "equal ids, different resources");
        // Spread, each GPU with its own size.
        let both = of("x.dev/small", &["GPU-b::2", "GPU-a::1", "GPU-a::0"]).unwrap();
        let limits: Vec<u64> = both.grants.iter().map(|g| g.memory_limit_bytes >> 30).collect();
        assert_eq!(limits, [40, 8]);
        // What that GPU does not have under that name.
        for (resource, id, replicas) in [
            ("x.dev/large", "GPU-a::1", 1),
            ("x.dev/large", "GPU-b::0", 0),
            ("x.dev/gone", "GPU-a::0", 0),
        ] {
            let refused = of(resource, &[id]).unwrap_err();
            assert_eq!(
                refused,
                Refusal::Retired { id: id.into(), resource: resource.into(), replicas }
            );
        }
    }

    proptest! {
        #[test]
        fn the_id_depends_on_the_set_alone(
            mut list in prop::collection::vec("GPU-[ab]::[0-3]", 1..8),
        ) {
            let id = AllocationId::of("r/x", list.iter().map(String::as_str));
            list.reverse();
            list.push(list[0].clone());
            prop_assert_eq!(&AllocationId::of("r/x", list.iter().map(String::as_str)), &id);
            prop_assert_ne!(&AllocationId::of("r/y", list.iter().map(String::as_str)), &id);
            prop_assert_eq!(AllocationId::parse(id.as_str()), Some(id));
        }

        /// Kubelet may give others than those that were preferred.
        #[test]
        fn under_distinct_what_shares_a_gpu_is_refused_and_nothing_else(
            list in prop::collection::btree_set((0usize..2, 0u32..4), 1..8),
        ) {
            let mut catalogue = catalogue();
            catalogue.resources.get_mut(GPU).unwrap().split = Split::Distinct;
            let ids: Vec<String> =
                list.iter().map(|(gpu, n)| format!("GPU-{}::{n}", ["a", "b"][*gpu])).collect();
            let gpus = list.iter().map(|(gpu, _)| gpu).collect::<BTreeSet<_>>().len();
            match plan(&catalogue, GPU, &ids) {
                Ok(plan) => {
                    prop_assert_eq!((plan.grants.len(), ids.len()), (gpus, gpus));
                    prop_assert!(plan.grants.iter().all(|grant| grant.memory_limit_bytes == 8 << 30));
                }
                Err(refused) => {
                    prop_assert!(gpus < ids.len(), "{}", refused);
                    let text = refused.to_string();
                    prop_assert!(text.contains("share.split = \"distinct\""), "{}", text);
                }
            }
            // Who runs keeps its quota.
            prop_assert!(plan_for_running(&catalogue, GPU, &ids).is_ok());
        }
    }

    const GIB: u64 = 1 << 30;

    fn part(uuid: &str, gib: u64, cores_millis: u32) -> Grant {
        Grant {
            uuid: uuid.to_owned(),
            memory_limit_bytes: gib * GIB,
            context_overhead_bytes: 0,
            cores_millis,
            compute: Compute::Strict,
        }
    }

    fn ask(parts: Vec<Grant>) -> Record {
        Record::new(AllocationId::of("claim:u", ["r"]), 0, parts)
    }

    #[test]
    fn a_share_is_what_was_asked_of_each_gpu_and_parts_of_one_add_up() {
        let parts = vec![part("GPU-b", 3, 700), part("GPU-a", 1, 123), part("GPU-b", 2, 400)];
        let plan = plan_share(&Catalogue::example(), &ask(parts)).unwrap();
        let granted: Vec<_> = plan
            .grants
            .iter()
            .map(|g| (g.uuid.as_str(), g.memory_limit_bytes / GIB, g.cores_millis, g.compute))
            .collect();
        let strict = Compute::Strict;
        assert_eq!(granted, [("GPU-a", 1, 123, strict), ("GPU-b", 5, 1000, strict)]);
        assert_eq!((plan.replicas.len(), plan.resource.as_str()), (0, ""));
        assert_eq!(plan.grants[0].context_overhead_bytes, 256 << 20);
    }

    #[test]
    fn what_cannot_run_is_refused_by_name() {
        let mut catalogue = Catalogue::example();
        catalogue.gpus.get_mut("GPU-b").unwrap().sick = Some("XID 79".into());
        let refused = |parts| plan_share(&catalogue, &ask(parts)).unwrap_err();
        assert_eq!(refused(vec![]), Refusal::Empty);
        let sick = refused(vec![part("GPU-b", 1, 100)]);
        assert!(matches!(sick, Refusal::Dead { .. }), "{sick}");
        assert_eq!(refused(vec![part("GPU-z", 1, 1)]), Refusal::UnknownGpu("GPU-z".into()));
        let small = Grant { memory_limit_bytes: 256 << 20, ..part("GPU-a", 0, 100) };
        let text = refused(vec![small]).to_string();
        assert!(text.contains("256 MiB") && text.contains("GPU-a"), "{text}");
    }
}
