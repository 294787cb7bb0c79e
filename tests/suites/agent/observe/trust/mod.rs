//! Use of the GPUs past the quota: real processes, in mount namespaces of their own where the test may make them.

mod events;

use std::path::Path;
use std::process::{Command, Stdio};

use tessera_harness::Owned;
use tessera_harness::plugin::*;
use tessera_model::audit::{Event, What};
use tessera_store::{Filter, Ledger};
use tessera_view::status::Status;

const MIB: u64 = 1 << 20;

/// A process that does nothing.
struct Idle(Owned);

impl Idle {
    fn start() -> Self {
        Idle(Owned(Command::new("sleep").arg("300").spawn().unwrap()))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

/// As a container of an allocation: in a mount namespace of its own, with its pages. `None` where that may not be done.
fn container(pages: &Path) -> Option<Idle> {
    let script = format!(
        "set -e; mount -t tmpfs own /usr/local
         at=/usr/local/tessera/pages/{id}; mkdir -p $at
         mount --bind {pages} $at; mount -o remount,bind,ro $at
         mount --bind {pages}/usage $at/usage
         echo ready; exec sleep 300",
        pages = pages.display(),
        id = pages.file_name()?.display(),
    );
    let mut child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script])
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    let mut line = String::new();
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    let idle = Idle(Owned(child));
    if line.trim() == "ready" {
        return Some(idle);
    }
    eprintln!("not run: no mount namespace can be made here");
    None
}

async fn trail(node: &mut TestNode) -> Vec<Event> {
    node.stop_plugin().await;
    let (mut ledger, _) = Ledger::open(&node.ledger(), true).unwrap();
    ledger.lines(&Filter::all()).unwrap().events
}

fn tampered(events: &[Event]) -> Vec<String> {
    let what = |event: &Event| match &event.what {
        What::Tampered { what } => Some(what.clone()),
        _ => None,
    };
    events.iter().filter_map(what).collect()
}

#[tokio::test]
async fn a_process_of_no_tenant_on_a_shared_gpu_is_flagged_and_named() {
    let mut node = TestNode::start().await;
    let admitted = node.start_pod("a", 1).await;
    let stranger = Idle::start();
    node.gpus.show(&[uses(stranger.pid(), 300 * MIB)]);
    let _tenant = Tenant::hold(&admitted.pages, MIB);
    let pid = format!("process {} (sleep)", stranger.pid());
    let warning = node.warned(&pid).await;
    assert!(warning.contains("300 MiB") && warning.contains(&gpu(0).uuid), "{warning}");
    assert!(warning.contains("no pod: a process of the host itself"), "{warning}");
    assert_eq!(node.status().await.gpus[0].memory_outside_bytes, 300 * MIB);
    assert_eq!(node.status().await.allocations[0].unaccounted, 0, "nobody else's fault");
    node.gpus.show(&[]);
    drop(Tenant::hold(&admitted.pages, MIB));
    node.unwarned().await;
    let events = trail(&mut node).await;
    let bypassed = events.iter().find(|e| matches!(e.what, What::Bypassed { .. })).unwrap();
    assert_eq!((&bypassed.id, bypassed.gpu.as_deref()), (&None, Some(gpu(0).uuid.as_str())));
    assert!(bypassed.sentence("it").ends_with("has no share of it"), "{bypassed:?}");
    assert!(bypassed.detail().starts_with(&pid), "{bypassed:?}");
}

#[tokio::test]
async fn a_tenant_on_a_gpu_that_it_was_not_given_is_named() {
    let node = TestNode::start_with(
        "[share]\nreplicas = 4\nmemory = \"8Gi\"\nplacement = \"distributed\"\n",
    )
    .await;
    let mut pages = Vec::new();
    for name in ["a", "b"] {
        let admitted = node.start_pod(name, 1).await;
        pages.push((name, admitted.pages, admitted.ids));
    }
    let on_first = |ids: &[String]| ids[0].starts_with(&gpu(0).uuid);
    let (_, first, _) = pages.iter().find(|(_, _, ids)| on_first(ids)).unwrap();
    let (name, second, _) = pages.iter().find(|(_, _, ids)| !on_first(ids)).unwrap();
    let Some(elsewhere) = container(second) else { return };
    node.all_named().await;
    node.gpus.show(&[uses(elsewhere.pid(), 50 * MIB)]);
    let _tenant = Tenant::hold(first, MIB);
    let pod = format!("pod default/{name} (container main), whose share is of another GPU");
    node.warned(&pod).await;
}

