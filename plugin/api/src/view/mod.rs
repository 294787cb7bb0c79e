//! `status` as the view that the command line, the JSON API, metrics and the page share.
//!
//! - [`node`]: pure, from what `status` says
//! - [`NodeSource`]: answers the JSON API's questions about this node
//! - [`Past`]: what the history answers, where one is kept

mod gpu;
mod past;
mod source;
mod tenant;
mod trace;

use tessera_view::API_VERSION;
use tessera_view::node::{Node, Plugin};
use tessera_view::status::Status;

pub use past::Past;
pub use source::NodeSource;

/// The node, as `status` has it. `amiss` is what keeps it from offering everything, a sentence each.
pub fn node(name: &str, status: &Status, amiss: Vec<String>) -> Node {
    Node {
        api_version: API_VERSION.to_owned(),
        node: name.to_owned(),
        at_unix_ms: status.at_unix_ms,
        plugin: plugin(status, amiss),
        gpus: status.gpus.iter().map(gpu::view).collect(),
        tenants: status.allocations.iter().map(tenant::view).collect(),
        others: Vec::new(),
        hidden_tenants: 0,
        warnings: status.warning_details.clone(),
    }
}

fn plugin(status: &Status, amiss: Vec<String>) -> Plugin {
    let plugin = &status.plugin;
    let errors = plugin.configuration.as_ref().map(|one| one.errors.join("; "));
    Plugin {
        version: plugin.version.clone(),
        started_unix_ms: plugin.started_unix_ms,
        registration: plugin.registration.name().to_owned(),
        ready: amiss.is_empty(),
        amiss,
        resources: plugin.resources.iter().map(|resource| resource.name.clone()).collect(),
        dra_driver: plugin.dra.as_ref().map(|dra| dra.driver.clone()).unwrap_or_default(),
        config_error: errors.unwrap_or_default(),
    }
}
