//! Regular expressions for the schema: numbers within bounds, in the notations that the reader accepts. The
//! syntax is what ECMA 262 and Go's RE2 share.

/// A decimal number, with or without a fraction.
pub(super) const NUMBER: &str = r"([0-9]+\.?[0-9]*|\.[0-9]+)";
/// One that is not 0.
pub(super) const POSITIVE: &str = r"([0-9]*[1-9][0-9]*\.?[0-9]*|[0-9]*\.[0-9]*[1-9][0-9]*)";
/// A fraction less than 1 that is not 0.
const SMALL: &str = r"0*\.[0-9]*[1-9][0-9]*";
/// The suffix of a quantity of bytes, or none.
pub(super) const SUFFIX: &str = "([KMGTPE]iB?|[numkMGTPE]|[eE][+-]?[0-9]+)?";

/// The whole text.
pub(super) fn whole(pattern: &str) -> String {
    format!("^({pattern})$")
}

/// A whole number from `least` (not 0) to `most`, with or without zeros before it.
pub(super) fn range(least: u64, most: u64) -> String {
    let mut parts = Vec::new();
    let mut from = least;
    while from <= most {
        // The last digits run from zeros to nines.
        let mut step = 1;
        while from.is_multiple_of(step * 10) && from + step * 10 - 1 <= most {
            step *= 10;
        }
        let digit = from / step % 10;
        let more = (9 - digit).min((most - (from + step - 1)) / step);
        let head = Some(from / step / 10).filter(|head| *head > 0).map(|head| head.to_string());
        let class = match more {
            0 => digit.to_string(),
            _ => format!("[{digit}-{}]", digit + more),
        };
        let tail = "[0-9]".repeat(step.ilog10() as usize);
        parts.push(head.unwrap_or_default() + &class + &tail);
        from += step * (more + 1);
    }
    format!("0*({})", parts.join("|"))
}

/// A decimal number of more than 0 and at most `most`.
fn up_to(most: u64) -> String {
    let below = match most {
        1 => String::new(),
        _ => format!(r"|{}(\.[0-9]*)?", range(1, most - 1)),
    };
    format!(r"({SMALL}|0*{most}(\.0*)?{below})")
}

/// A quantity of more than 0 and at most `most`. What a suffix other than `m` makes of a number is not
/// looked at, but for whole numbers of thousands and more.
pub(super) fn part(most: u64) -> String {
    let (plain, milli) = (up_to(most), up_to(most * 1000));
    format!(r"\+?({plain}|{milli}m|{SMALL}([KMGTPE]i|[kMGTPE])|{POSITIVE}([nu]|[eE][+-]?[0-9]+))")
}

/// A percentage of more than 0 and at most 100.
pub(super) fn percent() -> String {
    format!(r"{}\s*%+", part(100))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use regex::Regex;

    use super::*;

    proptest! {
        #[test]
        fn a_range_has_its_numbers_and_no_others(
            a in 1_u64..100_000, b in 1_u64..100_000, near in -3_i64..=3, x in 0_u64..200_000,
        ) {
            let (least, most) = (a.min(b), a.max(b));
            let pattern = Regex::new(&whole(&range(least, most))).unwrap();
            for x in [x, least.saturating_add_signed(near), most.saturating_add_signed(near)] {
                let inside = (least..=most).contains(&x);
                prop_assert_eq!(pattern.is_match(&x.to_string()), inside, "{} in {}", x, pattern.as_str());
            }
        }

        #[test]
        fn a_part_is_more_than_nothing_and_at_most_the_whole(
            text in r"\+?[0-9]{0,4}\.?[0-9]{0,3}[mnukM]?", most in prop::sample::select(vec![1_u64, 100]),
        ) {
            let Ok(quantity) = tessera_model::quantity::Quantity::parse(&text) else { return Ok(()) };
            let (fits, any) = match quantity.millis() {
                Ok(millis) => ((1..=most * 1000).contains(&millis), text.ends_with(['n', 'u', 'k', 'M'])),
                Err(_) => (false, false),
            };
            let matches = Regex::new(&whole(&part(most))).unwrap().is_match(&text);
            prop_assert!(matches == fits || (matches && any), "{} of {}", text, most);
        }
    }
}
