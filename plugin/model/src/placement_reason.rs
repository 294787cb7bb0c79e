//! Why an allocation lies where it does: what was preferred when kubelet asked, and what it then took.
//! Pure; remembered from GetPreferredAllocation until the Allocate that follows it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::counted::plural;
use crate::percent::format_cores;
use crate::quantity::format_bytes;
use crate::replica::Replica;
use crate::sharing::{Placement, Split};

/// Longest reason, bytes: it stands in every record.
const REASON_KEPT: usize = 512;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementReason {
    /// The replicas that were preferred; empty where kubelet did not ask.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub preferred: Vec<String>,
    pub reason: String,
}

impl PlacementReason {
    /// What was preferred of what kubelet could give, and why. `tell` says how a GPU stood.
    pub fn by_preference(
        available: &[String],
        preferred: &[String],
        (placement, split): (Placement, Split),
        tell: &dyn Fn(&str) -> String,
    ) -> Self {
        let mut free: BTreeMap<&str, usize> = BTreeMap::new();
        for (uuid, _) in available.iter().filter_map(|id| Replica::split(id)) {
            *free.entry(uuid).or_default() += 1;
        }
        let mut chosen: Vec<&str> =
            preferred.iter().filter_map(|id| Some(Replica::split(id)?.0)).collect();
        chosen.sort_unstable();
        chosen.dedup();
        let rule = match (split, placement) {
            (Split::Distinct, _) => "distinct: each of another GPU",
            (_, Placement::Packed) => "packed: the fullest GPU with room, so that others stay free",
            (_, Placement::Distributed) => {
                "distributed: the emptiest GPU, so that neighbours are few"
            }
        };
        let each = chosen.iter().map(|uuid| {
            let free = free.get(uuid).copied().unwrap_or(0);
            format!("{uuid} had {free} free{}", tell(uuid))
        });
        let mut reason = format!(
            "of {} on {} ({rule}): {}",
            plural(available.len(), "free replica"),
            plural(free.len(), "GPU"),
            each.collect::<Vec<_>>().join("; ")
        );
        if reason.len() > REASON_KEPT {
            let end = (0..=REASON_KEPT).rev().find(|at| reason.is_char_boundary(*at));
            reason.truncate(end.unwrap_or(0));
        }
        let mut preferred = preferred.to_vec();
        preferred.sort_unstable();
        PlacementReason { preferred, reason }
    }

    /// Of an Allocate that followed no preference.
    pub fn unasked() -> Self {
        let reason = "kubelet did not ask which replicas are preferred".to_owned();
        PlacementReason { preferred: Vec::new(), reason }
    }

    /// Whether kubelet took just what was preferred.
    pub fn is_followed(&self, replicas: &[String]) -> bool {
        !self.preferred.is_empty() && self.preferred == replicas
    }

    pub fn sentence(&self, replicas: &[String]) -> String {
        match (self.preferred.is_empty(), self.is_followed(replicas)) {
            (true, _) => self.reason.clone(),
            (_, true) => format!("as preferred {}", self.reason),
            (_, false) => {
                format!(
                    "kubelet took others than {}, preferred {}",
                    self.preferred.join(","),
                    self.reason
                )
            }
        }
    }
}

impl PlacementReason {
    /// What the audit trail says of an Allocate: replicas, why these, and limits.
    pub fn of_allocation(&self, replicas: &[String], grants: &[crate::record::Grant]) -> String {
        let limits = grants.iter().map(|grant| {
            let memory = format_bytes(grant.memory_limit_bytes);
            format!("{memory} and {} of {}", format_cores(grant.cores_millis), grant.uuid)
        });
        let limits: Vec<String> = limits.collect();
        let (names, why) = (replicas.join(", "), self.sentence(replicas));
        format!("{names} with {}, {why}", limits.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn it_says_what_was_free_and_what_kubelet_took() {
        let available = ids(&["GPU-a::0", "GPU-a::1", "GPU-b::3"]);
        let tell =
            |uuid: &str| if uuid == "GPU-b" { ", NUMA node 1".to_owned() } else { String::new() };
        let chosen = ids(&["GPU-b::3"]);
        let placed = PlacementReason::by_preference(
            &available,
            &chosen,
            (Placement::Packed, Split::Spread),
            &tell,
        );
        assert_eq!(
            placed.sentence(&chosen),
            "as preferred of 3 free replicas on 2 GPUs (packed: the fullest GPU with room, so that others \
             stay free): GPU-b had 1 free, NUMA node 1"
        );
        let others = placed.sentence(&ids(&["GPU-a::0"]));
        assert!(
            others.starts_with("kubelet took others than GPU-b::3, preferred of 3"),
            "{others}"
        );
        assert!(PlacementReason::unasked().sentence(&chosen).contains("did not ask"));
    }

    #[test]
    fn it_stays_short() {
        let many: Vec<String> =
            (0..16).map(|n| format!("GPU-{}ä::0", "x".repeat(40 + n))).collect();
        let placed = PlacementReason::by_preference(
            &many,
            &many,
            (Placement::Distributed, Split::Spread),
            &|_| String::new(),
        );
        assert!(placed.reason.len() <= REASON_KEPT);
    }
}
