//! Hundreds of random claims, with everything that goes wrong on a node: nothing is sold twice, nothing leaks, and what
//! a pod was given stays as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;
use tessera_cluster::fixtures::Temper;
use tessera_cluster::k8s_openapi::api::resource::v1::{
    DeviceRequestAllocationResult as DeviceResult, ResourceClaim,
};
use tessera_fake_kubelet::dra::PreparedDevice;
use tessera_model::allocation_id::AllocationId;

use super::support::{Node, Plugin, bounded, cordon, fall_ill, gpus, named, recover};
use crate::claims;
use crate::fixtures::{configured, fails, forbids, parameters, share, units};
use crate::prepare::Sweeping;

/// Claims have one of few names, so that they are made again.
const NAMES: u8 = 6;

#[derive(Clone, Debug)]
enum Step {
    /// A claim appears, in place of one of its name.
    Make {
        name: u8,
        results: Vec<(u8, u8, u8)>,
        is_malformed: bool,
    },
    Delete(u8),
    /// A pod with these claims, as they are now.
    Run {
        pod: u8,
        names: BTreeSet<u8>,
    },
    End(u8),
    /// One call with all claims that there are, as no kubelet would ask.
    Everything,
    StopDriver,
    KillDriver,
    RestartKubelet,
    KubeletForgets,
    Api(Temper),
    Sick(bool),
    Cordoned(bool),
    /// Whether something lies where the CDI directory belongs.
    Cdi(bool),
}

fn step() -> impl Strategy<Value = Step> {
    // GPU (two that are there, one that is not), GiB, hundredths.
    let result = (0u8..9, 1u8..14, 1u8..60);
    let results = prop::collection::vec(result, 1..4);
    let name = 0..NAMES;
    let tempers = prop_oneof![
        4 => Just(Temper::Works),
        1 => Just(Temper::Away),
        1 => Just(forbids()),
        1 => Just(fails()),
        1 => Just(Temper::Slow(Duration::from_millis(3))),
    ];
    prop_oneof![
        8 => (name.clone(), results, prop::bool::weighted(0.1))
            .prop_map(|(name, results, is_malformed)| Step::Make { name, results, is_malformed }),
        2 => name.clone().prop_map(Step::Delete),
        10 => (0u8..8, prop::collection::btree_set(name, 1..4))
            .prop_map(|(pod, names)| Step::Run { pod, names }),
        6 => (0u8..8).prop_map(Step::End),
        2 => Just(Step::Everything),
        1 => Just(Step::StopDriver),
        2 => Just(Step::KillDriver),
        2 => Just(Step::RestartKubelet),
        1 => Just(Step::KubeletForgets),
        3 => tempers.prop_map(Step::Api),
        1 => any::<bool>().prop_map(Step::Sick),
        1 => any::<bool>().prop_map(Step::Cordoned),
        2 => any::<bool>().prop_map(Step::Cdi),
    ]
}

struct Storm {
    node: Node,
    plugin: Option<Plugin>,
    /// Claims as the API server has them, by name.
    claims: BTreeMap<String, ResourceClaim>,
    /// What was answered for a UID, until it was unprepared.
    given: BTreeMap<String, Vec<PreparedDevice>>,
    /// Claims of each pod that was prepared.
    pods: BTreeMap<u8, Vec<ResourceClaim>>,
    uids: u32,
    /// Generations of live records.
    made: BTreeMap<AllocationId, u64>,
}

impl Storm {
    async fn new() -> Self {
        let sweeping =
            Sweeping { interval: Duration::from_secs(900), grace: Duration::from_secs(900) };
        let node = Node { sweeping, ..Node::new() };
        let plugin = Some(node.plugin().await);
        let (claims, given, pods, made) = Default::default();
        Storm { node, plugin, claims, given, pods, uids: 0, made }
    }

