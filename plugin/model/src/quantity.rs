//! Kubernetes quantities: `123Mi`, `129M`, `129e6`, `250m`, `1.5Gi`, plain numbers.
//!
//! The grammar is that of `k8s.io/apimachinery/pkg/api/resource.Quantity`: a decimal number with an
//! optional sign, then `Ki Mi Gi Ti Pi Ei`, or `n u m k M G T P E`, or `e`/`E` and an exponent. A
//! number needs at least one digit. As there, what is finer than 10⁻⁹ is rounded up; unlike there,
//! what does not fit 2⁶³ − 1 is refused, not capped, because a limit that nobody wrote is no help.

/// A quantity, exact to 10⁻⁹.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity {
    nanos: i128,
}

/// Why a string is not a [`Quantity`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The number is missing or malformed.
    #[error("not a quantity; write a number with an optional suffix, such as 512Mi, 2G or 129e6")]
    Number,
    /// The suffix is none of Kubernetes'.
    #[error(
        "unknown suffix \"{0}\"; Kubernetes knows Ki Mi Gi Ti Pi Ei, n u m k M G T P E and e<n>"
    )]
    Suffix(String),
    /// Too large to mean anything.
    #[error("larger than 9223372036854775807")]
    Range,
    /// Negative where an amount is wanted.
    #[error("must not be negative")]
    Negative,
}

const NANO: i128 = 1_000_000_000;
const MAX_NANOS: i128 = i64::MAX as i128 * NANO;

impl Quantity {
    /// Parses Kubernetes' notation.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
            return Err(QuantityError::Number);
        }
        let scale = Scale::parse(suffix)?;
        let magnitude = scale.nanos(whole, fraction)?;
        Ok(Quantity { nanos: if negative { -magnitude } else { magnitude } })
    }

    /// The amount in whole units, rounded up as Kubernetes does.
    pub fn units(self) -> Result<u64, QuantityError> {
        self.rounded_up(NANO)
    }

    /// The amount in thousandths, rounded up as Kubernetes does.
    ///
    /// # Errors
    /// Negative amounts, and what does not fit 64 bits.
    pub fn millis(self) -> Result<u64, QuantityError> {
        self.rounded_up(NANO / 1000)
    }

    fn rounded_up(self, unit: i128) -> Result<u64, QuantityError> {
        if self.nanos < 0 {
            return Err(QuantityError::Negative);
        }
        u64::try_from((self.nanos + unit - 1) / unit).map_err(|_| QuantityError::Range)
    }
}

/// What a suffix multiplies by.
#[derive(Clone, Copy)]
enum Scale {
    /// 2^n.
    Binary(u32),
    /// 10^n.
    Decimal(i32),
}

impl Scale {
    fn parse(suffix: &str) -> Result<Self, QuantityError> {
        Ok(match suffix {
            "Ki" => Scale::Binary(10),
            "Mi" => Scale::Binary(20),
            "Gi" => Scale::Binary(30),
            "Ti" => Scale::Binary(40),
            "Pi" => Scale::Binary(50),
            "Ei" => Scale::Binary(60),
            "n" => Scale::Decimal(-9),
            "u" => Scale::Decimal(-6),
            "m" => Scale::Decimal(-3),
            "" => Scale::Decimal(0),
            "k" => Scale::Decimal(3),
            "M" => Scale::Decimal(6),
            "G" => Scale::Decimal(9),
            "T" => Scale::Decimal(12),
            "P" => Scale::Decimal(15),
            "E" => Scale::Decimal(18),
            _ => return Scale::exponent(suffix),
        })
    }

