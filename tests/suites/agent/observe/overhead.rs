//! Memory beyond the account: what the driver shows of tenants' processes, published and audited.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;

use serde_json::Value;
use tessera_gpu::GpuProcess;
use tessera_harness::plugin::{GPU, Simulated, bounded, pod, *};
use tessera_harness::{Owned, artefacts, monotonic_ns};
use tessera_model::audit::What;
use tessera_region::layout::DEPARTURE_NS;
use tessera_region::quota::QuotaReader;

const MIB: u64 = 1 << 20;

/// The overhead that the tenant of `pages` reads.
fn overhead(pages: &Path) -> u64 {
    QuotaReader::attach(pages).unwrap().observed_overhead(0)
}

async fn until_overhead(pages: &Path, bytes: u64) {
    until(|| (overhead(pages) == bytes).then_some(())).await;
}

/// Until the tenant of `pages` reads whether the driver has memory of dead processes.
async fn until_departing(pages: &Path, any: bool) {
    let quota = QuotaReader::attach(pages).unwrap();
    until(|| (quota.departing(0, monotonic_ns()) == Some(any)).then_some(())).await;
}

#[tokio::test]
async fn what_the_driver_shows_beyond_the_charges_is_published_and_ends_with_the_process() {
    let node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("a", 1).await;
    let tenant = Tenant::hold(&pages, 3 * GIB);
    let neighbour = node.start_pod("b", 1).await;
    let other = Tenant::hold(&neighbour.pages, GIB);
    node.gpus.show(&[uses(tenant.pid(), 3 * GIB + 100 * MIB), uses(other.pid(), GIB)]);
    until_overhead(&pages, 112 * MIB).await;
    assert_eq!(overhead(&neighbour.pages), 0, "each has its own");

    let allocation = node.allocation(&ids).await.unwrap();
    let shown = &allocation.gpus[0];
    assert_eq!(shown.memory_granted_bytes, 3 * GIB);
    assert_eq!(shown.memory_overhead_bytes, 112 * MIB);
    assert_eq!(shown.memory_nvml_bytes, Some(3 * GIB + 100 * MIB));
    assert_eq!((allocation.unaccounted, node.status().await.warnings.len()), (0, 0));

    // The driver takes the memory down later than the kernel ends the process, and lists it until then:
    // so long all of it stays charged.
    let usage = tessera_region::usage::UsageMap::attach(&pages).unwrap();
    let pid = tenant.pid();
    tenant.kill();
    until(|| (usage.charged_total(0) == 3 * GIB && usage.living_total(0) == 0).then_some(())).await;
    // Its neighbours need to know: they wait for that memory, too.
    let neighbours = neighbour.pages;
    until_departing(&neighbours, true).await;
    tokio::time::sleep(std::time::Duration::from_nanos(DEPARTURE_NS) * 5 / 4).await;
    assert_eq!((usage.charged_total(0), overhead(&pages)), (3 * GIB, 112 * MIB));
    // Part of it is gone, then all.
    node.gpus.show(&[uses(pid, GIB), uses(other.pid(), GIB)]);
    until(|| (usage.charged_total(0) == GIB).then_some(())).await;
    node.gpus.show(&[uses(other.pid(), GIB)]);
    until(|| (usage.charged_total(0) == 0 && overhead(&pages) == 0).then_some(())).await;
    until_departing(&neighbours, false).await;
    // Of one that is dead and in no account any more.
    node.gpus.show(&[uses(pid, GIB), uses(other.pid(), GIB)]);
    until_departing(&neighbours, true).await;
}

#[tokio::test]
async fn a_process_outside_the_account_is_flagged_and_counts_against_the_quota() {
    let mut node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("a", 1).await;
    // In a session and in no slot: the kernel vouches for whose it is.
    let _session = connect(&pages);
    node.gpus.show(&[uses(std::process::id(), 700 * MIB)]);
    let found = |status: &tessera_view::status::Status| {
        // The count is the region's and the warning the node's: one may be a moment earlier.
        let reported = status.warnings.iter().any(|w| w.contains("outside its account"));
        (status.allocations.first()?.unaccounted == 1 && reported).then_some(())
    };
    node.status_until(found).await;
    until_overhead(&pages, 704 * MIB).await;
    // It goes: nothing stands any more, and what was found stays counted.
    node.gpus.show(&[]);
    node.pre_start(&ids).await.unwrap();
    drop(Tenant::hold(&pages, MIB));
    node.unwarned().await;
    assert_eq!(node.status().await.allocations[0].unaccounted, 1);
    node.stop_plugin().await;
    let events = crate::trail(&node.ledger());
    let what = What::Bypassed { pid: std::process::id(), bytes: 700 * MIB };
    let bypassed = events.iter().find(|event| event.what == what).unwrap();
    let reason = bypassed.reason.as_ref().unwrap();
    assert!(bypassed.id.is_some() && reason.contains("a static program"), "{reason}");
}

#[tokio::test]
async fn an_emptied_usage_page_hides_nothing() {
    let node = TestNode::start_with(&format!("{SETTINGS}[gpus]\naudit_slack = \"100Mi\"\n")).await;
    let pages = node.start_pod("a", 1).await.pages;
    let tenant = Tenant::hold(&pages, GIB);
    node.gpus.show(&[uses(tenant.pid(), GIB)]);
    let file = std::fs::File::options().write(true).open(pages.join("usage")).unwrap();
    file.set_len(0).unwrap();
    until(|| (overhead(&pages) >= GIB - 2 * MIB).then_some(())).await;
    let unaccounted = |status: &tessera_view::status::Status| {
        (status.allocations[0].unaccounted > 0).then_some(status.allocations[0].tamperings)
    };
    assert!(node.status_until(unaccounted).await > 0);
}

