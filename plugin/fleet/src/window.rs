//! A node's history, by our clock and within the window that was asked. Pure.
//!
//! Charts, pictures and sums are drawn over the instants of all nodes together, so one node's absurd instant would
//! spoil them for all.

use std::time::Duration;

use tessera_view::history::{Answer, GpuPoint, Query, TenantPoint};

use crate::answer::AskError;
use crate::entries::ahead;

/// The lengths that a bucket has.
const STEPS: [u32; 3] = [10, 300, 3600];
/// Nothing is kept longer: `history.keep_1h` is at most 800 days.
const LONGEST: Duration = Duration::from_secs(801 * 86_400);
/// A figure in seconds of a bucket is no more than so many times its length: many processes may wait at once.
const MANY: f64 = 1e6;
/// All of a GPU's time, thousandths.
const WHOLE_MILLIS: u32 = 1000;

/// Moves all instants to our clock, drops what is outside the window, and puts the rest in order. A bucket with more
/// seconds than its length, as a clock that was set back leaves it, is brought to its length, and all shares stay.
///
/// # Errors
/// Its buckets have no length that there is, or hold what no second can.
pub(crate) fn fit(answer: &mut Answer, query: &Query, now_unix_ms: i64) -> Result<(), AskError> {
    let nonsense = |what: String| AskError::Silent(format!("its answer makes no sense: {what}"));
    // Of a node that keeps no history, or that looked at nothing yet.
    let is_empty = answer.gpus.is_empty() && answer.tenants.is_empty();
    if !(STEPS.contains(&answer.step_seconds) || answer.step_seconds == 0 && is_empty) {
        return Err(nonsense(format!("its buckets have {} s", answer.step_seconds)));
    }
    let step_ms = i64::from(answer.step_seconds) * 1000;
    let ahead = ahead(answer.at_unix_ms, now_unix_ms);
    let latest = match query.until_unix_ms {
        0 => now_unix_ms,
        until => until.min(now_unix_ms),
    };
    let longest = i64::try_from(LONGEST.as_millis()).unwrap_or(i64::MAX);
    let earliest = query.since_unix_ms.max(now_unix_ms.saturating_sub(longest));
    // A bucket counts where any part of it is inside. Clocks that are taken for equal may differ by a minute.
    let slack = step_ms.saturating_add(60_000);
    let window = earliest.saturating_sub(slack)..=latest.saturating_add(slack);
    let moved = |at: &mut i64| {
        *at = at.saturating_sub(ahead);
        window.contains(at)
    };
    for gpu in &mut answer.gpus {
        gpu.points.retain_mut(|point| moved(&mut point.at_unix_ms));
        gpu.points.sort_by_key(|point| point.at_unix_ms);
    }
    for tenant in &mut answer.tenants {
        tenant.points.retain_mut(|point| moved(&mut point.at_unix_ms));
        tenant.points.sort_by_key(|point| point.at_unix_ms);
    }
    answer.events.retain_mut(|event| moved(&mut event.at_unix_ms));
    answer.events.sort_by_key(|event| event.at_unix_ms);
    // What a node has of its oldest bucket may lie before the window.
    let oldest = now_unix_ms.saturating_sub(longest);
    if answer.since_unix_ms != 0 {
        answer.since_unix_ms =
            answer.since_unix_ms.saturating_sub(ahead).clamp(oldest, now_unix_ms);
    }
    answer.at_unix_ms = now_unix_ms;

    let length = f64::from(answer.step_seconds);
    let most = length * MANY;
    let mut is_absurd = false;
    let mut fit = |seconds: &mut f64, parts: &mut [&mut f64]| {
        let by = if *seconds > length { length / *seconds } else { 1.0 };
        *seconds *= by;
        parts.iter_mut().for_each(|part| **part *= by);
        is_absurd |= parts.iter().any(|part| **part > most);
    };
    for point in answer.gpus.iter_mut().flat_map(|gpu| &mut gpu.points) {
        let GpuPoint { seconds, leased_seconds, unhealthy_seconds, cordoned_seconds, .. } = point;
        fit(seconds, &mut [leased_seconds, unhealthy_seconds, cordoned_seconds]);
    }
    for point in answer.tenants.iter_mut().flat_map(|tenant| &mut tenant.points) {
        let TenantPoint { seconds, got_seconds: got, waited_seconds: waited, .. } = point;
        let (capped, rationed) = (&mut point.capped_seconds, &mut point.rationed_seconds);
        let (used, measured) = (&mut point.used_seconds, &mut point.measured_seconds);
        fit(seconds, &mut [got, waited, capped, rationed, used, measured]);
    }
    if is_absurd {
        return Err(nonsense("a bucket has more seconds than can be".to_owned()));
    }
    let peaks =
        answer.gpus.iter().flat_map(|gpu| &gpu.points).map(|point| point.leased_peak_millis);
    let tenants = answer.tenants.iter().flat_map(|tenant| &tenant.points);
    match peaks.chain(tenants.map(|point| point.used_peak_millis)).any(|peak| peak > WHOLE_MILLIS) {
        true => Err(nonsense("a share of GPU time is more than a GPU".to_owned())),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tessera_view::history::{Event, GpuSeries, TenantSeries};

    const NOW: i64 = 1_800_000_000_000;
    const HOUR: i64 = 3_600_000;

    fn answer(at_unix_ms: i64, step_seconds: u32, instants: &[i64]) -> Answer {
        let gpu = |at| GpuPoint { at_unix_ms: at, seconds: 10.0, ..GpuPoint::default() };
        let tenant = |at| TenantPoint { at_unix_ms: at, seconds: 10.0, ..TenantPoint::default() };
        let gpus = GpuSeries {
            points: instants.iter().copied().map(gpu).collect(),
            ..GpuSeries::default()
        };
        let tenants = TenantSeries {
            points: instants.iter().copied().map(tenant).collect(),
            ..TenantSeries::default()
        };
        let event = |at| Event { at_unix_ms: at, ..Event::default() };
        Answer {
            at_unix_ms,
            step_seconds,
            since_unix_ms: instants.first().copied().unwrap_or_default(),
            gpus: vec![gpus],
            tenants: vec![tenants],
            events: instants.iter().copied().map(event).collect(),
            ..Answer::default()
        }
    }

    fn instants(answer: &Answer) -> Vec<i64> {
        let gpus = answer.gpus.iter().flat_map(|gpu| &gpu.points).map(|point| point.at_unix_ms);
        let tenants = answer.tenants.iter().flat_map(|one| &one.points);
        gpus.chain(tenants.map(|point| point.at_unix_ms))
            .chain(answer.events.iter().map(|event| event.at_unix_ms))
            .collect()
    }

    #[test]
    fn a_node_whose_clock_is_hours_ahead_is_shown_by_ours() {
        let ahead = 5 * HOUR;
        let mut one = answer(NOW + ahead, 10, &[NOW - HOUR + ahead, NOW - 10_000 + ahead]);
        let query = Query { since_unix_ms: NOW - 2 * HOUR, ..Query::default() };
        fit(&mut one, &query, NOW).unwrap();
        assert_eq!(instants(&one), [NOW - HOUR, NOW - 10_000].repeat(3));
        assert_eq!((one.at_unix_ms, one.since_unix_ms), (NOW, NOW - HOUR));
        // A second is the way of the answer, and moves nothing.
        let mut one = answer(NOW - 1000, 10, &[NOW - HOUR]);
        fit(&mut one, &query, NOW).unwrap();
        assert_eq!(instants(&one), [NOW - HOUR; 3]);
    }

    #[test]
    fn buckets_of_no_length_that_there_is_are_refused() {
        for step in [1, 7, 60, u32::MAX] {
            let error = fit(&mut answer(NOW, step, &[]), &Query::default(), NOW).unwrap_err();
            assert!(error.to_string().contains(&format!("{step} s")), "{error}");
        }
        assert!(fit(&mut Answer::default(), &Query::default(), NOW).is_ok());
        let mut long = answer(NOW, 10, &[NOW - HOUR]);
        long.gpus[0].points[0].leased_seconds = 1e9;
        let error = fit(&mut long, &Query::default(), NOW).unwrap_err().to_string();
        assert!(error.contains("more seconds"), "{error}");
        let mut busy = answer(NOW, 10, &[NOW - HOUR]);
        busy.tenants[0].points[0].used_peak_millis = 1001;
        let error = fit(&mut busy, &Query::default(), NOW).unwrap_err().to_string();
        assert!(error.contains("more than a GPU"), "{error}");
    }

    #[test]
    fn a_bucket_that_a_clock_filled_twice_has_its_shares_and_spoils_nothing() {
        for step in STEPS {
            let length = f64::from(step);
            let mut one = answer(NOW, step, &[NOW - HOUR, NOW - 2 * HOUR]);
            one.gpus[0].points[0].seconds = length * 2.0;
            one.gpus[0].points[0].leased_seconds = length;
            one.tenants[0].points[0].seconds = length * 4.0;
            one.tenants[0].points[0].got_seconds = length;
            fit(&mut one, &Query::default(), NOW).unwrap();
            let gpu = &one.gpus[0].points[1];
            assert_eq!((gpu.seconds, gpu.leased_seconds), (length, length / 2.0));
            let tenant = &one.tenants[0].points[1];
            assert_eq!((tenant.seconds, tenant.got_seconds), (length, length / 4.0));
            assert_eq!(one.gpus[0].points[0].seconds, 10.0);
        }
    }

    proptest! {
        /// No instant of a node leaves the window, whatever it says.
        #[test]
        fn every_instant_is_within_the_window(
            at in any::<i64>(),
            all in proptest::collection::vec(any::<i64>(), 0..8),
            near in proptest::collection::vec(-HOUR..HOUR, 0..8),
            since in -HOUR * 10..0,
        ) {
            let all: Vec<i64> = all.into_iter().chain(near.iter().map(|by| NOW + by)).collect();
            let query = Query { since_unix_ms: NOW + since, ..Query::default() };
            for at in [at, NOW, i64::MAX, i64::MIN, 0] {
                let mut one = answer(at, 10, &all);
                fit(&mut one, &query, NOW).unwrap();
                prop_assert_eq!(one.at_unix_ms, NOW);
                prop_assert!(one.since_unix_ms <= NOW && one.since_unix_ms >= 0);
                for at in instants(&one) {
                    prop_assert!((NOW + since - 70_000..=NOW + 70_000).contains(&at), "{}", at);
                }
            }
        }
    }
}
