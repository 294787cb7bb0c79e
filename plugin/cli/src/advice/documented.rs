//! The samples of `docs/views.md` are what the commands print about this node.

use tessera_advice::{Observed, Question};
use tessera_api::print::Paper;
use tessera_config::Advice;
use tessera_view::gpu::{Gpu, Replicas};
use tessera_view::history::{Answer, TenantPoint, TenantSeries};
use tessera_view::node::Node;
use tessera_view::tenant::{Tenant, Use};
use tessera_view::workload;

use super::{recommend, waste};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// 2026-11-16 08:00:00.
const BEGIN: i64 = 1_794_816_000_000;
const HOUR: i64 = 3_600_000;
const HOURS: i64 = 6 * 24 + 1;

/// An hour of a pod: memory, and seconds that it got.
type Hour = (u64, f64);

/// A node with a GPU of 80 GiB, of which pods hold halves.
#[derive(Default)]
struct Documented {
    node: Node,
    history: Answer,
}

impl Documented {
    fn new() -> Self {
        let replicas = |name: &str, count, gib: u64, cores_millis| Replicas {
            resource_name: format!("tessera.dev/{name}"),
            count,
            memory_limit_bytes: gib * GIB,
            cores_millis,
            ..Replicas::default()
        };
        let gpu = |n: u32| Gpu {
            uuid: format!("GPU-{n}"),
            memory_total_bytes: 80 * GIB,
            replicas: vec![replicas("gpu", 8, 8, 125), replicas("gpu-large", 2, 40, 500)],
            ..Gpu::default()
        };
        let node = Node { gpus: (0..2).map(gpu).collect(), ..Node::default() };
        Documented { node, history: Answer { step_seconds: 300, ..Answer::default() } }
    }

    fn pod(&mut self, pod: &str, container: &str, gpu: u32, hours: impl Fn(i64) -> Hour) {
        let (memory_limit_bytes, cores_millis) = (40 * GIB, 500);
        let point = |n: i64| {
            let (memory_peak_bytes, got_seconds) = hours(n);
            TenantPoint {
                at_unix_ms: BEGIN + n * HOUR,
                seconds: 3600.0,
                memory_used_bytes: memory_peak_bytes,
                memory_peak_bytes,
                memory_limit_bytes,
                cores_millis,
                got_seconds,
                // Noted, and no more than the mean.
                used_seconds: got_seconds,
                measured_seconds: got_seconds,
                used_peak_millis: u32::from(got_seconds > 0.0),
                launches: if got_seconds > 0.0 { 1000 } else { 0 },
                ..TenantPoint::default()
            }
        };
        let gpu_uuid = format!("GPU-{gpu}");
        let used = Use {
            gpu_uuid: gpu_uuid.clone(),
            memory_limit_bytes,
            cores_millis,
            policy: tessera_view::tenant::ComputePolicy::Burst,
            ..Use::default()
        };
        let (id, workload) = (format!("id-{pod}"), workload::of(pod).to_owned());
        self.node.tenants.push(Tenant {
            id: id.clone(),
            namespace: "team".into(),
            pod: pod.into(),
            container: container.into(),
            workload: workload.clone(),
            resource_name: "tessera.dev/gpu-large".into(),
            state: "started".into(),
            gpus: vec![used],
            ..Tenant::default()
        });
        self.history.tenants.push(TenantSeries {
            id,
            generation: 1,
            namespace: "team".into(),
            pod: pod.into(),
            container: container.into(),
            workload,
            gpu_uuid,
            live: true,
            points: (0..HOURS).map(point).collect(),
        });
    }

    fn question<'a>(&self, pod: &'a str, hours: i64) -> Question<'a> {
        let now_unix_ms = BEGIN + HOURS * HOUR;
        Question {
            pod,
            since_unix_ms: now_unix_ms - hours * HOUR,
            now_unix_ms,
            ..Question::default()
        }
    }

    fn observed(&self) -> [Observed<'_>; 1] {
        [Observed { node: &self.node, history: &self.history }]
    }
}

/// The page has this command with this output.
fn assert_documented(command: &str, output: &str) {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/views.md");
    let page = std::fs::read_to_string(page).unwrap();
    let sample = format!("```\n$ {command}\n{output}```\n");
    assert!(page.contains(&sample), "docs/views.md has another sample than:\n{sample}");
}

#[test]
fn what_a_workload_could_ask_for() {
    let mut made = Documented::new();
    // More work by day, and a little more memory in one hour of all.
    let hours = |n: i64| match (n, (8 + n) % 24) {
        (75, _) => (4 * GIB + 128 * MIB, 90.0),
        (_, 8..18) => (4 * GIB, 216.0),
        _ => (3 * GIB + 512 * MIB, 90.0),
    };
    for (pod, gpu) in
        [("chat-7c9d8f6b5-hq7wd", 0), ("chat-7c9d8f6b5-k4m9s", 0), ("chat-7c9d8f6b5-x2v4q", 1)]
    {
        made.pod(pod, "server", gpu, hours);
    }
    let pod = "chat-7c9d8f6b5-x2v4q";
    let question = made.question(pod, 7 * 24);
    let advice = tessera_advice::recommend(&made.observed(), &Advice::default(), &question);
    assert_documented(
        &format!("tessera recommend {pod}"),
        &recommend::text(&advice, Paper::plain()),
    );
}

#[test]
fn what_is_wasted() {
    let mut made = Documented::new();
    // Trained for the first hours of the last day, and was left open.
    let idle_from = HOURS - 19;
    made.pod(
        "nb-0",
        "main",
        0,
        |n| if n < idle_from { (38 * GIB, 360.0) } else { (38 * GIB, 0.0) },
    );
    let settings =
        Advice { price_millis_per_gpu_hour: 2000, currency: "EUR".into(), ..Advice::default() };
    let wasted = tessera_advice::waste(&made.observed(), &settings, &made.question("", 24));
    assert_documented("tessera waste --since 24h", &waste::text(&wasted, Paper::plain()));
}
