//! The task against an API server in memory.

use std::os::unix::fs::symlink;
use std::sync::Mutex;

use tessera_cluster::fixtures::{FakeApi, Mood};
use tessera_cluster::k8s_openapi::api::resource::v1::Device;
use tessera_config::Config;
use tessera_system::locks::lock;

use super::super::fixtures::{MIB, gpu};
use super::super::status::State;
use super::*;
use crate::names;

/// GPUs that a test changes.
#[derive(Debug)]
struct Fake {
    gpus: Mutex<Vec<DraGpu>>,
    events: watch::Sender<u64>,
}

impl Fake {
    fn new(gpus: Vec<DraGpu>) -> Arc<Self> {
        Arc::new(Fake { gpus: Mutex::new(gpus), events: watch::Sender::new(0) })
    }

    fn change(&self, change: impl FnOnce(&mut Vec<DraGpu>)) {
        change(&mut lock(&self.gpus));
        self.events.send_modify(|count| *count += 1);
    }
}

impl Gpus for Fake {
    fn gpus(&self) -> Vec<DraGpu> {
        lock(&self.gpus).clone()
    }

    fn events(&self) -> watch::Receiver<u64> {
        self.events.subscribe()
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

fn devices(api: &FakeApi) -> Vec<Device> {
    let slices = api.slices();
    slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default()).collect()
}

fn names(api: &FakeApi) -> Vec<String> {
    devices(api).into_iter().map(|device| device.name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_is_published_and_what_is_wiped_comes_back() {
    let api = FakeApi::new(names::DRIVER, "n1");
    let fake = Fake::new(vec![gpu("GPU-a", 0), gpu("GPU-b", 1)]);
    let pci = tempfile::tempdir().unwrap();
    symlink("../../../devices/pci0000:16/0000:01:00.0", pci.path().join("0000:01:00.0")).unwrap();
    let config = Current::from(Config::default());
    let publisher = Publisher::new(Arc::new(api.clone()), Arc::clone(&fake), config.clone(), "n1")
        .with_pci_devices(pci.path());
    let status = publisher.status();
    let task = tokio::spawn(publisher.run());
    let is_published = || status.borrow().state == State::Published;
    until("the first slice", || names(&api) == ["gpu-a", "gpu-b"] && is_published()).await;
    let roots: Vec<_> = devices(&api)
        .iter()
        .map(|device| {
            let attributes = device.attributes.as_ref().unwrap();
            attributes.get("resource.kubernetes.io/pcieRoot").and_then(|root| root.string.clone())
        })
        .collect();
    assert_eq!(roots, [None, Some("pci0000:16".to_owned())]);
    // Health.
    fake.change(|gpus| gpus[0].sick = Some("XID 79".to_owned()));
    until("the taint", || devices(&api)[0].taints.is_some()).await;
    fake.change(|gpus| gpus[0].sick = None);
    until("no taint", || devices(&api)[0].taints.is_none()).await;
    // Configuration, taken live: the emptiest first.
    fake.change(|gpus| gpus[0].free_bytes -= 4096 * MIB);
    let distributed = Config::parse("[share]\nplacement = \"distributed\"").unwrap();
    config.set(Arc::new(distributed));
    until("the other order", || names(&api) == ["gpu-b", "gpu-a"]).await;
    // Kubelet.
    assert_eq!(api.wipe_slices(), 1);
    until("the slices again", || names(&api) == ["gpu-b", "gpu-a"]).await;
    assert_eq!(status.borrow().wipes, 1);
    // The API server, while something changes.
    api.set_mood(Mood::Away);
    fake.change(|gpus| gpus.truncate(1));
    until("the trouble is said", || status.borrow().error.is_some()).await;
    api.set_mood(Mood::Works);
    until("the change", || names(&api) == ["gpu-a"] && is_published()).await;
    assert_eq!(status.borrow().error, None);
    // The next instance, beside the old one.
    let before = api.slices();
    let publisher = Publisher::new(Arc::new(api.clone()), Arc::clone(&fake), config, "n1");
    let next = publisher.status();
    let other = tokio::spawn(publisher.run());
    until("the next instance", || next.borrow().state == State::Published).await;
    task.abort();
    fake.change(|gpus| gpus.push(gpu("GPU-c", 2)));
    until("its first write", || names(&api).len() == 2).await;
    assert_eq!(api.slices().len(), before.len());
    other.abort();
}
