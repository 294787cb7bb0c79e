//! The cap of a strict share: a token bucket of GPU time whose debt is exact.

/// GPU time in thousandths of a nanosecond, so that a share in thousandths of a GPU earns whole
/// numbers.
const PARTS: i128 = 1000;
/// Debt ends here: five minutes of GPU time. A program with operations of 10 s whose length nobody knows yet
/// may have a dozen of them in flight, once. Only a clock or an arbiter that stood still, while tenants
/// rationed themselves, can cause more.
const MOST_DEBT: i128 = 300_000_000_000 * PARTS;

/// What may be saved, in nanoseconds at the rate of the share.
pub(super) const BURST: u64 = 50_000_000;
/// What a tenant may save while it waits for others: 10 s of its share. Beside neighbours that drain long,
/// or are owed much, a turn may be seconds away, and a tenant that lost what it earns meanwhile would never
/// reach its cap.
const WAITS: u64 = 200;

/// Earns `millis` thousandths of the time that passes, up to what it may hold; spends what is used,
/// below zero if need be, and then earns that back first.
#[derive(Clone, Debug)]
pub(super) struct CapBucket {
    /// Thousandths of nanoseconds.
    level: i128,
    /// Up to when it has earned.
    at: u64,
}

impl CapBucket {
    /// A bucket with just enough to begin.
    pub(super) fn new(now: u64, millis: u32) -> Self {
        Self { level: threshold(millis, BURST), at: now }
    }

    /// Earns up to `now`, and spends `used` nanoseconds of GPU time of that time. What it holds
    /// beyond `burst` stays, but grows no more.
    pub(super) fn pass(&mut self, now: u64, millis: u32, burst: u64, used: u64) {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        let earned = self.level + i128::from(passed) * i128::from(millis);
        let left = earned - i128::from(used) * PARTS;
        self.level = left.max(-MOST_DEBT).min(most(millis, burst).max(self.level));
    }

    /// The same for a tenant that waits for others, and must lose nothing by it.
    pub(super) fn wait(&mut self, now: u64, millis: u32) {
        self.pass(now, millis, BURST * WAITS, 0);
    }

    /// Drops what is held beyond `burst`.
    pub(super) fn forget(&mut self, millis: u32, burst: u64) {
        self.level = self.level.min(most(millis, burst));
    }

    /// Gives back `ns` of what was spent.
    pub(super) fn refund(&mut self, ns: u64) {
        self.level += i128::from(ns) * PARTS;
    }

    /// Whether anything is left to go on with.
    pub(super) fn empty(&self) -> bool {
        self.level <= 0
    }

    /// When there will be enough for a lease, if nothing is spent before.
    pub(super) fn ready_at(&self, millis: u32, burst: u64) -> u64 {
        let missing = (threshold(millis, burst) - self.level).max(0);
        let wait = (missing + i128::from(millis) - 1) / i128::from(millis.max(1));
        self.at.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX))
    }

    /// When it will be empty if all the time from now on is spent; `None` for a whole GPU.
    pub(super) fn empty_at(&self, millis: u32) -> Option<u64> {
        let loss = PARTS - i128::from(millis);
        if loss <= 0 {
            return None;
        }
        let left = (self.level.max(0) + loss - 1) / loss;
        Some(self.at.saturating_add(u64::try_from(left).unwrap_or(u64::MAX)))
    }
}

/// The most that it may hold.
fn most(millis: u32, burst: u64) -> i128 {
    i128::from(millis) * i128::from(burst)
}

/// What it must hold for a lease: leases are long, because each costs a hand-over, and yet so much room is
/// left above that nothing is lost while the tenant waits for its turn.
fn threshold(millis: u32, burst: u64) -> i128 {
    most(millis, burst) / 10 * 7
}

/// The burst with which a lease is charged at least `ns` before it is empty.
pub(super) fn burst_for(ns: u64, millis: u32) -> u64 {
    let millis = u64::from(millis.max(1));
    ns.saturating_mul(1000_u64.saturating_sub(millis)).saturating_mul(10) / (millis * 7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_lasts_until_it_is_empty_and_the_next_comes_when_it_is_mostly_full() {
        let mut bucket = CapBucket::new(0, 250);
        assert_eq!(bucket.ready_at(250, BURST), 0);
        // 8.75 ms of tokens, lost at 3/4 of the time.
        let end = bucket.empty_at(250).unwrap();
        assert_eq!(end, 11_666_667);
        bucket.pass(end, 250, BURST, end);
        assert!(bucket.empty());
        assert_eq!(bucket.ready_at(250, BURST), end + 35_000_001);
    }

    #[test]
    fn debt_is_paid_to_the_nanosecond() {
        let mut bucket = CapBucket::new(0, 100);
        bucket.pass(100_000_000, 100, BURST, 100_000_000);
        // Began with 3.5 ms, used 100, earned 10: 86.5 short, and 3.5 more to begin again.
        assert_eq!(bucket.ready_at(100, BURST), 100_000_000 + 900_000_000);
    }

    #[test]
    fn a_dozen_of_long_operations_is_paid_for() {
        const SECOND: u64 = 1_000_000_000;
        let mut bucket = CapBucket::new(0, 100);
        bucket.pass(120 * SECOND, 100, BURST, 120 * SECOND);
        assert_eq!(bucket.ready_at(100, BURST), 1_200 * SECOND);
    }

    #[test]
    fn saving_up_ends_at_the_burst() {
        let mut bucket = CapBucket::new(0, 100);
        bucket.pass(3_600_000_000_000, 100, BURST, 0);
        assert_eq!(bucket.empty_at(100), Some(3_600_000_000_000 + 5_555_556));
    }

    #[test]
    fn who_waits_for_others_goes_on_earning_and_who_is_idle_loses_the_surplus() {
        let mut bucket = CapBucket::new(0, 100);
        bucket.wait(100_000_000, 100);
        // 3.5 ms to begin with, and a tenth of 100 ms.
        assert_eq!(bucket.empty_at(100), Some(100_000_000 + 15_000_000));
        bucket.pass(200_000_000, 100, BURST, 0);
        assert_eq!(bucket.empty_at(100), Some(200_000_000 + 15_000_000), "no more, and no less");
        bucket.forget(100, BURST);
        assert_eq!(bucket.empty_at(100), Some(200_000_000 + 5_555_556));
        bucket.wait(3_600_000_000_000, 100);
        assert_eq!(bucket.empty_at(100), Some(3_600_000_000_000 + 1_111_111_112), "bounded");
    }

    #[test]
    fn a_whole_gpu_never_runs_out() {
        assert_eq!(CapBucket::new(0, 1000).empty_at(1000), None);
    }
}
