//! How much of the time the GPU works for two tenants, beside what it does without Tessera.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Gate, Place, Report, Spec, backlog};
use crate::compute::scenario;
use crate::stats::Sample;

const LENGTH: Duration = Duration::from_secs(4);
const ROUNDS: usize = 3;

/// What is measured: key, name, the least, who.
pub fn cases() -> Vec<(&'static str, &'static str, f64, Vec<Spec>)> {
    let copies = || Spec::new(50.0, &["--kernel-us=1000", "--sync-every=10", "--copy-mib=16"]);
    let periodic = Spec::new(50.0, &["--rate=333", "--kernel-us=200"]);
    let many = Spec { processes: 16, ..backlog(50.0, "200") };
    vec![
        (
            "periodic_busy_ratio",
            "busy, to bare: one short and periodic",
            0.93,
            vec![periodic, backlog(50.0, "200")],
        ),
        ("copy_busy_ratio", "busy, to bare: two that copy", 0.93, vec![copies(), copies()]),
        (
            "processes_busy_ratio",
            "busy, to bare: 16 processes and one",
            0.95,
            vec![many, backlog(50.0, "200")],
        ),
    ]
}

/// Measures it.
///
/// # Errors
/// A tenant that does not start.
pub fn run(place: &Place, report: &mut Report) -> anyhow::Result<()> {
    let mut detail = Map::new();
    for (key, what, least, tenants) in cases() {
        crate::note(what);
        let mut ratios = Vec::new();
        let mut rows = Vec::new();
        for _ in 0..ROUNDS {
            let bare = scenario::watch(place, &tenants, Gate::Bare, LENGTH / 2)?.account;
            let seen = scenario::watch(place, &tenants, Gate::Tessera, LENGTH)?.account;
            let busy = |rates: &[f64]| rates.iter().sum::<f64>();
            ratios.push(busy(&seen.rates()) / busy(&bare.rates()));
            rows.push(json!({ "rates": seen.rates(), "bare_rates": bare.rates() }));
        }
        report.at_least(key, what, "", Sample::new(ratios).median(), Some(least));
        detail.insert(key.into(), Value::Array(rows));
    }
    report.put("busy_detail", Value::Object(detail));
    Ok(())
}
