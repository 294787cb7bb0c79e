//! The size of a layout's share, relative to the whole.

/// Thousandths of a percent in a whole.
pub const WHOLE_PERCENT: u32 = 100_000;

/// How much of a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// What the others leave, evenly.
    Auto,
    /// Thousandths of a percent of the whole.
    Percent(u32),
    /// So many units.
    Exact(u64),
}

impl Amount {
    /// In units of the whole, rounded down; `None` for [`Amount::Auto`].
    pub fn of(self, whole: u64) -> Option<u64> {
        match self {
            Amount::Auto => None,
            Amount::Exact(units) => Some(units),
            Amount::Percent(part) => {
                let units = u128::from(whole) * u128::from(part) / u128::from(WHOLE_PERCENT);
                // At most 100 %, so it fits.
                Some(u64::try_from(units).unwrap_or(u64::MAX))
            }
        }
    }
}
