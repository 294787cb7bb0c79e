//! Quotas that are set and reset while pods come and go, the configuration is read again, and the plugin is
//! killed. Random; the seed is printed, and `LOAD_SEED` sets it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tessera_harness::{Rng, alone};

use serde_json::Value;
use tessera_fake_kubelet::Kubelet;
use tessera_model::audit::{Event, Limits, What};
use tessera_model::record::Record;
use tessera_region::quota::QuotaReader;
use tessera_store::Ledger;
use tessera_view::change::ReloadRequest;
use tessera_web::client::Client;
use tokio::task::JoinHandle;

use super::plugin::*;
use tessera_harness::PATIENCE;
use tessera_harness::plugin::{GPU, admin, pod};

/// How long they race each time, and lines of the trail at which they stop: it keeps 4096.
const RACE: Duration = Duration::from_secs(2);
const LINES: u64 = 1600;
/// Pods that stay, among others that come and go.
const STAY: usize = 8;

/// What the changes came to, by their number, which is in their reason.
#[derive(Default)]
struct Changes {
    /// Answered: it has changed.
    done: BTreeSet<u64>,
    /// Not answered: the plugin was killed meanwhile.
    open: BTreeSet<u64>,
    refused: u64,
}

struct Race {
    stop: AtomicBool,
    /// Numbers of changes, and lines of the trail at most.
    count: AtomicU64,
    lines: AtomicU64,
    changes: Mutex<Changes>,
}

