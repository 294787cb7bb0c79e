//! The kinds of load: see [`super`].

use std::time::{Duration, Instant};

use serde_json::json;

use super::{Clock, Options, Work};
use crate::exit::Exit;
use crate::histogram::Histogram;
use crate::memory::linear;
use crate::report;
use crate::rng::Rng;
use crate::stop::Asked;

/// Launches between two looks whether to stop.
const LOOK_EVERY: u64 = 16;

/// A tenant that always has more to do: launches until asked to stop. What is queued then is left behind, as by a killed program.
pub(super) fn backlog(work: &Work, options: &Options, clock: Clock) -> Result<(), Exit> {
    let (mut launched, mut is_shallow, mut stuck) = (0u64, true, options.stuck);
    let copied = vec![1; options.copy];
    let room = if copied.is_empty() { 0 } else { linear::plain(&work.cuda, copied.len())? };
    loop {
        if launched.is_multiple_of(LOOK_EVERY) && clock.asked(Duration::ZERO) == Some(Asked::Stop) {
            report::line("done", json!({ "seconds": clock.seconds(), "launched": launched }));
            return Ok(());
        }
        is_shallow = is_shallow && clock.start.elapsed() < options.shallow;
        work.launch()?;
        launched += 1;
        let is_due = options.sync_every > 0 && launched.is_multiple_of(options.sync_every);
        if stuck.is_some_and(|after| clock.start.elapsed() >= after) {
            stuck = None;
            is_shallow = false;
            work.cuda.wait_for_ever(work.stream)?;
        }
        if let Some((ms, every)) = options.host
            && launched.is_multiple_of(every)
        {
            work.cuda.sleep_on_host(ms, work.stream)?;
        }
        if is_due && !copied.is_empty() {
            linear::write(&work.cuda, room, &copied)?;
        }
        if is_due || is_shallow {
            work.wait()?;
        }
    }
}

/// Launches in flight while it is busy.
const DEPTH: usize = 32;

/// A tenant that leaves its share to others while it is idle, and wants it back at once: how long its first operation
/// takes beyond its own duration is the time to took. Comes and goes until asked to stop.
pub(super) fn reclaim(
    work: &Work,
    burst: Duration,
    pause: Duration,
    clock: Clock,
) -> Result<(), Exit> {
    let (mut rng, mut took) = (Rng::new(0x1e4d), Histogram::default());
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
                        "reclaims": took.count(),
                        "p50_us": took.permille(500) / 1000,
                        "p90_us": took.permille(900) / 1000,
                        "p99_us": took.permille(990) / 1000,
                        "max_us": took.max() / 1000,
                    }),
                );
                return Ok(());
            }
        }
        let back = Instant::now();
        work.launch_unit()?;
        work.wait()?;
        took.record(nanos(back.elapsed()).saturating_sub(work.unit_ns()));
        while back.elapsed() < burst {
            (0..DEPTH).try_for_each(|_| work.launch())?;
            work.wait()?;
        }
    }
}

/// A tenant with requests from outside, or steps of its own that follow each other. Latency counts from the arrival by
/// the tenant's own clock, so that a stall is felt by every request that arrives in it. Serves until asked to stop; a phase ends at SIGUSR1 and at the end, and
/// what was served is reported every second.
pub(super) fn serve(work: &Work, options: &Options, clock: Clock) -> Result<(), Exit> {
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

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
