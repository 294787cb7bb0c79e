use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use tessera_view::fleet::Entry;
use tessera_view::gpu::{Gpu, Lease};
use tessera_view::node::{Plugin, Warning};
use tessera_view::tenant::Compute;

use super::*;
use crate::top::view::{self, Moment};

const GIB: u64 = 1 << 30;
const MOMENT: Moment =
    Moment { now_unix_ms: 1_795_336_330_000, every: Duration::from_secs(1), live: true };

fn gpu(index: u32, lease_holder: &str, waiting: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{index}"),
        index,
        name: "NVIDIA A100-SXM4-40GB".into(),
        state: "healthy".into(),
        memory_total_bytes: 40 * GIB,
        memory_used_bytes: 21 * GIB,
        memory_limits_bytes: 20 * GIB,
        lease: Some(Lease { holder: lease_holder.into(), waiting, quantum_us: 5000 }),
        ..Gpu::default()
    }
}

struct Made {
    pod: &'static str,
    gpus: &'static [u32],
    used: u64,
    got: u32,
    waited_us: u64,
    refusals: u64,
}

fn tenant(made: &Made) -> Tenant {
    let gpus = made.gpus.iter().map(|index| Use {
        gpu_uuid: format!("GPU-{index}"),
        memory_limit_bytes: 10 * GIB,
        memory_used_bytes: made.used,
        cores_millis: 500,
        policy: tessera_view::status::ComputePolicy::Burst,
        ..Use::default()
    });
    Tenant {
        id: format!("id-{}", made.pod),
        generation: 1,
        state: "started".into(),
        namespace: "prod".into(),
        pod: made.pod.into(),
        container: "server".into(),
        gpus: gpus.collect(),
        refusals: made.refusals,
        launches: made.waited_us,
        compute: Some(Compute {
            gate: "closed".into(),
            used_10s_millis: Some(made.got),
            got_10s_millis: made.got,
            waited_us: made.waited_us,
            ..Compute::default()
        }),
        ..Tenant::default()
    }
}

/// A node by itself.
fn own(view: Node, at_unix_ms: i64) -> Fleet {
    let entry = Entry { answers: true, view: Some(view), ..Entry::default() };
    Fleet { nodes: vec![entry], at_unix_ms, ..Fleet::default() }
}

/// Its view, to be changed.
fn node(model: &mut Model) -> &mut Node {
    model.fleet.nodes[0].view.as_mut().unwrap()
}

/// Three pods; as the second of two answers a second apart.
fn model(sort: Sort) -> Model {
    let fleet = |at: u64| {
        let tenants = [
            Made {
                pod: "asr-0",
                gpus: &[0],
                used: GIB,
                got: 100,
                waited_us: 800_000 * at,
                refusals: 0,
            },
            Made {
                pod: "llama-7d4b9c-x2",
                gpus: &[0],
                used: 9 * GIB + GIB * 7 / 10,
                got: 620,
                waited_us: 10_000 * at,
                refusals: 12 * at,
            },
            Made {
                pod: "train",
                gpus: &[0, 1],
                used: 3 * GIB,
                got: 300,
                waited_us: 0,
                refusals: 0,
            },
        ];
        let text = "prod/asr-0 (server): floods its gate socket".into();
        let view = Node {
            plugin: Plugin { registration: "live".into(), ..Plugin::default() },
            gpus: vec![gpu(0, "id-llama-7d4b9c-x2", 1), gpu(1, "", 0)],
            tenants: tenants.iter().map(tenant).collect(),
            warnings: vec![Warning {
                text,
                since_unix_ms: 1_795_336_321_000,
                ..Warning::default()
            }],
            ..Node::default()
        };
        own(view, 1_795_336_321_000)
    };
    let mut model = Model::new(sort, false);
    model.take(fleet(1), Duration::from_secs(1));
    model.take(fleet(2), Duration::from_secs(2));
    model
}

/// The picture on a terminal of that size, without the spaces at the ends of lines.
fn picture(model: &Model, width: u16, height: u16) -> String {
    let lines = view::draw(model, false, MOMENT, (width, height));
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

fn press(model: &mut Model, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\x1b' => KeyCode::Esc,
            c => KeyCode::Char(c),
        };
        model.press(KeyEvent::new(code, KeyModifiers::NONE));
    }
}

fn names(model: &Model) -> Vec<&str> {
    model.shown().iter().map(|row| row.tenant.pod.as_str()).collect()
}

