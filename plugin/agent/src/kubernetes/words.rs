//! What a line of the audit trail is called as an event on a pod, and what its owner can do about it. Pure.
//!
//! An owner has rights in one namespace: no other tenant is named. What a line gives as its reason may name
//! neighbours, so only reasons that are about the container itself are repeated.
//!
//! Reasons are words in CamelCase that people filter by (`kubectl get events --field-selector reason=…`);
//! they stay as they are.

use tessera_model::audit::{Event, What};
use tessera_model::health;
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;

/// Longest message: core/v1 allows 1024 bytes (`pkg/apis/core/validation/events.go`, NoteLengthLimit).
pub const LONGEST: usize = 1024;

/// Reason, type and message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    /// The reason.
    pub reason: &'static str,
    /// `Warning`, or else `Normal`.
    pub warning: bool,
    /// The message.
    pub message: String,
}

/// Whether pods get events about this at all.
#[must_use]
pub fn concerns_pods(what: &What) -> bool {
    match what {
        What::Health { to, .. } => matches!(to, health::State::Unhealthy | health::State::Healthy),
        What::Unaccounted
        | What::QuotaSet { .. }
        | What::QuotaReset { .. }
        | What::RefusedMemory { .. }
        | What::Delayed { .. }
        | What::DriverRefused
        | What::Overlapped
        | What::Rationed
        | What::Unlisted
        | What::Tampered { .. }
        | What::Bypassed { .. } => true,
        _ => false,
    }
}

/// Words for a line; `None` if pods get no event about it.
#[must_use]
pub fn words(line: &Event) -> Option<Words> {
    let because = line.reason.as_deref();
    let gpu = line.gpu.as_deref().unwrap_or("its GPU");
    let (reason, warning, message) = match &line.what {
        _ if !concerns_pods(&line.what) => return None,
        What::RefusedMemory { bytes, charged_bytes, limit_bytes } => {
            let asked = match bytes {
                0 => "a request".to_owned(),
                bytes => format!("a request for {}", format_bytes(*bytes)),
            };
            let text = match limit_bytes {
                0 => format!("{asked} for device memory was refused because of the quota"),
                limit => format!(
                    "{asked} was refused: {} of {} device memory were in use",
                    format_bytes(*charged_bytes),
                    format_bytes(*limit)
                ),
            };
            let advice = "Ask for a larger share (more replicas of the resource, or a larger claim), or use less: \
                          a smaller batch, a shorter context";
            ("GPUMemoryRefused", true, advised(&text, advice, line))
        }
        What::DriverRefused => (
            "GPUMemoryFull",
            true,
            advised(
                "a request within the quota was refused by the driver: the GPU itself is full, or its memory \
                 fragmented",
                "It is not this pod's fault: ask those who run the node",
                line,
            ),
        ),
        What::Overlapped => (
            "GPUTimeOverrun",
            false,
            advised(
                "its work went on beyond the end of its lease, so that others ran beside it",
                "Long kernels and graphs make neighbours and itself slower: divide them where that is possible",
                line,
            ),
        ),
        What::Rationed => (
            "GPUTimeRationed",
            false,
            advised(
                "it kept to its part of GPU time by itself, because the plugin did not answer",
                "Nothing is to be done if it ends; else ask those who run the node",
                line,
            ),
        ),
        What::Unlisted => (
            "GPUNotGranted",
            true,
            advised(
                "a process found no free slot, or saw a GPU that was not granted to its container",
                "End processes that use CUDA without need, and leave CUDA_VISIBLE_DEVICES and \
                 NVIDIA_VISIBLE_DEVICES as they are",
                line,
            ),
        ),
        What::Delayed { waited_ms, within_ms, .. } => {
            let within = match within_ms {
                0 => String::new(),
                ms => format!(" in {:.1} s", *ms as f64 / 1000.0),
            };
            let waited = *waited_ms as f64 / 1000.0;
            let text = format!("waited {waited:.1} s{within} for its part of GPU time");
            let advice = "Others want the GPU as well: ask for a larger share, or for one whose policy is burst \
                          where it is strict";
            ("GPUTimeDelayed", false, advised(&text, advice, line))
        }
        What::Bypassed { pid, bytes } => (
            "GPUQuotaBypassed",
            true,
            because.map_or_else(
                || format!("process {pid} uses {} of {gpu} past the quota", format_bytes(*bytes)),
                str::to_owned,
            ),
        ),
        What::Unaccounted => (
            "GPUMemoryUnaccounted",
            true,
            because.unwrap_or("holds device memory outside its account").to_owned(),
        ),
        What::Tampered { what } => (
            "GPUQuotaTampered",
            true,
            because.map_or_else(|| format!("tampered with: {what}"), str::to_owned),
        ),
        What::Health { to: health::State::Unhealthy, .. } => (
            "GPUUnhealthy",
            true,
            format!(
                "{gpu} is unhealthy: {}. The pod runs on; new ones do not get this GPU",
                because.unwrap_or("")
            ),
        ),
        What::Health { .. } => ("GPUHealthy", false, format!("{gpu} is healthy again")),
        What::QuotaSet { after, forced, .. } => {
            let text = limits(after);
            let force = if *forced { ", below what was in use" } else { "" };
            ("GPUQuotaChanged", false, format!("the quota is now {text}{force}{}", by(line)))
        }
        What::QuotaReset { after, .. } => {
            ("GPUQuotaReset", false, format!("the quota is again {}{}", limits(after), by(line)))
        }
        _ => return None,
    };
    Some(Words { reason, warning, message: cut(message) })
}

