//! What an allocated claim comes to on this node. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use tessera_cluster::k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceAllocationResult,
    DeviceRequestAllocationResult as DeviceResult, ResourceClaim,
    ResourceClaimConsumerReference as Consumer,
};
use tessera_cluster::k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;
use tessera_cluster::resource::ClaimRef;
use tessera_kubelet_api::dra::v1::Device;
use tessera_model::allocation_id::AllocationId;
use tessera_model::origin::{ClaimResult, ClaimShare, Origin, base_request};
use tessera_model::printable;
use tessera_model::quantity::Quantity;
use tessera_model::record::{Grant, Record};
use tessera_model::sharing::Compute;
use tessera_rules::allocate::{AdvertisedGpu, Ask, Catalogue};
use tessera_rules::shares::FrontEnd;

use crate::names;

/// Thousandths of a GPU in one unit of the capacity `cores`.
const MILLIS: u64 = 10;
const WHOLE: u64 = 1000;
const LONGEST: usize = 64;

#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    pub pool: &'a str,
    pub catalogue: &'a Catalogue,
    pub records: &'a [Arc<Record>],
    /// DRA is turned on; where it is not, nothing more is prepared.
    pub is_on: bool,
}

/// What has to be there before a claim is prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Its shares, one a request, in the claim's order; those for monitoring have none. What is recorded stays as it
    /// is, with whatever limits it has by now.
    pub asks: Vec<Ask>,
    /// The answer, one a result in the claim's order, and what containers are given with each, which has no names of CDI
    /// devices yet.
    pub devices: Vec<(Device, Gives)>,
    /// Records of this claim that the scheduler's allocation does not have any more.
    pub stale: Vec<AllocationId>,
}

/// What containers are given with a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gives {
    /// The share of this place in [`Decision::asks`]. Only the first device of a request gives it: a request's
    /// devices go to containers together, and a CDI device that is named twice may be applied twice.
    Share(usize),
    /// What the first device of its request gives.
    Nothing,
    /// The sight of a GPU.
    View(String),
}

/// What `claim`, as the API server has it now, comes to.
/// Errors: Names the request and field at fault, and says what to do: the text reaches the pod's events.
pub fn decide(
    asked: &ClaimRef,
    claim: Option<&ResourceClaim>,
    node: Node<'_>,
) -> Result<Decision, String> {
    let claim =
        claim.ok_or("it does not exist any more; the pod that used it can only be deleted")?;
    let found = claim.metadata.uid.as_deref().unwrap_or_default();
    if found != asked.uid {
        return Err(format!(
            "it was deleted and made again: the pod was scheduled with another claim of that name (the UID is {found} \
             now); delete the pod, so that it is scheduled with this one"
        ));
    }
    if claim.metadata.deletion_timestamp.is_some() && reserved_for(claim).is_empty() {
        return Err("it is being deleted and no pod may use it any more; delete the pod".to_owned());
    }
    let allocated = allocated(claim).ok_or(
        "it is not allocated (any more): status.allocation is missing; the pod can run when it is scheduled again",
    )?;
    let results = allocated.results.iter().flatten();
    let ours: Vec<&DeviceResult> =
        results.filter(|result| result.driver == names::DRIVER).collect();
    if ours.is_empty() {
        return Err(format!(
            "its allocation has no device of {}; the pod can run when it is scheduled again",
            names::DRIVER
        ));
    }
    let mut asks: Vec<Ask> = Vec::new();
    let mut current: Vec<AllocationId> = Vec::new();
    let mut devices = Vec::with_capacity(ours.len());
    let mut by_request: BTreeSet<&str> = BTreeSet::new();
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for &result in &ours {
        if result.pool != node.pool {
            return Err(format!(
                "{} is of pool {}, and this node's is {}; the pod runs on another node than its claim was allocated \
                 for: delete the pod",
                named(result),
                result.pool,
                node.pool
            ));
        }
        let gives = if result.admin_access == Some(true) {
            let gpu = find(node, result)?;
            let sight = (result.request.as_str(), gpu.gpu.uuid.as_str());
            if seen.contains(&sight) {
                Gives::Nothing
            } else {
                seen.push(sight);
                Gives::View(gpu.gpu.uuid.clone())
            }
        } else if by_request.contains(result.request.as_str()) {
            Gives::Nothing
        } else {
            let request: Vec<&DeviceResult> = ours
                .iter()
                .copied()
                .filter(|other| other.request == result.request && other.admin_access != Some(true))
                .collect();
            let (id, ask) = share((asked, claim, allocated), &request, node)?;
            current.push(id);
            asks.push(ask);
            by_request.insert(&result.request);
            Gives::Share(asks.len() - 1)
        };
        let device = Device {
            // As a pod names it.
            request_names: vec![base_request(&result.request).to_owned()],
            pool_name: result.pool.clone(),
            device_name: result.device.clone(),
            cdi_device_ids: Vec::new(),
            share_id: result.share_id.clone(),
        };
        devices.push((device, gives));
    }
    let of_it = node.records.iter().filter(|record| uid(record) == Some(asked.uid.as_str()));
    let stale = of_it.map(|record| &record.id).filter(|id| !current.contains(id));
    Ok(Decision { stale: stale.cloned().collect(), asks, devices })
}

