//! One bucket of a tenant's series.

use tessera_view::history::TenantPoint;

/// A GPU in thousandths: more of its time nobody can have.
pub(crate) const WHOLE: u32 = 1000;

/// What is used of a [`TenantPoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    pub at_unix_ms: i64,
    pub observed_ms: u64,
    pub peak_bytes: u64,
    pub limit_bytes: u64,
    pub cores_millis: u32,
    pub leased_millis: u32,
    /// GPU time in which its work ran; where that is unknown, what it had leased: more it cannot be.
    pub used_millis: u32,
    /// Whether that is known.
    pub is_measured: bool,
    /// The most that it used in any ten seconds, as far as that is known.
    pub highest_millis: u32,
    pub wanted_millis: u32,
    /// It waited because its own share was spent.
    pub capped: bool,
    pub refusals: u64,
    /// It launched something, ran or waited for the GPU.
    pub worked: bool,
    pub launched: bool,
}

impl Sample {
    /// `None` for a bucket without a look.
    pub fn of(point: &TenantPoint) -> Option<Self> {
        let seconds = Some(point.seconds).filter(|seconds| *seconds > 0.0)?;
        let within = |value: f64| value.clamp(0.0, seconds);
        let leased = within(point.got_seconds);
        let measured = point.used().map(within);
        let used = measured.unwrap_or(leased);
        let wanted = within(used + within(point.waited_seconds));
        let used_millis = millis(used / seconds);
        let highest_millis = if measured.is_some() { point.used_peak_millis.min(WHOLE) } else { 0 };
        Some(Sample {
            at_unix_ms: point.at_unix_ms,
            observed_ms: u64::from(ceil(seconds * 1000.0).max(1)),
            peak_bytes: point.memory_peak_bytes.max(point.memory_used_bytes),
            limit_bytes: point.memory_limit_bytes,
            cores_millis: point.cores_millis.min(WHOLE),
            leased_millis: millis(leased / seconds),
            used_millis,
            is_measured: measured.is_some(),
            highest_millis: used_millis.max(highest_millis),
            wanted_millis: millis(wanted / seconds),
            capped: within(point.capped_seconds) > 0.0,
            refusals: point.refusals,
            worked: point.launches > 0 || wanted > 0.0,
            launched: point.launches > 0,
        })
    }

    /// The part of it that is not before `since`, Unix milliseconds, in buckets of so many seconds; `None` if nothing
    /// is. When in a bucket it was observed is not known: what may have been after `since` counts, and its highest
    /// figures are of the whole bucket. They are rather too high than too low.
    pub fn since(self, since_unix_ms: i64, step_seconds: u32) -> Option<Self> {
        if since_unix_ms <= self.at_unix_ms {
            return Some(self);
        }
        let left = self.closes_unix_ms(step_seconds).saturating_sub(since_unix_ms);
        let left = u64::try_from(left).ok().filter(|left| *left > 0)?;
        let observed_ms = self.observed_ms.min(left);
        Some(Sample { at_unix_ms: since_unix_ms, observed_ms, ..self })
    }

    /// The end of its bucket. A clock that was set back lets more be observed than the bucket is long.
    pub fn closes_unix_ms(&self, step_seconds: u32) -> i64 {
        let step_ms = i64::from(step_seconds).max(1) * 1000;
        let begin = self.at_unix_ms.saturating_sub(self.at_unix_ms.rem_euclid(step_ms));
        begin.saturating_add(step_ms).max(self.end_unix_ms())
    }

    pub fn end_unix_ms(&self) -> i64 {
        self.at_unix_ms.saturating_add(i64::try_from(self.observed_ms).unwrap_or(i64::MAX))
    }
}

/// A part of a GPU, rounded up, so that no less is advised than was used; but not for an error in the last digit.
fn millis(part: f64) -> u32 {
    ceil(part * f64::from(WHOLE) - 1e-6).min(WHOLE)
}

/// The next whole number, not negative.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded")]
pub(crate) fn ceil(value: f64) -> u32 {
    value.ceil().clamp(0.0, u32::MAX.into()) as u32
}

