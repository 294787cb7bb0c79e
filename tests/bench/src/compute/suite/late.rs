//! A strict share beside neighbours that do not drain in time, with several processes, and with long
//! operations; and a newcomer beside who was alone and has a long queue.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Gate, Place, Report, Spec, Timeouts, backlog};
use crate::compute::judge::{Look, Observation};
use crate::compute::scenario::Stage;

/// How long each case is looked at.
const LENGTH: Duration = Duration::from_secs(6);
/// The cap, percent.
const CAP: f64 = 25.0;

/// One case: its name, who is there, and how many of the last are stopped.
pub struct Case {
    pub name: &'static str,
    tenants: Vec<Spec>,
    stopped: usize,
    /// How long nobody looks.
    settle: Duration,
    length: Duration,
}

fn with(mut spec: Spec, words: &[&str]) -> Spec {
    spec.load.extend(words.iter().map(|&word| word.to_owned()));
    spec
}

/// All cases; the capped tenant is the first.
pub fn cases() -> Vec<Case> {
    let capped = || backlog(CAP, "200").strict();
    let beside = |name, others: Vec<Spec>, stopped| {
        let tenants = std::iter::once(capped()).chain(others).collect();
        Case { name, tenants, stopped, settle: Duration::ZERO, length: LENGTH }
    };
    let short = || backlog(CAP, "200");
    let many = Case {
        name: "8 processes",
        tenants: vec![Spec { processes: 8, ..capped() }],
        stopped: 0,
        settle: Duration::ZERO,
        length: LENGTH,
    };
    let long = Case {
        name: "operations of 3 s",
        tenants: vec![Spec::new(CAP, &["--kernel-us=3000000"]).strict()],
        stopped: 0,
        // As long as nobody knows that they are long, up to a dozen are in flight: it has to pay for them.
        settle: Duration::from_secs(110),
        length: Duration::from_secs(80),
    };
    vec![
        beside("1 stopped", vec![short()], 1),
        beside("2 stopped", vec![short(), short()], 2),
        beside("3 stopped", vec![short(), short(), short()], 3),
        beside("host functions", vec![with(short(), &["--host-ms=400"])], 0),
        beside("never drains", vec![with(short(), &["--stuck-after-ms=200"])], 0),
        many,
        long,
    ]
}

/// How far the first tenant is off its cap, percent of it; and what it got, percent.
///
/// # Errors
/// A tenant that does not start.
pub fn off(
    place: &Place,
    case: &Case,
    gate: Gate,
    timeouts: &mut u64,
) -> anyhow::Result<(f64, f64)> {
    let stage = Stage::set(place, &case.tenants, gate)?;
    for tenant in stage.tenants.iter().rev().take(case.stopped) {
        tenant.stop();
    }
    if case.stopped > 0 {
        std::thread::sleep(Duration::from_millis(300));
    }
    std::thread::sleep(case.settle);
    let seen = stage.look(case.length)?;
    *timeouts += seen.counted.timeouts;
    let got = rounds(&seen.account).unwrap_or(seen.account.rates()[0]) * 100.0;
    Ok(((got - CAP) / CAP * 100.0, got))
}

/// Part of the time of the first tenant's work, from the first to the last beginning of work after a long
/// pause, so that operations of seconds count whole. The work of one may be counted all at its end, so a
/// pause is long that lasts half as long as the longest. `None` where it makes no long pauses.
fn rounds(seen: &Observation) -> Option<f64> {
    const LEAST: usize = 20;
    let works: Vec<bool> =
        seen.looks.windows(2).map(|pair| pair[1].work_ns[0] > pair[0].work_ns[0]).collect();
    // Looks without work before each with some.
    let mut paused = 0;
    let mut pauses = Vec::new();
    for (at, &works) in works.iter().enumerate() {
        if works {
            pauses.push((at, std::mem::take(&mut paused)));
        } else {
            paused += 1;
        }
    }
    let longest = pauses.iter().map(|&(_, paused)| paused).max()?;
    let is_long = |&(_, paused): &(usize, usize)| paused >= LEAST.max(longest / 2);
    let begun: Vec<usize> = pauses.into_iter().filter(is_long).map(|(at, _)| at).collect();
    let (first, last): (&Look, &Look) = (&seen.looks[*begun.first()?], &seen.looks[*begun.last()?]);
    #[allow(clippy::cast_precision_loss, reason = "below 2^53")]
    let part = (last.work_ns[0] - first.work_ns[0]) as f64 / (last.at_ns - first.at_ns) as f64;
    (last.at_ns > first.at_ns).then_some(part)
}

