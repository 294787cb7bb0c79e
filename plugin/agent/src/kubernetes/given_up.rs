//! Events that were given up, said at intervals: a container decides how many there are. Pure.

use std::time::{Duration, Instant};

/// Least time between two lines of the log.
const INTERVAL: Duration = Duration::from_secs(300);

/// Those that no line of the log has counted yet, and when the last line was.
#[derive(Debug, Default)]
pub(super) struct GivenUp {
    unsaid: u64,
    said: Option<Instant>,
}

impl GivenUp {
    /// Counts more of them; gives how many to say now, if there is something to say and it is time.
    pub fn add(&mut self, events: u64, now: Instant) -> Option<u64> {
        self.unsaid = self.unsaid.saturating_add(events);
        let is_time = self.said.is_none_or(|said| now.duration_since(said) >= INTERVAL);
        if self.unsaid == 0 || !is_time {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line_each_interval_and_every_event_is_counted_once() {
        let (mut given_up, begun) = (GivenUp::default(), Instant::now());
        assert_eq!(given_up.add(0, begun), None);
        let mut said = Vec::new();
        for second in 0..=900 {
            said.extend(given_up.add(7, begun + Duration::from_secs(second)));
        }
        assert_eq!(said, [7, 2100, 2100, 2100]);
        assert_eq!(said.iter().sum::<u64>(), 7 * 901);
    }
}