#[tokio::test]
async fn where_the_driver_does_not_tell_nothing_is_published_and_status_says_so() {
    let node = TestNode::start().await;
    let Held { ids, pages } = node.start_pod("a", 1).await;
    let tenant = Tenant::hold(&pages, GIB);
    node.gpus.show(&[GpuProcess { pid: tenant.pid(), used_bytes: None }]);
    let _next = Tenant::hold(&pages, MIB);
    node.warned("does not tell what processes hold").await;
    assert_eq!(overhead(&pages), 0);
    let allocation = node.allocation(&ids).await.unwrap();
    assert_eq!(allocation.gpus[0].memory_nvml_bytes, None);
}

#[tokio::test]
async fn of_a_gpu_that_has_left_the_node_the_driver_need_not_tell() {
    let mut node = TestNode::start().await;
    let admitted = node.start_pod("a", 1).await;
    let gone = node.allocation(&admitted.ids).await.unwrap().gpus.remove(0).gpu_uuid;
    node.stop_plugin().await;
    node.gpus.gpus.lock().unwrap().retain(|gpu| gpu.uuid != gone);
    node.start_plugin().await;
    // The second look follows what was said of the first.
    let before = node.gpus.looks.load(Ordering::Relaxed);
    until(|| (node.gpus.looks.load(Ordering::Relaxed) >= before + 2).then_some(())).await;
    let warnings = node.status().await.warnings;
    assert!(!warnings.iter().any(|warning| warning.contains("does not tell")), "{warnings:?}");
}

// What a lone tenant uses: the plugin asks the simulated driver, and the simulator has its own account of it.

/// A pod alone on this GPU whose process works for a tenth of the time.
struct Lone {
    node: Simulated,
    _process: Owned,
}

impl Lone {
    async fn on(gpu: &str, settings: &str) -> Self {
        let mut node = Simulated::on(&format!("[[gpu]]\n{gpu}\n"), settings).await;
        node.launch();
        bounded(node.kubelet.wait_allocatable(GPU, 2)).await;
        let admitted = node.kubelet.run(&pod("alone", 1)).await.unwrap().remove(0);
        let mut load = node.tenant(&admitted.device_ids);
        load.envs(&admitted.response.envs);
        load.args(["--device", &admitted.response.envs["NVIDIA_VISIBLE_DEVICES"]]);
        load.args(["load", "--kernel-us", "2000", "--kernels", "1", "--rate", "50"]);
        let process = load.stdout(Stdio::null()).spawn().unwrap();
        Lone { node, _process: Owned(process) }
    }

    fn compute(&self) -> Value {
        self.node.json()["allocations"][0]["compute"].clone()
    }

    /// Waits until it has had this, microseconds, and what it had then.
    fn until(&self, figure: &str, us: u64) -> Value {
        loop {
            let compute = self.compute();
            if compute[figure].as_u64() > Some(us) {
                return compute;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    /// The simulator's time, and how long its GPU was busy.
    fn account(&self) -> [f64; 2] {
        let mut ctl = self.node.on_machine(Command::new(artefacts().simgpu_ctl()));
        let out = ctl.arg("account").output().unwrap();
        let line = String::from_utf8(out.stdout).unwrap();
        let account: Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
        [&account["now_ns"], &account["busy_ns"]].map(|ns| ns.as_f64().unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_pod_used_what_the_simulator_says_and_not_all_that_it_had_leased() {
    let lone = Lone::on("memory = \"16GiB\"", "").await;
    let first = lone.until("measured_us", 0);
    let begin = lone.account();
    // The same ten seconds, but for the time that a look takes.
    let second = lone.until("measured_us", first["measured_us"].as_u64().unwrap());
    let end = lone.account();
    let grown = |name: &str| second[name].as_f64().unwrap() - first[name].as_f64().unwrap();
    let used = grown("used_us") / grown("measured_us");
    let busy = (end[1] - begin[1]) / (end[0] - begin[0]);
    assert!((used - busy).abs() <= 0.02, "used {used}, busy {busy}: {second}");
    let shown = second["used_10s_millis"].as_f64().unwrap() / 1000.0;
    assert!((shown - busy).abs() <= 0.02, "shown {shown}, busy {busy}: {second}");
    assert_eq!(second["gate"], "solo");
    assert!(second["got_10s_millis"].as_u64() > Some(900), "leased: {second}");
    assert!((0.05..0.2).contains(&busy), "{busy}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_pod_on_an_instance_used_nobody_knows_how_much() {
    let mig = "memory = \"16GiB\"\nmig = [\"1g.4gb\"]";
    let lone = Lone::on(mig, "").await;
    // The driver was asked twice.
    let compute = lone.until("leased_us", 21_000_000);
    assert_eq!(compute["used_10s_millis"], Value::Null, "{compute}");
    assert_eq!([&compute["used_us"], &compute["measured_us"]], [&0, &0], "{compute}");
    let status = String::from_utf8(lone.node.run(&["status"]).stdout).unwrap();
    assert!(status.contains(" ? "), "{status}");
}
