//! `[compute]`.

use std::time::Duration;

use crate::leases::Leases;
use crate::reader::{Report, Section};
use tessera_model::duration;

const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(1);
const MOST_OPERATIONS: u32 = 1 << 16;

pub(super) fn read(report: &mut Report<'_>, section: &mut Section<'_, '_>, leases: &mut Leases) {
    for (key, target) in [
        ("quantum", &mut leases.quantum),
        ("quantum_min", &mut leases.quantum_min),
        ("quantum_max", &mut leases.quantum_max),
        ("window_time", &mut leases.window_time),
        ("credit", &mut leases.credit),
        ("drain_min", &mut leases.drain_min),
        ("drain_max", &mut leases.drain_max),
    ] {
        let Some(text) = section.string(report, key) else { continue };
        let parsed = duration::parse(&text).and_then(|length| {
            let fits = (SHORTEST..=LONGEST).contains(&length);
            fits.then_some(length).ok_or_else(|| format!("\"{text}\" is not from 1ms to 1s"))
        });
        match parsed {
            Ok(length) => *target = length,
            Err(message) => problem(report, key, message),
        }
    }
    match section.integer(report, "window").map(u32::try_from) {
        None => {}
        Some(Ok(count @ 2..=MOST_OPERATIONS)) => leases.window = count,
        Some(_) => problem(report, "window", format!("must be from 2 to {MOST_OPERATIONS}")),
    }
    for (key, shorter, least, longer) in [
        ("quantum_min", leases.quantum_min, "quantum", leases.quantum),
        ("quantum", leases.quantum, "quantum_max", leases.quantum_max),
        ("drain_min", leases.drain_min, "drain_max", leases.drain_max),
    ] {
        if shorter > longer {
            let longer = duration::format(longer);
            problem(report, key, format!("is longer than compute.{least} ({longer})"));
        }
    }
}

fn problem(report: &mut Report<'_>, key: &str, message: String) {
    let key = format!("compute.{key}");
    let line = report.lines.get(&key).copied();
    report.problem(&key, line, message);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn what_is_given_counts_and_the_rest_stays() {
        let config = Config::parse("[compute]\nquantum = \"8ms\"\nwindow = 32").unwrap();
        let want = Leases { quantum: Duration::from_millis(8), window: 32, ..Leases::default() };
        assert_eq!(config.compute, want);
    }

    #[test]
    fn each_mistake_says_what_is_wrong() {
        for (text, part) in [
            ("quantum = \"0ms\"", "compute.quantum: \"0ms\" is not from 1ms to 1s"),
            ("quantum = \"2s\"", "not from 1ms to 1s"),
            ("quantum = \"30ms\"", "compute.quantum: is longer than compute.quantum_max (20ms)"),
            ("quantum_min = \"6ms\"", "compute.quantum_min: is longer than compute.quantum (5ms)"),
            ("drain_min = \"300ms\"", "compute.drain_min: is longer than compute.drain_max"),
            ("window = 1", "compute.window: must be from 2 to 65536"),
            ("quantm = \"5ms\"", "did you mean `quantum`?"),
        ] {
            let error = Config::parse(&format!("[compute]\n{text}")).unwrap_err();
            let found: Vec<String> =
                error.problems.iter().map(|p| format!("{}: {}", p.key, p.message)).collect();
            assert!(found.iter().any(|problem| problem.contains(part)), "{text}: {found:?}");
        }
    }
}
