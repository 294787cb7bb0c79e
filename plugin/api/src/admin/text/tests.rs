use tessera_view::status::{
    Allocation, AllocationState, ComputePolicy, Gpu, GpuState, Health, Holder, Plugin, Process,
    Registration, Replica, Resource,
};
use tessera_view::tenant::{Compute, Limits, Use};

use super::*;

fn plain(status: &Status) -> String {
    text(status, Paper::plain())
}

fn holder(pod: &str) -> Option<Holder> {
    Some(Holder { namespace: "ns".into(), pod: pod.into(), container: "server".into() })
}

fn status() -> Status {
    Status {
        api_version: tessera_view::API_VERSION.into(),
        refusals: Vec::new(),
        plugin: Plugin {
            version: "1.2.3".into(),
            pid: 7,
            resource_name: "tessera.dev/gpu".into(),
            registration: Registration::Live,
            ..Plugin::default()
        },
        gpus: vec![Gpu {
            uuid: "GPU-49aabbcc-0000".into(),
            name: "Example".into(),
            health: Health::Healthy,
            state: GpuState::Healthy,
            memory_total_bytes: 80 << 30,
            ..Gpu::default()
        }],
        allocations: vec![Allocation {
            id: "0123456789abcdef".into(),
            state: AllocationState::Started,
            resource_name: "tessera.dev/gpu".into(),
            replica_ids: vec!["GPU-49aabbcc-0000::0".into(), "GPU-49aabbcc-0000::2".into()],
            holder: holder("llm-0"),
            gpus: vec![Use {
                gpu_uuid: "GPU-49aabbcc-0000".into(),
                memory_limit_bytes: 8 << 30,
                memory_used_bytes: 3 << 29,
                cores_millis: 500,
                policy: ComputePolicy::Burst,
                ..Use::default()
            }],
            processes: vec![Process { host_pid: 12, ..Process::default() }],
            refusals: 4,
            ..Allocation::default()
        }],
        warning_details: Vec::new(),
        warnings: Vec::new(),
        at_unix_ms: 600_000,
    }
}

/// The cell below the header `title` in the row that has `of`.
fn cell(text: &str, title: &str, of: &str) -> String {
    let mut lines = text.lines().skip_while(|line| !line.contains(title));
    let head = lines.next().unwrap_or_else(|| panic!("no {title}: {text}"));
    let row = lines.find(|line| line.contains(of)).unwrap_or_else(|| panic!("no {of}: {text}"));
    let at = head.find(title).unwrap();
    let mut from = 0;
    for part in row.split("  ") {
        let end = from + part.chars().count();
        let begin = end - part.trim_start().chars().count();
        if !part.trim().is_empty() && begin < at + title.len() && end > at {
            return part.trim().to_owned();
        }
        from = end + 2;
    }
    String::new()
}

#[test]
fn text_says_who_holds_what_in_labelled_columns() {
    let text = plain(&status());
    assert!(text.starts_with("tessera 1.2.3 (pid 7) serves tessera.dev/gpu: registered"), "{text}");
    assert!(text.contains("\nNothing needs attention.\n"), "{text}");
    for (title, want) in [
        ("POD/CONTAINER", "ns/llm-0/server"),
        ("GPU", "0"),
        ("USED", "1.5 GiB"),
        ("QUOTA", "8 GiB"),
        ("TIME SHARE", "50% burst"),
        ("USED 10s", "-"),
        ("GATE", "-"),
        ("REFUSED", "4"),
        ("ID", "01234567"),
    ] {
        let pods = &text[text.find("ALLOCATIONS").unwrap()..];
        assert_eq!(cell(pods, title, "llm-0"), want, "{title}: {text}");
    }
    assert!(text.contains("  GPU-49aa  ") && !text.contains("GPU-49aabb"), "{text}");
}

#[test]
fn allocations_are_in_the_order_of_gpus_and_names() {
    let mut status = status();
    for (pod, gpu) in [("chat", None), ("batch", Some("GPU-gone"))] {
        let mut other = status.allocations[0].clone();
        other.holder.as_mut().unwrap().pod = pod.into();
        if let Some(gpu) = gpu {
            other.gpus[0].gpu_uuid = gpu.into();
        }
        status.allocations.push(other);
    }
    let text = plain(&status);
    let [batch, chat, llm] = ["ns/batch", "ns/chat", "ns/llm-0"].map(|name| text.find(name));
    assert!(batch.is_some() && batch < chat && chat < llm, "{text}");
}