#[test]
fn eighty_columns_and_twenty_four_lines() {
    let expected = "\
tessera top  08:32:01  registered  2 GPUs  3 tenants  every 1s
  GPU  HEALTH         USED/SOLD/TOTAL  QUANT  WAIT  LEASE
    0  healthy  ██··      21G/20G/40G  5.0ms     1  prod/llama-7d4b9c-x2
    1  healthy  ██··      21G/20G/40G  5.0ms     0  -
  POD/CONTAINER          GPU        USED/QUOTA  ASK  USED  LEASED  WAIT  REFUSED
  prod/llama…-x2/server    0  ███·    9.6G/10G  50%   62%     62%    1%  24 12/s
  prod/train/server        0  █···      3G/10G  50%   30%     30%    0%        0
                           1  █···      3G/10G  50%
  prod/asr-0/server        0  █···      1G/10G  50%   10%     10%   80%        0













! prod/asr-0 (server): floods its gate socket
q quit  m c w r n sort: memory  R reverse  / filter
";
    let picture = picture(&model(Sort::Memory), 80, 24);
    assert_eq!(picture, expected, "\n{picture}");
}

#[test]
fn wide_terminals_show_policy_gate_and_state() {
    let picture = picture(&model(Sort::Refusals), 130, 20);
    let row = picture.lines().find(|line| line.contains("llama-7d4b9c-x2/server")).unwrap();
    for cell in ["██████", "24 12/s", "burst", "idle", "started"] {
        assert!(row.contains(cell), "{cell}: {picture}");
    }
    assert!(picture.contains("NVIDIA A100-SXM4-40GB"), "{picture}");
}

#[test]
fn a_gpu_that_is_held_back_says_so() {
    let mut model = model(Sort::Name);
    node(&mut model).gpus[0].withheld = "sold by another".into();
    node(&mut model).gpus[1].cordon = "cordoned by uid 0".into();
    let text = picture(&model, 80, 24);
    assert!(text.contains("0  withheld") && text.contains("1  cordoned"), "{text}");
}

#[test]
fn keys_sort_and_reverse() {
    let mut model = model(Sort::Memory);
    let llama = "llama-7d4b9c-x2";
    for (key, order) in [
        ("m", ["asr-0", "train", "train", llama]),
        ("m", [llama, "train", "train", "asr-0"]),
        ("c", [llama, "train", "train", "asr-0"]),
        ("w", ["asr-0", llama, "train", "train"]),
        ("r", [llama, "asr-0", "train", "train"]),
        ("n", ["asr-0", llama, "train", "train"]),
        ("R", ["train", "train", llama, "asr-0"]),
    ] {
        press(&mut model, key);
        assert_eq!(names(&model), order, "{key}");
    }
}

#[test]
fn a_filter_is_typed_kept_and_dropped() {
    let mut model = model(Sort::Name);
    press(&mut model, "/qASR");
    assert!(model.editing && !model.quit, "letters are no commands here");
    assert!(picture(&model, 80, 24).contains("/qASR_"));
    assert!(picture(&model, 80, 24).contains("Nothing contains"));
    press(&mut model, "\x1b/asr\n");
    assert_eq!(names(&model), ["asr-0"]);
    press(&mut model, "\x1b");
    assert_eq!(names(&model).len(), 4);
    press(&mut model, "/gpu-1\n");
    assert_eq!(names(&model), ["train", "train"], "an allocation is shown whole");
}

#[test]
fn a_plugin_that_goes_away_is_reported_and_what_it_said_stays() {
    let mut model = model(Sort::Name);
    model.miss("No such file or directory".into(), 1_795_336_321_000);
    model.miss("Connection refused".into(), 1_795_336_325_000);
    let text = picture(&model, 90, 24);
    assert!(text.contains("no answer since 08:32:01 (9s): Connection refused"), "{text}");
    assert!(text.contains("prod/asr-0/server"), "{text}");
    model.take(Fleet::default(), Duration::from_secs(9));
    assert!(!picture(&model, 90, 24).contains("no answer"));
}

#[test]
fn a_name_moves_no_cursor() {
    let mut model = model(Sort::Name);
    node(&mut model).gpus[0].name = "A100\x1b[2J".into();
    model.miss("gone\r\x1b[31m".into(), 1_795_336_321_000);
    for text in [picture(&model, 130, 24), crate::top::plain(&model, MOMENT, None)] {
        assert!(!text.contains('\x1b') && text.contains("A100\\u001b[2J"), "{text}");
    }
}