    fn exponent(suffix: &str) -> Result<Self, QuantityError> {
        let unknown = || QuantityError::Suffix(suffix.to_owned());
        let exponent = suffix.strip_prefix(['e', 'E']).ok_or_else(unknown)?;
        let digits = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(unknown());
        }
        exponent.parse().map(Scale::Decimal).map_err(|_| QuantityError::Range)
    }

    /// `whole.fraction` × this scale in 10⁻⁹, rounded up.
    fn nanos(self, whole: &str, fraction: &str) -> Result<i128, QuantityError> {
        /// Digits that count: 38 fit an i128, and the largest binary factor needs 19 of them.
        const KEPT: usize = 19;
        let fraction = fraction.trim_end_matches('0');
        let digits = format!("{whole}{fraction}");
        let digits = digits.trim_start_matches('0');
        if digits.is_empty() {
            return Ok(0);
        }
        let (binary, decimal) = match self {
            Scale::Binary(bits) => (bits, 0),
            Scale::Decimal(exponent) => (0, exponent),
        };
        let length = |digits: &str| i64::try_from(digits.len()).unwrap_or(i64::MAX);
        // The amount is `digits` × 10^shift × 2^binary. The place of the first digit bounds it.
        let shift = i64::from(decimal) + 9 - length(fraction);
        let top = length(digits).saturating_add(shift);
        if top > 29 {
            return Err(QuantityError::Range);
        }
        if top < -18 {
            // Below 10^-9 even with the largest binary suffix: rounds up to the smallest amount.
            return Ok(1);
        }
        let (kept, rest) = digits.split_at(digits.len().min(KEPT));
        let value = kept.parse::<i128>().map_err(|_| QuantityError::Number)? << binary;
        let mut inexact = rest.bytes().any(|digit| digit != b'0');
        let shift = shift + length(rest);
        let power = u32::try_from(shift.unsigned_abs()).map_err(|_| QuantityError::Range)?;
        let value = match 10i128.checked_pow(power) {
            Some(power) if shift >= 0 => value.checked_mul(power).ok_or(QuantityError::Range)?,
            Some(power) => {
                inexact |= value % power != 0;
                value / power
            }
            None if shift >= 0 => return Err(QuantityError::Range),
            None => {
                inexact = true;
                0
            }
        };
        let value = value + i128::from(inexact);
        if value > MAX_NANOS { Err(QuantityError::Range) } else { Ok(value) }
    }
}

/// `bytes` for people, with the largest binary suffix that is exact, or one decimal.
pub fn format_bytes(bytes: u64) -> String {
    tessera_region::Size(bytes).to_string()
}

