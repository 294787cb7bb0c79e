//! What could be asked instead, and what is paid for and not used.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tessera_model::printable;

/// What advice or waste is asked of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Only this namespace; empty for all.
    pub namespace: String,
    /// Only this pod, of advice its workload, as `pod` or `namespace/pod`; empty for all.
    pub pod: String,
    /// The window's beginning, Unix milliseconds: earlier buckets are not looked at. 0 for as early as there is.
    pub since_unix_ms: i64,
}

impl Scope {
    pub fn wants_namespace(&self, namespace: &str) -> bool {
        self.namespace.is_empty() || self.namespace == namespace
    }

    pub fn wants_pod(&self, namespace: &str, pod: &str) -> bool {
        match self.pod.split_once('/') {
            Some((of, name)) => of == namespace && name == pod,
            None => self.pod.is_empty() || self.pod == pod,
        }
    }
}

/// Advice for workloads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Recommendations {
    pub api_version: String,
    pub at_unix_ms: i64,
    /// What it was judged by; absent where nodes of a fleet differ.
    pub settings: Option<Settings>,
    /// One for each workload and container.
    pub workloads: Vec<Recommendation>,
    pub remarks: Vec<String>,
}

/// What advice is judged by: percentiles and margins of the table `[advice]`, percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Which part of the observed time the advised memory covers.
    pub memory_percentile: u32,
    /// What is added to that.
    pub memory_margin: u32,
    /// Which part of the observed time the advised share covers.
    pub cores_percentile: u32,
    /// What is added to that.
    pub cores_margin: u32,
}

/// Advice for one container of a workload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Recommendation {
    pub namespace: String,
    pub workload: String,
    pub container: String,
    /// Which of the container's allocations: `request NAME` of a claim, `resource NAME`, or `allocation ID`. Empty where
    /// it has one.
    pub part: String,
    /// Pods that were looked at, as `pod` names.
    pub pods: Vec<String>,
    pub memory_limit_bytes: u64,
    pub memory_bytes: u64,
    pub cores_millis: u32,
    pub recommended_cores_millis: u32,
    /// `low`, `medium` or `high`.
    pub confidence: String,
    /// Seconds that were observed, over all pods.
    pub observed_seconds: f64,
    pub since_unix_ms: i64,
    /// Why, a sentence each, with the figures.
    pub evidence: Vec<String>,
    /// Bytes that would be free, over all live pods; negative where more is needed.
    pub saves_memory_bytes: i64,
    /// Thousandths of GPUs that would be free; negative where more is needed.
    pub saves_cores_millis: i64,
    /// The exact change: commands or lines of a manifest, the least effort first. Empty where nothing should change.
    pub changes: Vec<Change>,
}

/// A command, or a line of a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Change {
    /// As a shell or a manifest takes it where it was asked for.
    pub text: String,
    /// What `text` is written from.
    pub what: What,
}

/// What is to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// The quota of an allocation that lives, until it ends.
    Quota {
        /// `namespace/pod`, or the beginning of an allocation's id.
        of: String,
        /// Empty for all of the pod's, and beside an id.
        container: String,
        memory_bytes: Option<u64>,
        cores_millis: Option<u32>,
    },
    /// The same of so many more of its pods.
    More(u64),
    /// What a request of its claim asks for.
    Capacity { request: String, memory_bytes: u64, cores_millis: Option<u32> },
    /// The container's limits in the pod's template.
    Limits { container: String, ask: Ask, now: Option<Ask> },
}

/// So many of a resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ask {
    pub resource: String,
    pub count: u64,
}

