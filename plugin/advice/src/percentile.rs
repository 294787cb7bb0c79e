//! Percentiles of values that held for different lengths of time.

/// The smallest of the values that covers `percent` of all weight: that much weight has this value or less.
/// `None` where nothing has any weight.
pub fn percentile<V: Copy + Ord>(
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
