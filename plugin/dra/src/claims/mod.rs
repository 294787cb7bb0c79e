//! What an allocated claim comes to on this node. Pure.

mod capacity;
mod fault;
mod parameters;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_cluster::resource::{Claim, ClaimRef, DeviceResult};
use tessera_model::allocation_id::AllocationId;
use tessera_model::origin::{ClaimResult, ClaimShare, Origin, base_request};
use tessera_model::record::Record;
use tessera_rules::ask::{ShareAsk, SharePart};

use crate::door::DraGpu;
use crate::names;
pub use fault::{ClaimError, Fault};

/// What is known of the node.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// The name of its pool.
    pub pool: &'a str,
    /// GPUs that this front end sells.
    pub gpus: &'a [DraGpu],
    /// Live records of claims.
    pub records: &'a [Arc<Record>],
    /// DRA is turned on; where it is not, nothing more is prepared.
    pub is_on: bool,
}

/// What has to be there before a claim is prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// One a request, in the claim's order; those for monitoring have none.
    pub shares: Vec<Share>,
    /// One a result, in the claim's order.
    pub devices: Vec<Device>,
    /// Records of this claim that the scheduler's allocation does not have any more.
    pub stale: Vec<AllocationId>,
}

/// The share that a request's tenant has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Share {
    /// It is recorded: it stays as it is, with whatever limits it has by now.
    Recorded(Arc<Record>),
    /// It is not.
    New(ShareAsk),
}

/// A device of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The request as a pod names it.
    pub request: String,
    pub pool: String,
    pub device: String,
    pub share_id: Option<String>,
    /// What its containers are given with it.
    pub gives: Gives,
}

/// What containers are given with a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gives {
    /// The share of this place in [`Decision::shares`]. Only the first device of a request gives it: a request's
    /// devices go to containers together, and a CDI device that is named twice may be applied twice.
    Share(usize),
    /// What the first device of its request gives.
    Nothing,
    /// The sight of a GPU.
    View(String),
}

/// What `claim`, as the API server has it now, comes to.
///
/// # Errors
/// [`ClaimError`] names the claim, and the request and field at fault.
pub fn decide(
    asked: &ClaimRef,
    claim: Option<&Claim>,
    node: Node<'_>,
) -> Result<Decision, ClaimError> {
    let error = |fault| ClaimError { claim: asked.clone(), fault: Box::new(fault) };
    let claim = claim.ok_or_else(|| error(Fault::Gone))?;
    if claim.uid != asked.uid {
        return Err(error(Fault::MadeAgain { found: claim.uid.clone() }));
    }
    if claim.deleting && claim.reserved_for.is_empty() {
        return Err(error(Fault::Deleting));
    }
    let allocated = claim.allocated.as_ref().ok_or_else(|| error(Fault::NotAllocated))?;
    let ours: Vec<&DeviceResult> =
        allocated.iter().filter(|result| result.driver == names::DRIVER).collect();
    if ours.is_empty() {
        return Err(error(Fault::NothingOfOurs));
    }
    decide_results(claim, &ours, node).map_err(error)
}

fn decide_results(
    claim: &Claim,
    ours: &[&DeviceResult],
    node: Node<'_>,
) -> Result<Decision, Fault> {
    let mut shares: Vec<Share> = Vec::new();
    let mut devices = Vec::with_capacity(ours.len());
    let mut by_request: BTreeMap<&str, usize> = BTreeMap::new();
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for &result in ours {
        if result.pool != node.pool {
            return Err(Fault::OtherPool { result: result.into(), own: node.pool.to_owned() });
        }
        let gives = if result.admin_access {
            let gpu = find(node, result)?;
            let sight = (result.request.as_str(), gpu.gpu.uuid.as_str());
            if seen.contains(&sight) {
                Gives::Nothing
            } else {
                seen.push(sight);
                Gives::View(gpu.gpu.uuid.clone())
            }
        } else if by_request.contains_key(result.request.as_str()) {
            Gives::Nothing
        } else {
            let request: Vec<&DeviceResult> = ours
                .iter()
                .copied()
                .filter(|other| other.request == result.request && !other.admin_access)
                .collect();
            shares.push(share(claim, &request, node)?);
            by_request.insert(&result.request, shares.len() - 1);
            Gives::Share(shares.len() - 1)
        };
        devices.push(Device {
            request: base_request(&result.request).to_owned(),
            pool: result.pool.clone(),
            device: result.device.clone(),
            share_id: result.share_id.clone(),
            gives,
        });
    }
    let current: Vec<&AllocationId> = shares.iter().map(Share::id).collect();
    let of_it = node.records.iter().filter(|record| uid(record) == Some(claim.uid.as_str()));
    let stale = of_it.map(|record| &record.id).filter(|id| !current.contains(id));
    Ok(Decision { stale: stale.cloned().collect(), shares, devices })
}

/// The share of one request.
fn share(claim: &Claim, results: &[&DeviceResult], node: Node<'_>) -> Result<Share, Fault> {
    let request = &results[0].request;
    let share = ClaimShare {
        uid: claim.uid.clone(),
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        request: request.clone(),
        pool: node.pool.to_owned(),
        asked: claim
            .asked
            .iter()
            .find(|asked| asked.request == *request)
            .map(|asked| asked.capacity.clone())
            .unwrap_or_default(),
        results: results
            .iter()
            .map(|result| ClaimResult {
                device: result.device.clone(),
                share_id: result.share_id.clone(),
            })
            .collect(),
    };
    let id = share.allocation_id();
    if let Some(record) = node.records.iter().find(|record| record.id == id) {
        return Ok(Share::Recorded(Arc::clone(record)));
    }
    let said = parameters::compute(&claim.config, request)?;
    let mut parts: Vec<SharePart> = Vec::with_capacity(results.len());
    for result in results {
        let gpu = find(node, result)?;
        let limits = capacity::limits(result)?;
        parts.push(SharePart {
            uuid: gpu.gpu.uuid.clone(),
            memory_bytes: limits.memory_bytes,
            cores_millis: limits.cores_millis,
            compute: said
                .effective(gpu.default_compute)
                .map_err(|looser| Fault::looser(claim, result, looser))?,
        });
    }
    Ok(Share::New(ShareAsk { id, origin: Origin::Claim(Box::new(share)), parts }))
}

fn find<'a>(node: Node<'a>, result: &DeviceResult) -> Result<&'a DraGpu, Fault> {
    if !node.is_on {
        return Err(Fault::TurnedOff { result: result.into() });
    }
    let is_it = |gpu: &&DraGpu| names::device(&gpu.gpu.uuid) == result.device;
    node.gpus.iter().find(is_it).ok_or_else(|| Fault::UnknownDevice { result: result.into() })
}

impl Share {
    /// The allocation's name.
    pub fn id(&self) -> &AllocationId {
        match self {
            Share::Recorded(record) => &record.id,
            Share::New(ask) => &ask.id,
        }
    }
}

/// The UID of the claim that a record is of.
pub fn uid(record: &Record) -> Option<&str> {
    record.origin.claim().map(|claim| claim.uid.as_str())
}
