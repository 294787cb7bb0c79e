//! Layouts: what GPUs are cut into where equal replicas under one name are not enough.

use tessera_model::sharing::{Compute, Placement, Split};

/// Thousandths of a percent in a whole.
pub const WHOLE_PERCENT: u32 = 100_000;

/// Which GPUs are cut how. The first layout that names a GPU counts for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// UUIDs, indexes, or product names, in which `*` stands for anything.
    pub gpus: Vec<String>,
    /// What each of them is cut into; every resource once.
    pub shares: Vec<LayoutShare>,
}

/// Equal replicas of each GPU of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutShare {
    /// The extended resource they are sold as.
    pub resource: String,
    /// How many of them each GPU has.
    pub count: u32,
    /// Memory limit of one: bytes, or a part of what the reserve leaves.
    pub memory: Amount,
    /// Compute share of one: thousandths of the GPU, or a part of it.
    pub cores: Amount,
    /// What the compute share means; `None`: as `share.compute` says.
    pub compute: Option<Compute>,
    /// Which GPU is preferred; `None`: as `share.placement` says. The same in all layouts.
    pub placement: Option<Placement>,
    /// Whether one container may have several GPUs; `None`: as `share.split` says. The same in all
    /// layouts.
    pub split: Option<Split>,
}

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
    #[must_use]
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
