//! Sentences of an explanation that name others, made of the fields that stand apart.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tessera_model::audit::{Event, What};
use tessera_model::time_format;

use super::{Limit, Stand};
use crate::narrow::Rights;
use crate::status::GpuState;

/// In place of an operator's name.
pub(crate) const OPERATOR: &str = "an operator";
/// Originators that name nobody.
const PARTS: [&str; 5] = ["kubelet", "configuration", "plugin", "driver", "container"];

/// An allocation that had what another waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Behind {
    /// Its id; empty where the reader may not see it.
    pub allocation_id: String,
    /// Its pod's namespace; empty where kubelet has not named the pod, or the reader may not see it.
    pub namespace: String,
    /// Its pod, likewise.
    pub pod: String,
}

impl Behind {
    pub(super) fn name(&self) -> String {
        match (self.pod.as_str(), self.allocation_id.as_str()) {
            ("", "") => "another pod".to_owned(),
            ("", id) => id.to_owned(),
            (pod, _) => format!("{}/{pod}", self.namespace),
        }
    }

    pub(crate) fn narrowed(self, rights: &Rights) -> Self {
        if rights.may_see(&self.namespace) { self } else { Behind::default() }
    }
}

/// A reason, and who had the GPU meanwhile.
pub(crate) fn because(reason: &str, behind: Option<&Behind>) -> String {
    match behind {
        Some(other) if reason.is_empty() => format!("{} had the lease", other.name()),
        Some(other) => format!("{reason}; {} had the lease", other.name()),
        None => reason.to_owned(),
    }
}

/// An originator, without a name where that is an operator's.
pub(crate) fn originator(by: &str) -> &str {
    if by.is_empty() || PARTS.contains(&by) { by } else { OPERATOR }
}

impl Limit {
    /// Where limits come from that somebody set.
    pub fn set(at_unix_ms: i64, by: &str) -> String {
        format!("set {} by {by}", time_format::utc(at_unix_ms))
    }
}

impl Stand {
    /// In a sentence.
    pub fn sentence(&self) -> String {
        if !self.missing.is_empty() {
            return format!("{}: {}", self.gpu_uuid, self.missing);
        }
        let numa = match self.numa_node {
            Some(node) => format!("NUMA node {node}"),
            None => "NUMA node unknown".to_owned(),
        };
        let health = match (self.cordon.as_str(), self.withheld.as_str()) {
            ("", "") if self.state_reason.is_empty() => self.state.name().to_owned(),
            ("", "") => format!("{} ({})", self.state.name(), self.state_reason),
            ("", withheld) => format!("not given out ({withheld})"),
            (cordon, _) => cordon.to_owned(),
        };
        format!(
            "GPU {} ({}): {}, {numa}, PCI {}, {health}; {}",
            self.index, self.gpu_uuid, self.name, self.pci_bus_id, self.free
        )
    }

    /// What is wrong with it, and what to do; `None` where nothing is.
    pub(super) fn trouble(&self) -> Option<String> {
        let gpu = format!("GPU {}", self.index);
        if !self.missing.is_empty() || self.state == GpuState::Healthy {
            return None;
        }
        let what = What::Health { from: GpuState::Suspect, to: self.state };
        let because = if self.state_reason.is_empty() { "" } else { ": " };
        let advice = Event::of_node(what, 0).advice();
        let text =
            format!("{gpu} is {}{because}{}. {advice}", self.state.name(), self.state_reason);
        Some(text.trim_end_matches([' ', '.']).to_owned())
    }
}