/// Measures them.
///
/// # Errors
/// A tenant that does not start.
pub fn run(place: &Place, report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    let (mut worst, mut detail) = (0.0f64, Map::new());
    for case in cases() {
        crate::note(case.name);
        let (bare, _) = match case.length == LENGTH {
            true => off(place, &Case { length: LENGTH / 3, ..shallow(&case) }, Gate::Bare, &mut 0)?,
            false => (f64::NAN, 0.0),
        };
        let (error, got) = off(place, &case, Gate::Tessera, &mut timeouts.0)?;
        worst = worst.max(error.abs());
        let value = json!({ "got": got, "error_percent": error, "bare_error_percent": bare });
        detail.insert(case.name.into(), value);
    }
    report.figure(
        "late_cap_error_pct",
        "strict cap beside late ones, the worst",
        "%",
        worst,
        Some(1.0),
    );
    report.put("late_cap_detail", Value::Object(detail));
    let bare = newcomer(place, Gate::Bare)?;
    let seconds = newcomer(place, Gate::Tessera)?;
    report.figure("newcomer_share_s", "a newcomer has its share after", "s", seconds, Some(0.5));
    report.put("newcomer_bare_s", json!(bare.is_finite().then_some(bare)));
    Ok(())
}

fn shallow(case: &Case) -> Case {
    Case { tenants: case.tenants.clone(), ..*case }
}

/// How long after it was there a newcomer with 80 % had that of each half second that followed, beside a
/// tenant that was alone with 10 s of work queued. Infinite where it never had.
///
/// # Errors
/// A tenant that does not start.
pub fn newcomer(place: &Place, gate: Gate) -> anyhow::Result<f64> {
    crate::note("newcomer");
    let alone = Spec::new(20.0, &["--kernel-us=10000"]);
    let mut stage = Stage::set(place, &[alone], gate)?;
    std::thread::sleep(Duration::from_millis(700));
    stage.join(&Spec::new(80.0, &["--kernel-us=200"]))?;
    let seen = stage.look(Duration::from_secs(5))?.account;
    let begun = seen.looks[0].at_ns;
    let half = |from: &Look| {
        let to = seen.looks.iter().find(|look| look.at_ns >= from.at_ns + 500_000_000)?;
        #[allow(clippy::cast_precision_loss, reason = "below 2^53")]
        let part = (to.work_ns[1] - from.work_ns[1]) as f64 / (to.at_ns - from.at_ns) as f64;
        Some((from.at_ns - begun, part))
    };
    let parts: Vec<(u64, f64)> = seen.looks.iter().map_while(half).collect();
    let late = parts.iter().rposition(|(_, part)| *part < 0.72);
    let from = late.map_or(Some(0), |at| parts.get(at + 1).map(|(at, _)| *at));
    Ok(from.map_or(f64::INFINITY, |ns| Duration::from_nanos(ns).as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_that_count_at_their_ends_are_no_beginnings() {
        // Looks every 50 ms; every 24 s two operations of 3 s, which end one after the other.
        let look = |n: u64| {
            let at = n * 50;
            let ended = at / 24_000 * 2 + (at % 24_000 / 3_000).min(2);
            Look {
                at_ns: at * 1_000_000,
                work_ns: vec![ended * 3_000_000_000],
                mark_ns: vec![0],
                kernels: vec![0],
                switches: 0,
            }
        };
        let seen = Observation { looks: (0..1600).map(look).collect(), handovers: Vec::new() };
        assert!((rounds(&seen).unwrap() - 0.25).abs() < 1e-9);
    }

    #[test]
    fn long_operations_count_from_beginning_to_beginning() {
        // Looks every 50 ms; 1 s of work every 4 s, seen from its middle on.
        let look = |n: u64| {
            let at = n * 50 + 500;
            Look {
                at_ns: at * 1_000_000,
                work_ns: vec![(at / 4_000 * 1_000 + (at % 4_000).min(1_000)) * 1_000_000],
                mark_ns: vec![0],
                kernels: vec![0],
                switches: 0,
            }
        };
        let seen = Observation { looks: (0..200).map(look).collect(), handovers: Vec::new() };
        assert!((rounds(&seen).unwrap() - 0.25).abs() < 1e-9);
    }
}
