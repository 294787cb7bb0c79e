//! What was: figures in buckets of time.

use std::collections::HashSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::explain::{Behind, because};

/// What is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Query {
    /// A GPU (UUID or index), or a pod, container or allocation as `explain` takes them; empty for all.
    pub subject: String,
    /// Only this namespace; empty for any.
    pub namespace: String,
    /// The earliest instant; 0 for as early as there is.
    pub since_unix_ms: i64,
    /// The latest; 0 for now.
    pub until_unix_ms: i64,
    /// Length of a bucket: 10, 300 or 3600; 0 for the finest that covers the window.
    pub step_seconds: u32,
}

/// What is known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Answer {
    pub api_version: String,
    pub node: String,
    pub at_unix_ms: i64,
    pub step_seconds: u32,
    /// The oldest bucket of that length; 0 where there is none.
    pub since_unix_ms: i64,
    pub gpus: Vec<GpuSeries>,
    /// Tenants, also those that are gone.
    pub tenants: Vec<TenantSeries>,
    /// Changes of quota, cordons, health and refusals, oldest first.
    pub events: Vec<Event>,
    pub remarks: Vec<String>,
}

impl Answer {
    /// Several answers as one: of several nodes, or of one node to several questions. What two of them know of a GPU or
    /// an event is there once. The node is named where it is the same.
    pub fn joined(answers: impl IntoIterator<Item = Answer>) -> Answer {
        let mut all = Answer { api_version: crate::API_VERSION.to_owned(), ..Answer::default() };
        let (mut first, mut gpus) = (true, HashSet::new());
        for one in answers {
            all.node = if first || all.node == one.node { one.node } else { String::new() };
            first = false;
            all.at_unix_ms = all.at_unix_ms.max(one.at_unix_ms);
            all.step_seconds = all.step_seconds.max(one.step_seconds);
            all.since_unix_ms = match (all.since_unix_ms, one.since_unix_ms) {
                (0, since) | (since, 0) => since,
                (a, b) => a.min(b),
            };
            let new = one.gpus.into_iter().filter(|gpu| gpus.insert(gpu.gpu_uuid.clone()));
            all.gpus.extend(new);
            all.tenants.extend(one.tenants);
            all.events.extend(one.events);
            for remark in one.remarks {
                if !all.remarks.contains(&remark) {
                    all.remarks.push(remark);
                }
            }
        }
        all.events.sort_by_key(|event| event.at_unix_ms);
        let mut kept: Vec<Event> = Vec::with_capacity(all.events.len());
        for event in all.events {
            let mut same = kept.iter().rev().take_while(|one| one.at_unix_ms == event.at_unix_ms);
            if !same.any(|one| *one == event) {
                kept.push(event);
            }
        }
        all.events = kept;
        all
    }
}

/// A GPU over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GpuSeries {
    pub gpu_uuid: String,
    /// Its index; absent where it is gone.
    pub index: Option<u32>,
    /// Oldest first; a bucket without a look is left out.
    pub points: Vec<GpuPoint>,
}

/// A GPU in one bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct GpuPoint {
    pub at_unix_ms: i64,
    /// Seconds of the bucket that were observed.
    pub seconds: f64,
    pub memory_used_bytes: u64,
    pub memory_peak_bytes: u64,
    /// Mean of the sum of limits.
    pub memory_limits_bytes: u64,
    /// Seconds that it was leased.
    pub leased_seconds: f64,
    /// The highest part of any ten seconds of the bucket that it was leased, thousandths. 0 beside a time above 0: not
    /// recorded.
    pub leased_peak_millis: u32,
    /// Seconds that it was not healthy.
    pub unhealthy_seconds: f64,
    pub cordoned_seconds: f64,
}

/// A tenant over time, on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TenantSeries {
    pub id: String,
    /// Which Allocate of this id.
    pub generation: u64,
    pub namespace: String,
    pub pod: String,
    pub container: String,
    /// See [`crate::workload`].
    pub workload: String,
    pub gpu_uuid: String,
    pub live: bool,
    /// Oldest first; a bucket without a look is left out.
    pub points: Vec<TenantPoint>,
}

