//! The task against an API server.

use std::os::unix::fs::symlink;

use tessera_agent::inventory::GpuSelection;
use tessera_cluster::fixtures::Temper;
use tessera_cluster::k8s_openapi::api::resource::v1::Device;
use tessera_config::Config;
use tessera_gpu::nvml::NvmlDiscovery;
use tessera_model::topology::Topology;

use super::*;
use crate::fixtures::Cluster;
use crate::tests::support::{self, fall_ill, gpus, open, recover, until};

fn devices(api: &Cluster) -> Vec<Device> {
    let slices = api.slices();
    slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default()).collect()
}

fn names(api: &Cluster) -> Vec<String> {
    devices(api).into_iter().map(|device| device.name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_is_published_and_what_is_wiped_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let api = Cluster::new("n1");
    let pci = tempfile::tempdir().unwrap();
    symlink("../../../devices/pci0000:16/0000:01:00.0", pci.path().join("0000:01:00.0")).unwrap();
    let config = Current::from(support::config(dir.path(), ""));
    let agent = open(config.clone());
    let publisher = || {
        let discovery = Arc::new(NvmlDiscovery::new(Some("/nowhere".into())));
        let sources = (Arc::clone(&agent), discovery as Arc<dyn Discovery>);
        let mut publisher = Publisher::new(api.client(), sources, config.clone(), "n1");
        pci.path().clone_into(&mut publisher.pci_devices);
        publisher
    };
    let select = |count: usize| {
        let gpus = gpus()[..count].to_vec();
        let selection = GpuSelection { topology: Topology::by_numa(&gpus), gpus };
        agent.reload(Config::clone(&agent.config()), Some(selection));
    };
    let first = publisher();
    let status = first.status();
    let task = tokio::spawn(first.run());
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
    fall_ill(&agent, "GPU-a");
    until("the taint", || devices(&api)[0].taints.is_some()).await;
    recover(&agent, "GPU-a").await;
    until("no taint", || devices(&api)[0].taints.is_none()).await;
    // Configuration, taken live: the emptiest first.
    let more = "[share]\nplacement = \"distributed\"\n";
    agent.reload(support::config(dir.path(), more), None);
    until("the other order", || names(&api) == ["gpu-b", "gpu-a"]).await;
    // Kubelet.
    assert_eq!(api.wipe_slices(), 1);
    until("the slices again", || names(&api) == ["gpu-b", "gpu-a"]).await;
    assert_eq!(status.borrow().wipes, 1);
    // The API server, while something changes.
    api.server.set_temper(Temper::Away);
    select(1);
    until("the trouble is said", || status.borrow().error.is_some()).await;
    api.server.set_temper(Temper::Works);
    until("the change", || names(&api) == ["gpu-a"] && is_published()).await;
    assert_eq!(status.borrow().error, None);
    // The next instance, beside the old one.
    let before = api.slices();
    let second = publisher();
    let next = second.status();
    let other = tokio::spawn(second.run());
    until("the next instance", || next.borrow().state == State::Published).await;
    task.abort();
    select(2);
    until("its first write", || names(&api).len() == 2).await;
    assert_eq!(api.slices().len(), before.len());
    other.abort();
}
