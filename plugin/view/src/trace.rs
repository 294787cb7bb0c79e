//! A trace of GPU time, in the Trace Event format (JSON object format) that Perfetto and `chrome://tracing` open: a
//! process is a GPU, a thread is a tenant of it, and thread 0 is the GPU's own.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::API_VERSION;
use crate::narrow::Rights;

/// The longest trace, seconds.
pub const LONGEST: u32 = 30;
/// Seconds of a trace that names none.
pub const USUAL: u32 = 10;

/// Processes of one node in a trace of several.
const NODE: u32 = 1000;
/// What a hidden tenant is called.
const ANOTHER: &str = "another tenant";

/// Times are in microseconds from `otherData.begun_unix_ms` on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Trace {
    pub api_version: String,
    /// `ms`.
    #[serde(rename = "displayTimeUnit")]
    pub display_time_unit: String,
    #[serde(rename = "otherData")]
    pub about: About,
    /// Names first.
    #[serde(rename = "traceEvents")]
    pub events: Vec<Event>,
}

/// What the events do not say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct About {
    /// When it began, by the node's clock.
    pub begun_unix_ms: i64,
    pub duration_us: f64,
    /// Events that the node had no room for. They were the first ones: the trace begins after them.
    pub lost_events: u64,
}

/// An event of the format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Event {
    /// `X` for an interval, `i` for an instant, `M` for a name.
    pub ph: String,
    /// `wait`, `lease`, `drain`, `late`, `late drained`, `share`, `idle: ` with a cause of
    /// `tessera_gpu_idle_while_wanted_seconds_total`, `health`; of names, `process_name` and `thread_name`.
    pub name: String,
    pub ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dur: Option<f64>,
    pub pid: u32,
    pub tid: u32,
    /// What else there is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub args: Option<Box<Args>>,
}

/// See [`Event::args`]. What does not apply is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Args {
    /// The name that a name gives.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub allocation: String,
    /// What a lease's gate said first: `solo`, `open` or `yield`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gate: String,
    /// Why it was closed: `idle`, `quantum`, `owed`, `cap` or `newcomer`; empty where it goes on, or its processes are
    /// gone.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub closed: String,
    /// The new share, thousandths of the GPU, and its policy.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub share: String,
    /// The new health, and why.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub health: String,
}

/// A name of the process (`tid` 0 of `process_name`) or of a thread.
pub fn name(kind: &str, pid: u32, tid: u32, args: Args) -> Event {
    Event {
        ph: "M".to_owned(),
        name: kind.to_owned(),
        pid,
        tid,
        args: Some(Box::new(args)),
        ..Event::default()
    }
}

impl Trace {
    /// Without events.
    pub fn begun(begun_unix_ms: i64) -> Self {
        Trace {
            api_version: API_VERSION.to_owned(),
            display_time_unit: "ms".to_owned(),
            about: About { begun_unix_ms, ..About::default() },
            events: Vec::new(),
        }
    }

    /// Those of several nodes as one, by their own clocks. Each GPU is named with its node.
    pub fn joined(traces: Vec<(String, Trace)>) -> Self {
        let begun = traces.iter().map(|(_, trace)| trace.about.begun_unix_ms).min().unwrap_or(0);
        let mut all = Trace::begun(begun);
        for ((node, trace), number) in traces.into_iter().zip(0_u32..) {
            #[allow(clippy::cast_precision_loss, reason = "far below 2^53")]
            let ahead = trace.about.begun_unix_ms.saturating_sub(begun) as f64 * 1000.0;
            all.about.lost_events = all.about.lost_events.saturating_add(trace.about.lost_events);
            all.about.duration_us = all.about.duration_us.max(ahead + trace.about.duration_us);
            all.events.extend(trace.events.into_iter().map(|mut event| {
                event.pid = event.pid.saturating_add(number.saturating_mul(NODE));
                match (event.ph.as_str(), &mut event.args) {
                    ("M", Some(args)) if event.name == "process_name" && !node.is_empty() => {
                        args.name = format!("{node}, {}", args.name);
                    }
                    ("M", _) => {}
                    _ => event.ts += ahead,
                }
                event
            }));
        }
        all
    }

    /// Leaves out what a reader may not see: of GPUs that no tenant of the reader's has, everything; of others' tenants
    /// on the rest, everything but when they had the GPU.
    pub fn narrowed(mut self, rights: &Rights) -> Self {
        if *rights == Rights::All {
            return self;
        }
        let mut seen: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for event in self.events.iter().filter(|event| event.name == "thread_name") {
            if event.args.as_ref().is_some_and(|args| rights.may_see(&args.namespace)) {
                seen.entry(event.pid).or_default().push(event.tid);
            }
        }
        self.events.retain_mut(|event| {
            let Some(tenants) = seen.get(&event.pid) else { return false };
            if event.tid == 0 || tenants.contains(&event.tid) {
                return true;
            }
            event.args = (event.name == "thread_name")
                .then(|| Box::new(Args { name: ANOTHER.to_owned(), ..Args::default() }));
            ["thread_name", "lease", "drain"].contains(&event.name.as_str())
        });
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(pid: u32, tid: u32, namespace: &str) -> [Event; 3] {
        let args = Args {
            name: format!("{namespace}/pod"),
            namespace: namespace.into(),
            allocation: format!("id of {namespace}"),
            ..Args::default()
        };
        let at = |name: &str| Event {
            ph: "X".into(),
            name: name.into(),
            dur: Some(5.0),
            pid,
            tid,
            args: Some(Box::new(Args { closed: "idle".into(), ..Args::default() })),
            ..Event::default()
        };
        [name("thread_name", pid, tid, args), at("wait"), at("lease")]
    }

    fn trace() -> Trace {
        let mut trace = Trace::begun(1000);
        for pid in [1, 2] {
            let args = Args { name: format!("GPU {pid}"), ..Args::default() };
            trace.events.push(name("process_name", pid, 0, args));
        }
        for (pid, tid, namespace) in [(1, 1, "mine"), (1, 2, "theirs"), (2, 2, "theirs")] {
            trace.events.extend(tenant(pid, tid, namespace));
        }
        trace
    }

    #[test]
    fn a_reader_sees_its_own_tracks_and_when_another_had_the_same_gpu() {
        let of = |namespace: &str| Rights::Namespaces([namespace.to_owned()].into());
        let narrowed = trace().narrowed(&of("mine"));
        let text = serde_json::to_string(&narrowed).unwrap();
        assert!(!text.contains("theirs") && !text.contains("GPU 2"), "{text}");
        let of_other: Vec<_> = narrowed.events.iter().filter(|event| event.tid == 2).collect();
        let names: Vec<&str> = of_other.iter().map(|event| event.name.as_str()).collect();
        assert_eq!(names, ["thread_name", "lease"]);
        assert_eq!(of_other[0].args.as_ref().unwrap().name, "another tenant");
        assert_eq!(of_other[1].args, None);
        let own = narrowed.events.iter().filter(|event| event.tid == 1).count();
        assert_eq!(own, 3);
        assert_eq!(trace().narrowed(&of("nobody")).events, []);
        assert_eq!(trace().narrowed(&Rights::All), trace());
        assert_eq!(narrowed.clone().narrowed(&of("mine")), narrowed);
    }
}
