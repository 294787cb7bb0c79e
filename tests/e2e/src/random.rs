//! Numbers that can be repeated: `TESSERA_E2E_SEED`.

use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;

/// xorshift64*: the same seed, the same numbers.
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }

    /// Puts things into any order, each as likely as the others (Fisher and Yates).
    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        for last in (1..things.len()).rev() {
            let other = usize::try_from(self.below(last as u64 + 1)).unwrap_or(last);
            things.swap(last, other);
        }
    }
}

/// The seed of this run: what `TESSERA_E2E_SEED` says, or the clock.
///
/// # Errors
/// It is no number.
pub fn seed() -> Result<u64> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    number_of("TESSERA_E2E_SEED", clock)
}

/// A number of the environment.
///
/// # Errors
/// It is none.
pub fn number_of(name: &str, default: u64) -> Result<u64> {
    match env::var(name) {
        Ok(text) => Ok(text.parse()?),
        Err(_) => Ok(default),
    }
}
