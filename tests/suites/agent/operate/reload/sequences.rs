//! Random sequences of configurations, good and bad, beside everything else that changes a node.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_agent::reload::{ReloadCause, Reloader, plan};
use tessera_config::file;
use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::Actor;
use tessera_model::record::{Grant, Record};
use tessera_region::quota::QuotaReader;
use tessera_view::change::{PlanResponse, ResetQuotaRequest, SetQuotaRequest, Target};
use tessera_view::status::Health;

use super::replace;
use tessera_harness::Random;
use tessera_harness::plugin::{GIB, GPU, TestNode, bounded, id_of, pod};

/// Steps of one run, and for how long at most.
const STEPS: usize = 80;
const LIMIT: Duration = Duration::from_secs(8);

/// What is meant to be good; of some no GPU has the memory.
fn settings(random: &mut Random) -> String {
    let replicas = 1 + random.below(8);
    let memory =
        random.one(&["", "memory = \"4Gi\"\n", "memory = \"8Gi\"\n", "memory = \"25%\"\n"]);
    let compute = random.one(&["", "cores = \"10%\"\n", "compute = \"strict\"\n"]);
    let gpus =
        random.one(&["reserve = 0\n", "reserve = \"2Gi\"\n", "reserve = 0\nexclude = [\"1\"]\n"]);
    let more =
        random.one(&["", "[health]\nrecovery = \"90s\"\n", "[kubernetes]\nevents = \"off\"\n"]);
    format!("[gpus]\n{gpus}[share]\nreplicas = {replicas}\n{memory}{compute}{more}")
}

const BAD: [&str; 4] = [
    "[share]\nreplicas = 0\n",
    "[share]\nreplicas = 4\nmemroy = \"4Gi\"\n",
    "[share]\nreplicas = 4\nmemory = \"30Gi\"\n",
    "[share]\nreplicas = 4\n[gpus]\nreserve = \"90Gi\"\n",
];

struct Sequence {
    node: TestNode,
    file: PathBuf,
    /// The text that holds.
    good: String,
    /// Pods that run, and their replicas.
    running: BTreeMap<String, Vec<String>>,
    pods: usize,
    /// Of each GPU, by UUID: what all might hold before the last step.
    sold: BTreeMap<String, u64>,
    counts: BTreeMap<&'static str, usize>,
}

type Live = BTreeMap<AllocationId, Arc<Record>>;

impl Sequence {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn reloader(&self) -> Arc<Reloader> {
        Arc::clone(self.node.sources().reloader().unwrap())
    }

    fn live(&self) -> Live {
        let all =
            self.node.agent().allocations().with_regions().into_iter().map(|(record, _)| record);
        all.filter(|record| record.is_live()).map(|record| (record.id.clone(), record)).collect()
    }

    async fn launch(&mut self) {
        let before = self.node.kubelet.registrations();
        self.node.launch_plugin_on(&self.file);
        bounded(self.node.kubelet.wait_until(|kubelet| kubelet.registrations() > before)).await;
    }

    async fn reload(&mut self, settings: &str) {
        settings.clone_into(&mut self.node.settings);
        let text = self.node.config_text();
        let (reloader, asked, file) = (self.reloader(), text.clone(), self.file.clone());
        let before = self.live();
        let plan = blocking(move || reloader.plan(asked, &file)).await;
        replace(&self.file, &text);
        let reloader = self.reloader();
        // That the file has changed may have been noticed before.
        let outcome = blocking(move || reloader.reload(&ReloadCause::Signal)).await;
        assert_eq!(outcome.problems.len(), plan.problems.len(), "{plan:?} {outcome:?}");
        if outcome.problems.is_empty() {
            self.count("taken");
            self.good = text;
            self.keeps(&plan, &before);
        } else {
            self.count("refused");
        }
        let state = self.reloader().state();
        assert_eq!(state.errors.is_empty(), outcome.problems.is_empty(), "{state:?}");
        let after = self.live();
        // Its holder may become known at any time.
        let facts = |record: &Arc<Record>| Record { holder: None, ..Record::clone(record) };
        for (id, replicas) in self.held() {
            let (after, before) = (after.get(&id).map(facts), before.get(&id).map(facts));
            assert!(before.is_some(), "{replicas:?} has no record");
            assert_eq!(after, before, "{replicas:?} is another after a reload");
        }
    }

    /// The plan says of every container that runs that it keeps what it has.
    fn keeps(&self, plan: &PlanResponse, before: &Live) {
        for (id, replicas) in self.held() {
            let planned = plan.allocations.iter().find(|planned| planned.id == id.as_str());
            let planned =
                planned.unwrap_or_else(|| panic!("{replicas:?} is not in the plan {plan:?}"));
            for Grant { uuid, memory_limit_bytes: bytes, cores_millis, compute, .. } in
                &before[&id].grants
            {
                let limits = plan::limits(*bytes, *cores_millis, *compute);
                let sentence = format!("keeps {limits} of {uuid} until its pod ends");
                assert!(planned.effects.contains(&sentence), "{sentence}: {planned:?}");
            }
        }
    }

    fn held(&self) -> impl Iterator<Item = (AllocationId, &Vec<String>)> {
        self.running.values().map(|replicas| (id_of(replicas), replicas))
    }

    async fn admit(&mut self, replicas: usize) {
        let name = format!("pod-{}", self.pods);
        self.pods += 1;
        match bounded(self.node.kubelet.run(&pod(&name, replicas))).await {
            Ok(mut admitted) => {
                self.count("admitted");
                self.running.insert(name, admitted.remove(0).device_ids);
            }
            // Kubelet leaves such a pod behind.
            Err(_) => self.node.kubelet.remove("default", &name),
        }
    }

