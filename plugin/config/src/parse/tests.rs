use std::time::Duration;

use super::*;
use crate::grammar::check_resource;
use crate::tables::EXAMPLE;
use crate::{Amount, Dra, History, Layout, LayoutShare, Leases, NoExecute, Problem};
use tessera_model::sharing::{Compute, Placement, Split};

fn problems(text: &str) -> Vec<Problem> {
    Config::parse(text).unwrap_err().problems
}

fn places(text: &str) -> Vec<(String, Option<usize>)> {
    problems(text).into_iter().map(|p| (p.key, p.line)).collect()
}

#[test]
fn the_commented_file_equals_the_defaults() {
    let text = include_str!("../../../../config.toml");
    let config = Config::parse(text).unwrap();
    assert_eq!(Config { source: Source::default(), ..config }, Config::default());
}

#[test]
fn an_empty_file_is_the_defaults() {
    assert_eq!(Config::parse("").unwrap(), Config::default());
}

/// All values that are wrong, each once, then all keys that contradict each other; of a text that is not TOML its first
/// error alone.
#[test]
fn faults_of_a_kind_are_reported_together() {
    let text = "\
[share]
replicas = \"four\"
cores = \"400%\"
plecement = \"best\"

[gpus]
include = [1, \"0\", true]
reserve = \"12MB\"
[compute]
quantum_min = \"9ms\"
drain_min = 5
drain_max = \"1ms\"
[driver]
root = \"/a\"
libraries = \"/b\"
mounts = [{ host = \"/a\" }]
[[layout]]
gpus = [\"0\"]
shares = [{ resource = \"a.b/c\", memory = \"60%\", count = 2 }]
[log]
format = \"text\"
";
    let want = [
        ("share.replicas", 2),
        ("share.cores", 3),
        ("share.plecement", 4),
        ("gpus.include", 7),
        ("gpus.include", 7),
        ("gpus.reserve", 8),
        ("compute.drain_min", 11),
        ("driver.mounts[0].container", 16),
    ];
    let all = |want: &[(&str, usize)]| -> Vec<_> {
        want.iter().map(|(key, line)| ((*key).to_owned(), Some(*line))).collect()
    };
    assert_eq!(places(text), all(&want));
    let broken = text.replace("best\"\n\n", "best\"\nmemory =\n") + "format = \"json\"\n";
    assert_eq!(places(&broken), all(&[("", 5)]));
    let right = [
        ("\"four\"", "4"),
        ("plecement = \"best\"", ""),
        ("1, \"0\", true", ""),
        ("12MB", "12Mi"),
        ("\nmounts = [{ host = \"/a\" }]", ""),
        ("drain_min = 5", "drain_min = \"5ms\""),
        ("400%", "40%"),
    ];
    let sound =
        right.iter().fold(text.to_owned(), |text, (wrong, right)| text.replace(wrong, right));
    let want = [
        ("share.cores", 3),
        ("compute.quantum_min", 10),
        ("compute.drain_min", 11),
        ("driver.root", 14),
        ("layout[0].shares", 18),
    ];
    assert_eq!(places(&sound), all(&want));
}

#[test]
fn what_is_given_counts_and_the_rest_stays() {
    let text = "[compute]\nquantum = \"8ms\"\nwindow = 32\n[dra]\nenabled = true\nno_execute = [\"cordoned\"]\n\
                memory_step = \"256Mi\"\n[history]\nsize = \"16Mi\"\nkeep_10s = \"12h\"\n";
    let config = Config::parse(text).unwrap();
    let quantum = Duration::from_millis(8);
    assert_eq!(config.compute, Leases { quantum, window: 32, ..Leases::default() });
    let no_execute = vec![NoExecute::Cordoned];
    let memory_step_bytes = 256 << 20;
    let dra = Dra { enabled: true, no_execute, memory_step_bytes, ..Dra::default() };
    assert_eq!(config.dra, dra);
    let keep_10s = Duration::from_secs(12 * 3600);
    let history = History { size_bytes: 16 << 20, keep_10s, ..History::default() };
    assert_eq!(config.history, history);
    assert_eq!(history.keep_seconds(), [12 * 3600, 7 * 86400, 35 * 86400]);
}

#[test]
fn each_mistake_says_what_is_wrong_and_what_to_do() {
    for (section, text, part) in [
        ("advice", "price_per_gpu_hour = -1", "must not be negative"),
        ("advice", "price_per_gpu_hour = \"2 EUR\"", "advice.price_per_gpu_hour"),
        ("advice", "currency = \"\"", "such as \"EUR\""),
        ("advice", "memory_percentile = 0", "must be from 50 to 100"),
        ("advice", "window = \"5m\"", "not from 1h to 8784h"),
        (
            "api",
            "authorisation = \"none\"\nlisten = \":80\"",
            "api.listen: everybody in the network could read everything: write \"127.0.0.1:9481\"",
        ),
        ("api", "tls_key = \"/b\"", "api.tls_key: set api.tls_cert too"),
        ("compute", "quantum = \"0ms\"", "compute.quantum: \"0ms\" is not from 1ms to 1s"),
        ("compute", "quantum = \"30ms\"", "quantum: is longer than compute.quantum_max (20ms)"),
        ("compute", "quantum_min = \"6ms\"", "is longer than compute.quantum (5ms)"),
        ("compute", "drain_min = \"300ms\"", "drain_min: is longer than compute.drain_max"),
        ("compute", "window = 1", "compute.window: must be from 2 to 65536"),
        ("compute", "quantm = \"5ms\"", "did you mean `quantum`?"),
        ("dra", "enabled = \"yes\"", "dra.enabled: must be true or false"),
        ("dra", "gpus = [\"\"]", "dra.gpus: entry 1: an empty name matches no GPU"),
        ("dra", "gpus = \"0\"", "dra.gpus: must be an array"),
        ("dra", "memory_step = 0", "dra.memory_step: must be at least 1Mi"),
        ("dra", "memory_step = \"100M\"", "is not a whole number of MiB; use 96Mi"),
        ("dra", "memory_step = \"1536Ki\"", "is not a whole number of MiB; use 2Mi"),
        ("dra", "no_execute = [\"sick\"]", "\"sick\" is none of \"unhealthy\", \"cordoned\""),
        (
            "dra",
            "enabled = true\nmemory_step = \"8Gi\"\n[share]\nmemory = \"4Gi\"",
            "dra.memory_step: 8 GiB is more than share.memory (4 GiB)",
        ),
        ("health", "recovery = \"5\"", "health.recovery: \"5\" is no length of time"),
        ("health", "recovery = \"0s\"", "not from 100ms to 24h"),
        ("health", "recovery = \"2h\"", "recovery: is longer than health.recovery_max (1h)"),
        ("health", "xid = { x = \"ignore\" }", "health.xid: \"x\" is no XID"),
        (
            "health",
            "xid = { 79 = \"ignroe\" }",
            "79: \"ignroe\" is none of \"ignore\", \"suspect\"",
        ),
        ("health", "xid_default = \"none\"", "health.xid_default"),
        ("history", "size = \"1Mi\"", "history.size: must be at least 4Mi"),
        (
            "history",
            "keep_10s = \"48h\"\nkeep_5m = \"24h\"",
            "history.keep_10s: is longer than history.keep_5m (24h)",
        ),
        ("ledger", "release_after = \"500ms\"", "is not from 1s to 1h"),
        ("ledger", "release_after = \"5\"", "write it like"),
        ("log", "format = \"xml\"", "log.format: \"xml\" is none of \"text\", \"json\""),
        ("metrics", "listen = \"9464\"", "metrics.listen: \"9464\" is not an address"),
    ] {
        let found = problems(&format!("[{section}]\n{text}"));
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        let said = format!("{}: {}", found[0].key, found[0].message);
        assert!(said.contains(part), "{text}: {said}");
    }
    for good in [
        "[api]\nauthorisation = \"none\"",
        "[api]\nauthorisation = \"none\"\nlisten = \"[::1]:80\"",
        "[api]\nauthorisation = \"none\"\nlisten = \"\"",
        "[api]\nlisten = \":80\"",
        "[api]\ntls_cert = \"/a\"\ntls_key = \"/b\"",
        // Off: the step divides nothing.
        "[dra]\nmemory_step = \"8Gi\"\n[share]\nmemory = \"4Gi\"",
    ] {
        assert!(Config::parse(good).is_ok(), "{good}");
    }
}

#[test]
fn quotas_that_can_never_work_are_refused() {
    let place = |key: &str, line| vec![(key.to_owned(), Some(line))];
    // Smaller than one context.
    let text = "[share]\nmemory = \"256Mi\"\n";
    let stated = |overhead: &str| format!("{text}[gpus]\ncontext_overhead = {overhead}\n");
    assert_eq!(places(&stated("\"256Mi\"")), place("share.memory", 2));
    for may_fit in [text, &stated("\"auto\""), &stated("\"255Mi\"")] {
        assert!(Config::parse(may_fit).is_ok(), "{may_fit}: depends on the GPU");
    }
    assert_eq!(places("[share]\nmemory = 0\n"), place("share.memory", 2));
    // More compute than there is.
    assert_eq!(places("[share]\nreplicas = 4\ncores = \"300m\"\n"), place("share.cores", 3));
    assert_eq!(places("[share]\ncores = 0\n"), place("share.cores", 2));
    // No quota would hold without the shim.
    assert_eq!(places("[container]\ninject = []\n"), place("container.inject", 2));
    assert_eq!(places("[share]\nmemory = \"-1Gi\"\n"), place("share.memory", 2));
}

#[test]
fn quantities_may_be_strings_or_numbers() {
    for (text, want) in [
        ("\"4Gi\"", 4 << 30),
        ("4294967296", 4 << 30),
        ("4_294_967_296", 4 << 30),
        ("\"4294967296\"", 4 << 30),
        ("4.294967296e9", 4 << 30),
    ] {
        let config = Config::parse(&format!("[share]\nmemory = {text}\n")).unwrap();
        assert_eq!(config.share.memory_bytes, Some(want), "{text}");
    }
    for text in ["\"250m\"", "0.25", "\"0.25\"", "\"250e-3\""] {
        let config = Config::parse(&format!("[share]\ncores = {text}\n")).unwrap();
        assert_eq!(config.share.cores_millis, Some(250), "{text}");
    }
}

#[test]
fn mounts_are_checked() {
    let found = problems(
        "[driver]\nmounts = [{ host = \"/a\" }, { host = \"b\", container = \"/b\" },\n\
         { host = \"/a\", container = \"/usr/local/tessera/pages\" }]\n",
    );
    let messages: Vec<_> = found.iter().map(|p| p.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "each mount needs `host` and `container`",
            "\"b\" must be an absolute path",
            "/usr/local/tessera/pages is Tessera's own; mount elsewhere",
        ]
    );
}

#[test]
fn resource_names_follow_kubernetes() {
    for name in ["tessera.dev/gpu", "a/b", "x-y.example.com/gpu-8g", "nvidia.com/gpu.shared"] {
        assert_eq!(check_resource(name), Ok(()), "{name}");
    }
    let long = format!("a.b/{}", "x".repeat(64));
    for name in [
        "",
        "gpu",
        "/gpu",
        "a.b/",
        "A.b/gpu",
        "a..b/gpu",
        "a.b/g/h",
        "a.b/-g",
        "kubernetes.io/gpu",
        &long,
    ] {
        assert!(check_resource(name).is_err(), "{name}");
    }
}

#[test]
fn the_commented_example_of_layouts_is_valid_and_shows_every_key() {
    let config = Config::parse(EXAMPLE).unwrap();
    assert_eq!(config.layouts.len(), 2);
    let known = |table: &str| {
        let text =
            format!("[[layout]]\ngpus = [\"*\"]\nshares = [{{ resource = \"a.b/c\" {table} }}]");
        let problem = problems(&text).remove(0);
        problem.message.split_once("known here: ").unwrap().1.to_owned()
    };
    for key in known(", qqqqqqqqqqqqqq = 1").split(", ") {
        assert!(EXAMPLE.contains(&format!("{key} = ")), "{key}");
    }
}

#[test]
fn a_layout_is_read_with_percentages_quantities_and_defaults() {
    let config = Config::parse(
        "[[layout]]\ngpus = [\"NVIDIA A100*\", \"3\"]\nshares = [\n\
         { resource = \"tessera.dev/gpu-large\", memory = \"50%\", cores = \"12.5%\" },\n\
         { resource = \"tessera.dev/gpu-small\", count = 2, memory = \"8Gi\", cores = 0.25,\n\
           compute = \"strict\", placement = \"distributed\", split = \"spread\" },\n]\n",
    )
    .unwrap();
    let plain = LayoutShare {
        resource: "tessera.dev/gpu-large".into(),
        count: 1,
        memory: Amount::Percent(50_000),
        cores_millis: Some(125),
        compute: None,
        placement: None,
        split: None,
    };
    let full = LayoutShare {
        resource: "tessera.dev/gpu-small".into(),
        count: 2,
        memory: Amount::Exact(8 << 30),
        cores_millis: Some(250),
        compute: Some(Compute::Strict),
        placement: Some(Placement::Distributed),
        split: Some(Split::Spread),
    };
    let gpus = vec!["NVIDIA A100*".to_owned(), "3".to_owned()];
    assert_eq!(config.layouts, [Layout { gpus, shares: vec![plain, full] }]);
}

/// That a text has one problem, at this place, whose message says this.
fn has_one(text: &str, (key, line, message): (&str, usize, &str)) {
    let found = problems(text);
    assert_eq!(found.len(), 1, "{text}\n{found:?}");
    assert_eq!((found[0].key.as_str(), found[0].line), (key, Some(line)), "{text}");
    assert!(found[0].message.contains(message), "{text}\n{}", found[0].message);
}

fn layout(shares: &str) -> String {
    format!("[[layout]]\ngpus = [\"*\"]\nshares = [\n{shares}\n]\n")
}

#[test]
fn shares_that_do_not_fit_together_are_reported_at_their_list() {
    for (first, second, message) in [
        ("memory = \"60%\"", "memory = \"50%\"", "is 110% of each GPU"),
        ("count = 3, memory = \"33.334%\"", "count = 1", "is 100.002% of each GPU"),
        ("memory = \"100%\"", "count = 1", "they leave nothing"),
        ("count = 3, cores = \"400m\"", "count = 1", "are 120%, more than one GPU"),
        ("cores = \"998m\"", "count = 3", "0.2% are too little for 3"),
    ] {
        let shares =
            format!("{{ resource = \"a.b/c\", {first} }},\n{{ resource = \"a.b/d\", {second} }}");
        has_one(&layout(&shares), ("layout[0].shares", 3, message));
    }
}

#[test]
fn every_nonsense_in_a_share_is_reported_at_its_line() {
    for (key, value, message) in [
        ("count", "0", "must be from 1 to 256"),
        ("memory", "0", "is not more than 0"),
        ("memory", "\"101%\"", "more than 0% and at most 100%"),
        ("memory", "\"0%\"", "more than 0% and at most 100%"),
        ("memory", "\"half\"", "a percentage such as \"25%\", or \"auto\""),
        ("cores", "25", "counts whole GPUs"),
        ("mem", "\"1Gi\"", "unknown key"),
        ("split", "\"both\"", "is none of \"reject\", \"spread\""),
    ] {
        let shares = format!("{{ resource = \"a.b/c\", {key} = {value} }}");
        has_one(&layout(&shares), (&format!("layout[0].shares[0].{key}"), 4, message));
    }
    let shares = "shares = [{ resource = \"a.b/c\" }]";
    let twice = layout("{ resource = \"a.b/c\" },\n{ resource = \"a.b/c\" }");
    let small = layout("{ resource = \"a.b/c\", memory = \"256Mi\" }")
        + "[gpus]\ncontext_overhead = \"512Mi\"\n";
    let differs = format!(
        "[[layout]]\ngpus = [\"0\"]\nshares = [{{ resource = \"a.b/c\", split = \"spread\" }}]\n\
         [[layout]]\ngpus = [\"1\"]\n{shares}\n"
    );
    for (text, problem) in [
        (twice, ("layout[0].shares[1].resource", 5, "is shares[0] of this layout already")),
        (layout("{ resource = \"gpu\" }"), ("layout[0].shares[0].resource", 4, "has no domain")),
        (layout("{ count = 1 }"), ("layout[0].shares[0].resource", 4, "is missing")),
        (small, ("layout[0].shares[0].memory", 4, "not more than gpus.context_overhead")),
        (layout(""), ("layout[0].shares", 3, "must list at least one")),
        ("[[layout]]\ngpus = [\"*\"]\n".into(), ("layout[0].shares", 1, "must list at least one")),
        (format!("[[layout]]\n{shares}\n"), ("layout[0].gpus", 1, "must name GPUs")),
        (format!("[[layout]]\ngpus = []\n{shares}\n"), ("layout[0].gpus", 2, "must name GPUs")),
        (format!("[[layout]]\ngpus = [\"\"]\n{shares}\n"), ("layout[0].gpus", 2, "an empty name")),
        ("layout = 3\n".into(), ("layout", 1, "must be an array of tables")),
        (differs, ("layout[1].shares[0].split", 6, "must be the same in all layouts")),
    ] {
        has_one(&text, problem);
    }
}
