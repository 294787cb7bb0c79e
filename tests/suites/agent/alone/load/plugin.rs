//! The plugin's process, and what is asked of it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tessera_harness::exposition::Exposition;
use tessera_harness::gate_tenants::working;
pub use tessera_harness::metrics::{scrape, scrape_until};
use tessera_harness::plugin::{GPU, Simulated, admin, bounded, pod, stderr, target, until};
use tessera_harness::{CProgram, alone};
use tessera_model::audit::{Event, What};
use tessera_region::quota::QuotaReader;
use tessera_store::{Change, HISTORY_KEPT, Ledger};
use tessera_view::change::{QuotaResponse, ResetQuotaRequest, SetQuotaRequest};
use tessera_web::client::{Client, ClientError};
use tokio::task::JoinSet;

/// 32 shares of 256 MiB of each of two GPUs of 16 GiB, pods forgotten soon, GPUs that recover soon.
pub const SHARE: &str = "replicas = 32\nmemory = \"256Mi\"\n[metrics]\nlisten = \"127.0.0.1:0\"\n\
    [ledger]\nfsync = false\nrelease_after = \"1s\"\n\
    [health]\nprobe_interval = \"100ms\"\nrecovery = \"100ms\"\nrecovery_max = \"100ms\"\n";

/// The plugin under test.
pub struct Plugin {
    pub node: Simulated,
}

impl Plugin {
    /// Not started yet.
    pub async fn new() -> Self {
        Plugin { node: Simulated::new(SHARE).await }
    }

    /// Starts it, and gives where its metrics are.
    pub async fn serve(&mut self) -> SocketAddr {
        let address = self.serve_any().await;
        bounded(self.node.kubelet.wait_allocatable(GPU, 64)).await;
        address
    }

    /// As [`Plugin::serve`], also where little or nothing is left to sell.
    pub async fn serve_any(&mut self) -> SocketAddr {
        let _ = std::fs::remove_file(self.node.dir.path().join("log"));
        let before = self.node.kubelet.lists();
        self.node.launch();
        bounded(self.node.kubelet.wait_until(|kubelet| kubelet.lists() > before)).await;
        self.node.address().await
    }

    /// A pod that runs, and has a name: where its pages are.
    pub async fn run(&self, name: &str) -> PathBuf {
        self.node.start_pod(name, 1).await.pages
    }

    /// Waits until kubelet has said that these run, and that no others do.
    pub async fn named(&self, names: &[String]) {
        until(|| {
            let status = self.node.json();
            let all = status["allocations"].as_array()?;
            let has = |name: &String| all.iter().any(|a| a["holder"]["pod"] == **name);
            (all.len() == names.len() && names.iter().all(has)).then_some(())
        })
        .await;
    }

