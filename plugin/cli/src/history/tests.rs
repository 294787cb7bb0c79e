use proptest::prelude::*;
use tessera_view::history::{Answer, Event, GpuPoint, GpuSeries, TenantPoint, TenantSeries};

use super::*;

const GIB: u64 = 1 << 30;
const T0: i64 = 1_750_032_000_000;

fn tenant(pod: &str, points: usize) -> TenantSeries {
    let point = |n: usize| TenantPoint {
        at_unix_ms: T0 + n as i64 * 300_000,
        seconds: 300.0,
        memory_used_bytes: 4 * GIB,
        memory_peak_bytes: 9 * GIB,
        memory_limit_bytes: 12 * GIB,
        cores_millis: 250,
        // Alone, it had all of it leased.
        got_seconds: 300.0,
        used_seconds: 75.0,
        measured_seconds: 300.0,
        waited_seconds: 150.0,
        refusals: u64::from(n == 3) * 12,
        ..TenantPoint::default()
    };
    TenantSeries {
        id: "0123456789abcdef0123456789abcdef".into(),
        namespace: "team".into(),
        pod: pod.into(),
        container: "server".into(),
        gpu_uuid: "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28".into(),
        live: true,
        points: (0..points).filter(|n| !(20..23).contains(n)).map(point).collect(),
        ..TenantSeries::default()
    }
}

fn answer(pod: &str) -> Answer {
    let event = Event {
        at_unix_ms: T0 + 60_000,
        what: "quota-set".into(),
        pod: format!("team/{pod}"),
        text: "limits set from 12Gi to 16Gi".into(),
        ..Event::default()
    };
    Answer {
        at_unix_ms: T0 + 72 * 300_000,
        step_seconds: 300,
        tenants: vec![tenant(pod, 72)],
        events: vec![event],
        remarks: vec!["a remark".into()],
        ..Answer::default()
    }
}

fn of_gpu(pod: &str) -> Answer {
    let point = |n: i64| GpuPoint {
        at_unix_ms: T0 + n * 300_000,
        seconds: 300.0,
        memory_used_bytes: 30 * GIB,
        memory_peak_bytes: 31 * GIB,
        memory_limits_bytes: 60 * GIB,
        leased_seconds: 150.0,
        unhealthy_seconds: if n == 5 { 20.0 } else { 0.0 },
        ..GpuPoint::default()
    };
    let gpu = GpuSeries {
        gpu_uuid: "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28".into(),
        index: Some(0),
        points: (0..72).map(point).collect(),
    };
    Answer { gpus: vec![gpu], ..answer(pod) }
}

fn drawn(answer: &Answer, width: usize) -> String {
    text::text(answer, &Query::default(), width, CHARTS)
}

#[test]
fn a_pod_has_use_against_quota_and_what_it_got_against_its_share() {
    let text = drawn(&answer("chat-0"), 80);
    for part in [
        "note: a remark",
        "team/chat-0, container server, on GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28:\nlives",
        "memory: peak 9 GiB of 12 GiB",
        "GPU time: used 25.0%, wanted 75.0%, share 25%",
        "refused memory 12 times",
        "· nothing was seen then",
        "team/chat-0: limits set from 12Gi to 16Gi",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    for (row, bar) in [("memory", '▆'), ("used", '▂'), ("wanted", '▆')] {
        let row = text.lines().find(|line| line.trim_start().starts_with(row)).unwrap();
        assert!(row.matches(bar).count() > 60, "{text}");
    }
}

/// A pod and its GPU that were looked at until now, in buckets of ten seconds.
fn in_tens(gpu: bool) -> Answer {
    let mut answer = if gpu { of_gpu("chat-0") } else { answer("chat-0") };
    answer.step_seconds = 10;
    answer.tenants[0].points = (0..72).map(|n| tens(n, &answer.tenants[0].points[0])).collect();
    for one in &mut answer.gpus {
        let first = one.points[0].clone();
        let point =
            |n: i64| GpuPoint { at_unix_ms: T0 + n * 10_000, seconds: 10.0, ..first.clone() };
        one.points = (0..72).map(point).collect();
    }
    answer
}

fn tens(n: i64, like: &TenantPoint) -> TenantPoint {
    TenantPoint {
        at_unix_ms: T0 + n * 10_000,
        seconds: 10.0,
        got_seconds: 10.0,
        used_seconds: 2.5,
        measured_seconds: 10.0,
        waited_seconds: 5.0,
        ..like.clone()
    }
}

#[test]
fn a_plugin_that_does_not_look_leaves_a_gap() {
    let mut answer = in_tens(false);
    answer.at_unix_ms = T0 + 72 * 10_000 + 60_000;
    assert!(drawn(&answer, 80).contains("nothing was seen then"));
}

#[test]
fn a_bucket_is_as_wide_as_its_time() {
    let column = chart::Column { seconds: 60.0, got: 0.5, refusals: 1, ..Default::default() };
    let buckets = [0, 1, 3].map(|n| (n * 3_600_000, column));
    let columns = chart::columns(buckets.into_iter(), (0, 4 * 3_600_000), 3600, 80);
    let known: Vec<usize> = (0..80).filter(|n| columns[*n].seconds > 0.0).collect();
    assert_eq!(known, (0..40).chain(60..80).collect::<Vec<_>>());
    assert_eq!(columns.iter().map(|column| column.refusals).sum::<u64>(), 3);
}

#[test]
fn where_nobody_measured_what_was_used_the_chart_says_so() {
    let mut alone = answer("chat-0");
    alone.tenants[0].points.iter_mut().for_each(|point| point.measured_seconds = 0.0);
    let text = drawn(&alone, 200);
    assert!(text.contains("used -") && text.contains("unknown for 100.0% of the time"), "{text}");
}

#[test]
fn a_gpus_chart_has_its_states_and_tenants() {
    let text = drawn(&of_gpu("chat-0"), 100);
    for part in ["GPU 0, GPU-49aa", "leased", "u not healthy", "team/chat-0", "25.0%"] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
}

#[test]
fn a_narrow_terminal_has_a_line_for_each() {
    let text = drawn(&answer("chat-0"), 30);
    assert!(text.contains("25.0%") && !text.contains("wanted"), "{text}");
}

proptest! {
    /// Buckets end where they end, and looks come when they come.
    #[test]
    fn what_has_not_ended_yet_is_no_gap(
        since_the_last_ms in -10_000..20_000i64, width in 40..200usize, gpu: bool,
    ) {
        let mut answer = in_tens(gpu);
        answer.at_unix_ms = T0 + 72 * 10_000 + since_the_last_ms;
        let text = drawn(&answer, width);
        prop_assert!(!text.contains("nothing was seen then"), "{text}");
    }

    #[test]
    fn no_line_is_wider_than_the_terminal_whatever_pods_are_called(
        pod in "\\PC{0,300}|[\\x00-\\x7f]{0,60}",
        width in 20..200usize,
        gpu: bool,
    ) {
        let answer = if gpu { of_gpu(&pod) } else { answer(&pod) };
        let text = drawn(&answer, width);
        for line in text.lines() {
            prop_assert!(tessera_api::print::columns(line) <= width, "{width}: {line:?}");
        }
        prop_assert!(text.chars().all(|c| c == '\n' || !c.is_control()));
    }
}
