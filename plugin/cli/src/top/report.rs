//! A [`Model`] as plain text and as JSON. Pure.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::model::Model;
use super::view::{self, Moment};
use tessera_system::terminal::Look;
use tessera_view::API_VERSION;

/// What a pipe gets: wide enough for every column; of a cluster, with nodes.
const WIDTH: u16 = 140;
const WIDTH_OF_CLUSTER: u16 = 170;
/// As wide as it gets.
pub(super) const WIDEST: u16 = 500;

/// The picture without escape sequences, as high as it has to be.
pub(super) fn plain(model: &Model, look: Look, moment: Moment, width: Option<u16>) -> String {
    let usual = if model.is_own() { WIDTH } else { WIDTH_OF_CLUSTER };
    let width = width.unwrap_or(usual).clamp(20, WIDEST);
    let views = model.fleet.nodes.iter().filter_map(|entry| entry.view.as_ref());
    // GPUs take a third at most, so three times what they need is enough for everything.
    let lines = views.map(|view| 3 * view.gpus.len() + view.warnings.len()).sum::<usize>()
        + model.shown().len()
        + model.fleet.nodes.len()
        + 16;
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

/// The fleet as the API has it, with the rates of each tenant that is shown, in the view's order.
pub(super) fn json(model: &Model) -> Value {
    let silent = model
        .silence
        .as_ref()
        .map(|silence| json!({ "since_unix_ms": silence.since_unix_ms, "reason": silence.reason }));
    let mut whole = serde_json::to_value(&model.fleet).unwrap_or_default();
    let shown = model.shown();
    let places: HashMap<(&str, &str), usize> = (shown.iter().enumerate())
        .filter(|(_, row)| row.first)
        .map(|(at, row)| ((row.node.as_str(), row.id.as_str()), at))
        .collect();
    for entry in whole["nodes"].as_array_mut().into_iter().flatten() {
        let node = entry["node"].as_str().unwrap_or_default().to_owned();
        let Some(tenants) = entry["view"]["tenants"].as_array_mut() else { continue };
        let place = |one: &Value| places.get(&(node.as_str(), one["id"].as_str()?)).copied();
        tenants.retain(|one| place(one).is_some());
        tenants.sort_by_key(place);
        for one in tenants {
            let rates = place(one).map(|at| shown[at].rates).unwrap_or_default();
            one["rates"] = json!({
                "waited": rates.waited,
                "refusals_per_second": rates.refusals,
                "driver_refusals_per_second": rates.driver_refusals,
                "launches_per_second": rates.launches,
            });
        }
    }
    whole["api_version"] = API_VERSION.into();
    whole["interval_seconds"] = model.interval.map(|interval| interval.as_secs_f64()).into();
    whole["plugin_silent"] = silent.into();
    whole
}