    /// What `explain -o json` says of a pod.
    pub fn explain(&self, name: &str) -> Value {
        let output = self.node.run(&["explain", name, "-o", "json"]);
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Memory of the process that no file backs, bytes (proc_pid_smaps(5)).
    pub fn anonymous(&self) -> u64 {
        let pid = self.node.plugin.as_ref().unwrap().id();
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

/// A request for memory, with a reason by which the trail is searched.
pub fn memory(name: &str, bytes: u64, reason: &str) -> SetQuotaRequest {
    SetQuotaRequest {
        target: target(name),
        memory_limit_bytes: Some(bytes),
        reason: reason.into(),
        ..Default::default()
    }
}

pub fn reset(name: &str, reason: &str) -> ResetQuotaRequest {
    ResetQuotaRequest { target: target(name), reason: reason.into(), ..Default::default() }
}

pub async fn set(admin: &Client, request: SetQuotaRequest) -> Result<QuotaResponse, ClientError> {
    bounded(admin.call(&request)).await
}

/// Containers that have series, by their pods' names.
pub fn pods_of(metrics: &Exposition) -> Vec<String> {
    let mut names: Vec<String> =
        metrics.of("tessera_container_info").map(|s| s.labels["pod"].clone()).collect();
    names.sort();
    names
}

/// One MiB.
pub const MIB: u64 = 1 << 20;

/// An hour, in the seconds that a [`Clock`] is set by.
pub const HOUR: i64 = 3600;

/// The wall clock of every process with [`Clock::envs`], every other clock being the machine's; and what that has
/// on its heap.
pub struct Clock {
    library: PathBuf,
    shared: PathBuf,
}

impl Clock {
    pub fn new(dir: &Path) -> Self {
        let library = CProgram::new("around").shared().build();
        let shared = dir.join("around");
        std::fs::write(&shared, [0; 16]).unwrap();
        Self { library, shared }
    }

    pub fn envs(&self) -> Vec<(&'static str, OsString)> {
        vec![("LD_PRELOAD", (&self.library).into()), ("AROUND", (&self.shared).into())]
    }

    /// So many seconds before or after the machine's.
    pub fn set(&self, seconds: i64) {
        // In place: it is mapped.
        let file = std::fs::File::options().write(true).open(&self.shared).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    /// Bytes on the heap when the clock was last read.
    pub fn heap(&self) -> u64 {
        let mut word = [0; 8];
        std::fs::File::open(&self.shared).unwrap().read_exact_at(&mut word, 8).unwrap();
        u64::from_ne_bytes(word)
    }
}

// The wall clock is set by hours and days, forward and back, while the plugin serves.

/// Where the clock stands, one after the other.
const JUMPS: [i64; 2] = [5 * HOUR, -9 * HOUR];

fn machine_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis().try_into().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_jumps_by_hours_stops_nothing_and_loses_nothing() {
    let _alone = alone();
    let mut plugin = Plugin::new().await;
    let clock = Clock::new(plugin.node.dir.path());
    plugin.node.envs = clock.envs();
    let address = plugin.serve().await;
    let stay: Vec<String> = (0..=JUMPS.len()).map(|n| format!("stay-{n}")).collect();
    let mut pages = Vec::new();
    for name in &stay {
        pages.push(plugin.run(name).await);
    }
    plugin.named(&stay).await;
    // Both want the same GPU all the time.
    let wanting: Vec<_> = pages[..2].iter().map(|dir| working(dir)).collect();
    let admin = admin(plugin.node.dir.path());
    let generations: Vec<u64> =
        pages.iter().map(|dir| QuotaReader::attach(dir).unwrap().generation()).collect();
    for (n, jump) in JUMPS.into_iter().enumerate() {
        let leases = |metrics: &tessera_harness::exposition::Exposition| {
            ["stay-0", "stay-1"]
                .map(|name| metrics.sum("tessera_container_leases_total", &[("pod", name)]))
        };
        clock.set(jump);
        let before = scrape(address).await;
        assert_eq!(pods_of(&before), stay, "no series is lost");
        // The plugin does live by that clock: nothing else here would notice if it did not.
        let status = plugin.node.json();
        let behind = status["at_unix_ms"].as_i64().unwrap() - jump * 1000 - machine_ms();
        assert!(behind.abs() < 60_000, "{behind} ms");

        // Signs of life and leases go on by another.
        let page = QuotaReader::attach(&pages[2]).unwrap();
        let (beat, arbiter) = (page.heartbeat_ns(), page.arbiter_ns());
        until(|| (page.heartbeat_ns() > beat && page.arbiter_ns() > arbiter).then_some(())).await;
        scrape_until(address, |metrics| {
            let (old, new) = (leases(&before), leases(metrics));
            (new[0] > old[0] && new[1] > old[1]).then_some(())
        })
        .await;

        // A pod comes, and goes.
        let guest = format!("guest-{n}");
        plugin.run(&guest).await;
        plugin.named(&[stay.clone(), vec![guest.clone()]].concat()).await;
        plugin.node.kubelet.remove("default", &guest);

        // Quotas are set, and the trail has it.
        let request = memory("stay-0", (300 + n as u64) * MIB, &format!("jump-{n}"));
        assert!(set(&admin, request).await.unwrap().changed);

        // A file is read when it has changed, and judged.
        let file = plugin.node.file();
        let good = std::fs::read_to_string(&file).unwrap();
        let refused = |metrics: &tessera_harness::exposition::Exposition| {
            metrics.sum("tessera_config_reloads_total", &[("outcome", "refused")])
        };
        let earlier = refused(&scrape(address).await);
        std::fs::write(&file, good.replace("replicas = 32", "replicas = 999")).unwrap();
        scrape_until(address, |metrics| (refused(metrics) > earlier).then_some(())).await;
        std::fs::write(&file, &good).unwrap();

        // A GPU falls ill and is well again.
        plugin.node.control(&["xid", "1", "144"]);
        let state = |metrics: &tessera_harness::exposition::Exposition, state: &str| {
            metrics.sum("tessera_gpu_health", &[("gpu", "1"), ("state", state)])
        };
        scrape_until(address, |metrics| (state(metrics, "healthy") == 1.0).then_some(())).await;
        let status = plugin.node.json();
        let now = status["at_unix_ms"].as_i64().unwrap();
        for gpu in status["gpus"].as_array().unwrap() {
            let since = gpu["state_since_unix_ms"].as_i64().unwrap();
            let age = if since == 0 { 0 } else { now - since };
            assert!((0..120_000).contains(&age), "a GPU's state is {age} ms old: {gpu}");
        }
        // What has gone is released in its time, and what stays is not.
        plugin.named(&stay).await;
    }
    drop(wanting);
    clock.set(-26 * HOUR);
    let metrics = scrape(address).await;
    assert_eq!(metrics.sum("tessera_ledger_commits_total", &[("outcome", "failed")]), 0.0);
    let now: Vec<u64> =
        pages.iter().map(|dir| QuotaReader::attach(dir).unwrap().generation()).collect();
    assert_eq!(now, generations, "each has the allocation that it was given");

    // The trail is in the order in which it happened, whatever the clock said.
    let story = plugin.explain("stay-0")["allocations"][0].clone();
    let reasons: Vec<&str> =
        story["trail"].as_array().unwrap().iter().filter_map(|l| l["reason"].as_str()).collect();
    let wanted: Vec<String> = (0..JUMPS.len()).map(|n| format!("jump-{n}")).collect();
    let sets: Vec<&str> = reasons.into_iter().filter(|r| r.starts_with("jump-")).collect();
    assert_eq!(sets, wanted);
    let text =
        String::from_utf8(plugin.node.run(&["explain", "stay-0", "-o", "wide"]).stdout).unwrap();
    assert!(text.contains("(the node's clock was set back since)"), "{text}");
    let shown = plugin.node.run(&["status"]);
    assert!(shown.status.success(), "{}", stderr(&shown));

    // Killed and started at another time, it has all of them, and takes new ones.
    plugin.node.kill();
    clock.set(-40 * HOUR);
    let address = plugin.serve().await;
    plugin.named(&stay).await;
    scrape_until(address, |metrics| (pods_of(metrics) == stay).then_some(())).await;
    bounded(plugin.node.kubelet.run(&pod("late", 1))).await.unwrap();
    assert_eq!(plugin.node.terminate().await, Some(0));
    let (mut ledger, _) = Ledger::open(&plugin.node.dir.path().join("ledger.redb"), false).unwrap();
    let trail = ledger.lines().unwrap().events;
    let of_jumps = |e: &&Event| e.reason.as_ref().is_some_and(|r| r.starts_with("jump-"));
    let sets = trail.iter().filter(of_jumps);
    let hours: Vec<i64> = sets
        .map(|event| (event.at_unix_ms - machine_ms() + 900_000).div_euclid(1_800_000))
        .collect();
    let wanted: Vec<i64> = JUMPS.iter().map(|jump| jump / (HOUR / 2)).collect();
    assert_eq!(hours, wanted, "half hours by the clock of their time");
    let last = trail.iter().rfind(|event| event.what.into_str() == "allocated").unwrap();
    assert!((last.at_unix_ms - machine_ms() + 40 * HOUR * 1000).abs() < 120_000, "{last:?}");
}

// Memory of the process while pods come and go and it is scraped: what it keeps of each that went.

/// Pods that come and go before memory is first looked at, and after that. The heap of a plugin that just started
/// grows until each of its caches and threads has been used, for up to 80 pods on a busy machine.
const WARM_UP: usize = 160;
const PODS: usize = 320;
/// What malloc may have handed out more at the end: 150 bytes of each of these pods. A record alone, with its
/// names, is several times that. (As measured, the heap breathes by 16 KiB and does not grow.)
const HEAP: u64 = 48 << 10;
/// And what the process may have grown by, which is pages: heap with its holes, and stacks. Coarse: what
/// starting needed is given back once, and taken again as it is needed.
const PAGES: u64 = MIB;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_come_and_go_leave_nothing_in_memory() {
    let _alone = alone();
    // The history keeps pods until it has stored them, once a minute.
    let settings = format!("{SHARE}[history]\nenabled = false\n");
    let mut plugin = Plugin { node: Simulated::new(&settings).await };
    let clock = Clock::new(plugin.node.dir.path());
    // Symbols of a backtrace stay in memory; and what glibc keeps for the next request of a thread would
    // count as handed out.
    let exact = [("RUST_BACKTRACE", "0"), ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")];
    plugin.node.envs = clock.envs();
    plugin.node.envs.extend(exact.map(|(name, value)| (name, value.into())));
    fill_trail(&plugin);
    let address = plugin.serve().await;
    let stay: Vec<String> = (0..16).map(|n| format!("stay-{n}")).collect();
    for name in &stay {
        plugin.run(name).await;
    }
    plugin.named(&stay).await;
    // Reads the whole trail: the ledger's cache is full now, which else takes a thousand pods.
    plugin.explain("stay-0");
    let mut looks = Vec::new();
    for batch in 0..(WARM_UP + PODS) / 16 {
        let mut guests = JoinSet::new();
        for n in 0..16 {
            let (kubelet, pod) =
                (plugin.node.kubelet.clone(), pod(&format!("guest-{batch}-{n}"), 1));
            guests.spawn(async move { kubelet.run(&pod).await.map(|_| pod) });
        }
        let guests = guests.join_all().await;
        let metrics = scrape(address).await;
        assert!(pods_of(&metrics).len() >= stay.len());
        for pod in guests {
            plugin.node.kubelet.remove("default", &pod.unwrap().name);
        }
        looks.push((clock.heap(), plugin.anonymous()));
    }
    // The least of several looks on either side: what a request holds for a moment is no growth.
    let least = |looks: &[(u64, u64)]| {
        let least = |of: fn(&(u64, u64)) -> u64| looks.iter().map(of).min().unwrap();
        (least(|look| look.0), least(|look| look.1))
    };
    let (warm, end) = (&looks[WARM_UP / 16 - 5..WARM_UP / 16], &looks[looks.len() - 5..]);
    let (before, after) = (least(warm), least(end));
    println!("heap and pages, bytes: {before:?}, after {PODS} more pods {after:?}");
    assert!(after.0 < before.0 + HEAP, "heap, bytes: {looks:?}");
    assert!(after.1 < before.1 + PAGES, "pages, bytes: {looks:?}");
}

/// As many lines as the trail keeps.
fn fill_trail(plugin: &Plugin) {
    let (mut ledger, _) = Ledger::open(&plugin.node.dir.path().join("ledger.redb"), false).unwrap();
    let line = |n: u64| Event::of_node(What::Cordoned, n as i64).because("x".repeat(200));
    let events = (1..=HISTORY_KEPT).map(line).collect();
    ledger.commit(&Change { events, ..Change::default() }).unwrap();
}
