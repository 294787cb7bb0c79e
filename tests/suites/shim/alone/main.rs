//! Tests of the shim that flood the machine, measure it, or stop threads anywhere: one at a time.

mod deaths;
mod gate_tied;
mod loaded;
mod starved;
mod storms;
