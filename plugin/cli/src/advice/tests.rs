use clap::Parser;
use proptest::prelude::*;
use tessera_advice::Observed;
use tessera_advice::fixtures::{EIGHTH, GIB, HOUR, Hour, Limits, MIDNIGHT, Made, busy};
use tessera_api::print::Paper;
use tessera_config::Advice;

use super::*;
use crate::steer::QuotaCommand;

/// `tessera quota`.
#[derive(Debug, Parser)]
struct Quota {
    #[command(subcommand)]
    command: QuotaCommand,
}

/// Words of a line as a shell has them.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut is_quoted) = (vec![String::new()], false);
    let mut rest = line.chars();
    while let Some(next) = rest.next() {
        match next {
            '\'' => is_quoted = !is_quoted,
            '\\' if !is_quoted => words.last_mut().unwrap().extend(rest.next()),
            ' ' if !is_quoted => words.push(String::new()),
            other => words.last_mut().unwrap().push(other),
        }
    }
    words
}

proptest! {
    #[test]
    fn the_quota_command_takes_every_command_that_is_advised(
        tenants in prop::collection::vec(
            ("[0-9a-f]{32}", "[a-z0-9]{1,3}|[ -~]{1,12}", "main|side|[ -~]{1,12}", "|a|b", 0u64..9 << 10), 1..6,
        ),
    ) {
        let mut made = Made::new();
        for (id, pod, container, request, peak_mib) in &tenants {
            made = made.pod(pod, EIGHTH, &[busy(*peak_mib, 36.0, 0.0)]);
            let (tenant, series) = made.last();
            (tenant.id, series.id) = (id.clone(), id.clone());
            (tenant.container, series.container) = (container.clone(), container.clone());
            if !request.is_empty() {
                (tenant.claim, tenant.request) = (format!("team/{request}"), request.clone());
            }
        }
        let Made { node, history } = made;
        let observed = [Observed { node: &node, history: &history }];
        let advice = tessera_advice::recommend(&observed, &Advice::default(), &Scope::default());
        let changes = advice.workloads.iter().flat_map(|one| &one.changes);
        for line in changes.map(|one| &one.text).filter(|line| line.starts_with("tessera ")) {
            let words = words(line);
            prop_assert_eq!(&words[..3], ["tessera", "quota", "set"], "{}", line);
            let parsed = Quota::try_parse_from(&words[1..]);
            prop_assert!(matches!(parsed, Ok(Quota { command: QuotaCommand::Set(_) })), "{line}: {parsed:?}");
        }
    }
}

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

fn scope(pod: &str, hours: i64) -> Scope {
    let since_unix_ms = BEGIN + (HOURS - hours) * HOUR;
    Scope { pod: pod.to_owned(), since_unix_ms, ..Scope::default() }
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
    let advice = tessera_advice::recommend(&observed, &Advice::default(), &scope(pod, 7 * 24));
    assert_documented(
        &format!("tessera recommend {pod}"),
        &recommend_text(&advice, Paper::plain()),
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
    let wasted = tessera_advice::waste(&observed, &settings, &scope("", 24));
    assert_documented("tessera waste --since 24h", &waste_text(&wasted, Paper::plain()));
}

#[test]
fn days_and_weeks_are_known() {
    for (text, seconds) in [
        ("90m", 5400),
        ("12h", 12 * 3600),
        ("7d", 7 * DAY),
        ("2w", 14 * DAY),
        ("1h30m", 5400),
        ("1d12h", 36 * 3600),
    ] {
        assert_eq!(text.parse(), Ok(Since(Duration::from_secs(seconds))), "{text}");
    }
    for text in [
        "",
        "0h",
        "0d",
        "d",
        "-1d",
        "1.5d",
        "7 d",
        "99999999999999999999d",
        "soon",
        "1h30",
        "h1",
        "1d-1h",
    ] {
        assert!(text.parse::<Since>().unwrap_err().contains("7d"), "{text}");
    }
    assert_eq!(Since(Duration::from_secs(3600)).before(7_200_000), 3_600_000);
    assert_eq!(Since(Duration::MAX).before(5), 1);
}