    fn make(&mut self, name: u8, results: &[(u8, u8, u8)], is_malformed: bool) {
        self.uids += 1;
        let uid = format!("u{}", self.uids);
        let result = |(at, (gpu, gib, cores)): (usize, &(u8, u8, u8))| -> DeviceResult {
            let device = ["gpu-a", "gpu-b", "gpu-z"][usize::from(gpu / 4)];
            let request = if gpu % 2 == 0 { "one" } else { "other/small" };
            let (memory, cores) = (format!("{gib}Gi"), cores.to_string());
            share(request, device, &format!("{uid}-{at}"), &memory, &cores)
        };
        let results = results.iter().enumerate().map(result).collect();
        let nonsense = [parameters(json!({ "kind": "Nonsense" }), false, &[])];
        let (name, config) = (format!("c{name}"), if is_malformed { &nonsense[..] } else { &[] });
        let claim = configured(&name, &uid, results, config);
        self.node.cluster.put(&[&claim]);
        self.claims.insert(name, claim);
    }

    fn block_cdi(&self, is_away: bool) {
        let [cdi, away] = ["cdi", "cdi.away"].map(|name| self.node.root.path().join(name));
        if is_away == cdi.is_file() {
            return;
        }
        if is_away {
            let _ = std::fs::rename(&cdi, &away);
            std::fs::write(&cdi, "in the way").unwrap();
        } else {
            std::fs::remove_file(&cdi).unwrap();
            let _ = std::fs::rename(&away, &cdi);
        }
    }

    async fn restart(&mut self) {
        let before = self.node.kubelet.registrations();
        self.plugin = Some(self.node.try_plugin(None).unwrap());
        self.node.registered(before + 1).await;
    }

    async fn step(&mut self, step: &Step) {
        let Node { kubelet, cluster, .. } = &self.node;
        match step {
            Step::Make { name, results, is_malformed } => self.make(*name, results, *is_malformed),
            Step::Delete(name) => {
                let name = format!("c{name}");
                cluster.remove_claim(&name);
                self.claims.remove(&name);
            }
            Step::Run { pod, names } => {
                let claims: Vec<ResourceClaim> = names
                    .iter()
                    .filter_map(|name| self.claims.get(&format!("c{name}")).cloned())
                    .collect();
                if self.pods.contains_key(pod) || claims.is_empty() {
                    return;
                }
                let names: Vec<_> = claims.iter().map(named).collect();
                match bounded(kubelet.prepare(&pod.to_string(), &names)).await {
                    Ok(devices) => {
                        for (claim, devices) in claims.iter().zip(devices) {
                            let before = self.given.insert(named(claim).uid, devices.clone());
                            assert!(before.is_none_or(|before| before == devices), "{devices:?}");
                        }
                        self.pods.insert(*pod, claims);
                    }
                    // The pod fails, and kubelet takes back what of it was prepared.
                    Err(error) => {
                        assert!(!error.to_string().is_empty());
                        bounded(kubelet.unprepare(&pod.to_string())).await.unwrap();
                    }
                }
            }
            Step::End(pod) => {
                bounded(kubelet.unprepare(&pod.to_string())).await.unwrap();
                self.pods.remove(pod);
            }
            Step::Everything => {
                // Only for claims that a pod has: kubelet would not know of others.
                let known = self.pods.values().flatten().map(named);
                let known: BTreeMap<_, _> = known.map(|claim| (claim.uid.clone(), claim)).collect();
                let batch: Vec<_> = known.into_values().collect();
                let answer = bounded(kubelet.call_prepare(&batch)).await.unwrap();
                assert_eq!(answer.len(), batch.len());
                for (uid, devices) in answer {
                    // A claim that is gone or away is an error; what is there is as it was.
                    if let (Ok(devices), Some(before)) = (devices, self.given.get(&uid)) {
                        assert_eq!(before, &devices);
                    }
                }
            }
            Step::StopDriver => {
                self.plugin.take().unwrap().stop().await;
                self.restart().await;
            }
            Step::KillDriver => {
                self.plugin.take().unwrap().kill();
                self.restart().await;
            }
            Step::RestartKubelet => {
                let before = kubelet.registrations();
                kubelet.restart();
                self.node.registered(before + 1).await;
            }
            Step::KubeletForgets => {
                kubelet.forget();
                self.pods.clear();
                // Whatever pods come next are new; what was held has no pod any more, and may be swept.
                for claim in self.given.keys() {
                    self.claims.retain(|_, known| named(known).uid != *claim);
                }
                for name in 0..NAMES {
                    let name = format!("c{name}");
                    if !self.claims.contains_key(&name) {
                        cluster.remove_claim(&name);
                    }
                }
            }
            Step::Api(temper) => cluster.server.set_temper(temper.clone()),
            Step::Sick(sick) => {
                if *sick {
                    fall_ill(&self.node.agent, "GPU-a");
                } else {
                    bounded(recover(&self.node.agent, "GPU-a")).await;
                }
            }
            Step::Cordoned(cordoned) => cordon(&self.node.agent, "GPU-b", *cordoned),
            Step::Cdi(is_away) => self.block_cdi(*is_away),
        }
    }

