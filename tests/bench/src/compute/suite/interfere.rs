//! A server of requests, alone and beside a neighbour that never has enough.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Gate, Place, Report, Spec, backlog};
use crate::compute::scenario::Stage;
use crate::stats::Sample;

/// One stretch of serving, alone or not.
const LENGTH: Duration = Duration::from_millis(1500);
/// Rounds; alone and beside alternate, and medians of their percentiles count.
const ROUNDS: usize = 3;

/// Latency of requests in one stretch.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// Median, microseconds.
    pub p50_us: f64,
    /// 99th percentile, microseconds.
    pub p99_us: f64,
}

/// Alone, then beside a neighbour.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Nobody else is there.
    pub alone: Latency,
    /// The neighbour is.
    pub beside: Latency,
}

impl Round {
    /// By how many percent the 99th percentile is higher beside the neighbour.
    pub fn more_percent(&self) -> f64 {
        (self.beside.p99_us / self.alone.p99_us - 1.0) * 100.0
    }

    /// For the summary.
    pub fn value(&self) -> Value {
        let latency = |l: Latency| json!({ "p50_us": l.p50_us, "p99_us": l.p99_us });
        json!({
            "alone": latency(self.alone), "beside": latency(self.beside),
            "p99_more_percent": self.more_percent(),
        })
    }
}

/// Requests of these kernels, Poisson.
pub fn server(cores: f64, request_us: &str, rate: f64) -> Spec {
    let (kernels, rate) = (format!("--kernel-us={request_us}"), format!("--rate={rate}"));
    Spec::new(cores, &[&kernels, &rate, "--poisson"])
}

/// One round.
///
/// # Errors
/// A tenant that does not start.
pub fn round(
    place: &Place,
    server: &Spec,
    neighbour: &Spec,
    gate: Gate,
    length: Duration,
) -> anyhow::Result<Round> {
    let alone = serve(place, std::slice::from_ref(server), gate, length)?;
    let beside = serve(place, &[server.clone(), neighbour.clone()], gate, length)?;
    Ok(Round { alone, beside })
}

/// What the first of `tenants` says of its requests.
fn serve(place: &Place, tenants: &[Spec], gate: Gate, length: Duration) -> anyhow::Result<Latency> {
    let mut stage = Stage::set(place, tenants, gate)?;
    let server = &mut stage.tenants[0];
    // What was served while others started is not looked at.
    server.signal(libc::SIGUSR1);
    server.hear("phase", 1)?;
    server.forget();
    std::thread::sleep(length);
    server.signal(libc::SIGUSR1);
    let phase = server.hear("phase", 1)?.remove(0);
    let field = |name: &str| phase[name].as_f64().unwrap_or(f64::NAN);
    anyhow::ensure!(field("requests") > 0.0, "no request was served");
    Ok(Latency { p50_us: field("p50_us"), p99_us: field("p99_us") })
}

/// Half of a request's kernels each, 40 requests of 2 ms in a second: 8 % of the GPU.
///
/// # Errors
/// A tenant that does not start.
pub fn run(place: &Place, report: &mut Report) -> anyhow::Result<()> {
    let mut detail = Map::new();
    for (key, what, cores, gate) in [
        ("bare", "interference, bare", 50.0, Gate::Bare),
        ("50_50", "a server's p99 beside a backlog, 50/50", 50.0, Gate::Tessera),
        ("80_20", "· 80/20", 80.0, Gate::Tessera),
    ] {
        crate::note(what);
        let server = server(cores, "500,500,500,500", 40.0);
        let neighbour = backlog(100.0 - cores, "200");
        let rounds = (0..ROUNDS)
            .map(|_| round(place, &server, &neighbour, gate, LENGTH))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let median =
            |of: &dyn Fn(&Round) -> f64| Sample::new(rounds.iter().map(of).collect()).median();
        let latency = |of: &dyn Fn(&Round) -> Latency| Latency {
            p50_us: median(&|r| of(r).p50_us),
            p99_us: median(&|r| of(r).p99_us),
        };
        let whole = Round { alone: latency(&|r| r.alone), beside: latency(&|r| r.beside) };
        detail.insert(key.into(), whole.value());
        let more = whole.more_percent();
        match key {
            "50_50" => report.figure("interference_p99_pct", what, "% more", more, None),
            "80_20" => report.figure("interference_p99_80_pct", what, "% more", more, Some(10.0)),
            _ => report.figure(
                "interference_p99_bare_pct",
                "· without Tessera",
                "% more",
                more,
                None,
            ),
        }
    }
    report.put("interference_detail", Value::Object(detail));
    Ok(())
}
