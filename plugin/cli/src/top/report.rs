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

/// All of it without escape sequences, as high as it has to be.
pub(super) fn plain(model: &Model, look: Look, moment: Moment, width: Option<u16>) -> String {
    let usual = if model.is_own() { WIDTH } else { WIDTH_OF_CLUSTER };
    let width = width.unwrap_or(usual).clamp(20, WIDEST);
    let look = Look { colour: false, ..look };
    let lines = view::draw(model, look, moment, (width, u16::MAX));
    format!("{}\n", lines.join("\n").trim_end())
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
        .filter(|(_, row)| row.is_first)
        .map(|(at, row)| ((row.node, row.tenant.id.as_str()), at))
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
