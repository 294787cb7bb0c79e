//! What can be said without the plugin: the pages as they are, and a copy of the ledger, which knows the pods.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::UNIX_EPOCH;

use tessera_kubelet_api::admin::{
    Allocation, AllocationState, ComputePolicy, GpuUse, Process, StatusResponse,
};
use tessera_region::abi;
use tessera_region::quota::{self, Policy};
use tessera_region::usage::UsageFile;

use crate::admin::{allocated, allocation};
use tessera_config::Config;
use tessera_model::clock::unix_ms;
use tessera_model::record::Record;
use tessera_model::steered::Cordon;
use tessera_store::{Filter, Ledger, Lines};
use tessera_system::files::{self, Copied, CopyError};
use tessera_tenant::regions::{self, Use};

/// What goes on while there is no plugin.
pub(crate) const WHAT_HOLDS: &str =
    "running pods keep their limits, and new ones wait for the plugin";

/// What a ledger says.
#[derive(Debug, Default)]
pub(crate) struct Books {
    /// Allocations.
    pub records: Vec<Record>,
    /// The audit trail, oldest line first.
    pub trail: Lines,
    /// Cordons by UUID, and of the node.
    pub cordons: BTreeMap<String, Cordon>,
}

/// Pods with their limits, as `tessera status` has them: by the pages, with the names that the ledger knows. No
/// GPUs, and of GPU time nothing. What could not be read is among the warnings.
pub fn status(config: &Config) -> StatusResponse {
    let mut warnings = Vec::new();
    let books = match books(&config.paths.ledger) {
        Ok(books) => books,
        // Nothing was ever recorded.
        Err(_) if matches!(config.paths.ledger.try_exists(), Ok(false)) => Books::default(),
        Err(why) => {
            warnings.push(format!("{why}: pods are not known by name"));
            Books::default()
        }
    };
    let mut allocations = by_pages(config);
    for record in &books.records {
        let id = record.id.to_string();
        let named = allocation(record, None, &Use::default());
        match allocations.iter_mut().find(|paged| paged.id == id) {
            Some(paged) => {
                for (gpu, used) in paged.gpus.iter_mut().enumerate() {
                    used.allocated = allocated(record, gpu);
                    used.memory_owed_bytes = record.owed_bytes(&used.gpu_uuid);
                }
                let paged_now = std::mem::take(paged);
                *paged = Allocation {
                    gpus: paged_now.gpus,
                    processes: paged_now.processes,
                    refusals: paged_now.refusals,
                    pages_dir: paged_now.pages_dir,
                    ..named
                };
            }
            None if record.is_live() => allocations.push(named),
            None => {}
        }
    }
    for (uuid, cordon) in &books.cordons {
        warnings.push(match uuid.as_str() {
            Cordon::NODE => format!("the node is {cordon}"),
            uuid => format!("{uuid} is {cordon}"),
        });
    }
    StatusResponse { allocations, warnings, at_unix_ms: unix_ms(), ..StatusResponse::default() }
}

/// When the ledger was last written, Unix milliseconds: a sign of life of the plugin.
pub(crate) fn last_write(config: &Config) -> Option<i64> {
    let changed = std::fs::metadata(&config.paths.ledger).and_then(|meta| meta.modified()).ok()?;
    i64::try_from(changed.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()
}

/// What the pages say by themselves: no pods, no replica ids, no GPUs.
pub(crate) fn by_pages(config: &Config) -> Vec<Allocation> {
    let root = &config.paths.pages;
    let mut allocations = Vec::new();
    for id in regions::existing(root) {
        let Some(spec) = regions::read_spec(root, &id) else { continue };
        let dir = regions::dir(root, &id);
        let abi = quota::abi_in(&dir).unwrap_or_else(abi::version);
        let usage = UsageFile::open_as(&dir, abi).ok();
        let snapshot = usage.and_then(|usage| usage.snapshot().ok()).unwrap_or_default();
        let gpus = spec.gpus.iter().enumerate().map(|(gpu, quota)| GpuUse {
            gpu_uuid: quota.uuid.clone(),
            memory_limit_bytes: quota.memory_limit_bytes,
            memory_charged_bytes: snapshot.charged(gpu),
            memory_granted_bytes: snapshot.granted(gpu),
            memory_peak_bytes: snapshot.slots.iter().map(|s| s.peak[gpu]).max().unwrap_or(0),
            memory_overhead_bytes: regions::read_overhead(root, &id, gpu),
            memory_nvml_bytes: None,
            context_overhead_bytes: quota.context_overhead_bytes,
            cores_millis: quota.cores_millis,
            policy: match quota.policy {
                Policy::Burst => ComputePolicy::Burst,
                Policy::Strict => ComputePolicy::Strict,
                Policy::None => ComputePolicy::None,
            }
            .into(),
            ..GpuUse::default()
        });
        let process = |slot: &tessera_region::usage::SlotView| Process {
            container_pid: slot.pid_hint,
            slot: u32::try_from(slot.index).unwrap_or(u32::MAX),
            memory_charged_bytes: slot.charged.iter().fold(0, |a, b| a.saturating_add(*b)),
            ..Process::default()
        };
        allocations.push(Allocation {
            id: id.to_string(),
            state: AllocationState::Unspecified.into(),
            generation: spec.generation,
            gpus: gpus.collect(),
            processes: snapshot.slots.iter().map(process).collect(),
            refusals: snapshot.slots.iter().fold(0, |a, slot| a.saturating_add(slot.refusals)),
            pages_dir: dir.display().to_string(),
            ..Allocation::default()
        });
    }
    allocations
}

/// The ledger's records, of a copy: a plugin that was killed leaves a ledger that must be repaired first.
///
/// # Errors
/// Why not, in words that name the ledger.
pub fn records(path: &Path) -> Result<Vec<Record>, String> {
    books(path).map(|books| books.records)
}

/// Reads a copy of the ledger.
///
/// # Errors
/// Why not, in words.
pub(crate) fn books(path: &Path) -> Result<Books, String> {
    let failed = |error: &dyn std::fmt::Display| {
        format!("the ledger {} cannot be read ({error})", path.display())
    };
    let copied = Copied::of(path, files::LEDGER).map_err(|error| match error {
        CopyError::InUse => format!(
            "the ledger {} is in use by a plugin that does not answer on this socket (does --config name the \
             plugin's configuration?)",
            path.display()
        ),
        error => failed(&error),
    })?;
    let (mut ledger, _) = Ledger::open(&copied.path(), false).map_err(|error| failed(&error))?;
    let (records, _, _) = ledger.load().map_err(|error| failed(&error))?;
    let trail = ledger.lines(&Filter::all()).map_err(|error| failed(&error))?;
    let cordons = ledger.cordons().map_err(|error| failed(&error))?;
    Ok(Books { records, trail, cordons })
}
