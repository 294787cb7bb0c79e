//! What `tessera config check` shows of GPUs.

use crate::print::table;
use tessera_config::Config;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_rules::shares;

/// What each GPU would be sold as.
pub fn offers(gpus: &[tessera_model::gpu::Gpu], config: &Config) -> String {
    let header = ["GPU", "NAME", "UUID", "RESOURCE", "REPLICAS", "MEMORY", "CORES"];
    let rows = gpus.iter().flat_map(|gpu| {
        shares::cut(gpu, config).into_iter().enumerate().map(|(i, share)| {
            // What belongs to the GPU stands in its first row.
            let once = |text: String| if i == 0 { text } else { String::new() };
            vec![
                once(gpu.index.to_string()),
                once(gpu.name.clone()),
                once(gpu.uuid.clone()),
                share.resource,
                share.count.to_string(),
                format_bytes(share.limit.memory_bytes),
                format!("{} {}", format_cores(share.limit.cores_millis), share.compute.name()),
            ]
        })
    });
    let mut out = String::new();
    table(&mut out, &header, rows.collect());
    out
}
