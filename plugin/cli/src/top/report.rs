//! A [`Model`] as plain text and as JSON. Pure.

use serde_json::{Value, json};

use super::model::Model;
use super::view::{self, Moment};
use tessera_system::terminal::Look;
use tessera_view::API_VERSION;
use tessera_view::status::Status;

/// What a pipe gets: wide enough for every column.
const WIDTH: u16 = 140;

/// The picture without escape sequences, as high as it has to be.
pub(super) fn plain(model: &Model, look: Look, moment: Moment, width: Option<u16>) -> String {
    let width = width.unwrap_or(WIDTH).clamp(20, 500);
    let status = &model.status;
    // GPUs take a third at most, so three times what they need is enough for everything.
    let lines = 3 * status.gpus.len() + model.shown().len() + status.warnings.len() + 16;
    let height = u16::try_from(lines).unwrap_or(u16::MAX);
    let lines: Vec<String> = view::draw(model, look, moment, (width, height)).text().collect();
    let mut out = String::new();
    // The gap above the warnings is one line here.
    for line in lines.chunk_by(|a, b| a.is_empty() && b.is_empty()) {
        out.push_str(&line[0]);
        out.push('\n');
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

/// What `tessera status -o json` says, with the rates of each allocation, in the view's order.
pub(super) fn json(model: &Model) -> Value {
    let silent = model
        .silence
        .as_ref()
        .map(|silence| json!({ "since_unix_ms": silence.since_unix_ms, "reason": silence.reason }));
    let status = Status { api_version: API_VERSION.to_owned(), ..model.status.clone() };
    let mut whole = serde_json::to_value(&status).unwrap_or_default();
    let shown: Vec<&str> =
        model.shown().iter().filter(|row| row.first).map(|row| row.id.as_str()).collect();
    if let Some(allocations) = whole["allocations"].as_array_mut() {
        let place = |value: &Value| shown.iter().position(|id| value["id"] == *id);
        allocations.retain(|value| place(value).is_some());
        allocations.sort_by_key(place);
        for value in allocations {
            let rates = model.rates(value["id"].as_str().unwrap_or_default());
            value["rates"] = json!({
                "waited": rates.waited,
                "refusals_per_second": rates.refusals,
                "driver_refusals_per_second": rates.driver_refusals,
                "launches_per_second": rates.launches,
            });
        }
    }
    whole["interval_seconds"] = model.interval.map(|interval| interval.as_secs_f64()).into();
    whole["plugin_silent"] = silent.into();
    whole
}
