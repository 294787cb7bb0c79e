//! Sizes as people read them: the one way in which any message of Tessera writes bytes.

use core::fmt;

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Bytes, in the largest unit of which there is a whole one. What is not a whole number of it has decimals,
/// one if the format asks for no other precision; they are cut, never rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let mut unit = (1u64, "B");
        for (name, n) in UNITS.into_iter().zip(1u32..) {
            let size = 1u64 << (10 * n);
            if bytes >= size {
                unit = (size, name);
            }
        }
        let (size, name) = unit;
        write!(f, "{}", bytes / size)?;
        if !bytes.is_multiple_of(size) {
            let digits = f.precision().unwrap_or(1).clamp(1, 6);
            let scale = 10u128.pow(u32::try_from(digits).unwrap_or(1));
            let part = u128::from(bytes % size) * scale / u128::from(size);
            write!(f, ".{part:0digits$}")?;
        }
        write!(f, " {name}")
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn the_largest_unit_is_taken_and_the_rest_cut() {
        for (bytes, text, long) in [
            (0, "0 B", "0 B"),
            (1023, "1023 B", "1023 B"),
            (1024, "1 KiB", "1 KiB"),
            (3 << 20, "3 MiB", "3 MiB"),
            ((3 << 20) - 1, "2.9 MiB", "2.999 MiB"),
            (4_026_557_952, "3.7 GiB", "3.750 GiB"),
            (4096 << 20, "4 GiB", "4 GiB"),
            ((1 << 30) + 1, "1.0 GiB", "1.000 GiB"),
            (u64::MAX, "15.9 EiB", "15.999 EiB"),
        ] {
            assert_eq!(
                (Size(bytes).to_string(), alloc::format!("{:.3}", Size(bytes))),
                (text.into(), long.into())
            );
        }
    }
}
