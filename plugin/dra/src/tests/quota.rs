//! Quotas that change under claims: what is published is what can be prepared.

use std::sync::Arc;

use proptest::prelude::*;
use tessera_agent::Agent;
use tessera_agent::allocations::steer::{ResetQuotaRequest, SetQuotaRequest, Target};
use tessera_cluster::resource::ClaimRef;
use tessera_config::Config;
use tessera_gpu::Facts;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::Actor;
use tessera_rules::allocate::Ask;

use super::support::{config, open};
use crate::claims::{Node, decide};
use crate::fixtures::{consumed, share, units};
use crate::names;
use crate::publish::{Offer, Published};

const MIB: u64 = 1 << 20;
const GPUS: [&str; 2] = ["GPU-a", "GPU-b"];

#[derive(Clone, Debug)]
enum Step {
    /// The scheduler allocates so many MiB of a GPU; kubelet has it prepared at once, or not yet.
    Allocate {
        gpu: usize,
        mib: u64,
        is_prepared: bool,
    },
    /// A claim that is prepared gets so many MiB.
    Quota {
        which: prop::sample::Index,
        mib: u64,
    },
    Reset(prop::sample::Index),
    End(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..2usize, 1u64..9000, prop::bool::weighted(0.8))
            .prop_map(|(gpu, mib, is_prepared)| Step::Allocate { gpu, mib, is_prepared }),
        4 => (any::<prop::sample::Index>(), 600u64..16_384)
            .prop_map(|(which, mib)| Step::Quota { which, mib }),
        1 => any::<prop::sample::Index>().prop_map(Step::Reset),
        2 => any::<prop::sample::Index>().prop_map(Step::End),
    ]
}

/// A claim as the scheduler counts it.
struct Claim {
    gpu: usize,
    device: String,
    bytes: u64,
    /// Once it is prepared.
    id: Option<AllocationId>,
}

struct World {
    agent: Arc<Agent>,
    config: Arc<Config>,
    claims: Vec<Claim>,
    made: usize,
}

impl World {
    fn offer(&self) -> Offer {
        let gpus = Published::all(&self.agent, &Facts::default(), &mut |_| None);
        Offer::new(&gpus, &self.config)
    }

    /// Bytes of a GPU that the scheduler has not given away.
    fn offered(&self, gpu: usize) -> u64 {
        let offer = self.offer();
        let device = offer.devices.iter().find(|device| device.name == names::device(GPUS[gpu]));
        let value =
            device.map_or(0, |device| units(&device.capacity.as_ref().unwrap()["memory"].value));
        let taken: u64 = self.claims.iter().filter(|one| one.gpu == gpu).map(|one| one.bytes).sum();
        value.saturating_sub(taken)
    }

    /// What the scheduler allocates for a request, if anything: a device, and bytes.
    fn schedule(&self, gpu: usize, mib: u64) -> Option<(String, u64)> {
        let (offer, name) = (self.offer(), names::device(GPUS[gpu]));
        let device = offer.devices.iter().find(|device| device.name == name)?;
        let bytes = consumed(&device.capacity.as_ref()?["memory"], Some(mib * MIB))?;
        (bytes <= self.offered(gpu)).then_some((name, bytes))
    }

    fn prepare(&mut self, at: usize) -> Result<(), String> {
        self.made += 1;
        let (claim, uid) = (&self.claims[at], format!("u{}", self.made));
        let bytes = claim.bytes.to_string();
        let results = vec![share("gpu", &claim.device, &format!("s-{uid}"), &bytes, "1")];
        let object = crate::fixtures::claim(&uid, &uid, results);
        let asked = ClaimRef { namespace: "team".into(), name: uid.clone(), uid };
        let catalogue = self.agent.inventory.catalogue();
        let node = Node { pool: "node", catalogue: &catalogue, records: &[], is_on: true };
        let decision = decide(&asked, Some(&object), node)?;
        self.agent.grant(&decision.asks).map_err(|error| error.to_string())?;
        let Ask::Share(ask) = &decision.asks[0] else { panic!("{decision:?}") };
        self.claims[at].id = Some(ask.id.clone());
        Ok(())
    }

    fn prepared(&self, which: &prop::sample::Index) -> Option<AllocationId> {
        let ids: Vec<_> = self.claims.iter().filter_map(|one| one.id.clone()).collect();
        (!ids.is_empty()).then(|| which.get(&ids).clone())
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let target = |id: &AllocationId| Target { name: id.to_string(), ..Target::default() };
        match step {
            Step::Allocate { gpu, mib, is_prepared } => {
                let Some((device, bytes)) = self.schedule(*gpu, *mib) else { return Ok(()) };
                self.claims.push(Claim { gpu: *gpu, device, bytes, id: None });
                if *is_prepared {
                    let prepared = self.prepare(self.claims.len() - 1);
                    // One that was allocated before and not prepared is not known to the node: what was given to
                    // another since may be its.
                    let all_known = self.claims.iter().rev().skip(1).all(|one| one.id.is_some());
                    prop_assert!(
                        prepared.is_ok() || !all_known,
                        "sold and refused: {:?}",
                        prepared
                    );
                }
            }
            Step::Quota { which, mib } => {
                let Some(id) = self.prepared(which) else { return Ok(()) };
                let (target, memory_limit_bytes) = (target(&id), Some(mib * MIB));
                let request =
                    SetQuotaRequest { target, memory_limit_bytes, ..SetQuotaRequest::default() };
                // More than there is, is refused.
                let _ = self.agent.set_quota(&request, Actor::Plugin);
            }
            Step::Reset(which) => {
                let Some(id) = self.prepared(which) else { return Ok(()) };
                let target = target(&id);
                let request = ResetQuotaRequest { target, ..ResetQuotaRequest::default() };
                let _ = self.agent.reset_quota(&request, Actor::Plugin);
            }
            Step::End(which) if !self.claims.is_empty() => {
                let claim = self.claims.remove(which.index(self.claims.len()));
                if let Some(id) = claim.id {
                    self.agent.release(&[id]).unwrap();
                }
            }
            Step::End(_) => {}
        }
        for (at, gpu) in GPUS.iter().enumerate() {
            let records = self.agent.allocations.records();
            let counted: u64 = records.iter().filter_map(|record| record.counted_bytes(gpu)).sum();
            let free = ([16u64, 24][at] << 30).saturating_sub(counted);
            let offered = self.offered(at);
            prop_assert!(offered <= free, "{}: {} are offered of {} free", gpu, offered, free);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 60, ..ProptestConfig::default() })]
    #[test]
    fn nothing_is_offered_that_a_quota_has_taken(
        steps in prop::collection::vec(step(), 1..24),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let _within = runtime.enter();
        let dir = tempfile::tempdir().unwrap();
        let agent = open(config(dir.path(), ""));
        let config = agent.config();
        let mut world = World { agent, config, claims: Vec::new(), made: 0 };
        for step in &steps {
            world.step(step)?;
        }
    }
}