#[tokio::test]
async fn a_bypass_is_in_the_audit_trail_with_its_cause() {
    let mut node = TestNode::start().await;
    let pages = node.start_pod("a", 1).await.pages;
    let Some(process) = container(&pages) else { return };
    node.gpus.show(&[uses(process.pid(), 700 * MIB)]);
    drop(Tenant::hold(&pages, MIB));
    node.warned("outside its account").await;
    let events = trail(&mut node).await;
    let bypassed = events.iter().find(|e| matches!(e.what, What::Bypassed { .. })).unwrap();
    let bytes = matches!(bypassed.what, What::Bypassed { bytes, pid } if bytes == 700 * MIB && pid == process.pid());
    assert!(bytes && bypassed.id.is_some(), "{bypassed:?}");
    // Its maps may be read here: it is root's, with no more rights than this.
    let reason = bypassed.reason.as_ref().unwrap();
    assert!(reason.contains("neither shim nor libcuda is mapped"), "{reason}");
}

/// A tenant's process that holds far more than it says, one that is in no slot, one of nobody's, and a page
/// that is ruined.
#[tokio::test]
async fn each_finding_raises_its_metric() {
    let node = TestNode::start_with(&tessera_harness::metrics::settings(SETTINGS)).await;
    let address = tessera_harness::metrics::address(&node).await;
    let mut pages = Vec::new();
    for name in ["beyond", "past", "ruins"] {
        let admitted = node.start_pod(name, 1).await;
        pages.push(admitted.pages);
    }
    node.all_named().await;
    let Some(past) = container(&pages[1]) else { return };
    let counts = |metrics: &tessera_harness::exposition::Exposition| {
        ["bypass", "unaccounted", "stranger", "usage_page"]
            .map(|kind| metrics.sum("tessera_findings_total", &[("finding", kind)]))
    };
    let before = tessera_harness::metrics::scrape(address).await;
    assert_eq!(counts(&before), [0.0; 4]);
    assert_eq!(before.of("tessera_findings_total").count(), 4, "each is there from the start");

    let (beyond, stranger) = (Tenant::hold(&pages[0], MIB), Idle::start());
    let bytes = [(beyond.pid(), 4096 * MIB), (past.pid(), 700 * MIB), (stranger.pid(), 300 * MIB)];
    node.gpus.show(&bytes.map(|(pid, bytes)| uses(pid, bytes)));
    let ruined = std::fs::File::options().write(true).open(pages[2].join("usage")).unwrap();
    ruined.set_len(0).unwrap();
    // And by container, where one is to blame. A scrape may come between a finding and its container's series.
    let blamed = [
        ("tessera_container_unaccounted_memory_findings_total", "beyond"),
        ("tessera_container_unaccounted_memory_findings_total", "past"),
        ("tessera_container_tamperings_total", "ruins"),
    ];
    let metrics = tessera_harness::metrics::scrape_until(address, |metrics| {
        ruined.set_len(0).unwrap();
        let of = |(name, pod): &(&str, &str)| metrics.sum(name, &[("pod", *pod)]);
        let all = counts(metrics).into_iter().chain(blamed.iter().map(of));
        all.min_by(f64::total_cmp).is_some_and(|least| least >= 1.0).then(|| metrics.clone())
    })
    .await;
    let outside = metrics.sum("tessera_gpu_memory_outside_bytes", &[]);
    assert!(outside >= (300 * MIB) as f64, "{outside}");
    assert!(metrics.sum("tessera_gpu_strangers", &[]) >= 1.0);
}

#[tokio::test]
async fn a_ruined_usage_page_is_in_the_audit_trail() {
    let mut node = TestNode::start().await;
    let pages = node.start_pod("a", 1).await.pages;
    let _tenant = Tenant::hold(&pages, MIB);
    let file = std::fs::File::options().write(true).open(pages.join("usage")).unwrap();
    for _ in 0..50 {
        file.set_len(0).unwrap();
        node.status().await;
    }
    let tamperings = |s: &Status| (s.allocations[0].tamperings >= 1).then_some(());
    node.status_until(tamperings).await;
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    let events = trail(&mut node).await;
    // The first at once; what a later look found, counted, when the plugin ends.
    let tampered = tampered(&events);
    assert!(matches!(tampered.len(), 1 | 2), "{tampered:?}, however often");
    assert!(tampered.iter().all(|what| what == "usage page"), "{tampered:?}");
}
