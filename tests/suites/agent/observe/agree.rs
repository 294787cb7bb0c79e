//! The same node in `status`, in the JSON API and in `/metrics`: one figure is one figure, in the unit that its name
//! says. `suites/page` holds the page against the API, and its words against those of the command line.

use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_harness::exposition::{Exposition, Sample};
use tessera_harness::gate_tenants::work;
use tessera_harness::metrics::{address, scrape, settings};
use tessera_harness::plugin::{
    GIB, SETTINGS, Tenant, TestNode, admin, bounded, id_of, pod, target,
};
use tessera_region::layout::{Past, USAGE_BYTES, USAGE_FILE, UsageHeader};
use tessera_view::change::{CordonRequest, SetQuotaRequest};
use tessera_view::gpu::Gpu;
use tessera_view::node::Node;
use tessera_view::status::Status;
use tessera_view::tenant;

/// What one moment is in each of the three.
struct Moment {
    status: Status,
    api: Node,
    metrics: Exposition,
}

/// A node with a busy tenant and an idle one, a changed quota, refusals, GPU time and a cordon.
async fn stage() -> (TestNode, Vec<Tenant>) {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let busy = bounded(node.kubelet.run(&pod("busy-0", 2))).await.unwrap().remove(0).device_ids;
    bounded(node.kubelet.run(&pod("idle-0", 1))).await.unwrap();
    let pages = node.pages(&busy);
    let dir = pages.clone();
    let hold = move || Tenant::refused(&dir, 3 * GIB + 12_345, 3);
    let tenant = tokio::task::spawn_blocking(hold).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let worker = std::thread::spawn(move || work(&pages, &stopped));
    let id = id_of(&busy).to_string();
    let has_leased = |status: &Status| {
        let busy = status.allocations.iter().find(|one| one.id == id)?;
        (busy.compute.as_ref()?.leased_us > 0).then_some(())
    };
    node.status_until(has_leased).await;
    let are_named =
        |status: &Status| status.allocations.iter().all(|one| one.holder.is_some()).then_some(());
    node.status_until(are_named).await;
    stop.store(true, Ordering::Relaxed);
    tokio::task::spawn_blocking(move || worker.join().unwrap()).await.unwrap();
    let root = admin(node.dir.path());
    let change = SetQuotaRequest {
        target: target("idle-0"),
        cores_millis: Some(333),
        memory_limit_bytes: Some(8 * GIB + 1),
        ..Default::default()
    };
    root.call(&change).await.unwrap();
    let cordon = CordonRequest { gpu: "1".into(), reason: "fans".into(), ..Default::default() };
    root.call(&cordon).await.unwrap();
    (node, vec![tenant])
}

