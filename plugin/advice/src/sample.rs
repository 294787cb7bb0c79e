//! One bucket of a tenant's series, made sound.

use tessera_view::history::TenantPoint;

/// A GPU in thousandths: more of its time nobody can have.
pub(crate) const WHOLE: u32 = 1000;
/// Longest bucket that is believed, seconds.
const LONGEST: f64 = 24.0 * 3600.0;

/// What is used of a [`TenantPoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// The bucket's beginning.
    pub at_unix_ms: i64,
    /// How long it was observed.
    pub observed_ms: u64,
    /// The highest use of memory.
    pub peak_bytes: u64,
    /// The limit then.
    pub limit_bytes: u64,
    /// The share then.
    pub cores_millis: u32,
    /// GPU time that it got.
    pub got_millis: u32,
    /// The most that it got in any ten seconds, as far as that is known.
    pub highest_millis: u32,
    /// Only the mean of what it got is known.
    pub hides_peaks: bool,
    /// What it got and waited for.
    pub wanted_millis: u32,
    /// It waited because its own share was spent.
    pub capped: bool,
    /// Refused requests.
    pub refusals: u64,
    /// It launched something, ran or waited for the GPU.
    pub worked: bool,
    /// It launched something.
    pub launched: bool,
}

impl Sample {
    /// `None` for a bucket without a look, or one that makes no sense.
    pub fn of(point: &TenantPoint) -> Option<Self> {
        let seconds = Some(point.seconds).filter(|s| s.is_finite() && *s > 0.0)?.min(LONGEST);
        let within = |value: f64| if value.is_finite() { value.clamp(0.0, seconds) } else { 0.0 };
        let got = within(point.got_seconds);
        let wanted = within(got + within(point.waited_seconds));
        let got_millis = millis(got / seconds);
        Some(Sample {
            at_unix_ms: point.at_unix_ms,
            observed_ms: u64::from(ceil(seconds * 1000.0).max(1)),
            peak_bytes: point.memory_peak_bytes.max(point.memory_used_bytes),
            limit_bytes: point.memory_limit_bytes,
            cores_millis: point.cores_millis.min(WHOLE),
            got_millis,
            highest_millis: got_millis.max(point.got_peak_millis.min(WHOLE)),
            hides_peaks: got > 0.0 && point.got_peak_millis == 0,
            wanted_millis: millis(wanted / seconds),
            capped: within(point.capped_seconds) > 0.0,
            refusals: point.refusals,
            worked: point.launches > 0 || wanted > 0.0,
            launched: point.launches > 0,
        })
    }

    /// The part of it that is not before `since`, Unix milliseconds; `None` if nothing is. Its highest figures are of
    /// the whole bucket: they are rather too high than too low.
    pub fn since(self, since_unix_ms: i64) -> Option<Self> {
        let before = since_unix_ms.saturating_sub(self.at_unix_ms);
        let Some(before) = u64::try_from(before).ok().filter(|before| *before > 0) else {
            return Some(self);
        };
        let observed_ms = self.observed_ms.checked_sub(before).filter(|left| *left > 0)?;
        Some(Sample { at_unix_ms: since_unix_ms, observed_ms, ..self })
    }

    /// The bucket's observed end.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_left_out_or_bounded() {
        let point = |seconds| TenantPoint { seconds, ..TenantPoint::default() };
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Sample::of(&point(seconds)), None, "{seconds}");
        }
        let liar = TenantPoint {
            got_seconds: 1e300,
            waited_seconds: f64::NAN,
            capped_seconds: f64::NEG_INFINITY,
            at_unix_ms: i64::MAX,
            ..point(1e300)
        };
        let sample = Sample::of(&liar).unwrap();
        assert_eq!((sample.got_millis, sample.wanted_millis, sample.capped), (1000, 1000, false));
        assert_eq!(sample.end_unix_ms(), i64::MAX);
    }

    #[test]
    fn a_window_that_begins_within_a_bucket_has_the_rest_of_it() {
        let point = TenantPoint { at_unix_ms: 10_000, seconds: 10.0, ..TenantPoint::default() };
        let sample = Sample::of(&point).unwrap();
        assert_eq!(sample.since(0), Some(sample));
        assert_eq!(sample.since(10_000), Some(sample));
        let rest = sample.since(17_000).unwrap();
        assert_eq!((rest.at_unix_ms, rest.observed_ms), (17_000, 3000));
        assert_eq!(rest.end_unix_ms(), sample.end_unix_ms());
        assert_eq!(sample.since(20_000), None);
        assert_eq!(sample.since(i64::MAX), None);
        assert_eq!(sample.since(i64::MIN), Some(sample));
    }

    #[test]
    fn shares_of_time_are_rounded_up_once() {
        let point = TenantPoint {
            seconds: 10.0,
            got_seconds: 2.5,
            waited_seconds: 1.0001,
            ..TenantPoint::default()
        };
        let sample = Sample::of(&point).unwrap();
        assert_eq!((sample.got_millis, sample.wanted_millis), (250, 351));
    }
}
