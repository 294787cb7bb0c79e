//! What a line of the audit trail is called as an event on a pod, and what its owner can do about it. Pure.
//!
//! An owner has rights in one namespace: no other tenant is named. What a line gives as its reason may name neighbours
//! or repeat what a process calls itself, so no reason is repeated but the driver's about a GPU. `tessera explain` has
//! the others for their owners.
//!
//! Reasons are words in CamelCase that people filter by (`kubectl get events --field-selector reason=…`);
//! they stay as they are.

use tessera_cluster::events::LONGEST_MESSAGE as LONGEST;
use tessera_model::audit::{Event, What};
use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::{health, printable};

/// Reason, type and message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    pub reason: &'static str,
    /// `Warning`, or else `Normal`.
    pub warning: bool,
    pub message: String,
}

/// Whether pods get events about this at all.
pub fn concerns_pods(what: &What) -> bool {
    match what {
        What::Health { to, .. } => matches!(to, health::State::Unhealthy | health::State::Healthy),
        What::Unaccounted
        | What::Cordoned
        | What::Uncordoned
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

/// Whether a line that names neither allocation nor holder concerns every pod on its GPU. What a stranger does is
/// no news for the pods beside it.
pub fn concerns_neighbours(what: &What) -> bool {
    matches!(what, What::Health { .. } | What::Cordoned | What::Uncordoned)
}

/// Words for a line whose holder is the pod that gets them; `None` if pods get no event about it.
pub fn words(line: &Event) -> Option<Words> {
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
        What::Bypassed { pid, bytes } => {
            ("GPUQuotaBypassed", true, bypassed(*pid, *bytes, gpu, line))
        }
        What::Unaccounted => (
            "GPUMemoryUnaccounted",
            true,
            advised(
                "its processes hold far more device memory than calls obtained; it counts against the quota",
                "Large modules and kernels' local memory look like that, and those who run the node can then raise \
                 gpus.context_overhead; else something goes past Tessera's library: link programs dynamically, and \
                 leave LD_PRELOAD as it is",
                line,
            ),
        ),
        What::Tampered { what } => (
            "GPUQuotaTampered",
            true,
            advised(
                &format!(
                    "Tessera's files in the container were tampered with: {}",
                    cut(what.clone(), LONGEST / 2)
                ),
                "The pod's volumes, a process of it or somebody on the node did that: mount nothing over these files, and \
                 write to none of them",
                line,
            ),
        ),
        What::Health { to: health::State::Unhealthy, .. } => {
            let because = line.reason.as_deref();
            let because = because.map(|reason| format!(": {reason}")).unwrap_or_default();
            let advice = "New pods do not get this GPU. This one is left alone, but its work on the GPU may have \
                          failed: if CUDA calls fail, delete the pod, so that its controller starts another";
            ("GPUUnhealthy", true, advised(&format!("{gpu} is unhealthy{because}"), advice, line))
        }
        What::Health { .. } => {
            let advice = "If CUDA calls still fail, restart the pod";
            ("GPUHealthy", false, advised(&format!("{gpu} is healthy again"), advice, line))
        }
        What::Cordoned => {
            let text = format!("{gpu} is cordoned{}: new pods do not get it", by(line));
            let advice = "This one runs on, unless the operator or dra.no_execute evicts it: ask those who run the \
                          node how long it may stay";
            ("GPUCordoned", false, advised(&text, advice, line))
        }
        What::Uncordoned => {
            ("GPUUncordoned", false, format!("{gpu} is no longer cordoned{}", by(line)))
        }
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
    Some(Words { reason, warning, message: cut(message, LONGEST) })
}

/// A process past the quota: of a container that has one, or of a pod without a share of this GPU.
fn bypassed(pid: u32, bytes: u64, gpu: &str, line: &Event) -> String {
    let uses = match bytes {
        0 => gpu.to_owned(),
        bytes => format!("{} of {gpu}", format_bytes(bytes)),
    };
    if line.id.is_some() {
        let text = format!(
            "process {pid} uses {uses} past Tessera's library; the memory counts against the quota, and no request \
             of this process is refused"
        );
        let advice =
            "Link programs dynamically, and leave LD_PRELOAD and /etc/ld.so.preload as they are";
        return advised(&text, advice, line);
    }
    // No share, nothing to explain.
    format!(
        "process {pid} uses {uses}, which is shared, and the pod has no share of it. Request one, or keep the GPU \
         from the pod: it must not be privileged, and NVIDIA_VISIBLE_DEVICES (which CUDA's images set to all) must \
         be void"
    )
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

fn cut(text: String, longest: usize) -> String {
    let mut text = printable::line(&text).into_owned();
    printable::cut(&mut text, longest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::allocation_id::AllocationId;
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
    }

    fn id() -> Option<AllocationId> {
        AllocationId::parse("0123456789abcdef0123456789abcdef")
    }

    #[test]
    fn a_process_past_the_quota_is_its_containers_or_that_of_a_pod_without_a_share() {
        let what = What::Bypassed { pid: 7, bytes: 1 << 30 };
        let stranger = Event { holder: Some(holder("team", "chat")), ..line(what).on_gpu("GPU-1") };
        let sent = words(&stranger).unwrap();
        let text =
            "process 7 uses 1 GiB of GPU-1, which is shared, and the pod has no share of it. ";
        assert!(sent.message.starts_with(text), "{}", sent.message);
        let sent = words(&Event { id: id(), ..stranger }).unwrap();
        let text = "process 7 uses 1 GiB of GPU-1 past Tessera's library; ";
        assert!(sent.message.starts_with(text), "{}", sent.message);
    }

    /// Every line that may be, in all the ways in which it may name somebody.
    fn lines_that_name_neighbours() -> Vec<Event> {
        let theirs = || Some(holder("theirs", "train"));
        let id_of = || "theirs".to_owned();
        let mut lines = Vec::new();
        for (what, id) in What::examples().into_iter().flat_map(|w| [(w.clone(), None), (w, id())])
        {
            let what = match what {
                What::Delayed { waited_ms, within_ms, .. } => {
                    let behind = Behind::Allocation { id: id_of(), holder: theirs() };
                    What::Delayed { waited_ms, within_ms, behind }
                }
                what => what,
            };
            // What the driver says of a GPU names no pod.
            let reason = match what {
                What::Health { .. } => "XID 79",
                _ => "process 1 (theirs) of pod theirs/train uses 1 GiB",
            };
            let command = "cordon 0 --reason \"for theirs/train\"".to_owned();
            let (login_uid, login, user) = (None, None, Some("root".to_owned()));
            let by = Actor::Admin { uid: 0, pid: 7, login_uid, user, login, command };
            let line = Event { id, ..line(what).on_gpu("GPU-1").because(reason).by(by) };
            lines.push(Event { holder: Some(holder("team", "chat")), ..line });
        }
        lines
    }

    #[test]
    fn no_event_names_a_neighbour_and_every_warning_says_what_to_do() {
        for line in lines_that_name_neighbours() {
            let Some(sent) = words(&line) else { continue };
            assert!(!sent.message.contains("theirs"), "{:?}: {}", line.what, sent.message);
            let sentences = sent.message.split(". ").count();
            assert!(!sent.warning || sentences >= 2, "{:?}: {}", line.what, sent.message);
            let hint = "`kubectl tessera explain chat -n team` has more";
            let is_stranger = matches!(line.what, What::Bypassed { .. }) && line.id.is_none();
            assert!(
                !sent.warning || is_stranger || sent.message.ends_with(hint),
                "{}",
                sent.message
            );
            assert!(sent.message.len() < LONGEST, "{}", sent.message);
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
        assert_eq!(words(&line(What::Cordoned).on_gpu("GPU-1")).unwrap().reason, "GPUCordoned");
    }

    #[test]
    fn what_is_too_long_for_an_event_is_cut() {
        let line = Event { holder: Some(holder("team", "chat")), ..line(What::Cordoned) };
        let what = What::Tampered { what: "ä".repeat(LONGEST) };
        let sent = words(&Event { what, ..line.clone() }).unwrap();
        assert!(sent.message.len() <= LONGEST && sent.message.ends_with("has more"), "with advice");
        let sent = words(&line.on_gpu(&"ä".repeat(LONGEST))).unwrap();
        assert!(sent.message.len() <= LONGEST && sent.message.ends_with("ä…"));
    }
}