/// The node at a moment at which nothing changed: it looked the same before and after.
async fn settled(node: &TestNode) -> Moment {
    let client = admin(node.dir.path());
    let address = address(node).await;
    // It moves with every text that is made: one that is reused may be of a moment before.
    let is_made_after = |new: &Exposition, old: &Exposition| {
        let idle = "tessera_container_idle_seconds";
        new.sum(idle, &[]) > old.sum(idle, &[])
    };
    let look = async {
        loop {
            let status = node.status().await;
            let old = scrape(address).await;
            let metrics = loop {
                let metrics = scrape(address).await;
                if is_made_after(&metrics, &old) {
                    break metrics;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            };
            let api: Node = client.get("/api/v1/node").await.unwrap();
            let after = node.status().await;
            let is_named = after.allocations.iter().all(|one| one.holder.is_some());
            let is_still = status.allocations == after.allocations && status.gpus == after.gpus;
            if is_named && is_still && api.at_unix_ms >= status.at_unix_ms {
                break Moment { status, api, metrics };
            }
        }
    };
    bounded(look).await
}

/// The one series of that name with these labels.
fn one<'m>(metrics: &'m Exposition, name: &'m str, labels: &[(&str, &str)]) -> Option<&'m Sample> {
    let has = |sample: &&Sample| {
        labels.iter().all(|(key, value)| sample.labels.get(*key).is_some_and(|has| has == value))
    };
    let found: Vec<&Sample> = metrics.of(name).filter(has).collect();
    assert!(found.len() < 2, "{name} {labels:?}: {found:?}");
    found.first().copied()
}

/// That the series has the value; a series that is absent has none.
fn assert_is(
    metrics: &Exposition,
    name: &str,
    labels: &[(&str, &str)],
    value: impl Into<Option<f64>>,
) {
    let found = one(metrics, name, labels).map(|sample| sample.value);
    assert_eq!(found, value.into(), "{name} {labels:?}");
}

fn assert_tenant(metrics: &Exposition, gpus: &[Gpu], tenant: &tenant::Tenant) {
    let names = [
        ("namespace", tenant.namespace.as_str()),
        ("pod", tenant.pod.as_str()),
        ("container", tenant.container.as_str()),
    ];
    let compute = tenant.compute.clone().unwrap();
    let counted = [
        ("tessera_container_out_of_memory_total", tenant.refusals as f64),
        ("tessera_container_driver_refusals_total", tenant.driver_refusals as f64),
        ("tessera_container_launches_total", tenant.launches as f64),
        ("tessera_container_unaccounted_memory_findings_total", tenant.unaccounted as f64),
        ("tessera_container_processes", f64::from(tenant.processes)),
        ("tessera_container_leases_total", compute.leases as f64),
        ("tessera_container_lease_overlaps_total", compute.overlaps as f64),
        ("tessera_container_gate_wait_seconds_total", compute.waited_us as f64 / 1e6),
        ("tessera_container_gate_waiting_seconds", compute.waiting_us.unwrap_or(0) as f64 / 1e6),
    ];
    for (name, value) in counted {
        assert_is(metrics, name, &names, value);
    }
    for used in &tenant.gpus {
        let index = gpus.iter().find(|gpu| gpu.uuid == used.gpu_uuid).unwrap().index.to_string();
        let on = [("gpu", index.as_str()), ("uuid", used.gpu_uuid.as_str())];
        let labels = [&names[..], &on].concat();
        let figures = [
            ("tessera_container_memory_used_bytes", Some(used.memory_used_bytes as f64)),
            ("tessera_container_memory_limit_bytes", Some(used.memory_limit_bytes as f64)),
            ("tessera_container_memory_peak_bytes", Some(used.memory_peak_bytes as f64)),
            ("tessera_container_memory_overhead_bytes", Some(used.memory_overhead_bytes as f64)),
            (
                "tessera_container_memory_nvml_bytes",
                used.memory_nvml_bytes.map(|bytes| bytes as f64),
            ),
            ("tessera_container_cores_ratio", Some(f64::from(used.cores_millis) / 1000.0)),
            ("tessera_container_gpu_seconds_total", Some(compute.leased_us as f64 / 1e6)),
            (
                "tessera_container_gpu_used_seconds_total",
                compute.used_10s_millis.map(|_| compute.used_us as f64 / 1e6),
            ),
        ];
        for (name, value) in figures {
            assert_is(metrics, name, &labels, value);
        }
        let resource =
            [("resource", tenant.resource_name.as_str()), ("policy", used.policy.name())];
        let labels = [&labels[..], &resource, &[("allocation", tenant.id.as_str())]].concat();
        assert_is(metrics, "tessera_container_info", &labels, 1.0);
    }
}

fn assert_gpu(metrics: &Exposition, gpu: &Gpu, tenants: &[tenant::Tenant]) {
    let index = gpu.index.to_string();
    let labels = [("gpu", index.as_str()), ("uuid", gpu.uuid.as_str())];
    let is_cordoned = !gpu.cordon.is_empty();
    let is_well = matches!(gpu.state.as_str(), "healthy" | "suspect");
    let is_available = is_well && !is_cordoned && gpu.withheld.is_empty();
    let lease = gpu.lease.as_ref();
    // No series where nobody has looked; the others have no word for that but 0.
    let outside = one(metrics, "tessera_gpu_memory_outside_bytes", &labels)
        .is_some()
        .then_some(gpu.memory_outside_bytes as f64);
    assert!(outside.is_some() || gpu.memory_outside_bytes == 0, "{labels:?}");
    let figures = [
        ("tessera_gpu_memory_total_bytes", Some(gpu.memory_total_bytes as f64)),
        ("tessera_gpu_memory_used_bytes", Some(gpu.memory_used_bytes as f64)),
        ("tessera_gpu_memory_reserved_bytes", Some(gpu.memory_reserve_bytes as f64)),
        ("tessera_gpu_memory_sold_bytes", Some(gpu.memory_limits_bytes as f64)),
        ("tessera_gpu_memory_charged_bytes", Some(gpu.memory_charged_bytes as f64)),
        ("tessera_gpu_memory_outside_bytes", outside),
        ("tessera_gpu_context_overhead_bytes", Some(gpu.context_overhead_bytes as f64)),
        ("tessera_gpu_cores_sold_ratio", Some(f64::from(gpu.cores_millis) / 1000.0)),
        ("tessera_gpu_cordoned", Some(f64::from(u8::from(is_cordoned)))),
        ("tessera_gpu_available", Some(f64::from(u8::from(is_available)))),
        ("tessera_gpu_lease_waiting", lease.map(|lease| f64::from(lease.waiting))),
        ("tessera_gpu_lease_quantum_seconds", lease.map(|lease| lease.quantum_us as f64 / 1e6)),
        (
            "tessera_gpu_lease_held",
            lease.map(|lease| f64::from(u8::from(!lease.holder.is_empty()))),
        ),
    ];
    for (name, value) in figures {
        assert_is(metrics, name, &labels, value);
    }
    for state in ["healthy", "suspect", "unhealthy", "recovering"] {
        let labels = [&labels[..], &[("state", state)]].concat();
        assert_is(metrics, "tessera_gpu_health", &labels, f64::from(u8::from(gpu.state == state)));
    }
    for cut in &gpu.replicas {
        let name = "tessera_gpu_replicas";
        let of = |state| {
            [&labels[..], &[("resource", cut.resource_name.as_str()), ("state", state)]].concat()
        };
        assert_is(metrics, name, &of("held"), f64::from(cut.held));
        assert_is(metrics, name, &of("free"), f64::from(cut.free));
        let withheld = cut.count - cut.held - cut.free;
        assert_is(metrics, name, &of("unhealthy"), f64::from(withheld));
    }
    let on_it = tenants.iter().filter(|one| one.gpus.iter().any(|used| used.gpu_uuid == gpu.uuid));
    let series = metrics.of("tessera_container_memory_limit_bytes");
    let series = series.filter(|one| one.labels.get("uuid") == Some(&gpu.uuid)).count();
    assert_eq!(series, on_it.count(), "tenants of {}", gpu.uuid);
}

/// The command line's JSON has the same of what people look at.
fn assert_status(status: &Status, api: &Node) {
    let cli = serde_json::to_value(status).unwrap();
    let gpus = cli["gpus"].as_array().unwrap();
    assert_eq!(
        (gpus.len(), cli["allocations"].as_array().unwrap().len()),
        (api.gpus.len(), api.tenants.len())
    );
    for (said, gpu) in gpus.iter().zip(&api.gpus) {
        let shown = serde_json::to_value(gpu).unwrap();
        for name in [
            "uuid",
            "index",
            "state",
            "cordon",
            "memory_used_bytes",
            "memory_limits_bytes",
            "cores_millis",
        ] {
            assert_eq!(said[name], shown[name], "{name}");
        }
        let of = |state: &dyn Fn(&serde_json::Value) -> bool| {
            said["replicas"].as_array().unwrap().iter().filter(|one| state(one)).count() as u64
        };
        let sum = |count: &dyn Fn(&tessera_view::gpu::Replicas) -> u32| -> u64 {
            gpu.replicas.iter().map(|cut| u64::from(count(cut))).sum()
        };
        assert_eq!(of(&|_| true), sum(&|cut| cut.count));
        assert_eq!(of(&|one| one["allocation_id"] != ""), sum(&|cut| cut.held));
        assert_eq!(
            of(&|one| one["allocation_id"] == "" && one["health"] == "healthy"),
            sum(&|cut| cut.free)
        );
    }
    for (said, tenant) in status.allocations.iter().zip(&api.tenants) {
        assert_eq!((&said.gpus, &said.compute), (&tenant.gpus, &tenant.compute));
        let counts = (&said.id, said.refusals, said.launches, said.gpu_time_us);
        let shown = (&tenant.id, tenant.refusals, tenant.launches, tenant.gpu_time_us);
        assert_eq!((counts, said.processes.len()), (shown, tenant.processes as usize));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn status_the_api_and_metrics_have_the_same_figures() {
    let (node, _tenants) = stage().await;
    let Moment { status, api, metrics } = settled(&node).await;
    assert_status(&status, &api);
    api.tenants.iter().for_each(|tenant| assert_tenant(&metrics, &api.gpus, tenant));
    api.gpus.iter().for_each(|gpu| assert_gpu(&metrics, gpu, &api.tenants));
    // There was something to disagree on.
    let busy = api.tenants.iter().find(|tenant| tenant.pod == "busy-0").unwrap();
    let idle = api.tenants.iter().find(|tenant| tenant.pod == "idle-0").unwrap();
    assert_eq!((busy.refusals, busy.processes), (3, 1));
    assert!(busy.compute.as_ref().unwrap().leased_us > 0);
    assert_eq!(busy.gpus[0].memory_charged_bytes % GIB, 12_345);
    assert_eq!((idle.gpus[0].memory_limit_bytes, idle.gpus[0].cores_millis), (8 * GIB + 1, 333));
    let held: u32 = api.gpus.iter().flat_map(|gpu| &gpu.replicas).map(|cut| cut.held).sum();
    assert_eq!((held, api.gpus.iter().filter(|gpu| !gpu.cordon.is_empty()).count()), (3, 1));
}

fn numbers(value: &serde_json::Value) -> Vec<f64> {
    match value {
        serde_json::Value::Number(number) => number.as_f64().into_iter().collect(),
        serde_json::Value::Array(all) => all.iter().flat_map(numbers).collect(),
        serde_json::Value::Object(all) => all.values().flat_map(numbers).collect(),
        _ => Vec::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_all_ones_is_no_figure_anywhere() {
    let node = TestNode::start_with(&settings(SETTINGS)).await;
    let ids = bounded(node.kubelet.run(&pod("ones-0", 1))).await.unwrap().remove(0).device_ids;
    let (pages, id) = (node.pages(&ids), id_of(&ids).to_string());
    let dir = pages.clone();
    let hold = move || Tenant::hold(&dir, GIB);
    let _tenant = tokio::task::spawn_blocking(hold).await.unwrap();
    let past = offset_of!(UsageHeader, past);
    for ones in [past..past + size_of::<Past>(), 0..USAGE_BYTES] {
        let is_whole = ones.len() == USAGE_BYTES;
        let usage = File::options().write(true).open(pages.join(USAGE_FILE)).unwrap();
        usage.write_all_at(&vec![0xff; ones.len()], ones.start as u64).unwrap();
        let is_seen = |status: &Status| {
            let one = status.allocations.iter().find(|one| one.id == id)?;
            (is_whole == (one.tamperings > 0)).then_some(())
        };
        node.status_until(is_seen).await;
        let Moment { status, api, metrics } = settled(&node).await;
        let cli = serde_json::to_value(&status).unwrap();
        // Milliseconds since 1970 and bytes of a GPU are less.
        let most = 1e15;
        for (view, shown) in [("status", cli), ("JSON", serde_json::to_value(&api).unwrap())] {
            let found = numbers(&shown).into_iter().find(|found| !(0.0..most).contains(found));
            assert_eq!(found, None, "{view}: {shown:#}");
        }
        for sample in &metrics.samples {
            assert!((0.0..most).contains(&sample.value), "{sample:?}");
        }
    }
}