    /// What must be true whenever nothing is under way.
    fn check(&mut self) {
        let records = self.node.agent.claims();
        for gpu in gpus() {
            let grants = records.iter().flat_map(|record| &record.grants);
            let held: Vec<_> = grants.filter(|grant| grant.uuid == gpu.uuid).collect();
            let memory: u64 = held.iter().map(|grant| grant.memory_limit_bytes).sum();
            let cores: u32 = held.iter().map(|grant| grant.cores_millis).sum();
            assert!(memory <= gpu.memory_bytes && cores <= 1000, "{gpu}: {memory} {cores}");
        }
        // What is live stays as it was made, and so do its pages.
        self.made.retain(|id, _| records.iter().any(|record| record.id == *id));
        let pages = self.node.pages();
        for record in &records {
            let made = self.made.entry(record.id.clone()).or_insert(record.generation);
            assert_eq!(*made, record.generation, "a live share was made again");
        }
        let names: Vec<_> = pages.iter().map(|path| path.file_name().unwrap()).collect();
        let ids: Vec<_> = records.iter().map(|record| record.id.as_str()).collect();
        assert_eq!(names, ids, "pages without a record, or a record without");
        // Every pod that runs has all that its claims were allocated, to the byte.
        for claim in self.pods.values().flatten() {
            let uid = named(claim).uid;
            let of_it = records.iter().filter(|one| claims::uid(one) == Some(uid.as_str()));
            let held: u64 =
                of_it.flat_map(|record| &record.grants).map(|grant| grant.memory_limit_bytes).sum();
            let results = claims::allocated(claim).unwrap().results.iter().flatten();
            let memory = |result: &DeviceResult| {
                units(&result.consumed_capacity.as_ref().unwrap()["memory"])
            };
            assert_eq!(held, results.map(memory).sum::<u64>(), "{:?}", claim.metadata.name);
        }
    }

    /// All pods end, and claims that are held without a pod are gone: nothing is left.
    async fn end(mut self) {
        self.node.cluster.server.set_temper(Temper::Works);
        self.block_cdi(false);
        for pod in 0..8 {
            bounded(self.node.kubelet.unprepare(&u8::to_string(&pod))).await.unwrap();
        }
        for name in 0..NAMES {
            self.node.cluster.remove_claim(&format!("c{name}"));
        }
        // A driver that looks for the dead often.
        self.plugin.take().unwrap().kill();
        self.node.sweeping =
            Sweeping { interval: Duration::from_millis(5), grace: Duration::from_millis(10) };
        self.restart().await;
        let emptied = async {
            while !self.node.agent.claims().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        bounded(emptied).await;
        assert!(self.node.pages().is_empty());
        self.plugin.take().unwrap().stop().await;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 40, ..ProptestConfig::default() })]
    #[test]
    fn nothing_is_sold_twice_or_lost_whatever_happens(steps in prop::collection::vec(step(), 20..70)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut storm = Storm::new().await;
            for step in &steps {
                storm.step(step).await;
                storm.check();
            }
            storm.end().await;
        });
    }
}
