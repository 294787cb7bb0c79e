//! The declarations of all keys; [`super::table`] says what follows from one.

mod node;
mod rules;
mod shares;

pub use node::{
    Api, CONTAINER_DRIVER_DIR, Cdi, Container, Driver, Kubernetes, Labels, Ledger, Log, Metrics,
    Mount, Pages, Paths,
};
pub use rules::{Advice, Health, History, Leases};
pub use shares::{Dra, Gpus, Layout, LayoutShare, Resource, Share};

#[cfg(test)]
pub(super) use shares::EXAMPLE;
