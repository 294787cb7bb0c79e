//! The plugin's process under what a node does to it over the months: the wall clock jumps, the API server is
//! away or slow, quotas are changed while pods come and go, it is killed. Nothing is lost, and its memory
//! stays what it was. The long form is in `make bench` (`docs/benchmarks.md`).

#[path = "../metrics/client.rs"]
#[allow(dead_code, reason = "not everything is used here")]
mod client;
#[path = "../metrics/exposition.rs"]
#[allow(dead_code, reason = "not everything is used here")]
mod exposition;
#[path = "../node_support/mod.rs"]
mod node_support;
#[path = "../process_support/mod.rs"]
mod process_support;
#[path = "../arbiter/support.rs"]
#[allow(dead_code, reason = "not everything is used here")]
mod support;

mod api;
mod clock;
mod flat;
mod plugin;
mod quotas;
mod world;