/// Two amounts that a sentence compares: as [`format_bytes`], with as many decimals as tell them apart.
pub fn format_compared(one: u64, other: u64) -> [String; 2] {
    let texts = |digits: usize| {
        [one, other].map(|bytes| format!("{:.digits$}", tessera_region::Size(bytes)))
    };
    // 2.0 GiB reads as 2 GiB does.
    let reads = |text: &str| match text.split_once(' ') {
        Some((number, unit)) if number.contains('.') => {
            format!("{} {unit}", number.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text.to_owned(),
    };
    let differ = |[one, other]: &[String; 2]| reads(one) != reads(other);
    match one == other {
        true => texts(1),
        false => (1..=6)
            .map(texts)
            .find(differ)
            .unwrap_or_else(|| [one, other].map(|bytes| format!("{bytes} bytes"))),
    }
}

/// A Kubernetes quantity of bytes, or one spelled with a final `B` (`4GiB`, `2GB`).
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let unit = text.strip_suffix('B').filter(|t| t.ends_with(['i', 'k', 'M', 'G', 'T', 'P']));
    Quantity::parse(unit.unwrap_or(text)).and_then(Quantity::units).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn units(text: &str) -> u64 {
        Quantity::parse(text).unwrap().units().unwrap()
    }

    proptest! {
        #[test]
        fn amounts_that_differ_read_differently(one in 0_u64..1 << 44, more in 0_u32..44) {
            let number = |text: &str| {
                let (number, unit) = text.split_once(' ').unwrap();
                (number.parse::<f64>().unwrap().to_bits(), unit.to_owned())
            };
            let [a, b] = format_compared(one, one + (1 << more));
            prop_assert_ne!(number(&a), number(&b));
            let [a, b] = format_compared(one, one);
            prop_assert_eq!((&a, &b), (&format_bytes(one), &format_bytes(one)));
        }
    }

    #[test]
    fn amounts_are_compared_with_as_many_digits_as_it_takes() {
        for (one, other, texts) in [
            (3 << 30, 2 << 30, ["3 GiB", "2 GiB"]),
            ((2 << 30) + (1 << 20), 2 << 30, ["2.0009 GiB", "2 GiB"]),
            ((2 << 30) + 1, 2 << 30, ["2147483649 bytes", "2147483648 bytes"]),
            ((1 << 30) - 1, 1 << 30, ["1023.9 MiB", "1 GiB"]),
        ] {
            assert_eq!(format_compared(one, other), texts);
        }
    }

    #[test]
    fn kubernetes_notations_mean_what_they_mean_there() {
        for (text, want) in [
            ("123Mi", 123 << 20),
            ("129M", 129_000_000),
            ("129e6", 129_000_000),
            ("129E6", 129_000_000),
            ("129e+6", 129_000_000),
            ("128974848", 128_974_848),
            ("128974848000m", 128_974_848),
            ("1.5Gi", 3 << 29),
            (".5Gi", 1 << 29),
            ("5.Gi", 5 << 30),
            ("1E", 1_000_000_000_000_000_000),
            ("7Ei", 7 << 60),
            ("0", 0),
            ("-0", 0),
            ("+4k", 4000),
            ("0.0000000001Gi", 1),
            ("1e-30", 1),
            ("00000000000000000000000000000000000000001Ki", 1024),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(units(text), want, "{text}");
        }
    }

    #[test]
    fn fractions_round_up() {
        assert_eq!(units("1m"), 1);
        assert_eq!(units("1001m"), 2);
        assert_eq!(units("0.5"), 1);
        assert_eq!(Quantity::parse("250m").unwrap().millis(), Ok(250));
        assert_eq!(Quantity::parse("0.25").unwrap().millis(), Ok(250));
        assert_eq!(Quantity::parse("0.3333").unwrap().millis(), Ok(334));
    }

    #[test]
    fn malformed_quantities_are_refused() {
        for text in ["", "-", ".", "Mi", "1.1.M", "aoeu", " 1", "e6", "+-1"] {
            assert_eq!(Quantity::parse(text), Err(QuantityError::Number), "{text}");
        }
        for text in ["1 ", "0.1mi", "0.1am", ".5i", "1i", "1K", "1MiB", "1e", "1e-", "1e1.5", "1_0"]
        {
            assert!(matches!(Quantity::parse(text), Err(QuantityError::Suffix(_))), "{text}");
        }
    }

    #[test]
    fn amounts_beyond_64_bits_are_refused() {
        for text in ["8Ei", "1e19", "9223372036854775808", "1e999999999999", "1e2147483647"] {
            assert_eq!(Quantity::parse(text), Err(QuantityError::Range), "{text}");
        }
        assert_eq!(Quantity::parse("-1").unwrap().units(), Err(QuantityError::Negative));
        assert_eq!(Quantity::parse("9e18").unwrap().millis(), Err(QuantityError::Range));
    }

    #[test]
    fn bytes_read_well() {
        assert_eq!(format_bytes(0), "0 B");
        assert_eq!(format_bytes(4 << 30), "4 GiB");
        assert_eq!(format_bytes((3 << 29) + 1), "1.5 GiB");
        assert_eq!(format_bytes(u64::MAX), "15.9 EiB");
    }

    proptest! {
        #[test]
        fn no_input_panics(text in "[-+.0-9a-zA-Z]{0,60}") {
            let _ = Quantity::parse(&text);
        }

        #[test]
        fn whole_numbers_are_exact(n in 0u64..=i64::MAX as u64) {
            prop_assert_eq!(units(&n.to_string()), n);
        }

        #[test]
        fn binary_suffixes_shift(n in 0u64..1 << 13, power in 1u32..=5) {
            let suffix = ["Ki", "Mi", "Gi", "Ti", "Pi"][power as usize - 1];
            prop_assert_eq!(units(&format!("{n}{suffix}")), n << (10 * power));
        }

        #[test]
        fn a_fraction_equals_its_milli_form(n in 0u64..1_000_000_000) {
            let fraction = format!("{}.{:03}", n / 1000, n % 1000);
            prop_assert_eq!(Quantity::parse(&fraction), Quantity::parse(&format!("{n}m")));
        }
    }
}