/// The share of one request, and its name.
fn share(
    (named, claim, allocated): (&ClaimRef, &ResourceClaim, &DeviceAllocationResult),
    results: &[&DeviceResult],
    node: Node<'_>,
) -> Result<(AllocationId, Ask), String> {
    let request = &results[0].request;
    let share = ClaimShare {
        uid: named.uid.clone(),
        namespace: named.namespace.clone(),
        name: named.name.clone(),
        request: request.clone(),
        pool: node.pool.to_owned(),
        asked: asked(claim, request).map(|(_, capacity)| capacity).unwrap_or_default(),
        results: results
            .iter()
            .map(|result| ClaimResult {
                device: result.device.clone(),
                share_id: result.share_id.clone(),
            })
            .collect(),
    };
    let id = share.allocation_id();
    if node.records.iter().any(|record| record.id == id) {
        return Ok((id.clone(), Ask::Recorded(id)));
    }
    let said = said(allocated.config.as_deref().unwrap_or_default(), request)?;
    let mut grants: Vec<Grant> = Vec::with_capacity(results.len());
    for result in results {
        let gpu = find(node, result)?;
        let (memory_limit_bytes, cores_millis) = limits(result)?;
        grants.push(Grant {
            uuid: gpu.gpu.uuid.clone(),
            memory_limit_bytes,
            context_overhead_bytes: gpu.context_overhead_bytes,
            cores_millis,
            compute: said.effective(claim, result, gpu.default_share.compute)?,
        });
    }
    let origin = Origin::Claim(Box::new(share));
    let record = Record { origin, ..Record::new(id.clone(), 0, grants) };
    Ok((id, Ask::Share(Box::new(record))))
}

fn find<'a>(node: Node<'a>, result: &DeviceResult) -> Result<&'a AdvertisedGpu, String> {
    if !node.is_on {
        // The driver is there for what it has prepared.
        return Err(format!(
            "{}: DRA is turned off on this node (dra.enabled is false); claims that are prepared go on until they end, and \
             no other is prepared. Delete the pod, so that it is scheduled again",
            named(result)
        ));
    }
    let is_it = |sold: &&AdvertisedGpu| {
        sold.seller == FrontEnd::Dra && names::device(&sold.gpu.uuid) == result.device
    };
    node.catalogue.gpus.values().find(is_it).ok_or_else(|| {
        format!(
            "{} is not on this node; was the GPU replaced, or does the configuration give it to the device plugin \
             (dra.gpus)? Delete the pod, so that it is scheduled again",
            named(result)
        )
    })
}

/// Bytes, and thousandths of a GPU's time, from what the scheduler counts: never from what was asked for.
fn limits(result: &DeviceResult) -> Result<(u64, u32), String> {
    let memory = amount(result, names::MEMORY)?;
    let memory_bytes = memory.units().map_err(|why| bad(result, names::MEMORY, &why))?;
    let cores = amount(result, names::CORES)?;
    let thousandths = cores.millis().map_err(|why| bad(result, names::CORES, &why))?;
    // Hundredths of a GPU are the unit, so these are hundred-thousandths.
    let cores_millis = thousandths.div_ceil(1000 / MILLIS);
    if memory_bytes == 0 {
        return Err(bad(result, names::MEMORY, &"a share needs some memory"));
    }
    match u32::try_from(cores_millis) {
        Ok(millis) if (1..=WHOLE).contains(&cores_millis) => Ok((memory_bytes, millis)),
        _ => Err(bad(result, names::CORES, &"a GPU's time is shared in parts of 1 to 100")),
    }
}

fn amount(result: &DeviceResult, name: &str) -> Result<Quantity, String> {
    let value = result.consumed_capacity.as_ref().and_then(|all| all.get(name));
    let value = value.ok_or_else(|| {
        format!(
            "{} was allocated whole: consumedCapacity.{name} is missing, because the cluster does not divide devices: it \
             needs Kubernetes 1.36 (DRAConsumableCapacity); delete the pod, so that it is scheduled again",
            named(result)
        )
    })?;
    Quantity::parse(&value.0).map_err(|why| bad(result, name, &why))
}

fn bad(result: &DeviceResult, name: &str, why: &dyn std::fmt::Display) -> String {
    let value = result.consumed_capacity.as_ref().and_then(|all| all.get(name));
    let value = value.map(|value| value.0.as_str()).unwrap_or_default();
    let value = printable::brief(value, LONGEST);
    format!("{}: consumedCapacity.{name} is \"{value}\": {why}", named(result))
}

/// As an error names it.
fn named(result: &DeviceResult) -> String {
    format!("request {}: device {}", result.request, result.device)
}

/// What was allocated to a claim, of every driver; `None` before the allocation.
pub fn allocated(claim: &ResourceClaim) -> Option<&DeviceAllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref()
}