#[test]
fn keys_quit() {
    let mut model = model(Sort::Name);
    press(&mut model, "q");
    assert!(model.quit);
    let mut model = Model::new(Sort::Name, false);
    assert!(picture(&model, 40, 3).contains("first answer"));
    model.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert!(model.quit);
}

#[test]
fn many_rows_scroll_and_the_rest_is_counted() {
    let mut model = Model::new(Sort::Name, false);
    let mut view = Node { gpus: (0..16).map(|i| gpu(i, "", 0)).collect(), ..Node::default() };
    for i in 0..100 {
        let made = Made { pod: "x", gpus: &[0], used: 0, got: 0, waited_us: 0, refusals: 0 };
        let (id, pod) = (format!("id-{i}"), format!("pod-{i:02}"));
        view.tenants.push(Tenant { id, pod, ..tenant(&made) });
    }
    model.take(own(view, 0), Duration::from_secs(1));
    let text = picture(&model, 80, 24);
    assert!(text.contains("and 11 more GPUs"), "{text}");
    assert!(text.contains("prod/pod-00") && text.contains("more rows"), "{text}");
    press(&mut model, "jjj");
    let text = picture(&model, 80, 24);
    assert!(text.contains("prod/pod-03") && !text.contains("prod/pod-02"), "{text}");
    model.press(KeyEvent::new(KeyCode::Home, KeyModifiers::NONE));
    assert_eq!(model.scroll, 0);
    for _ in 0..99 {
        model.press(KeyEvent::new(KeyCode::PageDown, KeyModifiers::NONE));
    }
    assert!(picture(&model, 80, 24).contains("prod/pod-99"));
}

#[test]
fn a_printed_frame_has_everything_and_no_keys() {
    let moment = Moment { live: false, ..MOMENT };
    let text = crate::top::plain(&model(Sort::Name), moment, None);
    assert!(!text.contains("q quit") && !text.contains('\x1b'), "{text}");
    assert!(text.ends_with("\n! prod/asr-0 (server): floods its gate socket\n"), "{text}");
    assert_eq!(text.matches("prod/").count(), 5, "{text}");
}

#[test]
fn json_has_the_fleet_and_the_rates() {
    let json = crate::top::json(&model(Sort::Refusals));
    let view = &json["nodes"][0]["view"];
    assert_eq!(view["tenants"][0]["id"], "id-llama-7d4b9c-x2");
    assert_eq!(view["tenants"][0]["rates"]["refusals_per_second"], 12.0);
    assert_eq!(view["tenants"][0]["gpus"][0]["memory_limit_bytes"], 10 * GIB);
    assert_eq!(view["tenants"][1]["rates"]["waited"], 0.8);
    assert_eq!(view["gpus"][0]["lease"]["waiting"], 1);
    assert_eq!(json["interval_seconds"], 1.0);
    assert!(!json.to_string().contains('\n'), "an object a line");
}

fn cluster() -> Fleet {
    let entry = |name: &str, tenants| {
        let view = Node { gpus: vec![gpu(0, "", 0), gpu(1, "", 0)], tenants, ..Node::default() };
        Entry { node: name.into(), answers: true, view: Some(view), ..Entry::default() }
    };
    let of = |pod, used| tenant(&Made { pod, gpus: &[0], used, got: 0, waited_us: 0, refusals: 0 });
    let mut nodes = vec![
        entry("n1", vec![of("small", GIB), of("x\u{1b}[2J", 0)]),
        entry("n2", vec![of("large", 9 * GIB)]),
        Entry { node: "n3".into(), error: "it stalls".into(), ..Entry::default() },
    ];
    nodes[1].view.as_mut().unwrap().hidden_tenants = 2;
    Fleet { name: "prod".into(), nodes, ..Fleet::default() }
}

