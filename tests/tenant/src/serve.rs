//! Requests, as `infer` and `load` serve them: they arrive whether or not the last one is done (an open loop), or follow
//! each other. Latency counts from the arrival by the tenant's own clock, so that a stall is felt by every request that
//! arrives in it, and a stalled neighbour's harm is not hidden by requests that were never sent.

use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::json;

use crate::exit::Exit;
use crate::histogram::Histogram;
use crate::report;
use crate::stop::{self, Asked};

/// When requests come.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// So many a second, exponentially distributed or evenly.
    Arriving { rate: f64, poisson: bool },
    /// Each after the last and a pause of half as much to one and a half.
    Following { pause: Duration },
}

impl Pace {
    fn next(self, arrival: Instant, rng: &mut Rng) -> Instant {
        // In (0, 1].
        let uniform = 1.0 - rng.f64();
        match self {
            Self::Arriving { rate, poisson: true } => {
                arrival + Duration::from_secs_f64(-uniform.ln() / rate)
            }
            Self::Arriving { rate, .. } => arrival + Duration::from_secs_f64(1.0 / rate),
            Self::Following { pause } => Instant::now() + pause.mul_f64(0.5 + uniform),
        }
    }
}

/// What happened in one stretch of time.
#[derive(Default)]
pub struct Window {
    latency: Histogram,
    pub out_of_memory: u64,
    pub errors: u64,
    pub corrupted: u64,
    pub verified_bytes: u64,
}

impl Window {
    fn absorb(&mut self, other: &Self) {
        self.latency.merge(&other.latency);
        self.out_of_memory += other.out_of_memory;
        self.errors += other.errors;
        self.corrupted += other.corrupted;
        self.verified_bytes += other.verified_bytes;
    }

    fn report(&self, event: &str, begun: Instant, held: u64) {
        let us = |permille| self.latency.permille(permille) / 1000;
        report::line(
            event,
            json!({
                "seconds": (begun.elapsed().as_secs_f64() * 1000.0).round() / 1000.0,
                "requests": self.latency.count(),
                "p50_us": us(500), "p90_us": us(900), "p99_us": us(990),
                "p99_at_least_us": self.latency.p99_at_least() / 1000,
                "max_us": self.latency.max() / 1000,
                "out_of_memory": self.out_of_memory,
                "errors": self.errors,
                "corrupted": self.corrupted,
                "verified_bytes": self.verified_bytes,
                "held": held,
            }),
        );
    }
}

/// Serves for `limit`, or until asked to stop; a phase ends at SIGUSR1 and at the end, and what was served is reported
/// every second, too. `request` is given the request's number, and notes what it finds; all that happened.
pub fn serve(
    pace: Pace,
    limit: Duration,
    held: u64,
    mut request: impl FnMut(u64, &mut Window) -> Result<(), Exit>,
) -> Result<Window, Exit> {
    let (mut rng, start) = (Rng::with_seed(0x7e55), Instant::now());
    let [mut second, mut phase, mut whole] = [(); 3].map(|()| Window::default());
    let [mut second_begun, mut phase_begun, mut arrival] = [start; 3];
    let mut number = 0;
    loop {
        let asked = match start.elapsed() >= limit {
            true => Some(Asked::Stop),
            false => stop::wait(arrival.saturating_duration_since(Instant::now())),
        };
        if asked.is_some() || second_begun.elapsed() >= Duration::from_secs(1) {
            phase.absorb(&second);
            whole.absorb(&second);
            second.report("progress", second_begun, held);
            (second, second_begun) = (Window::default(), Instant::now());
        }
        if let Some(asked) = asked {
            phase.report("phase", phase_begun, held);
            if asked == Asked::Stop {
                whole.report("done", start, held);
                return Ok(whole);
            }
            // What arrived before is not of the next phase.
            (phase, phase_begun, arrival) = (Window::default(), Instant::now(), Instant::now());
            continue;
        }
        if Instant::now() < arrival {
            continue;
        }
        request(number, &mut second)?;
        second.latency.record(u64::try_from(arrival.elapsed().as_nanos()).unwrap_or(u64::MAX));
        number += 1;
        arrival = pace.next(arrival, &mut rng);
    }
}
