//! The shim in processes on the simulated driver.

mod api;
mod clients;
mod gate;
mod host;
mod memory;
mod processes;
