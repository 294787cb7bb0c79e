//! Whether a rule of the scheduler holds: it does, it does not, or it cannot be said here.

/// In this order, all of several is the least of them and any is the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Holds {
    /// It does not.
    No,
    /// It hangs on what is not read, or on an operator that this program does not know.
    Open,
    /// It does.
    Yes,
}

impl Holds {
    pub(super) fn all(each: impl Iterator<Item = Holds>) -> Holds {
        each.min().unwrap_or(Holds::Yes)
    }

    pub(super) fn any(each: impl Iterator<Item = Holds>) -> Holds {
        each.max().unwrap_or(Holds::No)
    }
}

impl From<bool> for Holds {
    fn from(holds: bool) -> Self {
        if holds { Holds::Yes } else { Holds::No }
    }
}
