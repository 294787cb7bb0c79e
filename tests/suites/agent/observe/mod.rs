//! What the plugin sees of GPUs and tenants, and what it says about them.

mod advice;
mod agree;
mod api;
mod explain;
mod health;
mod history;
mod metrics;
mod others;
mod overhead;
mod silent_gpus;
mod trust;
mod used;