impl Race {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn line(&self, lines: u64) {
        self.lines.fetch_add(lines, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn quotas_that_race_with_everything_are_each_in_the_trail_once_and_never_oversell() {
    let _alone = alone();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos();
    let seed = std::env::var("LOAD_SEED").map_or(u64::from(now), |seed| seed.parse().unwrap());
    println!("LOAD_SEED={seed}");
    let mut plugin = Plugin::new().await;
    plugin.serve().await;
    for n in 0..STAY {
        plugin.run(&format!("stay-{n}")).await;
    }
    let race = Arc::new(Race {
        stop: AtomicBool::new(false),
        count: AtomicU64::new(0),
        lines: AtomicU64::new(0),
        changes: Mutex::default(),
    });

    // Until it is quiet: what is reported, what is in the pages and what was recorded are the same.
    let tasks = start(&plugin, &race, seed).await;
    rest(&race, 1).await;
    race.stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    assert!(race.changes.lock().unwrap().open.is_empty(), "nothing breaks without a kill");
    assert_pages(&plugin);

    // And killed while they race.
    race.stop.store(false, Ordering::Relaxed);
    let tasks = start(&plugin, &race, seed ^ 0x5555).await;
    rest(&race, 2).await;
    plugin.node.kill();
    race.stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    let copy = plugin.node.dir.path().join("copy.redb");
    std::fs::copy(plugin.node.dir.path().join("ledger.redb"), &copy).unwrap();
    let (records, trail) = recorded(&copy);
    assert_trail(&race, &records, &trail);

    let address = plugin.serve_any().await;
    let reported = assert_pages(&plugin);
    let recorded_limits: BTreeMap<&str, u64> =
        records.iter().map(|r| (r.id.as_str(), r.grants[0].memory_limit_bytes)).collect();
    let mut shown = 0;
    for one in reported["allocations"].as_array().unwrap() {
        let id = one["id"].as_str().unwrap();
        assert_eq!(
            recorded_limits.get(id),
            Some(&limit(one)),
            "{id}, as it was when it was killed"
        );
        shown += usize::from(one["holder"]["pod"].as_str().is_some_and(|p| p.starts_with("stay-")));
    }
    assert_eq!(shown, STAY, "guests may have been forgotten since");
    scrape(address).await;
    plugin.node.kill();
    let (_, after) = recorded(&plugin.node.dir.path().join("ledger.redb"));
    let of = |trail: &[Event]| trail.iter().filter_map(number).collect::<Vec<_>>();
    assert_eq!(of(&after), of(&trail), "a restart adds no change, and loses none");
    let changes = race.changes.lock().unwrap();
    println!(
        "{} changed, {} refused or nothing new, {} cut off, {} lines",
        changes.done.len(),
        changes.refused,
        changes.open.len(),
        trail.len()
    );
}

/// Lets them race for a while, and until enough has happened, but not more than the trail keeps.
async fn rest(race: &Race, times: u64) {
    let begin = Instant::now();
    loop {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let done = race.changes.lock().unwrap().done.len() as u64;
        let lines = race.lines.load(Ordering::Relaxed);
        if lines > LINES * times || begin.elapsed() > RACE && done > 20 * times {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{done} changes, {lines} lines");
    }
}

/// Three who set and reset, two who run pods, one who has the file read.
async fn start(plugin: &Plugin, race: &Arc<Race>, seed: u64) -> Vec<JoinHandle<()>> {
    let mut random = Rng::with_seed(seed);
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let (admin, race) = (admin(plugin.node.dir.path()), Arc::clone(race));
        let random = Rng::with_seed(random.u64(..));
        let pages = plugin.node.dir.path().join("pages");
        tasks.push(tokio::spawn(async move { steer(admin, &race, random, &pages).await }));
    }
    for n in 0..2 {
        let (kubelet, race) = (plugin.node.kubelet.clone(), Arc::clone(race));
        let random = Rng::with_seed(random.u64(..));
        tasks.push(tokio::spawn(async move { churn(kubelet, &race, random, n).await }));
    }
    let file = plugin.node.file();
    let (reloading, until) = (admin(plugin.node.dir.path()), Arc::clone(race));
    tasks.push(tokio::spawn(async move {
        let text = std::fs::read_to_string(&file).unwrap();
        for n in 0.. {
            let other = ["replicas = 32\nmemory = \"256Mi\"", "replicas = 24\nmemory = \"320Mi\""];
            std::fs::write(&file, text.replace(other[0], other[n % 2])).unwrap();
            // Its file's own news may come first, or the plugin be gone.
            let _ = reloading.call(&ReloadRequest {}).await;
            until.line(1);
            tokio::time::sleep(Duration::from_millis(200)).await;
            if !until.goes_on() {
                break;
            }
        }
        std::fs::write(&file, text).unwrap();
    }));
    tasks
}

async fn steer(admin: Client, race: &Race, mut random: Rng, pages: &Path) {
    while race.goes_on() {
        let ids: Vec<String> = limits(pages).into_keys().collect();
        if ids.is_empty() {
            tokio::task::yield_now().await;
            continue;
        }
        let id = &ids[random.usize(..ids.len())];
        let n = race.count.fetch_add(1, Ordering::Relaxed);
        let reason = format!("change-{n}");
        let answer = match random.u64(..4) {
            0 => admin.call(&reset(id, &reason)).await,
            // Mostly small, and sometimes nearly all there is.
            1 => admin.call(&memory(id, (1 + random.u64(..12)) * 1024 * MIB, &reason)).await,
            _ => admin.call(&memory(id, (100 + random.u64(..900)) * MIB, &reason)).await,
        };
        let mut changes = race.changes.lock().unwrap();
        match answer.map(|answer| answer.changed) {
            Ok(true) => {
                changes.done.insert(n);
                race.line(1);
            }
            Ok(false) => changes.refused += 1,
            Err(error) => match error.code() {
                Some(404 | 409 | 422) => changes.refused += 1,
                // It ends, or has ended.
                Some(503) | None => {
                    changes.open.insert(n);
                    return;
                }
                _ => panic!("{error:?}"),
            },
        }
    }
}

/// Pods of one or two shares, a few at a time.
async fn churn(kubelet: Kubelet, race: &Race, mut random: Rng, who: u64) {
    let mut run = Vec::new();
    for n in 0.. {
        if !race.goes_on() {
            break;
        }
        let name = format!("guest-{who}-{n}");
        // What does not fit is refused, as it should be.
        if kubelet.run(&pod(&name, 1 + random.usize(..2))).await.is_ok() {
            run.push(name);
        }
        race.line(4);
        if run.len() > 6 {
            kubelet.remove("default", &run.swap_remove(random.usize(..7)));
        }
        tokio::time::sleep(Duration::from_millis(random.u64(..10))).await;
    }
    run.iter().for_each(|name| kubelet.remove("default", name));
}

/// Limits by allocation, as tenants read them, of the pages that are whole.
fn limits(pages: &Path) -> BTreeMap<String, u64> {
    let names = std::fs::read_dir(pages).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| name.len() == 32)
        .filter_map(|name| {
            let page = QuotaReader::attach(&pages.join(&name)).ok()?;
            Some((name, page.memory_limit(0)))
        })
        .collect()
}

fn limit(allocation: &Value) -> u64 {
    allocation["gpus"][0]["memory_limit_bytes"].as_u64().unwrap()
}

/// Each allocation's page says what status says, and no GPU has sold more than it has. Gives the status.
fn assert_pages(plugin: &Plugin) -> Value {
    let begin = Instant::now();
    let (status, pages) = loop {
        let (status, pages) = (plugin.node.json(), limits(&plugin.node.dir.path().join("pages")));
        // Those who went are forgotten now and then, between two looks.
        let ids = |status: &Value| {
            let all = status["allocations"].as_array().unwrap().iter();
            all.map(|one| one["id"].clone()).collect::<Vec<_>>()
        };
        if ids(&status) == ids(&plugin.node.json()) {
            break (status, pages);
        }
        assert!(begin.elapsed() < PATIENCE);
    };
    let mut sold: BTreeMap<&str, u64> = BTreeMap::new();
    for one in status["allocations"].as_array().unwrap() {
        let id = one["id"].as_str().unwrap();
        assert_eq!(pages.get(id), Some(&limit(one)), "{id}");
        if one["state"] != "parked" {
            *sold.entry(one["gpus"][0]["gpu_uuid"].as_str().unwrap()).or_default() += limit(one);
        }
    }
    for gpu in status["gpus"].as_array().unwrap() {
        let figure = |name: &str| gpu[name].as_u64().unwrap();
        let sold = sold.get(gpu["uuid"].as_str().unwrap()).copied().unwrap_or(0);
        assert_eq!(figure("memory_limits_bytes"), sold);
        assert!(sold <= figure("memory_total_bytes") - figure("memory_reserve_bytes"));
    }
    status
}

fn recorded(file: &Path) -> (Vec<Record>, Vec<Event>) {
    let (mut ledger, _) = Ledger::open(file, false).unwrap();
    (ledger.load().unwrap().0, ledger.lines().unwrap().events)
}

fn number(event: &Event) -> Option<u64> {
    event.reason.as_ref()?.strip_prefix("change-")?.parse().ok()
}

/// Each change that was answered is there once, none that was refused; and each begins where the one before it
/// ended, to the limits that are recorded.
fn assert_trail(race: &Race, records: &[Record], trail: &[Event]) {
    assert!(trail.len() < 4096, "the first lines are lost");
    let changes = race.changes.lock().unwrap();
    let mut found = BTreeSet::new();
    for n in trail.iter().filter_map(number) {
        assert!(found.insert(n), "change-{n} is there twice");
        assert!(changes.done.contains(&n) || changes.open.contains(&n), "change-{n} was refused");
    }
    let lost: Vec<_> = changes.done.difference(&found).collect();
    assert!(lost.is_empty(), "lost: {lost:?}");
    let mut last: BTreeMap<(String, u64), Vec<Limits>> = BTreeMap::new();
    for event in trail {
        let (What::QuotaSet { before, after, .. } | What::QuotaReset { before, after }) =
            &event.what
        else {
            continue;
        };
        let key = (event.id.as_ref().unwrap().to_string(), event.generation);
        if let Some(earlier) = last.insert(key, after.clone()) {
            assert_eq!(earlier, *before, "{event:?}");
        }
    }
    for record in records {
        let now: Vec<Limits> = record.grants.iter().map(Limits::from).collect();
        if let Some(after) = last.get(&(record.id.to_string(), record.generation)) {
            assert_eq!(*after, now, "{record:?}");
        }
    }
    assert!(records.iter().any(|record| record.resource == GPU));
}