    fn remove(&mut self, random: &mut Random) {
        let names: Vec<String> = self.running.keys().cloned().collect();
        if !names.is_empty() {
            let name = random.one(&names);
            self.node.kubelet.remove("default", name);
            self.running.remove(name);
            self.count("removed");
        }
    }

    async fn quota(&mut self, random: &mut Random) {
        let ids: Vec<AllocationId> = self.held().map(|(id, _)| id).collect();
        if ids.is_empty() {
            return;
        }
        let target = Target { name: random.one(&ids).to_string(), ..Target::default() };
        let memory_limit_bytes = Some((1 + random.below(32)) * GIB);
        let (node, is_reset) = (self.node.agent(), random.below(3) == 0);
        let done = blocking(move || match is_reset {
            true => {
                let ask = ResetQuotaRequest { target, ..ResetQuotaRequest::default() };
                node.reset_quota(&ask, Actor::Plugin)
            }
            false => {
                let ask = SetQuotaRequest { target, memory_limit_bytes, ..Default::default() };
                node.set_quota(&ask, Actor::Plugin)
            }
        })
        .await;
        self.count(if done.is_ok() { "steered" } else { "not steered" });
    }

    async fn restart(&mut self) {
        let before = self.live();
        self.node.stop_plugin().await;
        self.launch().await;
        let after = self.live();
        for (id, replicas) in self.held() {
            assert_eq!(after[&id].grants, before[&id].grants, "{replicas:?} after a restart");
        }
        self.count("restarts");
    }

    /// What holds after every step.
    async fn check(&mut self, step: &str) {
        assert_eq!(self.reloader().state().hash, file::hash(&self.good), "after {step}");
        let live = self.live();
        for (id, replicas) in self.held() {
            let record = live.get(&id).unwrap_or_else(|| panic!("{replicas:?} after {step}"));
            let quota = QuotaReader::attach(&self.node.pages(replicas)).unwrap();
            for (n, grant) in record.grants.iter().enumerate() {
                assert_eq!(quota.memory_limit(n), grant.memory_limit_bytes, "after {step}");
            }
        }
        // The capacity rule: what all may hold exceeds what is there only as far as it did before.
        let status = self.node.status().await;
        for gpu in &status.gpus {
            let sellable = gpu.memory_total_bytes - gpu.memory_reserve_bytes;
            let before = self.sold.get(&gpu.uuid).copied().unwrap_or(0);
            let now = gpu.memory_limits_bytes;
            assert!(now <= sellable.max(before), "{now} of {sellable} after {step}: {gpu:?}");
            assert!(now <= gpu.memory_total_bytes, "{now} after {step}: {gpu:?}");
            let free = gpu.replicas.iter().filter(|replica| {
                replica.allocation_id.is_empty() && replica.health == Health::Healthy
            });
            let free: u64 = free.map(|replica| replica.memory_limit_bytes).sum();
            assert!(free == 0 || now + free <= sellable, "{now} + {free} after {step}: {gpu:?}");
        }
        // Of a GPU that is left out for a while, too.
        self.sold.clear();
        for grant in live.values().flat_map(|record| &record.grants) {
            *self.sold.entry(grant.uuid.clone()).or_default() += grant.memory_limit_bytes;
        }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    bounded(tokio::task::spawn_blocking(work)).await.unwrap()
}

/// `TESSERA_SEED` repeats a run.
fn seed() -> u64 {
    match std::env::var("TESSERA_SEED") {
        Ok(seed) => seed.parse().expect("TESSERA_SEED is a number"),
        Err(_) => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            u64::from(now.unwrap().subsec_nanos())
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_reloaded_no_running_container_changes_and_the_capacity_rule_holds() {
    let seed = seed();
    println!("TESSERA_SEED={seed}");
    let mut random = Random(seed);
    let mut node = TestNode::without_plugin(super::FOUR).await;
    let file = node.dir.path().join("config.toml");
    let good = node.config_text();
    replace(&file, &good);
    node.settings.clear();
    let (running, sold, counts) = Default::default();
    let mut it = Sequence { node, file, good, running, pods: 0, sold, counts };
    it.launch().await;
    bounded(it.node.kubelet.wait_allocatable(GPU, 8)).await;
    let began = Instant::now();
    for step in 0..STEPS {
        if began.elapsed() > LIMIT {
            break;
        }
        let what = match random.below(16) {
            0..4 => {
                let settings = settings(&mut random);
                it.reload(&settings).await;
                format!("{step}: {settings:?}")
            }
            4..6 => {
                let settings = *random.one(&BAD);
                it.reload(settings).await;
                format!("{step}: {settings:?}")
            }
            6..10 => {
                it.admit(if random.below(4) == 0 { 2 } else { 1 }).await;
                format!("{step}: a pod came")
            }
            10..12 => {
                it.remove(&mut random);
                format!("{step}: a pod went")
            }
            12..15 => {
                it.quota(&mut random).await;
                format!("{step}: a quota")
            }
            _ => {
                it.restart().await;
                format!("{step}: a restart")
            }
        };
        it.check(&what).await;
    }
    println!("{:?}", it.counts);
    let all = began.elapsed() <= LIMIT;
    for what in ["taken", "refused", "admitted", "steered"].into_iter().filter(|_| all) {
        assert!(it.counts.contains_key(what), "no {what}: {:?}", it.counts);
    }
}