pub fn reserved_for(claim: &ResourceClaim) -> &[Consumer] {
    let reserved = claim.status.as_ref().and_then(|status| status.reserved_for.as_deref());
    reserved.unwrap_or_default()
}

/// What a claim's author asked for by this request, or by an alternative, `request/alternative`: the DeviceClass, and how
/// much of each capacity, as it was written.
fn asked(claim: &ResourceClaim, request: &str) -> Option<(String, BTreeMap<String, String>)> {
    let (name, alternative) = match request.split_once('/') {
        Some((name, alternative)) => (name, Some(alternative)),
        None => (request, None),
    };
    let mut requests = claim.spec.devices.as_ref()?.requests.iter().flatten();
    let request = requests.find(|one| one.name == name)?;
    let (class, capacity) = match alternative {
        None => {
            let exactly = request.exactly.as_ref()?;
            (&exactly.device_class_name, &exactly.capacity)
        }
        Some(name) => {
            let one = request.first_available.iter().flatten().find(|one| one.name == name)?;
            (&one.device_class_name, &one.capacity)
        }
    };
    let capacity = capacity.iter().flat_map(|capacity| capacity.requests.iter().flatten());
    let written = |(name, Amount(value)): (&String, &Amount)| (name.clone(), value.clone());
    Some((class.clone(), capacity.map(written).collect()))
}

pub fn uid(record: &Record) -> Option<&str> {
    record.origin.claim().map(|claim| claim.uid.as_str())
}

// === The driver's opaque parameters: `gpu.tessera.dev/v1`, kind `ShareConfig` ===

/// Most bytes of what is said of malformed parameters, which quotes them.
const LONGEST_PARAMETERS: usize = 160;

/// What parameters say of a request's share of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Said {
    class: Option<Compute>,
    claim: Option<Compute>,
}

impl Said {
    /// The limit of `result` on a node that says `node` of its GPU. Who grants a limit, by class or node, may loosen it; a
    /// claim's author may only make it stricter.
    /// Errors: The claim is looser than its class, or than the node where its class does not say.
    fn effective(
        self,
        claim: &ResourceClaim,
        result: &DeviceResult,
        node: Compute,
    ) -> Result<Compute, String> {
        let (granted, request) = (self.class.unwrap_or(node), &result.request);
        let Some(looser) = self.claim.filter(|asked| *asked < granted) else {
            return Ok(self.claim.unwrap_or(granted));
        };
        let by = match asked(claim, request) {
            _ if self.class.is_none() => format!(
                "the configuration of node {} (share.compute, or its layout's)",
                result.pool
            ),
            Some((class, _)) => format!("DeviceClass {class}"),
            None => "its DeviceClass".to_owned(),
        };
        Err(format!(
            "request {request}: the claim says compute: {}, and {by} says {}: a claim may be as strict or stricter, never \
             looser; write {} in the claim, or leave compute out",
            looser.into_str(),
            granted.into_str(),
            granted.or_stricter()
        ))
    }
}

/// What parameters say of a request. Of one source, later ones take precedence.
fn said(config: &[DeviceAllocationConfiguration], request: &str) -> Result<Said, String> {
    let mut said = Said::default();
    for (index, config) in config.iter().enumerate() {
        let ours = config.opaque.as_ref().filter(|opaque| opaque.driver == names::DRIVER);
        let Some(opaque) = ours.filter(|_| is_for(config, request)) else { continue };
        let from_class = config.source == "FromClass";
        let read = read(&opaque.parameters.0);
        let read = read.map_err(|why| {
            let of = if from_class { "DeviceClass" } else { "claim" };
            format!("parameters of the {of}, status.allocation.devices.config[{index}].opaque.parameters: {why}")
        })?;
        let of_source = if from_class { &mut said.class } else { &mut said.claim };
        *of_source = read.or(*of_source);
    }
    Ok(said)
}

/// Whether it is for this request, `request` or `request/alternative`: a request's name stands for its alternatives too.
fn is_for(config: &DeviceAllocationConfiguration, request: &str) -> bool {
    let named = config.requests.as_deref().unwrap_or_default();
    named.is_empty() || named.iter().any(|name| name == request || name == base_request(request))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ShareConfig {
    api_version: String,
    kind: String,
    compute: Option<Compute>,
}

fn read(parameters: &Value) -> Result<Option<Compute>, String> {
    let read = ShareConfig::deserialize(parameters);
    let brief = |error: serde_json::Error| {
        printable::brief(&error.to_string(), LONGEST_PARAMETERS).into_owned()
    };
    let ShareConfig { api_version, kind, compute } = read.map_err(brief)?;
    if (api_version.as_str(), kind.as_str()) == (names::PARAMETERS_VERSION, names::PARAMETERS_KIND)
    {
        return Ok(compute);
    }
    let found = format!("{api_version} {kind}");
    Err(format!(
        "{} is not {} {}",
        printable::brief(&found, LONGEST),
        names::PARAMETERS_VERSION,
        names::PARAMETERS_KIND
    ))
}

#[cfg(test)]
mod tests;
