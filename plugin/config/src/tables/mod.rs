//! The declarations of all keys; [`super::table`] says what follows from one.

mod advice;
mod api;
mod compute;
mod delivery;
mod dra;
mod health;
mod history;
mod host;
mod layout;
mod sharing;

use super::parse::Checks;
use super::{Amount, Config};

pub use advice::Advice;
pub use api::Api;
pub use compute::Leases;
pub use delivery::{CONTAINER_DRIVER_DIR, Cdi, Container, Driver, Mount};
pub use dra::Dra;
pub use health::Health;
pub use history::History;
pub use host::{Kubernetes, Labels, Ledger, Log, Metrics, Pages, Paths};
pub use layout::{Layout, LayoutShare};
pub use sharing::{Gpus, Resource, Share};

pub(super) use api::check_api;
pub(super) use dra::check_step;
pub(super) use layout::{EXAMPLE, check_terms};

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
        if let Some(message) = sharing::too_little(bytes, &config.gpus)
            && checks.are_sound(&[&key, "gpus.context_overhead"])
        {
            checks.problem(&key, &message);
        }
    }
}