#[test]
fn wide_text_has_whole_ids_and_every_column() {
    let wide = text(&status(), Paper { width: None, colour: false });
    for part in
        ["0123456789abcdef", "GPU-49aabbcc-0000", "PROCESSES", "OVERHEAD", "NVML", "  0,2  "]
    {
        assert!(wide.contains(part), "{part}: {wide}");
    }
}

#[test]
fn what_is_wrong_stands_before_the_tables_and_what_is_broken_first() {
    let mut status = status();
    status.warnings = vec!["take care".into()];
    let cordoned = Gpu {
        uuid: "GPU-b".into(),
        index: 1,
        state: GpuState::Healthy,
        health: Health::Healthy,
        cordon: "cordoned by root: fans".into(),
        ..Gpu::default()
    };
    let broken = Gpu {
        uuid: "GPU-c".into(),
        index: 2,
        state: GpuState::Unhealthy,
        health: Health::Unhealthy,
        state_reason: "XID 79".into(),
        health_reason: "XID 79".into(),
        state_since_unix_ms: 420_000,
        state_waits_for: "a restart".into(),
        memory_total_bytes: 80 << 30,
        ..Gpu::default()
    };
    let with_node =
        Gpu { uuid: "GPU-d".into(), index: 3, cordoned_with_node: true, ..cordoned.clone() };
    status.gpus.extend([cordoned, broken, with_node]);
    let text = plain(&status);
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|line| *line == "ATTENTION: 4 things").unwrap();
    let broken = "  GPU 2 is unhealthy since 3m 0s: XID 79; waits for a restart. No pod is on it (docs/runbook.md, \
                  TesseraGpuUnhealthy)";
    assert_eq!(lines[at + 1], broken);
    let cordoned = "  GPU 1 is cordoned by root: fans; `tessera uncordon 1` ends it. No pod is on it \
                    (docs/runbook.md, TesseraGpuCordoned)";
    assert_eq!(lines[at + 2], cordoned);
    assert!(lines[at + 3].contains("`tessera uncordon --all` ends that of the node"), "{text}");
    assert_eq!(lines.iter().position(|line| *line == "  take care"), Some(at + 5), "{text}");
    assert!(lines.iter().position(|line| *line == "GPUS").unwrap() > at, "{text}");
    // A cordon is no illness.
    assert_eq!(cell(&text, "HEALTH", "GPU-b"), "cordoned");
    assert_eq!(cell(&text, "HEALTH", "GPU-c"), "unhealthy");
}

#[test]
fn a_plugin_that_kubelet_does_not_know_is_the_first_thing_said() {
    let mut status = status();
    let plugin = &mut status.plugin;
    plugin.registration = Registration::Waiting;
    plugin.registration_error = "no such socket".into();
    let text = plain(&status);
    assert!(
        text.contains("  new pods get no GPU here: last error: no such socket (docs/runbook.md,"),
        "{text}"
    );
}

#[test]
fn limits_that_were_changed_are_marked() {
    let mut status = status();
    assert!(!plain(&status).contains('*'));
    let memory_limit_bytes = 4 << 30;
    let allocated = Limits { memory_limit_bytes, cores_millis: 250, ..Limits::default() };
    status.allocations[0].gpus[0].allocated = Some(allocated);
    let text = plain(&status);
    assert!(text.contains("8 GiB*") && text.contains("50% burst*"), "{text}");
    assert!(text.contains("tessera quota show"), "{text}");
}

#[test]
fn several_resources_are_distinguished() {
    let mut status = status();
    assert!(!plain(&status).contains("RESOURCE"));
    let named = |name: &str, retired, healthy| Resource {
        name: name.into(),
        retired,
        registration: Registration::Live,
        replicas: 2,
        healthy,
        ..Resource::default()
    };
    status.plugin.resources = vec![named("x.dev/large", false, 1), named("x.dev/old", true, 0)];
    let replica = |name: &str, holder: &str| Replica {
        resource_name: name.into(),
        allocation_id: holder.into(),
        health: Health::Healthy,
        ..Default::default()
    };
    status.gpus[0].replicas = vec![replica("x.dev/large", ""), replica("x.dev/small", "id")];
    let text = plain(&status);
    let cells = |line: &str| -> Vec<String> {
        line.split("  ").map(|c| c.trim().to_owned()).filter(|c| !c.is_empty()).collect()
    };
    let old = text.lines().find(|line| line.contains("x.dev/old")).unwrap();
    let described = "registered, kubelet watches; retired, served while it is held";
    assert_eq!(cells(old), ["x.dev/old", described, "0", "2"]);
    assert!(text.contains("large: 1 of 1, small: 0 of 1"), "{text}");
    // Where their last parts do not distinguish them, whole.
    status.gpus[0].replicas = vec![replica("x.dev/a", ""), replica("y.dev/a", "id")];
    assert!(plain(&status).contains("x.dev/a: 1 of 1, y.dev/a: 0 of 1"), "{}", plain(&status));
}