/// The smallest of the values that covers `percent` of all weight: that much weight has this value or less.
/// `None` where nothing has any weight.
pub(crate) fn percentile<V: Copy + Ord>(
    values: impl IntoIterator<Item = (V, u64)>,
    percent: u32,
) -> Option<V> {
    let mut sorted: Vec<(V, u64)> = values.into_iter().filter(|(_, weight)| *weight > 0).collect();
    sorted.sort_unstable();
    let whole: u128 = sorted.iter().map(|(_, weight)| u128::from(*weight)).sum();
    let wanted = whole * u128::from(percent.min(100));
    let mut covered = 0;
    let found = sorted.iter().find(|(_, weight)| {
        covered += u128::from(*weight) * 100;
        covered >= wanted
    });
    found.map(|(value, _)| *value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_window_that_begins_within_a_bucket_has_the_rest_of_it() {
        assert_eq!(Sample::of(&TenantPoint::default()), None, "nothing was observed");
        let point = TenantPoint { at_unix_ms: 10_000, seconds: 10.0, ..TenantPoint::default() };
        let sample = Sample::of(&point).unwrap();
        assert_eq!(sample.since(0, 10), Some(sample));
        assert_eq!(sample.since(10_000, 10), Some(sample));
        let rest = sample.since(17_000, 10).unwrap();
        assert_eq!((rest.at_unix_ms, rest.observed_ms), (17_000, 3000));
        assert_eq!(rest.end_unix_ms(), sample.end_unix_ms());
        assert_eq!(sample.since(20_000, 10), None);
        assert_eq!(sample.since(i64::MAX, 10), None);
        assert_eq!(sample.since(i64::MIN, 10), Some(sample));
        // A pod that began late in its hour: all of it may be within the window.
        let late = TenantPoint { at_unix_ms: 3_600_000, seconds: 600.0, ..point };
        let late = Sample::of(&late).unwrap().since(5_400_000, 3600).unwrap();
        assert_eq!((late.at_unix_ms, late.observed_ms), (5_400_000, 600_000));
    }

    #[test]
    fn shares_of_time_are_rounded_up_once() {
        let point = TenantPoint {
            seconds: 10.0,
            got_seconds: 5.0,
            used_seconds: 2.0,
            measured_seconds: 4.0,
            waited_seconds: 1.0001,
            ..TenantPoint::default()
        };
        let sample = Sample::of(&point).unwrap();
        assert_eq!((sample.used_millis, sample.wanted_millis), (250, 351));
    }

    /// Each value as often as it weighs.
    fn oracle(values: &[(u32, u64)], percent: u32) -> Option<u32> {
        let mut all: Vec<u32> = Vec::new();
        for (value, weight) in values {
            all.extend(std::iter::repeat_n(*value, usize::try_from(*weight).unwrap()));
        }
        all.sort_unstable();
        let rank = (all.len() * percent as usize).div_ceil(100);
        all.get(rank.max(1) - 1).copied()
    }

    proptest! {
        #[test]
        fn a_percentile_is_that_of_the_values_written_out(
            values in prop::collection::vec((0u32..50, 0u64..20), 0..40), percent in 0u32..=100,
        ) {
            prop_assert_eq!(percentile(values.iter().copied(), percent), oracle(&values, percent));
        }

        #[test]
        fn weights_of_any_size_do_not_overflow(
            values in prop::collection::vec((any::<u64>(), any::<u64>()), 0..40), percent in 0u32..200,
        ) {
            let most = values.iter().filter(|(_, weight)| *weight > 0).map(|(value, _)| *value).max();
            let found = percentile(values.iter().copied(), percent);
            prop_assert!(found <= most);
            prop_assert!(percent < 100 || found == most);
        }
    }

    #[test]
    fn nothing_has_no_percentile() {
        assert_eq!(percentile::<u32>([], 99), None);
        assert_eq!(percentile([(7, 0)], 99), None);
    }
}
