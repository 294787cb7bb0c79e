//! Repeatable randomness (splitmix64, Steele et al. 2014).

/// A stream of numbers from a seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One of `from..=to`.
    pub fn within(&mut self, (from, to): (u64, u64)) -> u64 {
        from + self.next_u64() % (to.saturating_sub(from) + 1)
    }
}