#[test]
fn the_lease_and_what_each_got_stand_in_columns_of_their_own() {
    let mut status = status();
    let got = Compute {
        gate: "closed".into(),
        got_1s_millis: 620,
        got_10s_millis: 505,
        used_10s_millis: Some(410),
        waiting_us: Some(900),
        ..Compute::default()
    };
    status.allocations[0].compute = Some(got);
    status.allocations.push(Allocation {
        id: "quiet-id".into(),
        holder: holder("quiet"),
        compute: None,
        ..status.allocations[0].clone()
    });
    status.gpus[0].lease_holder = "0123456789abcdef".into();
    status.gpus[0].lease_late = vec!["id-gone".into()];
    status.gpus[0].lease_waiting = 2;
    let text = plain(&status);
    assert_eq!(cell(&text, "LEASE", "GPU-49aa"), "ns/llm-0 and late id-gone (2 wait)");
    let pods = &text[text.find("ALLOCATIONS").unwrap()..];
    assert_eq!(cell(pods, "USED 10s", "llm-0"), "41%");
    assert_eq!(cell(pods, "LEASED", "llm-0"), "50.5%");
    assert_eq!(cell(pods, "GATE", "llm-0"), "closed");
    if let Some(compute) = &mut status.allocations[0].compute {
        compute.used_10s_millis = None;
    }
    let unknown = plain(&status);
    let pods = &unknown[unknown.find("ALLOCATIONS").unwrap()..];
    assert_eq!(
        (cell(pods, "USED 10s", "llm-0"), cell(pods, "LEASED", "llm-0")),
        ("?".into(), "50.5%".into())
    );
    assert_eq!(cell(pods, "USED 10s", "quiet"), "-");
    assert!(text.contains("GATE closed: it waits"), "{text}");
    status.gpus[0].lease_holder.clear();
    status.gpus[0].lease_late.clear();
    status.gpus[0].lease_waiting = 0;
    assert_eq!(cell(&plain(&status), "LEASE", "GPU-49aa"), "-");
}

#[test]
fn a_pod_that_does_not_wait_is_not_said_to() {
    let mut status = status();
    let idle = Compute { gate: "closed".into(), waiting_us: None, ..Compute::default() };
    status.allocations[0].compute = Some(idle);
    let text = plain(&status);
    let pods = &text[text.find("ALLOCATIONS").unwrap()..];
    assert_eq!(cell(pods, "GATE", "llm-0"), "idle");
    assert!(!text.contains("it waits"), "{text}");
}

#[test]
fn what_is_left_for_claims_is_whole_beside_the_longest_names() {
    let mut status = status();
    let gpu = &mut status.gpus[0];
    gpu.front_end = "DRA".into();
    gpu.name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb".into();
    (gpu.left_memory_bytes, gpu.left_cores_millis) = ((1024 << 30) - (100 << 20), 999);
    (gpu.memory_used_bytes, gpu.memory_charged_bytes) = (1023 << 30, 1023 << 30);
    gpu.lease_holder = "a-lease-holder".repeat(9);
    for width in 40..=120 {
        let text = text(&status, Paper { width: Some(width), colour: false });
        let row = text.lines().skip_while(|line| *line != "GPUS").nth(2).unwrap();
        assert!(row.contains("1023.9 GiB, 99.9%"), "{width}: {text}");
    }
    status.gpus[0].no_room = "GPU time".into();
    assert_eq!(cell(&plain(&status), "FREE", "GPU-49aa"), "no GPU time");
    status.gpus[0].moving = true;
    let text = plain(&status);
    assert!(text.contains("FREE, moving: for claims, once"), "{text}");
    status.gpus[0].front_end = "device plugin".into();
    let text = plain(&status);
    assert!(text.contains("FREE, moving: for the device plugin, once"), "{text}");
    assert!(!text.contains("for claims, once"), "{text}");
}

#[test]
fn short_ids_still_tell_apart() {
    let mut status = status();
    for id in ["0123456789abcd00", "01234567xx"] {
        status.allocations.push(Allocation { id: id.into(), ..status.allocations[0].clone() });
    }
    let text = plain(&status);
    let pods = &text[text.find("ALLOCATIONS").unwrap()..];
    let ids: Vec<&str> =
        pods.lines().skip(2).filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(ids, ["0123456789abcde", "0123456789abcd0", "01234567x"], "{text}");
}
