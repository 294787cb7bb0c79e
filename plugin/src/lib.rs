//! Tessera's device plugin: advertises each GPU as replicas with quotas, hands allocations their
//! pages, and keeps the record.
//!
//! Pure decisions (`replica`, `shares`, `capacity`, `allocate`, `preferred`, `doubles`, `reconcile`,
//! `device::health`)
//! are kept apart from what does I/O (`ledger`, `regions`, `session`, `device::nvml`), and [`app`]
//! wires them. `docs/plugin.md` tells the life of an allocation.
#![forbid(unsafe_code)]

pub mod admin;
pub mod allocate;
pub mod app;
pub mod arbiter;
pub mod capacity;
pub mod cli;
pub mod coexist;
pub mod config;
pub mod delivery;
pub mod demo;
mod descriptors;
pub mod device;
pub mod doubles;
pub mod explain;
pub mod files;
pub mod grpc;
pub mod incidents;
pub mod kubelet;
pub mod kubernetes;
pub mod labels;
pub mod ledger;
mod locks;
mod look;
pub mod metrics;
pub mod node;
pub mod observe;
pub mod panics;
pub mod placed;
pub mod preferred;
pub mod printable;
pub mod reconcile;
pub mod regions;
pub mod reload;
pub mod replica;
pub mod run;
pub mod session;
pub mod shares;
pub mod shim_install;
pub mod standin;
pub mod top;
pub mod trust;
mod waiting;
pub mod when;