/// A tenant in one bucket, on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TenantPoint {
    pub at_unix_ms: i64,
    /// Seconds of the bucket that were observed.
    pub seconds: f64,
    /// Mean memory charged, with observed overhead.
    pub memory_used_bytes: u64,
    /// Highest memory charged, with observed overhead.
    pub memory_peak_bytes: u64,
    /// The limit at the bucket's end.
    pub memory_limit_bytes: u64,
    /// Mean of the overhead beyond charges.
    pub memory_overhead_bytes: u64,
    /// The share at the bucket's end.
    pub cores_millis: u32,
    /// Seconds of GPU time that it had leased.
    pub got_seconds: f64,
    /// Of those, seconds in which its work ran, as far as that is known; see [`TenantPoint::used`].
    pub used_seconds: f64,
    /// The leased seconds of which that is known. It may become known ten seconds later.
    pub measured_seconds: f64,
    /// The highest share of the GPU that it used in any ten seconds of the bucket, thousandths. 0 beside a time above 0:
    /// not recorded.
    pub used_peak_millis: u32,
    /// Seconds that it waited for GPU time: what it wanted is used and waited together.
    pub waited_seconds: f64,
    /// Of those, seconds that it waited because its own cap or share was spent.
    pub capped_seconds: f64,
    /// Seconds that it rationed itself because the arbiter was silent.
    pub rationed_seconds: f64,
    pub refusals: u64,
    pub launches: u64,
}

impl TenantPoint {
    /// Seconds in which its work ran; `None` where less than half of what it had leased was measured. The rest was like
    /// what was measured.
    pub fn used(&self) -> Option<f64> {
        let TenantPoint { used_seconds: used, measured_seconds: measured, .. } = *self;
        let is_known = measured * 2.0 >= self.got_seconds;
        is_known.then(|| {
            if measured > 0.0 { used * (self.got_seconds / measured).max(1.0) } else { 0.0 }
        })
    }
}

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Event {
    pub at_unix_ms: i64,
    /// The kind, as in the audit trail.
    pub what: String,
    /// The tenant's id; empty for one of a GPU or the node.
    pub tenant: String,
    /// The pod as `namespace/pod`; empty for one of a GPU or the node.
    pub pod: String,
    /// The GPU; empty where it is about none, or several.
    pub gpu_uuid: String,
    /// In words: all of the following in a sentence.
    pub text: String,
    /// What happened to it, in words.
    pub happened: String,
    /// Why; empty where nothing says.
    pub reason: String,
    /// The reason is about this tenant alone: the plugin wrote it, and it names nobody else.
    pub reason_is_own: bool,
    /// The allocation that had the GPU meanwhile, where that is known.
    pub behind: Option<Behind>,
    /// The operator that did it, with the command; empty where no operator did.
    pub by: String,
}

impl Event {
    /// What [`Event::text`] says of the other fields.
    pub fn sentence(&self) -> String {
        let because = because(&self.reason, self.behind.as_ref());
        let mut text = self.happened.clone();
        if !because.is_empty() {
            text = format!("{text}: {because}");
        }
        if !self.by.is_empty() {
            text = format!("{text} (by {})", self.by);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(node: &str, since_unix_ms: i64, events: &[(i64, &str)]) -> Answer {
        let event = |(at_unix_ms, what): &(i64, &str)| Event {
            at_unix_ms: *at_unix_ms,
            what: (*what).to_owned(),
            ..Event::default()
        };
        Answer {
            node: node.into(),
            since_unix_ms,
            step_seconds: 10,
            gpus: vec![GpuSeries { gpu_uuid: "GPU-a".into(), ..GpuSeries::default() }],
            events: events.iter().map(event).collect(),
            remarks: vec!["a file is gone".into()],
            ..Answer::default()
        }
    }

    #[test]
    fn what_two_answers_know_is_there_once() {
        let one = answer("n1", 500, &[(1, "a"), (2, "b"), (2, "c")]);
        let other = answer("n1", 300, &[(2, "c"), (2, "d"), (3, "b")]);
        let all = Answer::joined([one, other]);
        let events: Vec<_> = all.events.iter().map(|one| (one.at_unix_ms, &*one.what)).collect();
        assert_eq!(events, [(1, "a"), (2, "b"), (2, "c"), (2, "d"), (3, "b")]);
        assert_eq!((all.gpus.len(), all.remarks.len()), (1, 1));
        assert_eq!((&*all.node, all.since_unix_ms, all.step_seconds), ("n1", 300, 10));
    }

    #[test]
    fn several_nodes_have_no_one_name_and_nothing_joined_is_empty() {
        let of =
            |nodes: &[&str]| Answer::joined(nodes.iter().map(|node| answer(node, 0, &[]))).node;
        assert_eq!(of(&["n1", "n2", "n2"]), "");
        assert_eq!(of(&["n1"]), "n1");
        assert_eq!(Answer::joined([]).gpus, []);
    }
}
