//! Figures against their goals, for people and for machines. The summary's `rows` are the table; of them
//! `tests/bench/figures` makes the tables of `docs/benchmarks.md` and `README.md`.

use serde_json::{Map, Value, json};

use crate::stats::{Pair, Sample};

#[derive(Clone, Debug)]
struct Row {
    key: String,
    what: &'static str,
    measured: String,
    bare: String,
    target: String,
    reached: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
    summary: Map<String, Value>,
}

impl Report {
    /// Adds hooked − bare, with what it must not exceed.
    pub fn pair(&mut self, key: &str, what: &'static str, unit: &str, pair: &Pair, most: f64) {
        let overhead = pair.overhead();
        self.add(Row {
            key: key.to_owned(),
            what,
            measured: format!(
                "{} {unit} ±{}",
                short(overhead),
                short(pair.difference.spread() / 2.0)
            ),
            bare: format!("{} {unit}", short(pair.bare.median())),
            target: target(most, unit),
            reached: overhead <= most,
        });
        self.put(key, json!(round(overhead)));
        self.put(
            &format!("{key}_detail"),
            json!({
                "bare_median": round(pair.bare.median()),
                "hooked_median": round(pair.hooked.median()),
                "difference_median": round(pair.difference.median()),
                // Where other work disturbs the machine, the undisturbed rounds are the lower ones.
                "lower_quartile_overhead": round(
                    pair.hooked.quantile(0.25) - pair.bare.quantile(0.25),
                ),
                "difference_quartiles": [
                    round(pair.difference.quantile(0.25)),
                    round(pair.difference.quantile(0.75)),
                ],
                "rounds": pair.difference.len(),
            }),
        );
    }

    /// Adds a figure that must not exceed `most`.
    pub fn figure(&mut self, key: &str, what: &'static str, unit: &str, value: f64, most: f64) {
        let measured = format!("{} {unit}", short(value));
        self.plain(key, what, measured, target(most, unit), value <= most);
        self.put(key, json!(round(value)));
    }

    /// Adds a median in milliseconds; the summary has the other quantiles.
    pub fn median(&mut self, key: &str, what: &'static str, sample: &Sample, most: f64) {
        self.figure(key, what, "ms", sample.median(), most);
        self.detail(&format!("{key}_detail"), sample);
    }

    /// Adds a 99th percentile in milliseconds; the summary has the other quantiles.
    pub fn p99(&mut self, key: &str, what: &'static str, sample: &Sample, most: f64) {
        self.figure(key, what, "ms", sample.quantile(0.99), most);
        self.detail(&format!("{key}_detail"), sample);
    }

    /// Adds a figure that must not be below `least`.
    pub fn at_least(&mut self, key: &str, what: &'static str, unit: &str, value: f64, least: f64) {
        // Ratios near 1: three digits would hide what is missing.
        let measured = format!("{value:.4} {unit}");
        self.plain(key, what, measured, format!("≥ {least} {unit}"), value >= least);
        self.put(key, json!((value * 1e5).round() / 1e5));
    }

    fn plain(
        &mut self,
        key: &str,
        what: &'static str,
        measured: String,
        target: String,
        reached: bool,
    ) {
        let key = key.to_owned();
        self.add(Row { key, what, measured, bare: String::new(), target, reached });
    }

    /// Adds quantiles to the summary only.
    pub fn detail(&mut self, key: &str, sample: &Sample) {
        self.put(
            key,
            json!({
                "p50": round(sample.median()),
                "p90": round(sample.quantile(0.9)),
                "p99": round(sample.quantile(0.99)),
                "max": round(sample.max()),
                "samples": sample.len(),
            }),
        );
    }

    /// Adds anything to the summary only.
    pub fn put(&mut self, key: &str, value: Value) {
        self.summary.insert(key.to_owned(), value);
    }

    /// The summary, with the table's rows under `rows`.
    pub fn summary(&self) -> Value {
        let row = |row: &Row| {
            json!({
                "key": row.key,
                "what": row.what,
                "measured": row.measured.trim(),
                "bare": row.bare,
                "goal": row.target.trim(),
                "met": row.reached,
            })
        };
        let mut summary = self.summary.clone();
        summary.insert("rows".into(), self.rows.iter().map(row).collect());
        Value::Object(summary)
    }

    /// Adds a row, and prints it for people.
    fn add(&mut self, row: Row) {
        let Row { what, measured, target, .. } = &row;
        let measured = match row.bare.as_str() {
            "" => measured.clone(),
            bare => format!("{measured}, bare {bare}"),
        };
        let verdict = if row.reached { "reached" } else { "missed" };
        println!("{what:<68} {measured:<32} {target:<14} {verdict}");
        self.rows.push(row);
    }
}

fn target(most: f64, unit: &str) -> String {
    format!("≤ {} {unit}", short(most))
}

/// Three significant digits or so.
fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || v == 0.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_target_is_said_to_be_missed() {
        let mut report = Report::default();
        let pair = Pair::new(vec![100.0, 100.0], vec![108.0, 110.0]);
        report.pair("x_ns", "a call", "ns", &pair, 8.0);
        report.figure("y", "a figure", "ms", 1.0, 2.0);
        report.at_least("r", "a ratio", "", 0.9899, 0.99);
        assert_eq!(report.summary()["x_ns"], 9.0);
        assert_eq!(report.summary()["x_ns_detail"]["bare_median"], 100.0);
        let rows = &report.summary()["rows"];
        assert_eq!(rows[0]["key"], "x_ns");
        assert_eq!([0_usize, 1, 2].map(|at| rows[at]["met"] == true), [false, true, false]);
        assert_eq!(rows[1]["measured"], "1.00 ms");
    }
}