#[test]
fn tenants_of_all_nodes_stand_in_one_order_with_their_nodes() {
    let shown = |namespace: &str, width| {
        let mut model = Model::new(Sort::Memory, false);
        model.namespace = namespace.to_owned();
        model.take(cluster(), Duration::from_secs(1));
        crate::top::plain(&model, Moment { live: false, ..MOMENT }, Some(width))
    };
    let text = shown("", 140);
    let title = "prod: 2 of 3 nodes answer  4 GPUs  3 tenants of all namespaces, and 2 that you may not see";
    assert!(text.contains(title), "{text}");
    let at = |name: &str| text.find(name).unwrap();
    assert!(at("prod/large/server") < at("prod/small/server"), "{text}");
    let row = text.lines().find(|line| line.starts_with("  prod/large")).unwrap();
    assert!(row.contains(" n2 ") && row.contains(" 9G/10G "), "{text}");
    // GPUs that somebody who is shown is on.
    assert!(text.contains("n1/0 ") && text.contains("n2/0 ") && !text.contains("n1/1"), "{text}");
    assert!(text.contains("! node n3: it stalls") && !text.contains('\u{1b}'), "{text}");
    let none = shown("other", 140);
    assert!(none.contains("0 tenants of namespace other") && !none.contains("n1/0"), "{none}");
    assert!(!none.contains("may not see"), "{none}");
    for width in [40, 80] {
        assert!(shown("", width).lines().all(|line| line.chars().count() <= width.into()));
    }
    let mut wide = Model::new(Sort::Memory, false);
    wide.wide = true;
    wide.take(cluster(), Duration::from_secs(1));
    let text = crate::top::plain(&wide, MOMENT, Some(crate::top::WIDEST));
    assert!(text.contains(" GPU-0 "), "{text}");
}

#[test]
fn pods_that_share_a_claim_are_all_shown() {
    let mut fleet = cluster();
    let shared = &mut fleet.nodes[1].view.as_mut().unwrap().tenants[0];
    shared.other_holders = vec!["prod/large/side".into(), "prod/chat-1/main".into()];
    let mut model = Model::new(Sort::Memory, false);
    model.take(fleet, Duration::from_secs(1));
    assert_eq!(model.shown()[0].name(), "prod/large, chat-1");
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(32))]
    #[test]
    fn whatever_the_plugin_says_is_shown(numbers in proptest::collection::vec(proptest::prelude::any::<u64>(), 9), name in ".{0,40}", width in 1u16..200, height in 1u16..40) {
        let n = |i: usize| numbers[i];
        let mut one = tenant(&Made { pod: "x", gpus: &[0, 9], used: n(0), got: 7, waited_us: n(1), refusals: n(2) });
        one.launches = n(3);
        one.gpus[0].memory_limit_bytes = n(4);
        one.gpus[0].memory_used_bytes = n(5);
        one.pod = name;
        let mut model = Model::new(Sort::Memory, false);
        for i in [6, 7] {
            let mut gpu = gpu(0, "nobody", u32::MAX);
            (gpu.memory_used_bytes, gpu.memory_total_bytes) = (n(i), n(8));
            gpu.lease.as_mut().unwrap().quantum_us = n(6);
            one.launches = one.launches.wrapping_add(n(i));
            let view = Node { gpus: vec![gpu], tenants: vec![one.clone()], ..Node::default() };
            model.take(own(view, i64::MAX), Duration::from_nanos(n(i) & 0xffff_ffff));
        }
        picture(&model, width, height);
        crate::top::json(&model);
        crate::top::plain(&model, MOMENT, Some(width));
    }
}

fn fleet(started_unix_ms: i64, generation: u64, launches: u64, waited_us: u64) -> Fleet {
    let tenant = Tenant {
        id: "a".into(),
        generation,
        launches,
        refusals: launches / 10,
        compute: Some(Compute { waited_us, ..Compute::default() }),
        ..Tenant::default()
    };
    let plugin = Plugin { started_unix_ms, ..Plugin::default() };
    let view = Some(Node { plugin, tenants: vec![tenant], ..Node::default() });
    Fleet { nodes: vec![Entry { view, ..Entry::default() }], ..Fleet::default() }
}

fn of_a(before: &Fleet, after: &Fleet, seconds: f64) -> Rates {
    between(before, after, seconds)[&(String::new(), "a".to_owned())]
}

#[test]
fn what_cannot_be_compared_has_no_rate() {
    let none = Rates::default();
    assert_eq!(of_a(&fleet(1, 1, 9, 9), &fleet(1, 2, 9, 9), 1.0), none, "generation");
    assert_eq!(of_a(&Fleet::default(), &fleet(1, 1, 9, 9), 1.0), none, "new");
    assert_eq!(of_a(&fleet(1, 1, 9, 9), &fleet(1, 1, 9, 9), 0.0), none, "no time");
    let restarted = of_a(&fleet(1, 1, 10, 90), &fleet(2, 1, 20, 95), 1.0);
    assert_eq!((restarted.waited, restarted.launches), (None, Some(10.0)));
    let back = of_a(&fleet(1, 1, 100, 90), &fleet(1, 1, 20, 95), 1.0);
    assert_eq!(back.launches, None, "a counter that went back");
}
