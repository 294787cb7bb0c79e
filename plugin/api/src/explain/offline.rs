//! What can be explained without the plugin: the pages as they are, and a copy of the ledger.

use std::sync::Arc;

use super::Facts;
use crate::offline;
use tessera_config::Config;
use tessera_kubelet_api::admin::StatusResponse;
use tessera_model::clock::unix_ms;
use tessera_tenant::regions;

/// As much as there is; `silence`: why the plugin does not answer, and what to do.
pub(super) fn facts(config: &Config, silence: &str) -> Facts {
    let mut remarks = vec![format!(
        "{silence}. This is read from the ledger and the pages; GPUs and GPU time are unknown; {}",
        offline::WHAT_HOLDS
    )];
    let books = match offline::books(&config.paths.ledger) {
        Ok(books) => books,
        Err(error) => {
            remarks.push(format!("{error}: there is no history"));
            Default::default()
        }
    };
    let allocations = offline::by_pages(config);
    let versions = regions::existing(&config.paths.pages).into_iter().filter_map(|id| {
        let dir = regions::dir(&config.paths.pages, &id);
        Some((id.to_string(), tessera_region::quota::abi_in(&dir)?))
    });
    Facts {
        page_versions: versions.collect(),
        status: StatusResponse { allocations, at_unix_ms: unix_ms(), ..StatusResponse::default() },
        records: books.records.into_iter().map(Arc::new).collect(),
        trail: books.trail,
        config: Arc::new(config.clone()),
        gpus: Vec::new(),
        remarks,
        alone: true,
    }
}
