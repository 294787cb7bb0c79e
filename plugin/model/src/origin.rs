//! The front end that made an allocation.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::allocation_id::AllocationId;
use crate::quantity::{format_bytes, parse_bytes};
use strum::IntoStaticStr;

/// The front end that asked for an allocation, and what it calls it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum Origin {
    /// The device plugin: kubelet assigned replicas of a resource.
    #[default]
    DevicePlugin,
    /// Dynamic Resource Allocation: the scheduler allocated a request of a claim.
    Claim(Box<ClaimShare>),
    Run,
}

impl Origin {
    /// The claim's share, where a claim asked.
    pub fn claim(&self) -> Option<&ClaimShare> {
        match self {
            Origin::Claim(share) => Some(share),
            Origin::DevicePlugin | Origin::Run => None,
        }
    }

    /// Whether the device plugin asked, as for every record that says nothing else.
    pub fn is_device_plugin(&self) -> bool {
        *self == Origin::DevicePlugin
    }
}

/// What the scheduler allocated for one request of a resource claim. The request is what containers name, so all
/// of its results are one tenant's (`resource.k8s.io/v1`, `DeviceRequestAllocationResult`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimShare {
    /// The claim's UID. A claim that is made again has another.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// The request, with the alternative that was chosen: `gpu`, or `gpu/small`.
    pub request: String,
    pub pool: String,
    /// The results, in the claim's order.
    pub results: Vec<ClaimResult>,
    /// What the request asked for of each device, by capacity, in the claim's words; empty where it stated nothing.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub asked: BTreeMap<String, String>,
}

/// One device of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimResult {
    pub device: String,
    /// The share's id, which the scheduler draws for each allocation of a device that is shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
}

impl ClaimShare {
    /// The allocation's name: the same for every Prepare of the same results, another once the scheduler has
    /// allocated again.
    pub fn allocation_id(&self) -> AllocationId {
        // No resource has a name with a colon, so no replicas have this id.
        let scope = format!("claim:{}", self.uid);
        let result = |result: &ClaimResult| {
            let share = result.share_id.as_deref().unwrap_or_default();
            format!("{}/{}/{}/{share}", self.request, self.pool, result.device)
        };
        let results: Vec<String> = self.results.iter().map(result).collect();
        AllocationId::of(&scope, results.iter().map(String::as_str))
    }

    /// What the request asked for, as a sentence has it: `6 GiB of memory and 30 % of the time`, or that it stated
    /// no size. What is no quantity stays as it is.
    pub fn asked_text(&self) -> String {
        let bytes = |text: &String| parse_bytes(text).map_or_else(|_| text.clone(), format_bytes);
        match (self.asked.get("memory").map(bytes), self.asked.get("cores")) {
            (None, None) => "no particular size".to_owned(),
            (Some(memory), None) => format!("{memory} of memory"),
            (None, Some(cores)) => format!("{cores} % of the time"),
            (Some(memory), Some(cores)) => format!("{memory} of memory and {cores} % of the time"),
        }
    }
}

/// A request as a pod names it: without the alternative that was chosen.
pub fn base_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

impl std::fmt::Display for ClaimShare {
    /// As a person would call it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "claim {}/{} (request {})", self.namespace, self.name, self.request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(uid: &str, request: &str, results: &[(&str, Option<&str>)]) -> ClaimShare {
        let result = |(device, share): &(&str, Option<&str>)| ClaimResult {
            device: (*device).to_owned(),
            share_id: share.map(str::to_owned),
        };
        ClaimShare {
            uid: uid.to_owned(),
            namespace: "default".to_owned(),
            name: "chat".to_owned(),
            request: request.to_owned(),
            pool: "node".to_owned(),
            results: results.iter().map(result).collect(),
            asked: BTreeMap::new(),
        }
    }

    #[test]
    fn the_same_results_have_the_same_name_and_others_another() {
        let one = share("u", "gpu", &[("a", Some("1"))]);
        let same = ClaimShare { name: "renamed".into(), ..one.clone() };
        assert_eq!(one.allocation_id(), same.allocation_id());
        for other in [
            share("v", "gpu", &[("a", Some("1"))]),
            share("u", "b", &[("a", Some("1"))]),
            share("u", "gpu", &[("b", Some("1"))]),
            share("u", "gpu", &[("a", Some("2"))]),
            share("u", "gpu", &[("a", None)]),
            share("u", "gpu", &[("a", Some("1")), ("a", Some("2"))]),
        ] {
            assert_ne!(one.allocation_id(), other.allocation_id(), "{other:?}");
        }
    }

    #[test]
    fn what_was_asked_for_reads_as_amounts_do_elsewhere() {
        for (memory, text) in [
            ("4294967296", "4 GiB of memory"),
            ("6Gi", "6 GiB of memory"),
            ("1500Mi", "1.4 GiB of memory"),
            ("?", "? of memory"),
        ] {
            let asked = [("memory".to_owned(), memory.to_owned())].into();
            assert_eq!(ClaimShare { asked, ..share("u", "gpu", &[]) }.asked_text(), text);
        }
    }

    #[test]
    fn a_pod_names_the_request_without_the_alternative() {
        assert_eq!(base_request("gpu/small"), "gpu");
        assert_eq!(base_request("gpu"), "gpu");
    }
}
