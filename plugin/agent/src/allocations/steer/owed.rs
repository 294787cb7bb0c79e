//! Limits below what is in use: refused, or forced and owed until the tenant has let go of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use tracing::warn;

use super::{ChangeOptions, SteerError};
use crate::allocations::Allocations;
use crate::allocations::select::describe;
use tessera_model::quantity::{format_bytes, format_compared};
use tessera_model::record::{Grant, Record};
use tessera_store::Change;
use tessera_tenant::regions::Region;

/// Bytes by UUID; see [`tessera_model::steered::Override::owed`].
type Owed = BTreeMap<String, u64>;

impl Allocations {
    /// Frees what allocations have let go of that were forced below their use; true if there is any. Blocking.
    pub(crate) fn settle_owed(&self) -> bool {
        let owes = |record: &Record| record.overridden.as_ref().is_some_and(|o| !o.owed.is_empty());
        if !self.records.lock().values().any(|record| owes(record)) {
            return false;
        }
        let mut writer = self.journal.writer();
        let owing: Vec<Arc<Record>> =
            self.records.lock().values().filter(|record| owes(record)).cloned().collect();
        let mut change = Change::default();
        for record in owing {
            let region = self.pages.get(&record.id);
            // What cannot be read still owes it.
            let Some(region) = region else { continue };
            let used = in_use(&region, record.grants.len());
            let mut owed = BTreeMap::new();
            for (grant, used) in record.grants.iter().zip(used) {
                let over = used.saturating_sub(grant.memory_limit_bytes);
                let left = over.min(record.owed_bytes(&grant.uuid));
                if left > 0 {
                    owed.insert(grant.uuid.clone(), left);
                }
            }
            let settled = record.with_limits(record.grants.clone(), owed);
            if settled != *record {
                change.put.push(settled);
            }
        }
        if change.is_empty() {
            return false;
        }
        if let Err(error) = writer.ledger.commit(&change) {
            // Tried again at the next round.
            warn!(%error, "what was let go of is not sold yet");
            return false;
        }
        self.store(&change);
        true
    }
}

/// Lowers limits in the page and looks whether what is in use fits. What each GPU still owes then, and
/// what is in use.
///
/// Errors: It does not fit and nobody forces it; the page is as before.
pub(super) fn shrink(
    region: Option<&Region>,
    record: &Record,
    grants: &[Grant],
    options: &ChangeOptions,
    notes: &mut Vec<String>,
) -> Result<(Owed, Vec<Option<u64>>), SteerError> {
    let lower: Vec<Grant> = record
        .grants
        .iter()
        .zip(grants)
        .map(|(old, new)| match new.memory_limit_bytes < old.memory_limit_bytes {
            true => Grant { memory_limit_bytes: new.memory_limit_bytes, ..old.clone() },
            false => old.clone(),
        })
        .collect();
    let shrinks = lower != record.grants;
    if let Some(region) = region.filter(|_| shrinks && !options.dry_run) {
        region.set_limits(&lower);
        // Its partner is the fence between a request's charge and its look at the limit.
        fence(Ordering::SeqCst);
    }
    let used = region.map(|region| in_use(region, grants.len()));
    let restore = || {
        if let Some(region) = region.filter(|_| shrinks && !options.dry_run) {
            region.set_limits(&record.grants);
        }
    };
    let mut owed = Owed::new();
    for (i, (old, new)) in record.grants.iter().zip(grants).enumerate() {
        let uuid = &new.uuid;
        let (limit, counted) = (
            new.memory_limit_bytes,
            old.memory_limit_bytes.saturating_add(record.owed_bytes(uuid)),
        );
        if limit >= counted {
            continue;
        }
        // Nobody may be sold what could still be held.
        let used = used.as_ref().map_or(counted, |used| used[i]);
        let over = used.min(counted).saturating_sub(limit);
        if over == 0 {
            continue;
        }
        if limit < old.memory_limit_bytes && !options.force {
            restore();
            let [used, limit] = format_compared(used, limit);
            let uses = match region {
                Some(_) => format!("uses {used} of GPU {uuid}"),
                None => {
                    format!("has pages that cannot be read now, so its use of {uuid} is unknown")
                }
            };
            return Err(SteerError::Refused(format!(
                "{} {uses}, more than {limit}; lower its limit to no less than that, have it let go of \
                 memory, or add --force: then it keeps what it has, and everything new is refused \
                 until it fits",
                describe(record),
            )));
        }
        notes.push(format!(
            "it holds {} more of GPU {uuid} than its limit: that stays its own, and every new request \
             is refused, until it has let go of it",
            format_bytes(over)
        ));
        owed.insert(uuid.clone(), over);
    }
    let in_use = (0..grants.len()).map(|i| used.as_ref().map(|used| used[i])).collect();
    Ok((owed, in_use))
}

/// Bytes charged and observed on each of an allocation's GPUs.
fn in_use(region: &Region, gpus: usize) -> Vec<u64> {
    let snapshot = region.snapshot_active().snapshot;
    (0..gpus).map(|gpu| snapshot.charged(gpu).saturating_add(region.overhead(gpu))).collect()
}
