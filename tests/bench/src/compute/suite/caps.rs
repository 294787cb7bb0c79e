//! Strict shares: how much of the cap is used by who wants more.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Gate, Place, Report, Spec, Timeouts, backlog, graphs};
use crate::compute::scenario;

const LENGTH: Duration = Duration::from_millis(10_000);
/// Together they leave room, so that each is held by its own cap alone.
const TOGETHER: [&[f64]; 2] = [&[10.0, 25.0, 50.0], &[75.0]];

/// Measures kernels and graphs.
///
/// # Errors
/// A tenant that does not start.
pub fn run(place: &Place, report: &mut Report, timeouts: &mut Timeouts) -> anyhow::Result<()> {
    let mut detail = Map::new();
    let kernels: fn(f64) -> Spec = |cores| backlog(cores, "200");
    for (key, what, most, load) in [
        ("cap_error_pct", "strict caps, kernels", 1.0, kernels),
        ("cap_error_graph_pct", "strict caps, 8 ms graphs", 2.0, graphs as fn(f64) -> Spec),
    ] {
        crate::note(what);
        let mut worst = 0.0f64;
        let mut caps = Map::new();
        // What one could use without a cap.
        let bare = scenario::watch(place, &[load(100.0)], Gate::Bare, Duration::from_secs(2))?;
        let solo = bare.account.rates()[0];
        for group in TOGETHER {
            let tenants: Vec<Spec> = group.iter().map(|&cores| load(cores).strict()).collect();
            let seen = scenario::watch(place, &tenants, Gate::Tessera, LENGTH)?;
            timeouts.0 += seen.counted.timeouts;
            for (cap, got) in group.iter().zip(seen.account.rates()) {
                let got = got / solo * 100.0;
                let off = (got - cap) / cap * 100.0;
                worst = worst.max(off.abs());
                caps.insert(format!("{cap}"), json!({ "got": got, "error_percent": off }));
            }
        }
        report.figure(key, what, "%", worst, Some(most));
        detail.insert(key.into(), Value::Object(caps));
    }
    report.put("cap_detail", Value::Object(detail));
    Ok(())
}
