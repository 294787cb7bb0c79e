//! The three lengths of buckets, and how many of them are stored together.

/// A length of buckets; its number is in keys of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Ten seconds.
    Fine,
    /// Five minutes.
    Middle,
    /// One hour.
    Coarse,
}

impl Level {
    /// All, the finest first.
    pub const ALL: [Level; 3] = [Level::Fine, Level::Middle, Level::Coarse];

    /// Length of a bucket, seconds.
    pub const fn step_seconds(self) -> u32 {
        match self {
            Level::Fine => 10,
            Level::Middle => 300,
            Level::Coarse => 3600,
        }
    }

    pub fn of_step(seconds: u32) -> Option<Level> {
        Level::ALL.into_iter().find(|level| level.step_seconds() == seconds)
    }

    /// Buckets that are stored together.
    pub(crate) const fn buckets(self) -> u32 {
        match self {
            Level::Fine => 30,
            Level::Middle | Level::Coarse => 12,
        }
    }

    /// Seconds that are stored together.
    pub(crate) const fn chunk_seconds(self) -> u32 {
        self.step_seconds() * self.buckets()
    }

    /// What is kept of it, seconds, while there is anything finer or coarser to drop instead.
    pub(crate) const fn floor_seconds(self) -> u32 {
        match self {
            Level::Fine => 3600,
            Level::Middle => 24 * 3600,
            Level::Coarse => 7 * 24 * 3600,
        }
    }

    /// Where the chunk with this second begins.
    pub(crate) const fn chunk(self, second: u32) -> u32 {
        second - second % self.chunk_seconds()
    }
}
