//! A tenant that leaves its share to others while it is idle, and wants it back at once: how long its first
//! operation takes beyond its own duration is the time to reclaim.

use std::time::{Duration, Instant};

use serde_json::json;

use super::Clock;
use super::serve::nanos;
use super::work::Work;
use crate::exit::Exit;
use crate::histogram::Histogram;
use crate::report;
use crate::rng::Rng;
use crate::stop::Asked;

/// Launches in flight while it is busy.
const DEPTH: usize = 32;

/// Comes and goes until asked to stop.
pub(super) fn run(work: &Work, burst: Duration, pause: Duration, clock: Clock) -> Result<(), Exit> {
    let (mut rng, mut reclaim) = (Rng::new(0x1e4d), Histogram::default());
    let asked_to_stop = |wait| clock.asked(wait) == Some(Asked::Stop);
    loop {
        // From half the mean to half more, so that it meets others at every moment of theirs.
        let idle =
            pause / 2 + pause.mul_f64(f64::from(u32::try_from(rng.below(1000)).unwrap_or(0)) / 1e3);
        let until = Instant::now() + idle;
        while Instant::now() < until {
            if asked_to_stop(until.saturating_duration_since(Instant::now())) {
                report::line(
                    "done",
                    json!({
                        "seconds": clock.seconds(),
                        "reclaims": reclaim.count(),
                        "p50_us": reclaim.permille(500) / 1000,
                        "p90_us": reclaim.permille(900) / 1000,
                        "p99_us": reclaim.permille(990) / 1000,
                        "max_us": reclaim.max() / 1000,
                    }),
                );
                return Ok(());
            }
        }
        let back = Instant::now();
        work.launch_unit()?;
        work.wait()?;
        reclaim.record(nanos(back.elapsed()).saturating_sub(work.unit_ns()));
        while back.elapsed() < burst {
            (0..DEPTH).try_for_each(|_| work.launch())?;
            work.wait()?;
        }
    }
}
