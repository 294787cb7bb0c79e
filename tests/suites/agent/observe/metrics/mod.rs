//! Metrics and probes of a running plugin, over HTTP as Prometheus and kubelet ask: what is served, what is
//! said, what it costs, and that everything that is written about it names what there is.

mod autoscale;
mod names;
mod probes;
mod series;
