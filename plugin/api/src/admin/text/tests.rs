use proptest::prelude::*;
use tessera_view::status::{
    Allocation, AllocationState, Claim, ComputePolicy, Dra, Gpu, GpuState, Health, Holder, Plugin,
    Process, Registration, Replica, Resource,
};
use tessera_view::tenant::{Compute, Limits, Use};
use unicode_width::UnicodeWidthStr;

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

fn json(status: &Status) -> serde_json::Value {
    serde_json::to_value(status).unwrap()
}

/// The cell below the header `title` in the row that has `of`.
fn cell(text: &str, title: &str, of: &str) -> String {
    let mut lines = text.lines().skip_while(|line| !line.contains(title));
    let head = lines.next().unwrap_or_else(|| panic!("no {title}: {text}"));
    let row = lines.find(|line| line.contains(of)).unwrap_or_else(|| panic!("no {of}: {text}"));
    // A column ends where that of the next title begins, or its own title ends.
    let at = head.find(title).unwrap();
    let words = |line: &str| -> Vec<(usize, usize)> {
        let mut cells = Vec::new();
        let mut begin = None;
        let chars: Vec<char> = line.chars().collect();
        for i in 0..=chars.len() {
            let gap =
                i == chars.len() || (chars[i] == ' ' && chars.get(i + 1).is_none_or(|c| *c == ' '));
            match (gap, begin) {
                (false, None) if chars[i] != ' ' => begin = Some(i),
                (true, Some(from)) => {
                    cells.push((from, i));
                    begin = None;
                }
                _ => {}
            }
        }
        cells
    };
    let end = at + title.len();
    let over = words(row).into_iter().find(|(from, to)| *from < end && *to > at);
    over.map_or(String::new(), |(from, to)| row.chars().skip(from).take(to - from).collect())
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
fn a_node_without_gpus_says_so_and_where_the_reason_is() {
    let mut status = status();
    status.gpus.clear();
    status.allocations.clear();
    let said = plain(&status);
    assert!(said.contains("No GPUs: the plugin has found none"), "{said}");
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
    assert_eq!(json(&status)["allocations"][0]["compute"]["gate"], "closed");
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

#[test]
fn colour_is_only_added() {
    let mut status = status();
    status.warnings = vec!["take care".into()];
    let painted = text(&status, Paper { colour: true, ..Paper::plain() });
    assert!(painted.contains("\x1b["), "{painted}");
    let bare = ["\x1b[1;31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"];
    let bare = bare.iter().fold(painted, |text, code| text.replace(code, ""));
    assert_eq!(bare, plain(&status));
}

/// What a stranger, or a driver, may call something.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        "[a-z0-9.-]{0,253}",
        "\\PC{0,60}",
        "[\u{0}-\u{1f}\u{202e}\u{200b}a-z]{0,30}",
        "[模型推理👩🏽‍🚀é ]{0,120}",
    ]
}

/// A node with everything that a text shows, in each state.
fn full() -> Status {
    use GpuState::{Healthy, Recovering, Suspect, Unhealthy};
    let mut status = status();
    let replica = |name: &str| Replica { resource_name: name.into(), ..Replica::default() };
    let gpu = Gpu { replicas: vec![replica("x"), replica("y")], ..status.gpus[0].clone() };
    let of = |state: GpuState| {
        let sold = [("DRA", Health::Healthy, true), ("device plugin", Health::Unhealthy, false)];
        let gpu = &gpu;
        sold.map(|(front_end, health, cordoned_with_node)| {
            let front_end = front_end.to_owned();
            Gpu { state, health, front_end, cordoned_with_node, ..gpu.clone() }
        })
    };
    status.gpus = [Healthy, Suspect, Unhealthy, Recovering].into_iter().flat_map(of).collect();
    let one = &mut status.allocations[0];
    one.other_holders = holder("").into_iter().collect();
    one.gpus.push(Use { allocated: Some(Limits::default()), ..one.gpus[0].clone() });
    let waiting = Compute { gate: "closed".into(), waiting_us: Some(1), ..Compute::default() };
    one.compute = Some(waiting);
    let claim = Some(Claim::default());
    let state = AllocationState::Parked;
    let other = Allocation { claim, holder: None, compute: None, state, ..one.clone() };
    status.allocations.push(other);
    status.plugin.dra = Some(Dra::default());
    status.plugin.resources =
        vec![Resource { retired: true, ..Resource::default() }, Resource::default()];
    status.warnings = vec![String::new()];
    status
}

/// Every name and every number in it is another; what has few values stays.
fn change(
    value: &mut serde_json::Value,
    key: &str,
    texts: &mut dyn Iterator<Item = String>,
    numbers: &mut dyn Iterator<Item = u64>,
) {
    use serde_json::Value;
    match value {
        Value::String(_)
            if ["state", "health", "policy", "registration", "front_end"].contains(&key) => {}
        Value::String(text) => *text = texts.next().unwrap(),
        Value::Number(number) if key.ends_with("_bytes") => {
            *number = numbers.next().unwrap().into()
        }
        Value::Number(number) => *number = (numbers.next().unwrap() >> 32).into(),
        Value::Array(all) => all.iter_mut().for_each(|one| change(one, key, texts, numbers)),
        Value::Object(all) => {
            all.iter_mut().for_each(|(key, one)| change(one, key, texts, numbers));
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is on a node, and however it is called: no line is wider than the paper, and none does anything.
    #[test]
    fn no_line_is_wider_than_the_paper(
        names in prop::collection::vec(name(), 1..40),
        numbers in prop::collection::vec(any::<u64>(), 1..20),
        width in 40usize..=120,
    ) {
        let mut status = json(&full());
        change(&mut status, "", &mut names.into_iter().cycle(), &mut numbers.into_iter().cycle());
        let status: Status = serde_json::from_value(status).unwrap();
        let paper = Paper { width: Some(width), colour: false };
        let said = text(&status, paper);
        for line in said.lines() {
            prop_assert!(line.width() <= width, "{} columns: {line:?}", line.width());
            prop_assert!(!line.chars().any(|c| c.is_control() || c == '\u{202e}'), "{line:?}");
        }
        // A title is whole, or left out.
        let wide = text(&status, Paper { width: None, colour: false });
        let heads = |said: &str| -> Vec<String> {
            let lines = said.lines().zip(said.lines().skip(1));
            let heads = lines.filter(|(line, _)| matches!(*line, "GPUS" | "ALLOCATIONS" | "RESOURCES"));
            heads.map(|(_, head)| head.to_owned()).collect()
        };
        for (narrow, wide) in heads(&said).iter().zip(heads(&wide)) {
            for title in narrow.split("  ").map(str::trim).filter(|title| !title.is_empty()) {
                prop_assert!(wide.contains(title), "{title}: {narrow}");
            }
        }
    }
}
