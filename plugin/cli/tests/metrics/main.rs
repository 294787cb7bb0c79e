//! Metrics and probes of a running plugin, over HTTP as Prometheus and kubelet ask: what is served, what is
//! said, what it costs, and that everything that is written about it names what there is.

#[path = "../node_support/mod.rs"]
mod node_support;

mod client;
mod exposition;
mod load;
mod names;
mod probes;
mod series;

/// See [`node_support::tenant_process`].
#[test]
fn tenant_process() {
    node_support::tenant_process();
}
