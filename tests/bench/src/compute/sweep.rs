//! What the division costs, and how exact it is, by what events and switches cost: the same two
//! backlogged tenants at 75/25 on machines that differ in nothing else. The shim's markers are events.

use std::time::Duration;

use serde_json::{Value, json};

use super::machine::Costs;
use super::scenario::{self, Place, Seen};
use super::suite::backlog;
use super::tenant::Gate;

/// GPU time of recording an event, nanoseconds.
const EVENTS_NS: [u64; 4] = [0, 500, 2_000, 10_000];
/// GPU time lost at a switch between processes, microseconds.
const SWITCHES_US: [f64; 3] = [0.0, 50.0, 200.0];
/// What each is due.
const DUE: [f64; 2] = [75.0, 25.0];

/// One machine's figures.
struct Row {
    costs: Costs,
    tessera: Seen,
    bare: Seen,
}

/// Looks at each machine for `length`, with Tessera and without.
///
/// # Errors
/// A tenant that does not start.
pub fn run(place: &Place, kernel_us: &str, length: Duration) -> anyhow::Result<(Value, String)> {
    let mut rows = Vec::new();
    for event_ns in EVENTS_NS {
        for switch_us in SWITCHES_US {
            let costs = Costs { event_ns, switch_us, ..place.costs };
            let place = Place { costs, ..place.clone() };
            let tenants = DUE.map(|cores| backlog(cores, kernel_us));
            let look = |gate| scenario::watch(&place, &tenants, gate, length);
            rows.push(Row { costs, tessera: look(Gate::Tessera)?, bare: look(Gate::Bare)? });
        }
    }
    let mut text = String::from(
        "\n| event | switch | off | off, worst 1 s | busy | markers | hand-over p50, p99 | off, without | busy, without |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    rows.iter().for_each(|row| text.push_str(&row.line()));
    let values: Vec<Value> = rows.iter().map(Row::value).collect();
    Ok((json!({ "kernel_us": kernel_us, "due_percent": DUE, "sweep": values }), text))
}

/// Percentage points that the first tenant's part of all work was off, over all of the time.
fn off_pp(seen: &Seen) -> f64 {
    (seen.account.shares()[0] * 100.0 - DUE[0]).abs()
}

/// Percent of the time that work ran.
fn busy(seen: &Seen) -> f64 {
    seen.account.rates().iter().sum::<f64>() * 100.0
}

impl Row {
    fn worst_1s_pp(&self) -> f64 {
        let due = DUE.map(|part| part / 100.0);
        let errors = self.tessera.account.share_errors(&due, Duration::from_secs(1));
        errors.into_iter().fold(0.0, f64::max)
    }

    fn handover_us(&self) -> (f64, f64) {
        let times = self.tessera.account.handover_us();
        times.map_or((0.0, 0.0), |times| (times.median(), times.quantile(0.99)))
    }

    fn line(&self) -> String {
        let (p50, p99) = self.handover_us();
        format!(
            "| {} ns | {} µs | {:.2} pp | {:.2} pp | {:.1} % | {:.2} % | {p50:.0}, {p99:.0} µs | {:.1} pp | {:.1} % |\n",
            self.costs.event_ns,
            self.costs.switch_us,
            off_pp(&self.tessera),
            self.worst_1s_pp(),
            busy(&self.tessera),
            self.tessera.account.marks() * 100.0,
            off_pp(&self.bare),
            busy(&self.bare),
        )
    }

    fn value(&self) -> Value {
        let (p50, p99) = self.handover_us();
        json!({
            "event_ns": self.costs.event_ns,
            "switch_us": self.costs.switch_us,
            "error_pp": off_pp(&self.tessera),
            "error_1s_pp": self.worst_1s_pp(),
            "busy_percent": busy(&self.tessera),
            "marks_percent": self.tessera.account.marks() * 100.0,
            "handover_us": { "p50": p50, "p99": p99 },
            "error_bare_pp": off_pp(&self.bare),
            "busy_bare_percent": busy(&self.bare),
        })
    }
}