/// What happened, what to do about it, and where there is more.
fn advised(text: &str, advice: &str, line: &Event) -> String {
    let more = line.holder.as_ref().map(|holder| {
        format!("; `kubectl tessera explain {} -n {}` has more", holder.pod, holder.namespace)
    });
    format!("{text}. {advice}{}", more.unwrap_or_default())
}

fn limits(limits: &[tessera_model::audit::Limits]) -> String {
    let one = |l: &tessera_model::audit::Limits| {
        let (memory, cores) = (format_bytes(l.memory_limit_bytes), format_cores(l.cores_millis));
        format!("{memory} and {cores} of {}", l.uuid)
    };
    limits.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Without the command, in which an operator gives a reason: that may name anybody.
fn by(line: &Event) -> String {
    line.by.as_ref().map(|by| format!(", by {}", by.who())).unwrap_or_default()
}

fn cut(mut text: String) -> String {
    if text.len() > LONGEST {
        let mut end = LONGEST - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::audit::{Actor, Behind};
    use tessera_model::record::Holder;

    fn line(what: What) -> Event {
        Event::of_node(what, 0)
    }

    fn delayed(waited_ms: u64, within_ms: u64) -> What {
        let (id, holder) = ("x".to_owned(), Some(holder("theirs", "train")));
        What::Delayed { waited_ms, within_ms, behind: Behind::Allocation { id, holder } }
    }

    fn holder(namespace: &str, pod: &str) -> Holder {
        let container = "main".to_owned();
        Holder { namespace: namespace.to_owned(), pod: pod.to_owned(), container }
    }

    #[test]
    fn each_line_that_concerns_a_pod_has_a_reason_of_its_own() {
        let refused =
            What::RefusedMemory { bytes: 5 << 30, charged_bytes: 3 << 30, limit_bytes: 7 << 30 };
        let sent = words(&line(refused)).unwrap();
        assert_eq!((sent.reason, sent.warning), ("GPUMemoryRefused", true));
        let what = "a request for 5 GiB was refused: 3 GiB of 7 GiB device memory were in use. ";
        assert!(sent.message.starts_with(what), "{}", sent.message);
        let delayed = words(&line(delayed(12_340, 60_000))).unwrap();
        let what = "waited 12.3 s in 60.0 s for its part of GPU time. ";
        assert!(delayed.message.starts_with(what), "{}", delayed.message);
        let bypassed = line(What::Bypassed { pid: 7, bytes: 1 << 30 }).on_gpu("GPU-1");
        assert!(words(&bypassed).unwrap().message.contains("process 7 uses 1 GiB of GPU-1"));
        let sent = words(&bypassed.because("by dlmopen")).unwrap();
        assert_eq!(sent.message, "by dlmopen");
        assert_eq!(
            words(&line(What::Tampered { what: "x".into() })).unwrap().reason,
            "GPUQuotaTampered"
        );
    }

    #[test]
    fn every_refusal_says_what_to_do_and_names_no_neighbour() {
        let refused = What::RefusedMemory { bytes: 1, charged_bytes: 2, limit_bytes: 3 };
        let delayed = delayed(1, 2);
        let all = [
            refused,
            delayed,
            What::DriverRefused,
            What::Overlapped,
            What::Rationed,
            What::Unlisted,
        ];
        for what in all {
            let line = Event { holder: Some(holder("team", "chat")), ..line(what) }
                .because("theirs/train had it");
            let sent = words(&line).unwrap();
            assert!(!sent.message.contains("theirs"), "{}", sent.message);
            assert!(sent.message.ends_with("`kubectl tessera explain chat -n team` has more"));
            let sentences = sent.message.split(". ").count();
            assert!(sentences >= 2, "what happened, and what to do: {}", sent.message);
        }
    }

    #[test]
    fn who_changed_a_quota_is_said_without_the_command() {
        let command = "quota set chat --reason \"room for theirs/train\"".to_owned();
        let user = Some("root".to_owned());
        let by = Actor::Admin { uid: 0, pid: 7, login_uid: None, user, login: None, command };
        for what in [
            What::QuotaSet { before: Vec::new(), after: Vec::new(), forced: false },
            What::QuotaReset { before: Vec::new(), after: Vec::new() },
        ] {
            let sent = words(&line(what).by(by.clone()).because("for theirs")).unwrap();
            assert!(sent.message.ends_with(", by root"), "{}", sent.message);
            assert!(!sent.message.contains("theirs"), "{}", sent.message);
        }
    }

    #[test]
    fn a_sick_gpu_is_reported_when_it_falls_ill_and_when_it_is_well() {
        let health = |from, to| words(&line(What::Health { from, to }).on_gpu("GPU-1"));
        use health::State::{Healthy, Recovering, Suspect, Unhealthy};
        assert_eq!(health(Suspect, Unhealthy).unwrap().reason, "GPUUnhealthy");
        assert_eq!(health(Recovering, Healthy).unwrap().reason, "GPUHealthy");
        assert_eq!(health(Healthy, Suspect), None);
        assert_eq!(words(&line(What::Started)), None);
    }

    #[test]
    fn what_is_too_long_for_an_event_is_cut() {
        let sent = words(&line(What::Unaccounted).because("ä".repeat(LONGEST))).unwrap();
        assert!(sent.message.len() <= LONGEST && sent.message.ends_with("ä…"));
    }
}
