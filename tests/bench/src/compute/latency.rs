//! How long a tenant waits beside a neighbour that never has enough: a server of requests for its operations, and
//! one that comes and goes for its share.

use std::time::Duration;

use serde_json::json;

use super::scenario::Stage;
use super::{Artefacts, Gate, Report, Spec, backlog};
use crate::stats::Sample;

/// One stretch of serving, alone or not.
const SERVED: Duration = Duration::from_millis(1500);
/// Rounds; alone and beside alternate, and medians of their percentiles count.
const ROUNDS: usize = 3;
/// How long the one that comes and goes is looked at.
const BURSTS: Duration = Duration::from_secs(10);

/// The 99th percentile of a server's requests, half of a request's kernels each, 40 Poisson requests of 2 ms in a
/// second: 8 % of the GPU.
///
/// # Errors
/// A tenant that does not start.
pub fn interfere(artefacts: &Artefacts, report: &mut Report) -> anyhow::Result<()> {
    let what = "a server's p99 beside a backlog, 80/20";
    crate::note(what);
    let server = Spec::new(80.0, &["--kernel-us=500,500,500,500", "--rate=40", "--poisson"]);
    let tenants = [server, backlog(20.0, "200")];
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(serve(artefacts, &tenants[..1])?);
        beside.push(serve(artefacts, &tenants)?);
    }
    let (alone, beside) = (Sample::new(alone).median(), Sample::new(beside).median());
    let more = (beside / alone - 1.0) * 100.0;
    report.figure("interference_p99_80_pct", what, "% more", more, 10.0);
    report.put("interference_detail", json!({ "alone_us": alone, "beside_us": beside }));
    Ok(())
}

/// The 99th percentile that the first of `tenants` says of its requests, microseconds.
fn serve(artefacts: &Artefacts, tenants: &[Spec]) -> anyhow::Result<f64> {
    let mut stage = Stage::set(artefacts, tenants, Gate::Tessera)?;
    let server = &mut stage.tenants[0];
    // What was served while others started is not looked at.
    server.signal(libc::SIGUSR1);
    server.hear("phase", 1)?;
    server.forget();
    std::thread::sleep(SERVED);
    server.signal(libc::SIGUSR1);
    let phase = server.hear("phase", 1)?.remove(0);
    let field = |name: &str| phase[name].as_f64().unwrap_or(f64::NAN);
    anyhow::ensure!(field("requests") > 0.0, "no request was served");
    Ok(field("p99_us"))
}

/// How much later than alone the first operation of a burst begins: kernels of 200 µs for 10 ms, then nothing for
/// about 40.
///
/// # Errors
/// A tenant that does not start.
pub fn reclaim(artefacts: &Artefacts, report: &mut Report) -> anyhow::Result<()> {
    crate::note("reclaim");
    let bursty = Spec::new(50.0, &["--kernel-us=200", "--burst-ms=10", "--pause-ms=40"]);
    let mut stage = Stage::set(artefacts, &[bursty, backlog(50.0, "200")], Gate::Tessera)?;
    std::thread::sleep(BURSTS);
    stage.tenants[0].signal(libc::SIGTERM);
    let seen = stage.tenants[0].hear("done", 1)?.remove(0);
    let window = tessera_config::Leases::default().window_time;
    // The window, the longest operation, and 100 µs.
    let most = f64::from(u32::try_from(window.as_micros())?) + 200.0 + 100.0;
    let p99 = seen["p99_us"].as_f64().unwrap_or(f64::NAN);
    report.figure("reclaim_p99_us", "a bursty tenant gets the GPU back, p99", "µs", p99, most);
    report.put("reclaim_detail", seen);
    Ok(())
}
