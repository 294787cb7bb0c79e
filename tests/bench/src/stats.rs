//! Robust statistics: medians and quartiles, so that one preempted batch changes nothing.

#[derive(Clone, Debug, Default)]
pub struct Sample(Vec<f64>);

impl Sample {
    /// Of at least one value.
    pub fn new(mut values: Vec<f64>) -> Self {
        assert!(!values.is_empty(), "a statistic of nothing");
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// The value that `fraction` of all do not exceed, interpolated between ranks.
    pub fn quantile(&self, fraction: f64) -> f64 {
        let last = self.0.len() - 1;
        #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^53 values")]
        let rank = fraction.clamp(0.0, 1.0) * last as f64;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank between 0 and the last index"
        )]
        let below = rank.floor() as usize;
        let above = (below + 1).min(last);
        self.0[below] + (self.0[above] - self.0[below]) * rank.fract()
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub fn max(&self) -> f64 {
        self.0[self.0.len() - 1]
    }

    /// The mean without the highest `part` of all values.
    pub fn trimmed_mean(&self, part: f64) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^53 values")]
        let all = self.0.len() as f64;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 1 and the number of values"
        )]
        let kept = ((all * (1.0 - part)).ceil() as usize).clamp(1, self.0.len());
        #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^53 values")]
        let number = kept as f64;
        self.0[..kept].iter().sum::<f64>() / number
    }

    pub fn spread(&self) -> f64 {
        self.quantile(0.75) - self.quantile(0.25)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Two ways of doing the same, measured in alternating rounds.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Without the shim.
    pub bare: Sample,
    pub hooked: Sample,
    /// Round by round, hooked − bare: what drifts with the machine cancels out.
    pub difference: Sample,
}

impl Pair {
    /// From equally many rounds of each.
    pub fn new(bare: Vec<f64>, hooked: Vec<f64>) -> Self {
        assert_eq!(bare.len(), hooked.len(), "rounds are pairs");
        let difference = hooked.iter().zip(&bare).map(|(h, b)| h - b).collect();
        Self {
            bare: Sample::new(bare),
            hooked: Sample::new(hooked),
            difference: Sample::new(difference),
        }
    }

    pub fn overhead(&self) -> f64 {
        self.hooked.median() - self.bare.median()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn quantiles_interpolate_between_ranks() {
        let s = Sample::new(vec![4.0, 1.0, 3.0, 2.0]);
        assert!(close(s.median(), 2.5));
        assert!(close(s.quantile(0.0), 1.0));
        assert!(close(s.max(), 4.0));
        assert!(close(s.spread(), 1.5));
        assert!(close(Sample::new(vec![7.0]).quantile(0.99), 7.0));
        assert!(close(s.trimmed_mean(0.25), 2.0));
        assert!(close(s.trimmed_mean(0.0), 2.5));
    }

    #[test]
    fn one_outlier_does_not_move_an_overhead() {
        let bare = vec![10.0, 10.0, 10.0, 10.0, 500.0];
        let hooked = vec![14.0, 14.0, 14.0, 14.0, 14.0];
        let pair = Pair::new(bare, hooked);
        assert!(close(pair.overhead(), 4.0));
        assert!(close(pair.difference.median(), 4.0));
    }
}
