//! The declarations of all keys; [`super::table`] says what follows from one.

mod node;
mod rules;
mod shares;

use super::parse::Checks;
use super::{Amount, Config};

pub use node::{
    Api, CONTAINER_DRIVER_DIR, Cdi, Container, Driver, Kubernetes, Labels, Ledger, Log, Metrics,
    Mount, Pages, Paths,
};
pub use rules::{Advice, Health, History, Leases};
pub use shares::{Dra, Gpus, Layout, LayoutShare, Resource, Share};

pub(super) use node::check_api;
#[cfg(test)]
pub(super) use shares::EXAMPLE;
pub(super) use shares::{check_step, check_terms};

/// What must hold between memory and what a context takes, whatever GPUs there are.
pub(super) fn check_memory(config: &Config, checks: &mut Checks<'_>) {
    let share = config.share.memory_bytes.map(|bytes| ("share.memory".to_owned(), bytes));
    let layouts = config.layouts.iter().enumerate().flat_map(|(i, layout)| {
        let shares = layout.shares.iter().enumerate();
        shares.filter_map(move |(j, share)| match share.memory {
            Amount::Exact(bytes) => Some((format!("layout[{i}].shares[{j}].memory"), bytes)),
            Amount::Auto | Amount::Percent(_) => None,
        })
    });
    for (key, bytes) in share.into_iter().chain(layouts) {
        if let Some(message) = shares::too_little(bytes, &config.gpus)
            && checks.are_sound(&[&key, "gpus.context_overhead"])
        {
            checks.problem(&key, &message);
        }
    }
}
