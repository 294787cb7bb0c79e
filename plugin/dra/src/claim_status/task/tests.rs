//! The task against an API server in memory.

use std::sync::Mutex;

use serde_json::Value;
use tessera_cluster::error::{Kind, Verb};
use tessera_cluster::fixtures::{FakeApi, Mood};
use tessera_cluster::resource::{Claim, DeviceResult};
use tessera_system::locks::lock;

use super::super::tests::record;
use super::*;
use crate::names;

#[derive(Debug)]
struct Fake {
    records: Mutex<Vec<Arc<Record>>>,
    events: watch::Sender<u64>,
}

impl Fake {
    fn set(&self, records: Vec<Record>) {
        *lock(&self.records) = records.into_iter().map(Arc::new).collect();
        self.events.send_modify(|count| *count += 1);
    }
}

impl Claims for Fake {
    fn records(&self) -> Vec<Arc<Record>> {
        lock(&self.records).clone()
    }

    fn sick(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    fn events(&self) -> watch::Receiver<u64> {
        self.events.subscribe()
    }
}

fn claim(record: &Record) -> Claim {
    let share = record.origin.claim().unwrap();
    let result = DeviceResult {
        request: share.request.clone(),
        driver: names::DRIVER.to_owned(),
        pool: share.pool.clone(),
        device: share.results[0].device.clone(),
        share_id: share.results[0].share_id.clone(),
        ..DeviceResult::default()
    };
    Claim {
        uid: share.uid.clone(),
        namespace: share.namespace.clone(),
        name: share.name.clone(),
        allocated: Some(vec![result]),
        ..Claim::default()
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: not within 10 s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_shows_its_limits_and_follows_their_changes() {
    let api = FakeApi::new(names::DRIVER, "n1");
    let of = |mib| record("chat", "gpu", &["gpu-a"], &[("GPU-a", mib, 300)]);
    api.put_claim(&claim(&of(6144)));
    let fake = Arc::new(Fake { records: Mutex::default(), events: watch::Sender::new(0) });
    let task = tokio::spawn(Reporter::new(Arc::new(api.clone()), Arc::clone(&fake)).run());
    let memory = || {
        let found = api.device_status("team", "chat");
        found.first().map(|entry| entry["data"]["limits"]["memory"].clone())
    };
    fake.set(vec![of(6144)]);
    until("the first status", || memory() == Some(Value::from("6144Mi"))).await;
    let calls = || api.calls(Verb::Patch, Kind::ClaimStatus);
    assert_eq!(calls(), 1);
    // Something else happened: nothing to write.
    fake.set(vec![of(6144)]);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(calls(), 1);
    api.set_mood(Mood::Away);
    fake.set(vec![of(8192)]);
    until("the attempt", || calls() > 1).await;
    api.set_mood(Mood::Works);
    until("the changed status", || memory() == Some(Value::from("8192Mi"))).await;
    // A claim that is gone is left alone.
    let before = calls();
    fake.set(vec![of(8192), record("gone", "gpu", &["gpu-b"], &[("GPU-b", 64, 10)])]);
    until("the attempt", || calls() == before + 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(calls(), before + 1);
    task.abort();
}