impl Change {
    /// Written for those that call the program `program`, such as `kubectl tessera`.
    pub fn written(what: What, program: &str) -> Self {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let line = match &what {
            What::Quota { of, container, memory_bytes, cores_millis } => {
                let mut line = format!("{program} quota set {}", quoted(of));
                if !container.is_empty() {
                    line += &format!(" --container {}", quoted(container));
                }
                if let Some(bytes) = memory_bytes {
                    line += &format!(" --memory {}MiB", mib(*bytes));
                }
                match cores_millis.map(|millis| (millis / 10, millis % 10)) {
                    None => {}
                    Some((whole, 0)) => line += &format!(" --cores {whole}"),
                    Some((whole, tenth)) => line += &format!(" --cores {whole}.{tenth}"),
                }
                line
            }
            What::More(pods) => format!("# and likewise for {pods} more of its pods"),
            What::Capacity { request, memory_bytes, cores_millis } => {
                let cores =
                    cores_millis.map(|millis| format!(", cores: \"{}\"", millis.div_ceil(10)));
                format!(
                    "capacity: {{requests: {{memory: {}Mi{}}}}}  # request {request} of its claim",
                    mib(*memory_bytes),
                    cores.unwrap_or_default()
                )
            }
            What::Limits { container, ask, now } => {
                let now = now.as_ref().map(|now| format!(", now {}: {}", now.resource, now.count));
                format!(
                    "limits: {{{}: {}}}  # container {container}{}",
                    quoted(&ask.resource),
                    ask.count,
                    now.unwrap_or_default()
                )
            }
        };
        // A name may hold a line's end, and a shell runs the next line.
        Change { text: printable::line(&line).into_owned(), what }
    }
}

/// A word as a shell takes it: names come from pods.
pub fn quoted(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/".contains(&byte);
    match !text.is_empty() && !text.starts_with('-') && text.bytes().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

impl Recommendation {
    /// The container, with which of its allocations is meant.
    pub fn container_and_part(&self) -> String {
        match self.part.as_str() {
            "" => self.container.clone(),
            part => format!("{}, {part}", self.container),
        }
    }
}

/// What is asked and not used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Waste {
    pub api_version: String,
    pub at_unix_ms: i64,
    pub since_unix_ms: i64,
    /// Price of a GPU for an hour; 0 where none is set.
    pub price_per_gpu_hour: f64,
    /// The price's currency, as configured.
    pub currency: String,
    /// By namespace, the largest waste first.
    pub namespaces: Vec<NamespaceWaste>,
    pub remarks: Vec<String>,
}

/// Waste of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NamespaceWaste {
    /// The namespace; empty for tenants that nobody named.
    pub namespace: String,
    /// Hours of whole GPUs that were asked: the larger part of memory and share.
    pub asked_gpu_hours: f64,
    pub used_gpu_hours: f64,
    /// What the rest cost; 0 where no price is set.
    pub cost: f64,
    /// Its tenants, the largest waste first.
    pub tenants: Vec<TenantWaste>,
}

/// Waste of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TenantWaste {
    pub pod: String,
    pub container: String,
    pub workload: String,
    pub live: bool,
    pub memory_limit_bytes: u64,
    /// The highest use in the window.
    pub memory_peak_bytes: u64,
    pub cores_millis: u32,
    /// What it wanted on average: got and waited.
    pub wanted_millis: u32,
    /// Seconds since it last had work on a GPU; absent where it has some.
    pub idle_seconds: Option<f64>,
    /// Idle for longer than the set time.
    pub idle: bool,
    pub asked_gpu_hours: f64,
    /// Hours of whole GPUs that were asked and not used.
    pub wasted_gpu_hours: f64,
    /// What they cost; 0 where no price is set.
    pub cost: f64,
    /// `low`, `medium` or `high`.
    pub confidence: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_is_run_wherever_a_line_is_pasted() {
        assert_eq!(quoted("default/chat-0"), "default/chat-0");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted("--all"), "'--all'");
        for name in ["$(reboot)", "a;reboot", "a\nreboot", "`reboot`", "a|reboot", "a&reboot"] {
            let (of, container, resource) = (name.to_owned(), name.to_owned(), name.to_owned());
            let ask = Ask { resource, count: 2 };
            let quota =
                What::Quota { of, container, memory_bytes: Some(1 << 30), cores_millis: Some(125) };
            let capacity =
                What::Capacity { request: name.into(), memory_bytes: 1, cores_millis: None };
            let limits = What::Limits { container: name.into(), ask: ask.clone(), now: Some(ask) };
            for what in [quota, capacity, limits] {
                let line = Change::written(what, "tessera").text;
                let code = line.split('#').next().unwrap();
                let bare: String = code.split('\'').step_by(2).collect();
                assert!(!bare.contains(['$', ';', '`', '|', '&']), "{line}");
                assert!(!line.contains('\n'), "{line}");
            }
        }
    }
}
