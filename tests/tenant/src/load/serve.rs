//! A tenant with requests from outside, or steps of its own that follow each other. Latency counts from the arrival by the tenant's own clock,
//! so that a stall is felt by every request that arrives in it.

use std::time::{Duration, Instant};

use serde_json::json;

use super::work::Work;
use super::{Clock, Options};
use crate::exit::Exit;
use crate::histogram::Histogram;
use crate::report;
use crate::rng::Rng;
use crate::stop::Asked;

/// Serves until asked to stop; a phase ends at SIGUSR1 and at the end, and
/// what was served is reported every second.
pub(super) fn run(work: &Work, options: &Options, clock: Clock) -> Result<(), Exit> {
    let mut rng = Rng::new(0x7e55);
    let mut gap = || {
        let mean = 1.0 / options.rate.unwrap_or(1.0);
        if !options.poisson {
            return Duration::from_secs_f64(mean);
        }
        // Uniform in (0, 1], of 53 random bits.
        #[allow(clippy::cast_precision_loss, reason = "53 bits are exact")]
        let uniform = ((rng.draw() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        Duration::from_secs_f64(-uniform.ln() * mean)
    };
    let (mut latency, mut begun) = (Histogram::default(), Instant::now());
    let (mut second, mut second_begun) = (Histogram::default(), Instant::now());
    let mut arrival = Instant::now();
    loop {
        let asked = clock.asked(arrival.saturating_duration_since(Instant::now()));
        if let Some(asked) = asked {
            say("phase", &latency, begun, work);
            if asked == Asked::Stop {
                return Ok(());
            }
            // What arrived before is not of this phase.
            (latency, begun, arrival) = (Histogram::default(), Instant::now(), Instant::now());
            continue;
        }
        if Instant::now() < arrival {
            continue;
        }
        work.launch_unit()?;
        work.wait()?;
        let took = nanos(arrival.elapsed());
        latency.record(took);
        second.record(took);
        if second_begun.elapsed() >= Duration::from_secs(1) {
            say("progress", &second, second_begun, work);
            (second, second_begun) = (Histogram::default(), Instant::now());
        }
        arrival = if options.closed { Instant::now() } else { arrival + gap() };
    }
}

fn say(event: &str, latency: &Histogram, begun: Instant, work: &Work) {
    let us = |permille| latency.permille(permille) / 1000;
    report::line(
        event,
        json!({
            "seconds": begun.elapsed().as_secs_f64(),
            "requests": latency.count(),
            "work_us": work.unit_ns() / 1000,
            "p50_us": us(500), "p90_us": us(900), "p99_us": us(990),
            "p99_at_least_us": latency.p99_at_least() / 1000,
            "max_us": latency.max() / 1000,
        }),
    );
}

pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
