//! The samples of `docs/views.md` are what the commands print about this node.

use tessera_advice::fixtures::{EIGHTH, GIB, HOUR, Hour, Limits, MIDNIGHT, Made, busy};
use tessera_advice::{Observed, Question};
use tessera_api::print::Paper;
use tessera_config::Advice;

use super::{recommend, waste};

/// 2026-11-16 08:00:00.
const BEGIN: i64 = 1_794_816_000_000;
const HOURS: i64 = 6 * 24 + 1;
const HALF: Limits = Limits { memory_bytes: 40 * GIB, cores_millis: 500, ..EIGHTH };

/// With a pod that holds half a GPU: an hour each of memory in MiB and seconds that it got.
fn with(made: Made, pod: &str, container: &str, hours: impl Fn(i64) -> Hour) -> Made {
    let mut made = made.pod(pod, HALF, &(0..HOURS).map(hours).collect::<Vec<_>>());
    let (tenant, series) = made.last();
    "tessera.dev/gpu-large".clone_into(&mut tenant.resource_name);
    container.clone_into(&mut tenant.container);
    container.clone_into(&mut series.container);
    made
}

fn question(pod: &str, hours: i64) -> Question<'_> {
    let now_unix_ms = BEGIN + HOURS * HOUR;
    Question { pod, since_unix_ms: now_unix_ms - hours * HOUR, now_unix_ms, ..Question::default() }
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
    // More work by day, and a little more memory in one hour of all.
    let hours = |n: i64| match (n, (8 + n) % 24) {
        (75, _) => busy(4224, 90.0, 0.0),
        (_, 8..18) => busy(4096, 216.0, 0.0),
        _ => busy(3584, 90.0, 0.0),
    };
    let mut made = Made::new();
    for pod in ["chat-7c9d8f6b5-hq7wd", "chat-7c9d8f6b5-k4m9s", "chat-7c9d8f6b5-x2v4q"] {
        made = with(made, pod, "server", hours);
    }
    let Made { node, history } = made.later(BEGIN - MIDNIGHT);
    let observed = [Observed { node: &node, history: &history }];
    let pod = "chat-7c9d8f6b5-x2v4q";
    let advice = tessera_advice::recommend(&observed, &Advice::default(), &question(pod, 7 * 24));
    assert_documented(
        &format!("tessera recommend {pod}"),
        &recommend::text(&advice, Paper::plain()),
    );
}

#[test]
fn what_is_wasted() {
    // Trained for the first hours of the last day, and was left open.
    let hours = |n: i64| match n < HOURS - 19 {
        true => busy(38 << 10, 360.0, 0.0),
        false => Hour { peak_mib: 38 << 10, ..Hour::default() },
    };
    let Made { node, history } = with(Made::new(), "nb-0", "main", hours).later(BEGIN - MIDNIGHT);
    let observed = [Observed { node: &node, history: &history }];
    let settings =
        Advice { price_millis_per_gpu_hour: 2000, currency: "EUR".into(), ..Advice::default() };
    let wasted = tessera_advice::waste(&observed, &settings, &question("", 24));
    assert_documented("tessera waste --since 24h", &waste::text(&wasted, Paper::plain()));
}
